"""The command line: one file per command. `main` is the only place that turns errors into exit codes.

0 done · 1 the run failed · 2 the input was wrong (one line on stderr; --debug shows the traceback)
"""

import faulthandler
import os
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command in `arguments` (default: the process's own) and exit with its code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    given = [argument for argument in given if argument != "--debug"]
    if sys.__stderr__ is not None and not faulthandler.is_enabled():
        faulthandler.enable(sys.__stderr__)  # a crash, or a mapped file that is cut short (SIGBUS), shows where it was
    try:
        code = _exit_code(given, debug)
    except KeyboardInterrupt:  # while modules are being imported, too
        print("interrupted", file=sys.stderr)
        code = 130
    sys.exit(code)


def _exit_code(arguments: list[str], debug: bool) -> int:
    from kenotron.config.errors import InputError, PeerFailed, RunFailed

    try:
        if "SLURM_PROCID" in os.environ:  # gets torchrun's variables, by which also reports go to rank 0 alone
            from kenotron.launch.environment import started_as_rank

            started_as_rank()
        from kenotron.cli.app import run

        return run(arguments)
    except (InputError, RunFailed) as error:
        if debug:
            raise
        print(f"error: {_place(error)}{error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    except BrokenPipeError:  # the reader of a pipe went away: `kenotron config show | head`
        sys.stderr.close()
        return 0
    except PeerFailed as error:
        if debug:
            raise
        if os.environ.get("LOCAL_RANK") == "0" and error.machine != os.uname().nodename:
            print(f"error: ended because of {error}", file=sys.stderr)  # which reports it on its own machine
        return 1


def _place(error: Exception) -> str:
    """``rank 5 on node12: `` where torchrun or srun has started several, and the error does not say so."""
    rank = os.environ.get("RANK", "0")
    named = not rank.isdecimal() or rank == "0" or str(error).startswith("rank ")
    return "" if named else f"rank {rank} on {os.uname().nodename}: "
