"""A model on several ranks, with the interface of decoding: tokens in, the same next tokens out on all ranks.

Every rank runs the whole decode loop on the same rows, with the same tokens; it has its own layers and heads, with
their keys and values.

    tp 2    rank 0   tokens ─ half of every layer ─┬─ logits ─ choose ─┐
            rank 1   tokens ─ half of every layer ─┘  (whole)          └─▶ tokens       one broadcast per step

    pp 2    rank 0   tokens ─ layers 0 … 3 ─┐                          ┌─▶ tokens
            rank 1                          └─ layers 4 and 5 ─ logits ─ choose

    dp 2    replica 0: prompts 0 … 3      replica 1: prompts 4 … 6      independent, gathered at the end

One rank of a replica chooses the tokens: if all ranks sampled from their own logits, these could differ in a last bit,
then in the number of remaining rows, and the ranks would wait for each other forever.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kenotron.config.decoder import DecoderArchitecture
from kenotron.models import Context, MicroBatch
from kenotron.models.decoder import Decoder
from kenotron.parallel import data as data_parallel
from kenotron.parallel.collectives import memory_of
from kenotron.parallel.mesh import Mesh

if TYPE_CHECKING:
    from kenotron.parallel.pipeline import Pipeline

T = TypeVar("T")
# Without cuDNN, torch's first choice in half precision on Hopper and Blackwell: it replans for every number of keys,
# which on an H200 takes 59 ms per token and layer, instead of 0.4 ms with flash.
OF_ANY_LENGTH = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True)
class ModelOnRanks:
    """A model on the layout of `mesh`: this rank's `parts`, and with pp the `pipeline` that runs all ranks' parts.

    With `lockstep` False, data-parallel replicas split the prompts. With True, all ranks of the mesh decode the same
    ones, which is required if data parallelism shards the weights, which all ranks gather together, or if ranks share
    experts, to which they send tokens.
    """

    parts: Sequence[Decoder]
    mesh: Mesh
    device: torch.device
    pipeline: Pipeline | None = None
    lockstep: bool = False

    @staticmethod
    def alone(model: Decoder) -> ModelOnRanks:
        """Return a model that is whole in this process."""
        return ModelOnRanks([model], Mesh(), next(model.parameters()).device)

    @property
    def config(self) -> DecoderArchitecture:
        """Return the model's architecture."""
        return self.parts[0].config

    @sdpa_kernel(OF_ANY_LENGTH)
    def logits(self, tokens: Tensor, ctx: Context) -> Tensor | None:
        """Return logits ``[logits_to_keep, vocab]`` of flat tokens; None on pipeline ranks without the head."""
        if self.pipeline is None:
            return self.parts[0](tokens, ctx)
        found = self.pipeline.forward(MicroBatch(tokens, None, ctx))
        assert not isinstance(found, tuple), "without labels the last part returns logits"
        return found

    def agree(self, chosen: list[T] | None, rows: int, dtype: torch.dtype = torch.int64) -> list[T]:
        """Broadcast the choosing rank's tokens (or numbers) of `rows` rows to every rank that decodes these rows.

        The choosing rank is in the last pipeline stage, and first along every other axis.
        """
        ranks = "world" if self.lockstep else "model"
        group = self.mesh.group(ranks)
        if group is None:
            assert chosen is not None
            return chosen
        tokens = torch.tensor(chosen or [0] * rows, dtype=dtype, device=self.device)
        ranks_of_a_stage = self.mesh.degree(ranks) // self.mesh.degree("pp")  # pp is the slowest axis
        chooser = 0 if self.pipeline is None else self.pipeline.head_at * ranks_of_a_stage
        if memory := memory_of(tokens, group):
            memory.broadcast(tokens, chooser)
        else:
            dist.broadcast(tokens, group=group, group_src=chooser)
        return tokens.tolist()

    def share(self, prompts: Sequence[T]) -> Sequence[T]:
        """Return the consecutive prompts that this rank's replica decodes, none if there are fewer than replicas."""
        if self.lockstep:
            return prompts
        rank, degree = self.mesh.rank("batch"), self.mesh.degree("batch")
        first, last = (-(-len(prompts) * place // degree) for place in (rank, rank + 1))
        return prompts[first:last]

    def gather(self, mine: list[T]) -> list[T]:
        """Gather the results of the prompts that `share` split, in order, on every rank."""
        group = self.mesh.group("batch")
        if group is None or self.lockstep:
            return mine
        every: list[Any] = [None] * group.size()
        dist.all_gather_object(every, mine, group=group)
        return [one for some in every for one in some]

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Put the model in eval mode within the block, and run blocks compiled for training shapes uncompiled."""
        compiled = any(module._compiled_call_impl is not None for part in self.parts for module in part.modules())
        roots = self.parts if self.pipeline is None else self.pipeline.stages
        with (
            data_parallel.evaluating(self.parts, roots),
            torch.compiler.set_stance("force_eager") if compiled else nullcontext(),
        ):
            yield
