"""Text to tokens on disk: equal to a plain loop, whatever the workers, the kills, the form of the input."""

import gzip
import json
import os
import random
import shutil
from dataclasses import replace
from itertools import chain
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from kenotron.config.errors import InputError
from kenotron.data.formats import open_token_files
from kenotron.prepare import inputs as inputs_module
from kenotron.prepare import tokenize as tokenize_module
from kenotron.prepare.merge import merge
from kenotron.prepare.tokenize import TokenizeOptions, tokenize
from kenotron.text.byte_level_bpe import train_byte_level_bpe
from kenotron.text.file_documents import FileDocuments
from kenotron.text.tokenizer import TextTokenizer, load_tokenizer
from support.data_runs import bytes_of, quiet

WORDS = ["alpha", "beta", "gamma", "été", "漢字", "x1", "🙂", "the", "of", "and", "1234"]


def made_texts(count, seed=0, longest=60):
    source = random.Random(seed)
    texts = [" ".join(source.choices(WORDS, k=source.randint(1, longest))) for _ in range(count)]
    return [*texts, "ends by itself <|endoftext|>", "\n\n  spaces \t"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> TextTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_byte_level_bpe(made_texts(200, 7), 400).save(folder)
    return load_tokenizer(folder)


def write_jsonl(file: Path, texts, opened=open):
    with opened(file, "wt") as stream:
        for text in texts:
            stream.write(json.dumps({"text": text, "score": len(text)}) + "\n")


@pytest.fixture
def corpus(tmp_path) -> tuple[Path, list[str]]:
    """A folder of all that is read, and its documents in order."""
    from pyarrow import Table, ipc, parquet

    folder = tmp_path / "corpus"
    folder.mkdir()
    parts = [made_texts(60, seed) for seed in range(4)]
    write_jsonl(folder / "a.jsonl", parts[0])
    write_jsonl(folder / "b.jsonl.gz", parts[1], gzip.open)
    parquet.write_table(Table.from_pydict({"text": parts[2]}), folder / "c.parquet", row_group_size=7)
    table = Table.from_pydict({"text": parts[3]})
    with ipc.new_stream(folder / "d.arrow", table.schema) as stream:
        stream.write_table(table, max_chunksize=9)
    (folder / "e.txt").write_text("one file\n\nis one document")
    return folder, [*chain(*parts), "one file\n\nis one document"]


def plain_loop(tokenizer, texts):
    """What the tokens must be."""
    documents = []
    for text in texts:
        ids = tokenizer.encode(text)
        documents.append(ids if ids[-1:] == [tokenizer.eos_token_id] else [*ids, tokenizer.eos_token_id])
    return documents


def written(folder: Path, dtype="<u2"):
    """The documents in a folder of `.ds`, read by the published layout alone."""
    documents = []
    for file in sorted(folder.glob("*.ds")):
        ids = np.fromfile(file, dtype)
        ends = np.fromfile(f"{file}.index", "<u8").astype(int)
        assert ends[-1] == len(ids)
        documents += [part.tolist() for part in np.split(ids, ends[:-1])]
    return documents


SMALL = TokenizeOptions(shard_megabytes=0.002)


@pytest.mark.usefixtures("real_workers")
def test_tokens_are_those_of_a_plain_loop_and_the_bytes_the_same_for_any_number_of_workers(corpus, tokenizer, tmp_path):
    folder, texts = corpus
    made = tokenize([str(folder)], tokenizer, tmp_path / "one", SMALL, 1, quiet)
    assert written(tmp_path / "one") == plain_loop(tokenizer, texts)
    assert len(made["files"]) > 6
    tokenize([str(folder)], tokenizer, tmp_path / "three", SMALL, 3, quiet)
    assert bytes_of(tmp_path / "three") == bytes_of(tmp_path / "one")


def test_the_manifest_counts_and_names_what_was_done(corpus, tokenizer, tmp_path):
    import xxhash

    folder, texts = corpus
    tokenize([str(folder)], tokenizer, tmp_path / "out", SMALL, 1, quiet)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    expected = plain_loop(tokenizer, texts)
    assert manifest["documents"] == len(expected)
    assert manifest["tokens"] == sum(map(len, expected))
    assert manifest["bytes"] == sum(len(text.encode()) for text in texts)
    assert (manifest["eos"], manifest["bos"], manifest["dtype"]) == (tokenizer.eos_token_id, None, "uint16")
    assert manifest["tokenizer_hash"] == tokenizer.hash
    sums = {name: digest for file in manifest["files"] for name, digest in file["xxh3"].items()}
    files = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir() if file.name != "manifest.json"}
    assert sums == {name: xxhash.xxh3_128_hexdigest(content) for name, content in files.items()}


