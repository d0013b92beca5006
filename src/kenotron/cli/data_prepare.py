"""`kenotron data tokenize | merge | train-tokenizer`: convert text to token files."""

import re
from pathlib import Path
from typing import Annotated, Literal

import typer

from kenotron.cli.data import app, errors_name_options, require_local
from kenotron.cli.tables import to_stderr
from kenotron.config.errors import InputError, counted
from kenotron.launch.environment import cores

Inputs = Annotated[
    list[str], typer.Argument(metavar="INPUT...", help="text, jsonl(.gz), parquet, arrow files; folders; HF datasets.")
]
Column = Annotated[str, typer.Option(help="The column that contains the text.")]
Split = Annotated[str, typer.Option(help="Split of a Hugging Face dataset.")]
ConfigName = Annotated[str | None, typer.Option(help="Configuration of a Hugging Face dataset.")]
OnBad = Annotated[
    Literal["error", "skip"],
    typer.Option(help="A row, line or end of a file that cannot be read: an error, or skip and count."),
]


@app.command()
@errors_name_options()
def tokenize(
    inputs: Inputs,
    tokenizer: Annotated[str, typer.Option(help="A folder, a tokenizer.json or a Hugging Face name.")],
    output: Annotated[Path, typer.Option(help="Output folder; if it has part of the output, the rest is added.")],
    column: Column = "text",
    split: Split = "train",
    config_name: ConfigName = None,
    eos: Annotated[
        bool, typer.Option("--eos/--no-eos", help="Append the tokenizer's end-of-text token to every document.")
    ] = True,
    bos: Annotated[
        bool | None,
        typer.Option("--bos/--no-bos", help="Prepend the bos token to documents; default: as the tokenizer does."),
    ] = None,
    workers: Annotated[int, typer.Option(help="Worker processes; 0: one per core.", min=0)] = 0,
    shuffle_documents: Annotated[bool, typer.Option(help="Shuffle the documents of each shard.")] = False,
    seed: Annotated[int | None, typer.Option(help="Seed of the shuffle; default: 0.", min=0)] = None,
    shard_size: Annotated[float, typer.Option(help="MB of input per output file.", min=0.001)] = 256,
    filter: Annotated[
        str | None, typer.Option(help="module.function(row) -> bool, text or list of texts: the documents of a row.")
    ] = None,
    repeat: Annotated[
        str | None, typer.Option(help="module.function(row, file) -> int: how many times to write a row.")
    ] = None,
    on_bad_document: OnBad = "error",
    share: Annotated[
        str | None, typer.Option(metavar="I/N", help="Make one of N shares of the output: 0/N to N-1/N, on N machines.")
    ] = None,
) -> None:
    """Tokenize text to token files. An interrupted run resumes where it stopped."""
    from kenotron.prepare.tokenize import TokenizeOptions
    from kenotron.prepare.tokenize import tokenize as tokenize_files
    from kenotron.text.tokenizer import load_tokenizer

    require_local(output, "--output")
    _check_seed(seed, shuffle_documents, "--shuffle-documents")
    options = TokenizeOptions(
        column=column,
        split=split,
        config_name=config_name,
        eos=eos,
        bos=bos,
        shuffle_documents=shuffle_documents,
        seed=seed or 0,
        shard_megabytes=shard_size,
        filter=filter,
        repeat=repeat,
        skip_bad=on_bad_document == "skip",
    )
    part = (0, 1) if share is None else _share(share)
    result = tokenize_files(inputs, load_tokenizer(tokenizer), output, options, workers or cores(), to_stderr, part)
    if result is None:
        return
    left_out = f"; {result['skipped']:,} left out because they cannot be read" if result["skipped"] else ""
    for problem in result.get("first_skipped", ()):
        print(f"left out: {problem}")
    print(
        f"{output}: {counted(result['documents'], 'document')}, {result['tokens']:,} tokens of {result['dtype']} in "
        f"{counted(len(result['files']), 'file')}, from {result['bytes'] / 1e6:.1f} MB of text{left_out}"
    )
    print(f"Next: kenotron data inspect {output} --tokenizer {tokenizer}")
    print("      kenotron init tokens > my.yaml    # then set dataset, tokenizer and vocab_size in it")


@app.command()
def merge(
    sources: Annotated[list[str], typer.Argument(metavar="SRC...", help="Token files, or folders of them.")],
    output: Annotated[Path, typer.Option(help="A new file (.ds) or folder.")],
    shuffle: Annotated[bool, typer.Option(help="Shuffle documents across all sources.")] = False,
    seed: Annotated[int | None, typer.Option(help="Seed of the shuffle; default: 0.", min=0)] = None,
    max_tokens_per_file: Annotated[
        int | None, typer.Option(help="Maximum number of tokens per output file.", min=1)
    ] = None,
) -> None:
    """Merge token files into one or a few, end to end or shuffled."""
    from kenotron.prepare.merge import merge as merge_files

    require_local(output, "--output")
    _check_seed(seed, shuffle, "--shuffle")
    merged = merge_files(sources, output, shuffle, seed or 0, max_tokens_per_file, to_stderr)
    documents, files = counted(merged["documents"], "document"), counted(len(merged["files"]), "file")
    print(f"{output}: {documents}, {merged['tokens']:,} tokens in {files}")


@app.command("train-tokenizer")
@errors_name_options()
def train_tokenizer(
    inputs: Inputs,
    vocab_size: Annotated[int, typer.Option(help="Maximum vocabulary size.")],
    output: Annotated[Path, typer.Option(help="New folder for the tokenizer.")],
    column: Column = "text",
    split: Split = "train",
    config_name: ConfigName = None,
    max_characters: Annotated[
        int, typer.Option(help="Number of characters to train on, from the beginning of each INPUT.", min=1)
    ] = 200_000_000,
    on_bad_document: OnBad = "error",
) -> None:
    """Train a byte-level BPE."""
    from kenotron.prepare.inputs import first_texts, open_input
    from kenotron.prepare.scratch import scratch_beside
    from kenotron.storage.files import publish_folder
    from kenotron.text.byte_level_bpe import train_byte_level_bpe

    require_local(output, "--output")
    skip_bad = on_bad_document == "skip"
    texts = [open_input(name, column, split, config_name, skip_bad) for name in inputs]
    with scratch_beside(output) as folder:
        tokenizer = train_byte_level_bpe(first_texts(texts, max_characters), vocab_size)
        tokenizer.save(folder)
        publish_folder(folder, output)
    print(f"{output}: {tokenizer.vocab_size:,} entries, end of text {tokenizer.eos_token_id}")
    print(f"Next: kenotron data tokenize {' '.join(inputs)} --tokenizer {output} --output tokens")


def _share(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not int(match[1]) < int(match[2]):
        raise InputError(f"--share: expected I/N, from 0/N to N-1/N, found '{text}'")
    return int(match[1]), int(match[2])


def _check_seed(seed: int | None, shuffled: bool, option: str) -> None:
    if seed is not None and not shuffled:
        raise InputError(f"--seed: expected only with {option}")
