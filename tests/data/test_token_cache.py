"""The token cache: what is in it, when it is made again, and that it is whole or not there."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tokenizers

from kenotron.config.errors import InputError
from kenotron.data import cache
from kenotron.data.cache import EncodeRules, open_tokens
from kenotron.text.byte_level_bpe import train_byte_level_bpe
from kenotron.text.file_documents import FileDocuments, find_files
from kenotron.text.hash_split import is_held_out, text_hash, threshold_of_fraction
from kenotron.text.tokenizer import TextTokenizer
from support.data_runs import quiet, write_texts

RULES = EncodeRules(eos=0, max_tokens=None)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = write_texts(tmp_path_factory.mktemp("texts") / "t")
    return train_byte_level_bpe((file.read_text() for file in sorted(folder.iterdir())), 400)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("KENOTRON_CACHE", str(tmp_path / "cache"))
    return write_texts(tmp_path / "texts")


def texts_in(folder):
    return FileDocuments("texts", find_files(folder, "text_files"))


def test_it_holds_every_document_with_its_end_on_the_side_of_its_hash(folder, tokenizer):
    opened = open_tokens(texts_in(folder), tokenizer, RULES, 0.3, report=quiet)
    expected = {"train": [], "validation": []}
    for text, *_ in texts_in(folder).documents():
        expected["validation" if is_held_out(text, threshold_of_fraction(0.3)) else "train"].append(text)
    assert len(expected["validation"]) >= 4
    for side, documents in expected.items():
        split = getattr(opened, side)
        starts = np.concatenate(([0], split.ends[:-1]))
        for text, start, end in zip(documents, starts, split.ends, strict=True):
            assert split.tokens[int(start) : int(end)].tolist() == [*tokenizer.encode(text), 0]
        assert split.bytes == sum(len(text.encode()) for text in documents)
        assert split.max_id == split.tokens.max()
        assert len(split.tokens) == split.ends[-1]


def test_ids_take_two_bytes_up_to_65536_entries_and_four_beyond(folder, tokenizer):
    small = open_tokens(texts_in(folder), tokenizer, RULES, 0.3, report=quiet)
    assert small.train.tokens.dtype == np.dtype("<u2")

    large = train_byte_level_bpe(["aaaa"], 300)
    spec = json.loads(large.to_json())
    spec["model"]["vocab"] = {k: v + 70_000 for k, v in spec["model"]["vocab"].items()}
    spec["added_tokens"] = []
    wide = TextTokenizer(tokenizers.Tokenizer.from_str(json.dumps(spec)), {})
    opened = open_tokens(texts_in(folder), wide, RULES, 0.3, report=quiet)
    assert opened.train.tokens.dtype == np.dtype("<u4")
    assert opened.train.max_id > 70_000
    ended = open_tokens(texts_in(folder), tokenizer, EncodeRules(70_000, None), 0.3, report=quiet)  # eos beyond uint16
    assert ended.train.tokens.dtype == np.dtype("<u4")
    assert set(ended.train.tokens[ended.train.ends.astype(int) - 1].tolist()) == {70_000}


def test_it_is_made_once_and_again_when_anything_that_matters_changes(folder, tokenizer):
    def path(rules=RULES, fraction=0.3):
        lines = []
        return open_tokens(texts_in(folder), tokenizer, rules, fraction, report=lines.append).path, bool(lines)

    first = path()
    assert first[1]
    assert path() == (first[0], False)
    others = [path(fraction=0.4), path(EncodeRules(1, None)), path(EncodeRules(0, 5))]
    (folder / "000.txt").write_text("changed\n")
    every = [first, *others, path()]
    assert len(set(every)) == len({name for name, _ in every}) == 5
    assert all(made for _, made in every)


def long_ago(folder):
    """Files whose times can be trusted."""
    for file in folder.iterdir():
        os.utime(file, (1_000_000, 1_000_000))


def test_overwrite_makes_it_again_but_not_after_another_process_of_this_run_did(folder, tokenizer, monkeypatch):
    lines = []
    open_tokens(texts_in(folder), tokenizer, RULES, 0.3, report=quiet)
    monkeypatch.setattr("kenotron.data.cached_folder.PROCESS_START", time.time() + 100)
    again = open_tokens(texts_in(folder), tokenizer, RULES, 0.3, overwrite=True, report=lines.append)
    assert len(lines) == 1
    assert again.train.tokens.size
    monkeypatch.setattr("kenotron.data.cached_folder.PROCESS_START", time.time() - 100)
    open_tokens(texts_in(folder), tokenizer, RULES, 0.3, overwrite=True, report=lines.append)
    assert len(lines) == 1


def test_inspect_finds_a_flipped_bit(folder, tokenizer, shell):
    entry = open_tokens(texts_in(folder), tokenizer, RULES, 0.3, report=quiet).path
    code, said, _ = shell("data", "inspect", entry)
    assert (code, f"{entry}: cached tokens, as they were written" in said) == (0, True)
    data = bytearray((entry / "train.tokens").read_bytes())
    data[4] ^= 1
    (entry / "train.tokens").write_bytes(data)
    code, _, said = shell("data", "inspect", entry)
    line = f"error: {entry}/train.tokens: changed since it was written; delete {entry}"
    assert (code, line in said) == (2, True)


def test_an_empty_note_of_a_content_is_not_believed(folder, tokenizer, tmp_path):
    long_ago(folder)
    made = open_tokens(texts_in(folder), tokenizer, RULES, 0.3, report=quiet)
    note = tmp_path / "cache" / "known" / texts_in(folder).signature()
    assert note.read_text().strip() == texts_in(folder).content_hash()
    note.write_text("")
    assert open_tokens(texts_in(folder), tokenizer, RULES, 0.3, report=quiet).path == made.path
    assert note.read_text().strip() == texts_in(folder).content_hash()


def test_a_truncated_file_is_found_out(folder, tokenizer):
    opened = open_tokens(texts_in(folder), tokenizer, RULES, 0.3, report=quiet)
    os.truncate(opened.path / "train.tokens", 20)
    with pytest.raises(InputError, match=r"train\.tokens: damaged token cache .* delete"):
        open_tokens(texts_in(folder), tokenizer, RULES, 0.3, report=quiet)


def test_runs_that_hold_out_other_documents_share_no_entry(folder, tokenizer):
    """A document that validation reads for its own set's sake is in no training side, whoever cached the set before."""
    before = open_tokens(texts_in(folder), tokenizer, RULES, 0.3, report=quiet)
    texts = [text for text, *_ in texts_in(folder).documents()]
    trained = next(text for text in texts if not is_held_out(text, threshold_of_fraction(0.3)))
    after = open_tokens(texts_in(folder), tokenizer, RULES, 0.3, report=quiet, chosen={text_hash(trained)})
    assert after.path != before.path
    assert trained in tokenizer.decode(before.train.tokens)
    assert trained not in tokenizer.decode(after.train.tokens)
    assert len(after.train.ends) == len(before.train.ends) - 1
    assert len(after.validation.ends) == len(before.validation.ends) + 1
    again = open_tokens(texts_in(folder), tokenizer, RULES, 0.3, report=quiet)
    assert again.path == before.path