def test_a_finished_folder_says_so_and_other_work_in_it_is_refused(corpus, tokenizer, tmp_path):
    folder, _ = corpus
    said = []
    first = tokenize([str(folder)], tokenizer, tmp_path / "out", SMALL, 1, quiet)
    before = bytes_of(tmp_path / "out")
    assert tokenize([str(folder)], tokenizer, tmp_path / "out", SMALL, 1, said.append) == first
    assert "done already" in said[-1]
    other = train_byte_level_bpe(["some other words"], 300)
    with pytest.raises(InputError, match="started with tokenizer"):
        tokenize([str(folder)], other, tmp_path / "out", SMALL, 1, quiet)
    with pytest.raises(InputError, match=r"with options\.eos true, found false now"):
        tokenize([str(folder)], tokenizer, tmp_path / "out", replace(SMALL, eos=False), 1, quiet)
    with open(folder / "a.jsonl", "a") as stream:
        stream.write('{"text": "more"}\n')
    with pytest.raises(InputError, match="started with content"):
        tokenize([str(folder)], tokenizer, tmp_path / "out", SMALL, 1, quiet)
    assert bytes_of(tmp_path / "out") == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="files that this command did not write"):
        tokenize([str(folder)], tokenizer, tmp_path / "mine", SMALL, 1, quiet)


def test_a_text_that_was_corrected_at_the_same_length_is_another_input(tokenizer, tmp_path):
    file = tmp_path / "a.jsonl"
    write_jsonl(file, ["one two"])
    tokenize([str(file)], tokenizer, tmp_path / "out", TokenizeOptions(), 1, quiet)
    before = file.stat()
    write_jsonl(file, ["one six"])
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 10**9))
    assert file.stat().st_size == before.st_size
    with pytest.raises(InputError, match="started with content"):
        tokenize([str(file)], tokenizer, tmp_path / "out", TokenizeOptions(), 1, quiet)


def test_an_input_that_changes_while_it_is_read_is_refused(tokenizer, tmp_path, monkeypatch):
    file, make = tmp_path / "a.jsonl", tokenize_module.make_shards
    write_jsonl(file, ["one"])

    def meanwhile(*arguments):
        make(*arguments)
        write_jsonl(file, ["one", "two"])

    monkeypatch.setattr(tokenize_module, "make_shards", meanwhile)
    with pytest.raises(InputError, match=r"a\.jsonl: changed while it was read"):
        tokenize([str(file)], tokenizer, tmp_path / "out", TokenizeOptions(), 1, quiet)
    assert not (tmp_path / "out" / "manifest.json").exists()


def states(folder: Path) -> dict[str, tuple[int, int]]:
    """Which file each shard is, and when it was written."""
    return {file.name: (file.stat().st_ino, file.stat().st_mtime_ns) for file in folder.glob("*.ds*")}


