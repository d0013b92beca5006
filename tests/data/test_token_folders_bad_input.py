"""Training on tokenized files: all that can be wrong with them, told in one line that names the file."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kenotron.config import InputError
from kenotron.data import RunData
from kenotron.data.formats import TokenFile
from kenotron.data.sources.token_folder import TokenFolder
from support.written_tokens import LENGTHS, L, counting, epoch, opened, write_ds


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files, the second in a folder below; tokens 0-179 and 1000-1179."""
    write_ds(tmp_path / "data" / "a.ds", counting(0, LENGTHS))
    write_ds(tmp_path / "data" / "b" / "a.ds", counting(1000, LENGTHS))
    return tmp_path / "data"


def read_all(dataset: Any, **changes: Any) -> list[str]:
    """Train one epoch; what was said."""
    said: list[str] = []
    with opened(dataset, said=said, **changes) as data:
        epoch(data)
    return said


def test_a_token_outside_the_vocabulary_is_named_with_its_file_and_offset(folder: Path) -> None:
    documents = counting(1000, LENGTHS)
    documents[3][2] = 4096
    write_ds(folder / "b" / "a.ds", documents)
    message = r"b/a\.ds: token 4096 at offset 38 is not below the vocabulary of 4,096 .*uint16"
    with pytest.raises(InputError, match=message):
        read_all({"dataset_folder": str(folder)})
    read_all({"dataset_folder": str(folder)}, arch__vocab_size=4097)
    with pytest.raises(InputError, match=r"a\.ds: token 1\d\d at offset 1\d\d is not below the vocabulary of 100 "):
        read_all({"dataset_folder": str(folder), "vocab_size": 100})


def test_a_negative_id_is_named(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([*range(40), -1, *range(140)], dtype=np.int32))
    with pytest.raises(InputError, match=r"a\.npy: token -1 at offset 40 is not below the vocabulary of 4,096"):
        read_all({"tokens": str(tmp_path / "a.npy")})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"vocab_size": 5000}, r"dataset\.vocab_size: 5000 is above model\.model_config\.vocab_size = 4096"),
        ({"token_size_in_bytes": 4}, r"uint32 asked for, but .*a\.ds\.metadata says 2 bytes"),
    ],
)
def test_keys_that_do_not_fit_the_files_are_named(folder: Path, keys: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        opened({"dataset_folder": str(folder), **keys})


def test_no_folder_no_file_and_too_few_tokens_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"dataset_folder: no such file or folder: .*dat; did you mean 'data'"):
        opened({"dataset_folder": str(tmp_path / "dat")})
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"dataset\.tokens: no token file in .*empty"):
        opened({"tokens": str(tmp_path / "empty")})
    write_ds(tmp_path / "short" / "a.ds", [[1, 2, 3]])
    for paths in (str(tmp_path / "short"), [str(folder), str(tmp_path / "short")]):
        message = r"short: expected at least 9 tokens to train on \(sequence_length \+ 1\), found 1 document, 3 tokens"
        with pytest.raises(InputError, match=message):
            opened({"dataset_folder": paths})


def test_an_unknown_width_is_asked_for_where_it_may_be_another(tmp_path: Path) -> None:
    file = write_ds(tmp_path / "a.ds", counting(0, LENGTHS), 4, tokenizer=None)
    os.remove(f"{file}.index")
    with pytest.raises(InputError, match=r"every second id is 0.*seems to have 4.*token_size_in_bytes"):
        opened({"dataset_folder": str(tmp_path)})
    assert len(read_all({"dataset_folder": str(tmp_path), "token_size_in_bytes": 4})) == 0
    write_ds(tmp_path / "a.ds", counting(0, LENGTHS), 2, tokenizer=None)
    os.remove(f"{file}.index")
    read_all({"dataset_folder": str(tmp_path)})
    with pytest.raises(InputError, match="nothing says whether a token has 2 or 4 bytes"):
        opened({"dataset_folder": str(tmp_path)}, arch__vocab_size=1 << 17)
    write_ds(tmp_path / "a.ds", counting(0, LENGTHS), 2, tokenizer=None)  # its index tells
    opened({"dataset_folder": str(tmp_path)}, arch__vocab_size=1 << 17).close()


def test_another_tokenizer_is_reported_by_name_once_for_a_folder(folder: Path, tmp_path: Path) -> None:
    from kenotron.text.byte_level_bpe import train_byte_level_bpe

    train_byte_level_bpe(["some words"], 300).save(tmp_path / "words")
    run = {"tokenizer__tokenizer_name_or_path": str(tmp_path / "words")}
    assert read_all({"dataset_folder": str(folder)}, **run) == []  # the same name in another place
    said = read_all({"dataset_folder": str(folder), "tokenizer_name": "gpt2"}, **run)
    other = f"and the tokenizer of the run is '{tmp_path / 'words'}'"
    assert said == [f"warning: {folder} was tokenized with 'gpt2', {other}"]
    for file in ("a.ds", "b/a.ds"):
        write_ds(folder / file, counting(0, LENGTHS), tokenizer="gpt2")
    assert len(read_all({"dataset_folder": str(folder)}, **run)) == 1


