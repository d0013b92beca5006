"""The command line: one file per command. Only `main` converts errors to exit codes.

0: done, 1: the run failed, 2: the input was wrong (one line on stderr; --debug shows the traceback).
"""

import faulthandler
import os
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command in `arguments` (default: the process's own) and exit with its code."""
    command = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in command
    command = [argument for argument in command if argument != "--debug"]
    if sys.__stderr__ is not None and not faulthandler.is_enabled():
        faulthandler.enable(sys.__stderr__)  # prints a traceback for a crash, or a truncated mapped file (SIGBUS)
    try:
        code = _exit_code(command, debug)
    except KeyboardInterrupt:  # also during imports
        print("interrupted", file=sys.stderr)
        code = 130
    sys.exit(code)


def _exit_code(arguments: list[str], debug: bool) -> int:
    from kenotron.config.errors import InputError, PeerFailed, RunFailed

    try:
        if "SLURM_PROCID" in os.environ:  # set torchrun's variables, so that errors, too, are reported by rank 0 only
            from kenotron.launch.environment import started_as_rank

            started_as_rank()
        from kenotron.cli.app import run

        return run(arguments)
    except (InputError, RunFailed) as error:
        if debug:
            raise
        print(f"error: {_rank_prefix(error)}{error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    except BrokenPipeError:  # the reader of a pipe exited: `kenotron config show | head`
        sys.stderr.close()
        return 0
    except PeerFailed as error:
        if debug:
            raise
        if os.environ.get("LOCAL_RANK") == "0" and error.machine != os.uname().nodename:
            print(f"error: ended because of {error}", file=sys.stderr)  # the cause is reported on its machine
        return 1


def _rank_prefix(error: Exception) -> str:
    """Return ``rank 5 on node12: `` on ranks of torchrun or srun other than 0, unless the error has such a prefix."""
    rank = os.environ.get("RANK", "0")
    if not rank.isdecimal() or rank == "0" or str(error).startswith("rank "):
        return ""
    return f"rank {rank} on {os.uname().nodename}: "