@pytest.mark.slow
def test_a_killed_run_goes_on_without_doing_its_finished_shards_again(corpus, tokenizer, tmp_path, nursery):
    folder, _ = corpus
    tokenize([str(folder)], tokenizer, tmp_path / "whole", SMALL, 1, quiet)
    output = tmp_path / "out"
    arguments = ("data", "tokenize", folder, "--tokenizer", tokenizer.folder, "--output", output)
    arguments = (*arguments, "--shard-size", "0.002", "--workers", "2")
    known: dict[str, tuple[int, int]] = {}
    for die_at in (25, 41, 60):
        assert nursery.run(*arguments, folder=tmp_path, die_at=die_at).code == -9
        assert not (output / "manifest.json").exists()
        notes = {note.stem for note in (output / ".unfinished").glob("0*.json")}
        found = {name: state for name, state in states(output).items() if name.split(".")[0] in notes}
        assert known.items() <= found.items()
        known = found
    assert known  # some shards were finished before the last kill
    done = nursery.run(*arguments, folder=tmp_path)
    assert done.code == 0, done.stderr
    assert "shards done already" in done.stderr
    assert known.items() <= states(output).items()
    assert bytes_of(output) == bytes_of(tmp_path / "whole")


def test_bos_and_eos_are_what_the_options_say(tokenizer, tmp_path):
    file = tmp_path / "a.jsonl"
    write_jsonl(file, ["one two", "", "three"])
    tokenizer = TextTokenizer(tokenizer.backend, tokenizer.config | {"bos_token": "<|endoftext|>"})
    plain = [tokenizer.encode(text) for text in ("one two", "", "three")]
    eos = [tokenizer.eos_token_id]
    for name, options, expected in (
        ("neither", TokenizeOptions(eos=False), [plain[0], plain[2]]),
        ("eos", TokenizeOptions(), [ids + eos for ids in plain]),
        ("bos", TokenizeOptions(eos=False, bos=True), [eos + ids for ids in plain]),
    ):
        tokenize([str(file)], tokenizer, tmp_path / name, options, 1, quiet)
        assert written(tmp_path / name) == expected
    nameless = TextTokenizer(tokenizer.backend, {})
    with pytest.raises(InputError, match=r"--eos: .* names no end-of-text token"):
        tokenize([str(file)], nameless, tmp_path / "x", TokenizeOptions(), 1, quiet)


def test_a_tokenizer_that_begins_texts_by_itself_does_so_here_unless_told_otherwise(tokenizer, tmp_path):
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    end = "<|endoftext|>"
    backend = Tokenizer.from_str(tokenizer.to_json())
    backend.post_processor = TemplateProcessing(f"{end} $A", special_tokens=[(end, tokenizer.eos_token_id)])
    llama = TextTokenizer(backend, tokenizer.config | {"bos_token": end})
    write_jsonl(tmp_path / "a.jsonl", ["one two"])
    ids, border = tokenizer.encode("one two"), [tokenizer.eos_token_id]
    for bos, expected in ((None, border + ids + border), (True, border + ids + border), (False, ids + border)):
        out = tmp_path / str(bos)
        tokenize([str(tmp_path / "a.jsonl")], llama, out, TokenizeOptions(bos=bos), 1, quiet)
        assert written(out) == [expected]


def test_shuffled_documents_are_the_same_documents_in_an_order_of_the_seed(corpus, tokenizer, tmp_path):
    folder, texts = corpus
    made = {}
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        options = TokenizeOptions(shuffle_documents=True, seed=seed)
        tokenize([str(folder)], tokenizer, tmp_path / name, options, 1, quiet)
        made[name] = written(tmp_path / name)
    assert made["a"] == made["b"] != made["c"]
    plain = plain_loop(tokenizer, texts)
    assert sorted(made["a"]) == sorted(made["c"]) == sorted(plain)
    assert made["a"] != plain


