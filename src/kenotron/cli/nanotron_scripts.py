"""Scripts with the names and flags of nanotron and of the first Kénotron: run_train, run_generate, slurm_launcher."""

import argparse
import sys
from collections.abc import Sequence

from kenotron.cli import main


def run_train(arguments: Sequence[str] | None = None) -> None:
    """Run ``run_train.py --config-file my.yaml [path=value …]``: `kenotron train` in nanotron's log format."""
    parser = argparse.ArgumentParser(
        prog="run_train.py",
        description="Train a config: `kenotron train`, with nanotron's log. Further arguments are passed on to it.",
    )
    parser.add_argument("--config-file", required=True, help="the YAML file of the run")
    interval = "--sanity-check-dataloader-interval"
    parser.add_argument(interval, help="not supported: `kenotron data which --step N` prints what a step reads")
    known, rest = parser.parse_known_args(arguments)
    if known.sanity_check_dataloader_interval is not None:
        parser.error(f"{interval} is not supported: `kenotron data which {known.config_file} --step N` prints samples")
    main(["train", "--nanotron", known.config_file, *rest])


def run_generate(arguments: Sequence[str] | None = None) -> None:
    """Run ``run_generate.py --ckpt-path checkpoints/10/ --tp 2 --pp 2``: `kenotron generate` with nanotron's flags.

    It works with torchrun, where dp x pp x tp must be the number of processes, and without. A degree of 0 means the
    default. The key-value cache is always on; ``--use-cache`` has no effect.
    """
    parser = argparse.ArgumentParser(prog="run_generate.py", description="Generate from a checkpoint.")
    parser.add_argument("--ckpt-path", required=True, help="checkpoint, or folder of checkpoints")
    for axis in ("dp", "pp", "tp"):
        parser.add_argument(f"--{axis}", type=int, default=0, help="ranks (0: the checkpoint's, if they fit, else 1)")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--use-cache", action="store_true", help="always enabled")
    known, rest = parser.parse_known_args(arguments)
    layout = [f"--{axis}={getattr(known, axis)}" for axis in ("dp", "pp", "tp") if getattr(known, axis)]
    main(["generate", known.ckpt_path, "--max-new-tokens", str(known.max_new_tokens), *layout, *rest])


def slurm_launcher(arguments: Sequence[str] | None = None) -> None:
    """Run ``slurm_launcher.py --run pretrain --model 1b …``: `kenotron submit` with nanotron's flags and sizes."""
    from kenotron.launch.slurm.nanotron import submit_arguments

    main(submit_arguments(list(sys.argv[1:] if arguments is None else arguments)))