# ---- several processes at once -----------------------------------------------------------------------------

WORKER = """
import sys
from pathlib import Path
from kenotron.data import load_tokenizer
from kenotron.data.cache import EncodeRules, open_tokens
from kenotron.text.file_documents import FileDocuments, find_files
from kenotron.text import encode

folder, tokenizer, mode = sys.argv[1:]
encode.BATCH_CHARACTERS = 1000

class SlowDocuments(FileDocuments):
    def documents(self):
        for number, pair in enumerate(super().documents()):
            yield pair
            if number == 20 and mode == "stall":
                print("half", flush=True)
                sys.stdin.readline()

texts = SlowDocuments("texts", find_files(folder, "text_files"))
report = lambda line: print(line, flush=True)
opened = open_tokens(texts, load_tokenizer(tokenizer), EncodeRules(0, None), 0.3, report=report)
print("tokens", int(opened.train.tokens.astype(int).sum()), len(opened.train.tokens))
"""


def start(folder, tokenizer_folder, mode):
    command = [sys.executable, "-c", WORKER, str(folder), str(tokenizer_folder), mode]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True)


@pytest.fixture
def tokenizer_folder(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def test_two_processes_at_once_make_it_once(folder, tokenizer_folder):
    first = start(folder, tokenizer_folder, "stall")
    assert first.stdout.readline() == "half\n"
    second = start(folder, tokenizer_folder, "fast")
    assert second.stdout.readline() == "waiting for another process that is tokenizing texts\n"
    made = first.communicate("go on\n", timeout=60)[0]
    assert re.match(r"tokenized texts: .*\ntokens ", made)
    assert second.communicate(timeout=60)[0] == made.partition("\n")[2]


def test_a_process_killed_midway_leaves_nothing_that_counts(folder, tokenizer, tokenizer_folder, tmp_path):
    victim = start(folder, tokenizer_folder, "stall")
    assert victim.stdout.readline() == "half\n"
    victim.send_signal(signal.SIGKILL)
    victim.communicate(timeout=30)
    entries = sorted(path.name for path in (tmp_path / "cache" / "tokens").iterdir())
    assert [("tmp" in name, name.endswith(".lock")) for name in entries] == [(False, True), (True, False)]

    opened = open_tokens(texts_in(folder), tokenizer, RULES, 0.3, report=quiet)
    expected = []
    for text, *_ in texts_in(folder).documents():
        if not is_held_out(text, threshold_of_fraction(0.3)):
            expected += [*tokenizer.encode(text), 0]
    assert opened.train.tokens.tolist() == expected
    assert not [path.name for path in opened.path.parent.iterdir() if ".tmp-" in path.name]


def test_a_full_disk_is_one_clear_line_and_leaves_nothing(folder, tokenizer_folder, tmp_path):
    """The kernel refuses files beyond 4,000 bytes, as it refuses them on a full disk."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))\n"
    command = [sys.executable, "-c", limit + WORKER, str(folder), str(tokenizer_folder), "fast"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    expected = r"cannot write the cache.*File too large; set KENOTRON_CACHE to a writable folder with space"
    assert re.search(expected, result.stderr.splitlines()[-1])
    assert "Exception ignored" not in result.stderr
    assert [path.suffix for path in (tmp_path / "cache" / "tokens").iterdir()] == [".lock"]


def test_where_a_file_system_has_no_locks_the_first_rename_wins(folder, tokenizer, monkeypatch):
    import fcntl

    def refuse(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    original = cache._tokenize

    def overtaken(target, *arguments):
        """Another process finishes the same entry while this one works."""
        original(target, *arguments)
        monkeypatch.setattr(cache, "_tokenize", original)
        open_tokens(texts_in(folder), tokenizer, RULES, 0.3, report=quiet)

    monkeypatch.setattr(cache, "_tokenize", overtaken)
    opened = open_tokens(texts_in(folder), tokenizer, RULES, 0.3, report=quiet)
    assert opened.train.tokens.size
    assert [path.name for path in opened.path.parent.iterdir() if ".tmp-" in path.name] == []