def test_a_long_document_stays_one_document_in_pieces(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("kenotron.prepare.tokenize.LONGEST_CHUNK", 200)
    monkeypatch.setattr(inputs_module, "LONGEST_CHUNK", 200)
    paragraph = "words in a line\n" * 5 + "\n"
    write_jsonl(tmp_path / "a.jsonl", [paragraph * 40, "short"])
    (tmp_path / "b.txt").write_text(paragraph * 30)
    for name, options in (("plain", TokenizeOptions()), ("mixed", TokenizeOptions(shuffle_documents=True))):
        tokenize([str(tmp_path / "a.jsonl"), str(tmp_path / "b.txt")], tokenizer, tmp_path / name, options, 1, quiet)
        texts = [tokenizer.decode(ids[:-1]) for ids in written(tmp_path / name)]
        assert sorted(texts) == sorted([paragraph * 40, "short", paragraph * 30])


def test_functions_of_the_user_drop_rewrite_and_repeat_rows(tokenizer, tmp_path, monkeypatch):
    (tmp_path / "my_rows.py").write_text(
        "def keep(row):\n"
        "    return {'a': True, 'b': False, 'c': 'rewritten', 'd': ['two', 'texts'], 'e': True}[row['text']]\n"
        "def times(row, file):\n"
        "    assert file.endswith('a.jsonl')\n"
        "    return {'a': 2, 'e': 0}.get(row['text'], 1)\n"
        "def wrong(row, file):\n"
        "    return 0.5\n"
    )
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "a.jsonl", "abcde")
    options = TokenizeOptions(filter="my_rows.keep", repeat="my_rows.times")
    tokenize(["a.jsonl"], tokenizer, tmp_path / "out", options, 1, quiet)
    assert written(tmp_path / "out") == plain_loop(tokenizer, ["a", "a", "rewritten", "two", "texts"])
    with pytest.raises(InputError, match=r"--repeat: my_rows\.wrong must return a number of times, found 0\.5"):
        tokenize(["a.jsonl"], tokenizer, tmp_path / "x", TokenizeOptions(repeat="my_rows.wrong"), 1, quiet)


@pytest.mark.parametrize(
    ("name", "content", "message", "left"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text"\n{"text": "y"}\n', r"a\.jsonl:2: expected one JSON object", ["x", "y"]),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 3, mtime=0)[:-9], r"damaged gzip file, near byte", ["x"] * 3),
        ("a.parquet", b"PAR1 and nothing else PAR1", r"a\.parquet: damaged parquet file", None),
    ],
)
def test_damage_is_named_or_left_out_and_counted(tokenizer, tmp_path, name, content, message, left):
    (tmp_path / name).write_bytes(content)
    write_jsonl(tmp_path / "b.jsonl", ["last"])
    inputs = [str(tmp_path / name), str(tmp_path / "b.jsonl")]
    with pytest.raises(InputError, match=message) as caught:
        tokenize(inputs, tokenizer, tmp_path / "out", TokenizeOptions(), 1, quiet)
    assert "\n" not in str(caught.value)
    if left is not None:
        made = tokenize(inputs, tokenizer, tmp_path / "skipped", TokenizeOptions(skip_bad=True), 1, quiet)
        assert made["skipped"] == 1
        assert written(tmp_path / "skipped") == plain_loop(tokenizer, [*left, "last"])


def test_a_run_that_met_damage_goes_on_once_told_to_skip_it(tokenizer, tmp_path):
    good, bad = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    write_jsonl(good, ["one", "two"] * 6)  # more shards than are read ahead
    bad.write_text('{"text": "three"}\n{"text"\n')
    arguments = ([str(good), str(bad)], tokenizer, tmp_path / "out")
    options = TokenizeOptions(shard_megabytes=0.00005)
    with pytest.raises(InputError, match=r"b\.jsonl:2: expected one JSON object"):
        tokenize(*arguments, options, 1, quiet)
    first = (tmp_path / "out" / "00000.ds").stat()
    assert tokenize(*arguments, replace(options, skip_bad=True), 1, quiet)["skipped"] == 1
    assert written(tmp_path / "out") == plain_loop(tokenizer, ["one", "two"] * 6 + ["three"])
    assert (tmp_path / "out" / "00000.ds").stat().st_ino == first.st_ino


