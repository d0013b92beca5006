"""Datasets and tokenizers of the hub, from local caches made here, in processes that may open no socket."""

import os
import socket
import subprocess
import sys
import textwrap
import threading

import pytest

from kenotron.config.errors import InputError
from kenotron.data import load_tokenizer
from kenotron.storage import hub
from kenotron.text import hub_datasets
from kenotron.text.hub_datasets import HubDocuments, load_rows
from support.hub_cache import DATASET, TOKENIZER, made_documents, make_hub_cache, offline_environment

NO_SOCKET = """
import socket
def refuse(*_, **__): raise AssertionError("a socket was opened")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
import sys; sys.path[:0] = {folders}
from kenotron.config.errors import InputError
from kenotron.storage import hub
from kenotron.text.hub_datasets import HubDocuments
from kenotron.data import load_tokenizer, open_run
from support.data_runs import run_config

def failure(function):
    try:
        function()
    except InputError as error:
        return str(error)
"""


def run(code, environment, cache):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and "OFFLINE" not in k}
    program = NO_SOCKET.format(folders=[os.path.dirname(os.path.dirname(__file__))]) + textwrap.dedent(code)
    options = {"timeout": 120, "env": clean | environment | {"KENOTRON_CACHE": str(cache)}}
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, **options)
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout.splitlines()


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")]


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", *SLOW])
def test_offline_a_cached_dataset_and_tokenizer_are_read_without_a_socket(hub_home, tmp_path, variable):
    code = f"""
    config = run_config({{"hf_dataset_or_datasets": "{DATASET}"}}, tokenizer__tokenizer_name_or_path="{TOKENIZER}")
    with open_run(config) as data:
        stage = data._open(0).result()
        cache = stage.sources[0].cache
        print(len(cache.train.ends), len(cache.validation.ends), cache.train.bytes + cache.validation.bytes)
        print(data.tokenizer.decode(data.batch(1)[0].tokens[0][:3]))
        print("\\n".join(data.describe()))
    print([m for m in ("torch", "datasets", "transformers") if m in sys.modules])
    print(failure(lambda: load_tokenizer("robot-test/nothing")))
    print(failure(lambda: HubDocuments("robot-test/nothing").content_hash()))
    """
    environment = {"HF_HOME": str(hub_home), variable: "1"}
    lines = run(code, environment, tmp_path)
    documents = made_documents()
    assert lines.pop(0).startswith("tokenized stas/openwebtext-10k: 48,400 tokens in ")
    train, held, size = map(int, lines[0].split())
    assert train + held == len(documents)
    assert held > 40
    assert size == sum(map(len, documents))
    assert lines[1].startswith("word")
    assert "documents end with token 2 (model_config.eos_token_id, as the tokenizer has none)" in lines[2]
    assert lines[3].startswith("warning: model.model_config.vocab_size is ")
    assert lines[5] == "['datasets']"
    missing = f"'robot-test/nothing' is not in the local Hugging Face caches, and {variable}=1 forbids fetching it"
    assert [line.endswith(missing) for line in lines[6:8]] == [True, True]
    if variable != "HF_HUB_OFFLINE":
        return
    again = run(code.split("print(failure")[0], environment, tmp_path)
    assert again[:2] == lines[:2]
    assert again[-1] == "[]"  # found again without importing `datasets`


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder of data files, and two that `save_to_disk` wrote."""
    import datasets

    folder = tmp_path_factory.mktemp("saved")
    rows = datasets.Dataset.from_dict({"text": [f"row {n}" for n in range(10)], "number": list(range(10))})
    rows.save_to_disk(folder / "one")
    datasets.DatasetDict({"train": rows, "test": rows.select(range(3))}).save_to_disk(folder / "splits")
    (folder / "files").mkdir()
    rows.to_parquet(folder / "files" / "part.parquet")
    datasets.load_dataset(str(folder / "files"), split="train").save_to_disk(folder / "train only")
    return folder


def test_local_folders_splits_and_fractions_give_the_rows_they_name(saved, tmp_path):
    """And so does the snapshot of a repository of which there is no prepared copy."""
    home = make_hub_cache(tmp_path / "home", prepared=False)
    code = f"""
    import os; os.chdir("{saved}")
    texts = HubDocuments("{DATASET}")
    documents = [text for text, *_ in texts.documents()]
    print(texts.size, len(documents), documents[0])
    def rows(*arguments):
        texts = HubDocuments(*arguments)
        found = [text for text, *_ in texts.documents()]
        assert texts.size == len(found)
        return " ".join(text.split()[-1] for text in found)
    print(rows("one"))
    print(rows("files"))
    print(rows("splits", "test"))
    print(rows("splits", ["test", "train"]))
    print(rows({{"one": 0.39, "splits": 0.1}}))
    one, again, test = HubDocuments("one"), HubDocuments("one"), HubDocuments("one", "test")
    print(one.content_hash() == again.content_hash() != test.content_hash())
    print(HubDocuments({{"one": 0.5}}).content_hash() != HubDocuments("one").content_hash())
    for function in (
        lambda: HubDocuments("splits", "dev").content_hash(),
        lambda: list(HubDocuments("one", column="body").documents()),
        lambda: list(HubDocuments("one", column="number").documents()),
        lambda: HubDocuments("files", "dev").content_hash(),
        lambda: HubDocuments("files", "train", "german").content_hash(),
        lambda: HubDocuments("train only", "test").content_hash(),
        lambda: HubDocuments("train only", "train", "german").content_hash(),
        lambda: HubDocuments("/nowhere").content_hash(),
        lambda: HubDocuments({{"one": 0.0}}),
    ):
        print(failure(function))
    """
    snapshot, *lines = run(code, offline_environment(home), tmp_path)
    assert snapshot == f"400 400 {made_documents()[0]}"
    whole = "0 1 2 3 4 5 6 7 8 9"
    assert lines[:7] == [whole, whole, "0 1 2", "0 1 2 " + whole, "0 1 2 0", "True", "True"]
    expected = [
        "'splits' has no split 'dev'; it has train, test",
        "no text column 'body'; found number, text",
        "row 1: column 'number' must hold text, found int",
        "'files': Unknown split \"dev\"",
        "'files': BuilderConfig 'german' not found",
        "hf_dataset_splits: 'train only' has no split 'test'; it has train",
        "hf_dataset_config_name: 'train only' was saved from the configuration 'default', not 'german'",
        "no such folder: /nowhere",
        "fraction of 'one' must be above 0",
    ]
    for line, part in zip(lines[7:], expected, strict=True):
        assert part in line


def test_a_folder_of_parquet_has_a_signature_that_follows_its_files(tmp_path):
    folder = tmp_path / "rows"
    folder.mkdir()
    for name in ("part.parquet", "README.md"):
        (folder / name).write_text(name)
        os.utime(folder / name, (1_000_000, 1_000_000))
    first = HubDocuments(str(folder)).signature()
    assert first is not None
    assert HubDocuments(str(folder)).signature() == first
    (folder / "part.parquet").write_text("other content")
    assert HubDocuments(str(folder)).signature() is None  # changed within these two seconds: nothing cheap is known
    os.utime(folder / "part.parquet", (1_000_000, 1_000_000))
    assert HubDocuments(str(folder)).signature() not in (None, first)


def test_a_hub_that_accepts_and_never_answers_is_named_at_once(monkeypatch, tmp_path):
    """The connection stands: the kernel completes it before the server would accept it."""
    from huggingface_hub import constants

    with socket.create_server(("127.0.0.1", 0)) as silent:
        for name in (*hub.OFFLINE_VARIABLES, *hub.PROXY_VARIABLES, *map(str.lower, hub.PROXY_VARIABLES)):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr(hub, "ANSWER_S", 0.2)
        message = r"cannot reach .* not cached here \(127\.0\.0\.1: no answer in 0\.2 s\)"
        for ask in (lambda name: load_rows(name, None, "train"), load_tokenizer):
            with pytest.raises(InputError, match=message):
                ask("robot-test/nothing")


@pytest.mark.parametrize("first_line", [b"HTTP/1.1 503 Busy\r\n\r\n", b"what?\r\n"])
def test_a_hub_that_answers_anything_is_there(monkeypatch, first_line):
    from huggingface_hub import constants

    for name in (*hub.PROXY_VARIABLES, *map(str.lower, hub.PROXY_VARIABLES)):
        monkeypatch.delenv(name, raising=False)

    def answer():
        connection, _ = server.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(first_line)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer)
        thread.start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert hub.unreachable() is None
        thread.join()


@pytest.mark.slow
def test_a_hub_that_stalls_is_not_waited_for_without_limit(monkeypatch):
    import huggingface_hub

    with socket.create_server(("127.0.0.1", 0)) as silent, monkeypatch.context() as patch:
        patch.setattr(hub_datasets, "SILENCE_S", 0.2)
        hub_datasets.limit_waits()
        with pytest.raises(Exception, match="timed out"):
            huggingface_hub.get_session().get(f"http://127.0.0.1:{silent.getsockname()[1]}/api/datasets/a/b")
    hub_datasets.limit_waits()
