"""`kenotron convert`, called as a shell would, and the commands that it proposes."""

import shlex

import pytest

from support.nanotron_files import write_nanotron
from support.tiny_llamas import hf_llama, our_model, save_hf, save_ours, small_tokenizer
from support.tiny_run import tiny_config, tiny_dict, train_quietly, weights


def test_to_hf_says_what_was_written_and_proposes_a_command_that_works(shell, tmp_path):
    path = save_ours(our_model(tmp_path), tmp_path / "checkpoints", small_tokenizer())
    code, out, err = shell("convert", "to-hf", path, tmp_path / "out", "--dtype", "bfloat16")
    wrote, proposed = out.splitlines()
    assert (code, err) == (0, "")
    assert wrote.startswith(f"Wrote {tmp_path / 'out'}: model.safetensors, 69.4 kB in bfloat16")
    python, flag, program = shlex.split(proposed.removeprefix("Next: "))
    assert (python, flag) == ("python", "-c")
    exec(program, {})


@pytest.mark.parametrize("direction", ["to-hf", "from-hf", "from-nanotron"])
def test_a_url_is_no_folder_to_write_to(direction, shell, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = shell("convert", direction, "anything", "gs://bucket/out")
    assert (code, out) == (2, "")
    assert err == "error: DST: expected a local path, found gs://bucket/out; only inputs may be remote\n"
    assert list(tmp_path.iterdir()) == []


def test_from_hf_says_what_was_written_and_proposes_a_command_that_works(shell, tmp_path):
    save_hf(hf_llama(max_position_embeddings=256), tmp_path / "hf", small_tokenizer(), shard="50KB")
    code, out, err = shell("convert", "from-hf", tmp_path / "hf", tmp_path / "ours")
    assert (code, err) == (0, "")
    assert out.startswith(f"Wrote {tmp_path / 'ours' / '0'}: ")
    proposed = shlex.split(out.splitlines()[1].removeprefix("Next: "))
    assert proposed[0] == "kenotron"
    code, out, err = shell(*proposed[1:])
    assert (code, err) == (0, "")
    assert out.startswith("Once upon a time")


def test_from_nanotron_says_what_was_written_and_proposes_a_command_that_works(shell, tmp_path):
    config = tiny_dict(tmp_path)
    first = train_quietly(tiny_config(tmp_path, "tokens.train_steps=2"))
    write_nanotron(tmp_path / "theirs", config, weights(first), tp=2)
    code, out, err = shell("convert", "from-nanotron", tmp_path / "theirs", tmp_path / "ours")
    assert (code, len(err.splitlines())) == (0, 1)
    assert "begins with a fresh one" in err
    wrote, proposed, _ = out.splitlines()
    assert wrote.startswith(f"Wrote {tmp_path / 'ours' / '2'}: ")
    code, out, err = shell(*shlex.split(proposed.removeprefix("Next: "))[1:], f"logging.log_dir={tmp_path / 'again'}")
    assert (code, err) == (0, "")
    assert "Training from step 3 to 3" in out


def test_what_is_left_out_is_said_on_stderr(shell, tmp_path):
    save_hf(hf_llama(attention_dropout=0.1), tmp_path / "hf")
    code, _, err = shell("convert", "from-hf", tmp_path / "hf", tmp_path / "ours")
    assert code == 0
    dropout, tokenizer = err.splitlines()
    assert "attention_dropout 0.1 is ignored" in dropout
    assert "has no tokenizer" in tokenizer


def test_a_shard_size_is_taken(shell, tmp_path):
    path = save_ours(our_model(tmp_path), tmp_path / "checkpoints")
    code, out, _ = shell("convert", "to-hf", path, tmp_path / "out", "--max-shard-size", "50KB")
    assert code == 0
    assert f": {len(list((tmp_path / 'out').glob('*.safetensors')))} files" in out