def test_a_mistake_leaves_nothing_that_the_corrected_command_is_refused_for(tokenizer, tmp_path):
    (tmp_path / "texts").mkdir()
    write_jsonl(tmp_path / "texts" / "a.jsonl", ["a b"])
    texts, output = str(tmp_path / "texts"), tmp_path / "tokens"
    with pytest.raises(InputError, match="no text column 'txt'"):
        tokenize([texts], tokenizer, output, TokenizeOptions(column="txt"))
    made = tokenize([texts], tokenizer, output, TokenizeOptions())
    assert made["documents"] == 1
    assert tokenize([texts + "/"], tokenizer, output, TokenizeOptions()) == made  # the same folder
    with pytest.raises(InputError, match="listed twice"):
        tokenize([texts, texts + "/"], tokenizer, output, TokenizeOptions())


@pytest.mark.usefixtures("real_workers")
def test_from_text_to_a_merged_file_on_the_command_line(tmp_path, monkeypatch, shell):
    monkeypatch.chdir(tmp_path)
    texts = made_texts(50)
    write_jsonl(tmp_path / "a.jsonl", texts)
    assert shell("data", "train-tokenizer", "a.jsonl", "--vocab-size", "300", "--output", "tok")[0] == 0
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)  # macOS has none
    code, said, _ = shell("data", "tokenize", "a.jsonl", "--tokenizer", "tok", "--output", "out")
    assert (code, "Next: kenotron data inspect out --tokenizer tok" in said) == (0, True)
    assert shell("data", "merge", "out", "--shuffle", "--output", "all.ds")[0] == 0
    assert sorted(written(tmp_path)) == sorted(plain_loop(load_tokenizer("tok"), texts))
    shutil.copytree("tok", "10/tokenizer")  # as in a checkpoint
    before = {file.name for file in tmp_path.iterdir()}
    for options, line in (
        ("--tokenizer tok --output s3://b/x", "--output: expected a local path"),
        ("--tokenizer tok --output x --seed 1", "only with --shuffle-doc"),
        ("--tokenizer 10 --output x", "in it; did you mean 10/tokenizer?"),
    ):
        code, _, said = shell("data", "tokenize", "a.jsonl", *options.split())
        assert (code, line in said.splitlines()[0], said[:7]) == (2, True, "error: ")
    assert {file.name for file in tmp_path.iterdir()} == before


def test_the_commands_shuffle_by_their_seeds(corpus, tokenizer, tmp_path, shell):
    texts, out = str(corpus[0] / "a.jsonl"), tmp_path / "out"
    given = ["data", "tokenize", texts, "--tokenizer", str(tokenizer.folder), "--output", str(tmp_path / "by command")]
    for arguments in (
        [*given, "--shuffle-documents", "--seed", "5", "--workers", "1"],
        ["data", "merge", str(out), "--output", str(tmp_path / "merged by command"), "--shuffle", "--seed", "6"],
    ):
        tokenize([texts], tokenizer, out, TokenizeOptions(shuffle_documents=True, seed=5), 1, quiet)
        assert shell(*arguments)[0] == 0
    merge([str(out)], tmp_path / "merged", shuffle=True, seed=6, report=quiet)
    assert written(tmp_path / "by command") == written(out)
    assert written(tmp_path / "merged by command") == written(tmp_path / "merged") != written(out)


def test_an_endless_line_is_refused_in_bounded_memory_or_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr("kenotron.text.json_lines.LONGEST_LINE", 1000)
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{"text": "' + "y" * 5_000_000 + '"}\n{"text": "z"}\n')
    with pytest.raises(InputError, match=r"a\.jsonl:2: a line of more than"):
        list(FileDocuments("a", [tmp_path / "a.jsonl"]).documents())
    texts = FileDocuments("a", [tmp_path / "a.jsonl"], skip_bad=True)
    assert [chunk.text for chunk in texts.documents()] == ["x", "z"]
    assert texts.skipped == 1


