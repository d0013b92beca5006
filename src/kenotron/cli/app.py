"""The application with all commands. Each file of this folder has one, and imports its packages when it is called."""

import re
import sys
from typing import Annotated

import typer
from typer.exceptions import TyperException

import kenotron
from kenotron.cli import checkpoint, config, convert, data, mup
from kenotron.cli import data_fetch as _data_fetch  # noqa: F401 (its command is data.app's)
from kenotron.cli import data_prepare as _data_prepare  # noqa: F401 (its commands are data.app's)
from kenotron.cli import data_which as _data_which  # noqa: F401 (its command is data.app's)
from kenotron.cli.branch import branch
from kenotron.cli.chat import chat
from kenotron.cli.compare import compare
from kenotron.cli.doctor import doctor
from kenotron.cli.evaluate import evaluate
from kenotron.cli.generate import generate
from kenotron.cli.init import init
from kenotron.cli.plan import plan
from kenotron.cli.replay import replay
from kenotron.cli.runs import plot, report, runs
from kenotron.cli.slurm import cancel, logs, status, submit
from kenotron.cli.train import train
from kenotron.config.messages import command_for, hint_of, paths_of

HELP = """Pretrain language models from one YAML file, in one process or on any parallel layout.

[dim]kenotron init tiny-llama > my.yaml; kenotron train my.yaml[/dim]"""


def _print_version(asked: bool) -> None:
    if asked:
        print(f"kenotron {kenotron.__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error; may follow any command.")
    ] = False,  # `main` removes it first
) -> None:
    """Take the options of `kenotron` without a command."""


def _hint_for_option(option: str, context: typer.Context | None) -> str:
    """Return a hint for ``--tp 2`` and ``--tokens.train_steps=9``, config keys written as options, or ""."""
    if context is None or all(parameter.name != "overrides" for parameter in context.command.params):
        return ""
    name = option.lstrip("-").replace("-", "_")
    if name in ("config", "config_file"):
        return "; the YAML file is the first argument: my.yaml"
    paths = [name] if "." in name else paths_of(name)
    return f"; a key is set without dashes: {paths[0]}=…" if paths else hint_of(name)


def all_commands() -> typer.Typer:
    """Return the application with every command."""
    app = typer.Typer(help=HELP, no_args_is_help=True, rich_markup_mode="rich", pretty_exceptions_enable=False)
    app.info.context_settings = {"help_option_names": ["-h", "--help"]}
    app.callback()(_options)
    commands = (init, plan, train, branch, generate, chat, evaluate, compare, runs, report, plot)
    for command in (*commands, replay, doctor, submit, status, logs, cancel):
        app.command()(command)
    for group in (config, checkpoint, convert, data, mup):
        app.add_typer(group.app, name=group.__name__.rpartition(".")[2])
    return app


def run(arguments: list[str]) -> int:
    """Run the command in `arguments` and return its exit code."""
    try:
        code = all_commands()(arguments, prog_name="kenotron", standalone_mode=False)
    except TyperException as error:
        if not error.format_message():  # help was printed for a command without a subcommand
            return 2
        context = getattr(error, "ctx", None)
        unknown = getattr(error, "option_name", "") if hasattr(error, "possibilities") else ""
        hint = _hint_for_option(unknown, context)
        if other := re.search(r"No such command '([\w-]+)'", error.format_message()):
            suggestion = command_for(other[1])
            hint = f" Did you mean 'kenotron {suggestion}'?" if suggestion else ""
        if "unexpected extra argument" in error.format_message() and context and context.info_name == "generate":
            hint = "; a text to continue is an option: --prompt 'Once upon a time'"
        print(f"error: {error.format_message()}{hint}", file=sys.stderr)
        print(f"Try '{context.command_path if context else f'kenotron {arguments[0]}'} --help'.", file=sys.stderr)
        return 2
    if code == 130:  # typer converts Ctrl-C to this exit code
        raise KeyboardInterrupt
    return code if isinstance(code, int) else 0
