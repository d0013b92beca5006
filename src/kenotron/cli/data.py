"""`kenotron data`: prepare, inspect and merge token files.

The commands need no config, except `fetch` and `which`. torch is not imported.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from kenotron.config.errors import InputError, counted

app = typer.Typer(no_args_is_help=True, help="Prepare, inspect and convert token files.")

BAR = 40


@app.command()
def inspect(
    path: Annotated[
        str, typer.Argument(help="A token file or a folder: .ds, .bin with .idx, litdata, .npy, raw .bin.")
    ],
    vocab_size: Annotated[int | None, typer.Option(help="Size of the vocabulary; ids must be below it.", min=1)] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Tokenizer for decoding: a folder, a tokenizer.json or a name.")
    ] = None,
    samples: Annotated[int, typer.Option(help="Number of decoded samples to show, with --tokenizer.", min=0)] = 3,
    dtype: Annotated[
        str | None, typer.Option(help="Dtype of the ids in files that do not declare it, for example uint16.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Report on token files: counts, document lengths, samples.

    Exit code 2 if an id is out of range, or a file differs from its manifest's checksum. Of the folder of a text in the
    token cache only the checksums are compared.
    """
    from kenotron.data.cache import changed_files
    from kenotron.data.formats import open_token_files
    from kenotron.prepare.inspect import inspect as inspect_files
    from kenotron.prepare.inspect import starts_of_documents
    from kenotron.text.tokenizer import load_tokenizer

    if (changed := changed_files(Path(path))) is not None:
        if changed:
            raise InputError(
                f"{changed[0]}: changed since it was written; delete {path} to have the text tokenized again"
            )
        print(f"{path}: cached tokens, as they were written")
        return
    with errors_name_options():
        loaded = load_tokenizer(tokenizer) if tokenizer else None
    report = inspect_files(path, dtype, vocab_size or (loaded.vocab_size if loaded else None))
    if loaded:
        places = starts_of_documents(open_token_files(path, "token files", dtype), samples, 64)
        report["samples"] = [{"at": place, "text": loaded.decode(ids.tolist())} for place, ids in places]
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        _print_report(report)
    problems = [
        f"{file['file']}: XXH3 of {file['expected']} in its manifest, found {file['found'] or 'no such file'}: changed "
        "since it was made"
        for file in (report["checksums"] or {}).get("different", [])
    ]
    if first := report["first_beyond_vocab"]:
        problems.append(
            f"{first['file']}: token {first['token']} is {first['id']}, beyond the vocabulary of "
            f"{report['vocab_size']} ({report['beyond_vocab']} such tokens); another tokenizer, or a width other "
            f"than {report['dtype']}"
        )
    if problems:
        raise InputError("\n".join(problems))


def require_local(output: Path, name: str) -> None:
    """Raise InputError if `output` was a URL, which `Path` converts to a folder called `s3:`."""
    if output.parts and output.parts[0].endswith(":"):
        url = f"{output.parts[0]}//{'/'.join(output.parts[1:])}"
        raise InputError(f"{name}: expected a local path, found {url}; only inputs may be remote")


OPTIONS = {
    "tokenizer.tokenizer_name_or_path": "--tokenizer",
    "dataset.hf_dataset_or_datasets": "INPUT",
    "dataset.hf_dataset_splits": "--split",
    "dataset.hf_dataset_config_name": "--config-name",
    "dataset.text_column_name": "--column",
    "tokenizer.train.vocab_size": "--vocab-size",
}
"""Config key → the option of the commands that sets it."""


@contextmanager
def errors_name_options() -> Iterator[None]:
    """Replace the config key in an InputError by the option of the command."""
    try:
        yield
    except InputError as error:
        key, colon, message = str(error).partition(":")
        if key not in OPTIONS:
            raise
        raise InputError(OPTIONS[key] + colon + message) from error


def _print_report(report: dict[str, Any]) -> None:
    documents = "not known" if report["documents"] is None else f"{report['documents']:,}"
    print(
        f"{report['path']}: {report['format']}, {counted(report['files'], 'file')}, {report['bytes']:,} bytes of "
        f"{report['dtype']}"
    )
    print(f"tokens: {report['tokens']:,}   documents: {documents}   largest id: {report['largest_id']}")
    print(f"tokenizer: {report['tokenizer'] or 'unknown'}   tokens without loss: {report['no_loss_tokens']:,}")
    if sums := report["checksums"]:
        print(f"checksums: {sums['files'] - len(sums['different'])} of {counted(sums['files'], 'file')} as recorded")
    if lengths := report["document_lengths"]:
        print(f"document lengths: {lengths['shortest']} to {lengths['longest']} tokens, mean {lengths['mean']:.1f}")
        most = max(bucket["documents"] for bucket in lengths["histogram"])
        for bucket in lengths["histogram"]:
            bar = "█" * -(-BAR * bucket["documents"] // most)
            print(f"{bucket['from']:>12,} ─ {bucket['below'] - 1:<12,} {bar} {bucket['documents']:,}")
    for sample in report.get("samples", []):
        print(f"── {sample['at']}\n{sample['text']}")