@pytest.mark.parametrize("size", [1, 7, 50, 333, 10_000])
def test_spans_of_any_size_hold_every_document_once(tmp_path, size):
    texts = made_texts(30, 3)
    write_jsonl(tmp_path / "a.jsonl", texts)
    files = FileDocuments("a", [tmp_path / "a.jsonl"])
    byte_ranges = list(files.byte_ranges(size))
    assert sum(byte_range.size for byte_range in byte_ranges) == files.size
    assert [chunk.text for byte_range in byte_ranges for chunk in files.read(byte_range)] == texts


def test_a_saved_dataset_is_read_in_spans_of_rows(tokenizer, tmp_path):
    import datasets

    texts = made_texts(40, 5)
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(str(tmp_path / "saved"))
    tokenize([str(tmp_path / "saved")], tokenizer, tmp_path / "out", TokenizeOptions(shard_megabytes=0.002), 1, quiet)
    assert written(tmp_path / "out") == plain_loop(tokenizer, texts)
    assert len(list((tmp_path / "out").glob("*.ds"))) > 1


def twice(row, file):
    return 2


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_rows_without_text_are_skipped_with_a_hook_too(tmp_path, tokenizer, form):
    from pyarrow import Table, parquet

    texts, name = ["one", None, "two"], f"{tmp_path}/in.{form}"
    if form == "jsonl":
        Path(name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    else:
        parquet.write_table(Table.from_pydict({"text": texts}), name)
    options, position = TokenizeOptions(repeat=f"{__name__}.twice"), {"jsonl": ":2", "parquet": ", row 1"}[form]
    with pytest.raises(InputError, match=rf"in\.{form}{position}: column 'text' must hold text, found null"):
        tokenize([name], tokenizer, tmp_path / "strict", options, 1, quiet)
    made = tokenize([name], tokenizer, tmp_path / "skipping", replace(options, skip_bad=True), 1, quiet)
    assert (made["documents"], made["skipped"]) == (4, 1)


def test_what_a_stopped_command_left_is_not_taken_for_complete(tmp_path, tokenizer, monkeypatch):
    write_jsonl(tmp_path / "a.jsonl", ["one", "two"])
    arguments = [str(tmp_path / "a.jsonl")], tokenizer, tmp_path / "out", TokenizeOptions(), 1, quiet
    with monkeypatch.context() as patch:
        patch.setattr("kenotron.prepare.tokenize.finish", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            tokenize(*arguments)
    assert (tmp_path / "out" / "00000.ds").exists()
    with pytest.raises(InputError, match=r"^k: .*out is not complete: run the same kenotron data tokenize command"):
        open_token_files(tmp_path / "out", "k")
    with pytest.raises(InputError, match="is not complete"):
        merge([str(tmp_path / "out")], tmp_path / "all", report=quiet)
    tokenize(*arguments)
    assert len(open_token_files(tmp_path / "out", "k")) == 1


PRINTS = "print('hello', flush=True); from kenotron.text.encode import main; main()"


@pytest.mark.usefixtures("real_workers")
@pytest.mark.parametrize("program", ["raise SystemExit(3)", PRINTS])
def test_a_worker_that_ends_at_once_or_prints_is_reported(tmp_path, tokenizer, monkeypatch, program):
    """A command that ended without a message, or waited for ever."""
    from kenotron.text import encode

    real = encode.subprocess.Popen
    monkeypatch.setattr(encode.subprocess, "Popen", lambda command, **options: real([*command[:3], program], **options))
    write_jsonl(tmp_path / "a.jsonl", ["one", "two"])
    with pytest.raises(InputError, match="a tokenization process ended with code"):
        tokenize([str(tmp_path / "a.jsonl")], tokenizer, tmp_path / "out", TokenizeOptions(), 2, quiet)
