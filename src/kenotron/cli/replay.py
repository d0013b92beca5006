"""`kenotron replay CHECKPOINTS --step 1234`: compute steps of a finished run again, and compare every number.

Exit code 0: the numbers are equal; 1: they are not.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer


def replay(
    checkpoints: Annotated[Path, typer.Argument(help="The run's folder of checkpoints.")],
    step: Annotated[int, typer.Option(help="The last step to compute again.", min=1)],
    overrides: Annotated[list[str] | None, typer.Argument(help="Another layout, such as parallelism.tp=2.")] = None,
    log_dir: Annotated[Path | None, typer.Option(help="The run's log folder, if it was moved.")] = None,
) -> None:
    """Compute a step of a run again from the checkpoint before it, and compare it with the log.

    Exit code 0: the numbers are equal; 1: they are not.
    """
    from kenotron.cli.checkpoint import verify_entry
    from kenotron.launch.replaying import replay as compute_again

    result = compute_again(checkpoints, step, overrides or [], log_dir=log_dir, verified=verify_entry)
    if result is None:
        return
    if not result.equal:
        print("\n".join(result.differences))
        if any(": lr was " in line for line in result.differences):
            print("the run later continued with another schedule: its settings at that step are no longer known")
        print("\n".join(result.reads))
        sys.exit(1)
    steps = result.last + 1 - result.first
    missing = f"; the log has {result.compared} of these {steps} steps" if result.compared < steps else ""
    verdict = "equal up to rounding" if result.rounding else "every number is equal"
    print(f"steps {result.first} to {result.last}: {verdict}{missing}")
