"""docs/add-a-dataset.md does what it says, and so do names that packages register."""

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from kenotron.config.errors import InputError
from kenotron.data.batch import NO_LOSS
from support.data_runs import opened, write_texts

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "add-a-dataset.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the page's module and some texts, where the user stands."""
    write_texts(tmp_path / "texts", 20)
    (tmp_path / "my_bytes.py").write_text(blocks("python")[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_bytes", raising=False)
    return tmp_path


def write_module(folder: Path, name: str, text: str) -> None:
    (folder / f"{name}.py").write_text(text)
    sys.modules.pop(name, None)


def part(name: str, method: str, returned: str) -> str:
    """The text of a class of the page's kind with another method."""
    head = f"import numpy as np\nfrom my_bytes import FileBytes\nclass {name}(FileBytes):\n"
    return f"{head}    def {method}(self, indices):\n        return {returned}\n"


def register(folder: Path, package: str, toml: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a package that is nothing but its entry points."""
    info = folder / "site" / f"{package}-1.0.dist-info"
    info.mkdir(parents=True)
    groups = tomllib.loads(toml)["project"]["entry-points"]
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in names.items()) for group, names in groups.items()]
    (info / "entry_points.txt").write_text("\n".join(lines))
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(folder / "site"))


def all_bytes(folder: Path) -> list[bytes]:
    return [file.read_bytes() for file in sorted((folder / "texts").iterdir())]


def test_the_page_trains_on_every_byte_and_masks_between_files(beside: Path) -> None:
    dataset = yaml.safe_load(blocks("yaml")[0])["dataset"]
    whole, seen = b"".join(all_bytes(beside)), {}
    with opened(dataset, model__document_masking=True) as data:
        for step in range(1, 13):
            for batch in data.batch(step):
                for row, labels, documents in zip(batch.tokens, batch.labels, batch.documents, strict=True):
                    at = whole.index(bytes(row.tolist()))
                    assert at % 33 == 0
                    kept = labels != NO_LOSS
                    assert bytes(labels[kept].tolist()) == bytes(np.frombuffer(whole[at + 1 : at + 33], "u1")[kept])
                    ends = np.cumsum([len(text) for text in all_bytes(beside)])
                    of = np.searchsorted(ends, np.arange(at, at + 33), side="right")
                    assert (kept == (of[1:] == of[:-1])).all()
                    assert (documents == of[:-1] - of[0]).all()
                    seen[at] = True
    assert len(seen) == 48  # 12 steps of 4 samples, none twice


def test_the_page_s_own_check_passes(beside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(beside))
    exec(blocks("python")[1], {})


def test_a_registered_name_is_the_same_dataset(beside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register(beside, "my-bytes", blocks("toml")[0], monkeypatch)
    tokens = []
    for block in blocks("yaml"):
        with opened(yaml.safe_load(block)["dataset"]) as data:
            tokens.append([batch.tokens.tolist() for batch in data.batch(1)])
    assert tokens[0] == tokens[1]


FIRST = """
class First(Bytes):
    fingerprint = "the first"

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.all = Bytes(**kwargs)

    def __len__(self):
        return len(self.all) - 3

    def read(self, indices, document_ids=True):
        return self.all.read(indices + 3, document_ids)

    @property
    def held_out(self):
        return SampleRange(self.all, 0, 3)
"""


def test_a_source_may_hold_out_samples_of_its_own_choice(beside: Path) -> None:
    write_module(beside, "my_source", blocks("python")[2] + "\nfrom kenotron.data.source import SampleRange\n" + FIRST)
    with opened({"source": "my_source.First", "kwargs": {"folder": "texts"}}) as data:
        held = [bytes(row.tolist()) for batch, *_ in data.validation() for row in batch.tokens[:, :-1]]
        assert data.fingerprints() == {"texts": "the first"}
    everything = b"".join(all_bytes(beside))
    assert [row for row in held if any(row)] == [everything[33 * n : 33 * n + 31] for n in range(3)]


def failure(dataset: dict) -> str:
    with pytest.raises(InputError) as caught, opened(dataset) as data:
        data.batch(1)
    return str(caught.value)


def test_names_that_are_not_registered_twice_or_broken_are_reported(beside: Path, monkeypatch: Any) -> None:
    line = failure({"source": "file-bites"})
    expected = "expected a dotted path such as my_module.name, or a name that"
    assert line.startswith(f"data_stages.0.data.dataset.source: {expected}")
    assert line.endswith("kenotron.datasets (none), found 'file-bites'")
    more = '[project.entry-points."kenotron.datasets"]\nfile-bytes = "my_bytes:Other"\nbroken = "no_such:Thing"'
    register(beside, "my-bytes", blocks("toml")[0], monkeypatch)
    assert failure({"source": "file-bites"}).endswith("(file-bytes), found 'file-bites'; did you mean 'file-bytes'?")
    register(beside, "other", more, monkeypatch)
    assert "more than once: my_bytes:FileBytes, my_bytes:Other" in failure({"source": "file-bytes"})
    assert "'broken' is registered as no_such:Thing, which cannot be imported" in failure({"source": "broken"})


WRONG = {
    "documents": ("np.zeros((len(indices), 3), int)", r"documents.*expected integer document numbers of shape"),
    "loss": ("np.zeros((len(indices), 33))", r"loss.*expected booleans of shape \(\d+, 33\), found float64"),
}


@pytest.mark.parametrize("method", WRONG)
def test_what_a_source_says_beside_its_tokens_is_checked(beside: Path, method: str) -> None:
    code, message = WRONG[method]
    write_module(beside, "wrong_parts", part(method.title(), method, code))
    dataset = {"source": f"wrong_parts.{method.title()}", "kwargs": {"folder": "texts"}}
    with pytest.raises(InputError, match=message), opened(dataset, model__document_masking=True) as data:
        data.batch(1)


def test_labels_without_loss_and_documents_that_descend(beside: Path) -> None:
    even = part("Even", "loss", "self.samples(indices) % 2 == 0")
    write_module(beside, "masked", even + part("Down", "documents", "-self.places(indices)"))
    with opened({"source": "masked.Even", "kwargs": {"folder": "texts"}}) as data:
        labels = np.concatenate([batch.labels for batch in data.batch(1)])
    assert set((labels[labels != NO_LOSS] % 2).tolist()) == {0}
    assert (labels == NO_LOSS).any()
    message = r"masked\.Down: the document numbers of sample \d+ do not ascend"
    dataset = {"source": "masked.Down", "kwargs": {"folder": "texts"}}
    with pytest.raises(InputError, match=message), opened(dataset, model__document_masking=True) as data:
        data.batch(1)