@pytest.mark.parametrize("merged", [False, True])
def test_another_tokenizer_than_the_manifests_is_refused_whatever_its_name(tmp_path: Path, merged: bool) -> None:
    """The metadata of both folders name a folder `tokenizer`."""
    from kenotron.prepare.merge import merge
    from kenotron.prepare.tokenize import TokenizeOptions, tokenize
    from kenotron.text.byte_level_bpe import train_byte_level_bpe
    from kenotron.text.tokenizer import load_tokenizer

    for name, text in (("a", "some words"), ("b", "other text")):
        train_byte_level_bpe([text], 258).save(tmp_path / name / "tokenizer")
    (tmp_path / "a.txt").write_text("some words and other text\n\n" * 40)
    made_with = load_tokenizer(str(tmp_path / "a" / "tokenizer"))
    tokens = tmp_path / "tokens"
    tokenize([str(tmp_path / "a.txt")], made_with, tokens, TokenizeOptions(), 1, lambda line: None)
    manifest = tokens / "manifest.json"
    if merged:
        merge([str(tokens)], tmp_path / "all.ds")
        tokens, manifest = tmp_path / "all.ds", tmp_path / "all.ds.manifest.json"
    assert read_all({"tokens": str(tokens)}, tokenizer__tokenizer_name_or_path=made_with.name) == []
    (tmp_path / "manifest.json").write_text("[another program's")
    with pytest.raises(InputError, match=rf"{manifest.name}: its tokens were made with .*a/tok.* run is .*b/tok"):
        read_all({"tokens": str(tokens)}, tokenizer__tokenizer_name_or_path=str(tmp_path / "b" / "tokenizer"))


def test_two_bytes_are_too_few_for_the_runs_tokenizer(folder: Path, tmp_path: Path) -> None:
    import tokenizers

    model = tokenizers.models.WordLevel({f"w{n}": n for n in range(70_000)}, unk_token="w0")
    (tmp_path / "large").mkdir()
    tokenizers.Tokenizer(model).save(str(tmp_path / "large" / "tokenizer.json"))
    run = {"tokenizer__tokenizer_name_or_path": str(tmp_path / "large"), "arch__vocab_size": 70_000}
    message = r"a\.ds: tokens of 2 bytes are not those of the run's tokenizer .*large, which has 70,000 entries"
    with pytest.raises(InputError, match=message):
        opened({"dataset_folder": str(folder)}, **run)


@pytest.fixture
def every_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are looked at before every read, however soon it follows on the last."""
    monkeypatch.setattr("kenotron.data.sources.token_folder.CHECK_EVERY", 0.0)


@pytest.mark.usefixtures("every_look")
@pytest.mark.parametrize("change", ["truncate", "replace", "vanish"])
def test_a_file_that_changes_while_training_is_named(folder: Path, change: str) -> None:
    with opened({"dataset_folder": str(folder)}) as data:
        data.batch(1)
        if change == "truncate":
            os.truncate(folder / "a.ds", 100)
        elif change == "vanish":
            os.remove(folder / "a.ds")
        else:
            write_ds(folder / "a.ds", counting(1, LENGTHS))
        with pytest.raises(InputError, match=r"data/a\.ds: the file has changed or vanished since the run opened it"):
            epoch(data)


def test_an_index_out_of_order_is_named(tmp_path: Path) -> None:
    file = write_ds(tmp_path / "a.ds", [[1] * 9] * 20)
    ends = np.arange(9, 181, 9, dtype=np.uint64)
    folder = TokenFolder("a", [TokenFile(file, "datatrove", np.ones(180, np.uint16), ends, None, None)], L, 10)
    assert folder.read(np.arange(20)).document_ids is not None
    ends[5] = 3
    with pytest.raises(InputError, match="the ends of its documents are not in order"):
        folder.read(np.arange(20))


def read_steps(data: RunData, steps: range) -> None:
    for step in steps:
        data.batch(step)


@pytest.mark.usefixtures("every_look")
@pytest.mark.parametrize("kind", ["index", "loss"])
@pytest.mark.parametrize("packing", [None, "best_fit"])
def test_what_lies_beside_the_tokens_may_not_change_either(tmp_path: Path, kind: str, packing: str | None) -> None:
    documents = counting(0, [300] * 9)
    file = write_ds(tmp_path / "a.ds", documents, loss=[True] * 2700)
    dataset = {"tokens": str(file)} | ({"packing": packing} if packing else {})
    with opened(dataset, model__document_masking=True, arch__vocab_size=3000) as data:
        data.batch(1)
        os.truncate(f"{file}.{kind}", 0)
        with pytest.raises(InputError, match=rf"a\.ds\.{kind}: the file has changed or vanished"):
            read_steps(data, range(2, 12))


@pytest.mark.parametrize("packing", [None, "best_fit"])
def test_a_loss_that_is_neither_0_nor_1_is_named_before_it_is_fed(tmp_path: Path, packing: str | None) -> None:
    file = write_ds(tmp_path / "a.ds", counting(0, [300] * 9), loss=[True] * 2700)
    with open(f"{file}.loss", "r+b") as stream:
        stream.seek(70)
        stream.write(b"\x07")
    dataset = {"tokens": str(file)} | ({"packing": packing} if packing else {})
    message = r"a\.ds\.loss: expected 0 or 1 for each token, found 7 at byte 70"
    with pytest.raises(InputError, match=message), opened(dataset, train_steps=200, val_fraction=1e-6) as data:
        read_steps(data, range(1, 200))


def test_small_files_take_no_map_of_their_own(tmp_path: Path) -> None:
    """The kernel gives a process some 65,000."""
    from kenotron.data.formats import open_token_files

    for number in range(200):
        write_ds(tmp_path / f"{number:03}.ds", counting(number, [40]))
    before = len(Path("/proc/self/maps").read_text().splitlines())
    files = open_token_files(tmp_path, "PATH")
    assert len(Path("/proc/self/maps").read_text().splitlines()) < before + 100
    assert [int(file.tokens[0]) for file in files] == list(range(200))
