"""The request of `kenotron generate` to every rank, a section like those of a config, so that it is sent alike.

sampling = SamplingOptions(max_new_tokens=16)
request = Request(parallelism=Parallelism(tp=2), path="checkpoints/10", prompts=["def main("], sampling=sampling)
work_on_ranks(request, decode_on_ranks)
"""

import sys
from typing import Any, Literal

import torch
from pydantic import field_validator

from kenotron.config.errors import InputError
from kenotron.config.parallelism import Parallelism
from kenotron.config.section import Section
from kenotron.generation.decode import generate
from kenotron.generation.load import load_for_generation
from kenotron.generation.options import SamplingOptions
from kenotron.generation.printing import StreamPrinter, print_json, print_texts, warn_of_stops
from kenotron.parallel.mesh import Mesh
from kenotron.parallel.ranks import run_on_rank0


class Request(Section):
    """A model, a layout, prompts (rank 0's are used by all ranks) and sampling options: see `generate`."""

    parallelism: Parallelism
    path: str
    prompts: list[str | list[int]]
    built_in: bool = False  # the prompts are the command's defaults, not a user's
    dtype: str | None = None
    ema: bool = False
    show: Literal["text", "json", "stream"] = "text"
    sampling: SamplingOptions
    batch_size: int = 8

    @field_validator("sampling", mode="before")
    @classmethod
    def _from_plain_data(cls, value: SamplingOptions | dict[str, Any]) -> SamplingOptions:
        """Convert the dict that other ranks receive, which a strict section does not accept for a dataclass."""
        return SamplingOptions(**value) if isinstance(value, dict) else value

    @property
    def zero_stage(self) -> int:
        """Return 0: nothing is sharded over replicas."""
        return 0

    @property
    def expert_sizes(self) -> tuple[int, ...]:
        """Return no sizes: ZeRO shards nothing."""
        return ()


def decode_on_ranks(request: Request, mesh: Mesh, device: torch.device) -> None:
    """Continue the prompts of `request` on every rank of the mesh; rank 0 prints the texts.

    Raises InputError for text without a tokenizer, and as `load_for_generation` and `generate` do.
    """
    prompts = run_on_rank0(lambda: request.prompts)
    model, tokenizer, _ = load_for_generation(request.path, request.dtype, device, mesh, request.ema)
    streams = request.show == "stream"
    if tokenizer is None and any(isinstance(prompt, str) for prompt in prompts):
        raise InputError(f"{request.path} has no tokenizer: give --prompt-tokens 1,2,3 instead of text")
    if tokenizer is None and streams:
        raise InputError(f"--stream: {request.path} has no tokenizer, so there is no text to print as it comes")
    printer = None
    if tokenizer is not None and streams and mesh.is_first:
        printer = StreamPrinter([text if isinstance(text, str) else tokenizer.decode(text) for text in prompts])
    completions = generate(model, tokenizer, prompts, request.sampling, batch_size=request.batch_size, stream=printer)
    if not mesh.is_first:
        return
    if request.built_in:
        print(f"no --prompt: continuing {' and '.join(map(repr, prompts))}", file=sys.stderr)
    if printer is not None:
        printer.finish()
        warn_of_stops(completions)
    elif request.show == "json":
        print_json(completions)
    else:
        print_texts(completions)
