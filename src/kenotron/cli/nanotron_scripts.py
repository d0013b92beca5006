"""The scripts of nanotron and of the first Kénotron under their own names: run_train, run_generate, slurm_launcher."""

import argparse
import sys
from collections.abc import Sequence

from kenotron.cli import main


def run_train(arguments: Sequence[str] | None = None) -> None:
    """``run_train.py --config-file my.yaml [path=value …]``: the same command in nanotron's spelling and log format."""
    parser = argparse.ArgumentParser(
        prog="run_train.py",
        description="Train a config: `kenotron train`, with nanotron's log. Further arguments are passed on to it.",
    )
    parser.add_argument("--config-file", required=True, help="the YAML file of the run")
    interval = "--sanity-check-dataloader-interval"
    parser.add_argument(interval, help="not supported: `kenotron data which --step N` prints what a step reads")
    given, rest = parser.parse_known_args(arguments)
    if given.sanity_check_dataloader_interval is not None:
        parser.error(f"{interval} is not supported: `kenotron data which {given.config_file} --step N` prints samples")
    main(["train", "--nanotron", given.config_file, *rest])


def run_generate(arguments: Sequence[str] | None = None) -> None:
    """``run_generate.py --ckpt-path checkpoints/10/ --tp 2 --pp 2``: the same command in nanotron's spelling.

    Works under torchrun, where dp x pp x tp must be its processes, and without. A degree of 0 counts as not given.
    The key-value cache is always on; ``--use-cache`` changes nothing.
    """
    parser = argparse.ArgumentParser(prog="run_generate.py", description="Generate from a checkpoint.")
    parser.add_argument("--ckpt-path", required=True, help="checkpoint, or folder of checkpoints")
    for axis in ("dp", "pp", "tp"):
        parser.add_argument(f"--{axis}", type=int, default=0, help="ranks (0: the checkpoint's, if they fit, else 1)")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--use-cache", action="store_true", help="always enabled")
    given, rest = parser.parse_known_args(arguments)
    degrees = {axis: getattr(given, axis) for axis in ("dp", "pp", "tp")}
    layout = [part for axis, degree in degrees.items() if degree for part in (f"--{axis}", str(degree))]
    main(["generate", given.ckpt_path, "--max-new-tokens", str(given.max_new_tokens), *layout, *rest])


def slurm_launcher(arguments: Sequence[str] | None = None) -> None:
    """``slurm_launcher.py --run pretrain --model 1b …``: `kenotron submit` with nanotron's flags and model sizes."""
    from kenotron.launch.slurm.nanotron import submit_arguments

    given = list(sys.argv[1:] if arguments is None else arguments)
    main(submit_arguments(given))
