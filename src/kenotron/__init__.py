"""Kénotron: pretrain language models from one YAML file.

import kenotron as kn

config = kn.load("my.yaml", ["tokens.train_steps=100"])
run = kn.train(config)
print(run.last_metrics["lm_loss"])
print(kn.generate("checkpoints", "def main(")[0].text)
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kenotron.version import __version__ as __version__

if TYPE_CHECKING:
    from kenotron.config import Config
    from kenotron.evaluation import evaluate
    from kenotron.generation import Completion
    from kenotron.launch.comparing import compare
    from kenotron.launch.replaying import replay
    from kenotron.launch.slurm.submitting import submit
    from kenotron.training import Hook, Run

__all__ = ["Hook", "compare", "evaluate", "generate", "load", "replay", "submit", "train"]

# Everything is imported at first use, so that `import kenotron` is fast.


def load(
    source: str | Path | dict[str, Any] | Config,
    overrides: Sequence[str] = (),
    *,
    report: Callable[[str], None] | None = None,
) -> Config:
    """Load the config of a YAML file, a dict in the same schema, or another config, with ``path=value`` overrides.

    A config is not changed in place: ``config = kn.load(config, ["tokens.train_steps=100"])``.
    """
    from kenotron.config import load as load_config

    return load_config(source, overrides, report=report)


def train(config: Config | str | Path | dict[str, Any], *, fresh: bool = False) -> Run | None:
    """Train with `config` (or a path of a YAML file), from its newest checkpoint if one exists.

    A layout of one rank trains in this process, as does a rank that torchrun started; this returns the run (model,
    metrics of the last step, data), loaded from its checkpoint if all steps are already done. A larger layout starts
    its ranks on this machine, waits for them, and returns None: their results are in the run's log folder and its
    checkpoints. `fresh` sets earlier checkpoints aside. Raises `kenotron.config.InputError` if the input is wrong, and
    `kenotron.config.errors.RunFailed` if a rank failed.
    """
    from kenotron.config import Config
    from kenotron.launch import launch

    return launch(config if isinstance(config, Config) else load(config), fresh=fresh, reopen=True)


def generate(
    path: str | Path,
    prompts: str | Sequence[str | Sequence[int]],
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seed: int = 0,
    stop: Sequence[str] = (),
    stop_at_eos: bool = True,
    logprobs: bool = False,
    dtype: str | None = None,
    batch_size: int = 8,
) -> list[Completion]:
    """Continue one or several prompts with the model at `path`, in this process, as `kenotron generate` does.

    `path` is a checkpoint, a folder of checkpoints (the newest is used), or a Hugging Face model, folder or hub name.
    A prompt is a text or a list of token ids. A completion has `prompt`, `text`, the new `tokens`, `stopped_by`, and
    with `logprobs` the logarithms of the tokens' probabilities. `temperature` 0 is greedy; a text ends before the first
    of the strings `stop`; with `dtype` None the config's dtype is used. Raises `kenotron.config.InputError`.
    """
    from kenotron.generation import SamplingOptions
    from kenotron.generation import generate as continue_prompts
    from kenotron.generation.load import load_for_generation

    sampling = SamplingOptions(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=stop,
        stop_at_eos=stop_at_eos,
        logprobs=logprobs,
    )
    model, tokenizer, _ = load_for_generation(path, dtype)
    if isinstance(prompts, str):
        prompts = [prompts]
    return continue_prompts(model, tokenizer, prompts, sampling, batch_size=batch_size)


_MODULES = {
    "evaluate": "kenotron.evaluation",
    "Hook": "kenotron.training.hooks",
    "compare": "kenotron.launch.comparing",
    "replay": "kenotron.launch.replaying",
    "submit": "kenotron.launch.slurm.submitting",
}


def __getattr__(name: str) -> Any:
    """Import `kn.Hook`, the base class of your own hooks, and the functions of commands, at first use."""
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'kenotron' has no attribute {name!r}")
