"""Keep the states of recurrent layers in generation, so that a new token costs one token's work.

Attention caches every token; Mamba has a state of fixed size. The rest of the model sees the prompts concatenated; here
each becomes a row, so that the states after a row's last position are those of the text:

    packed     a b c d x y          fold      a b c d        unfold     a b c d x y
                                              . . x y        (zeros before a shorter text: a recurrence that starts
                                                             at zero stays there)
    a step     e z                  fold      e
                                              z
"""

from collections.abc import Sequence

import torch
from torch import Tensor

State = tuple[Tensor, ...]


class RecurrentStates:
    """The states of a batch of texts, by layer: layers access it as ``ctx.states``, and the decode loop drives it."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = device
        self._states: dict[object, State] = {}
        self._slots: Tensor | None = None  # index of each packed token in the flat rows; None: one token a row
        self._shape = (0, 1)

    def prefill(self, lengths: Sequence[int]) -> None:
        """Prepare for a call with concatenated prompts of these lengths."""
        longest = max(lengths)
        ends = [(row + 1) * longest for row in range(len(lengths))]
        slots = [torch.arange(end - length, end) for end, length in zip(ends, lengths)]
        self._slots, self._shape = torch.cat(slots).to(self.device), (len(lengths), longest)

    def step(self) -> None:
        """Prepare for a call with one token of every text."""
        self._slots = None

    def keep(self, rows: Tensor) -> None:
        """Keep only the texts `rows`, in this order."""
        self._states = {layer: tuple(each[rows] for each in state) for layer, state in self._states.items()}

    def fold(self, x: Tensor) -> Tensor:
        """Return ``[tokens, features]`` as ``[texts, length, features]``, with zeros before shorter texts."""
        if self._slots is None:
            return x.unsqueeze(1)
        rows, longest = self._shape
        return x.new_zeros(rows * longest, x.shape[1]).index_copy_(0, self._slots, x).view(rows, longest, -1)

    def unfold(self, x: Tensor) -> Tensor:
        """Return ``[texts, length, features]`` as ``[tokens, features]``, the inverse of `fold`."""
        return x.flatten(0, 1) if self._slots is None else x.flatten(0, 1)[self._slots]

    def recall(self, layer: object) -> State | None:
        """Return the states that the module `layer` stored, ``[texts, …]`` each, or None if there are none yet."""
        return self._states.get(layer)

    def remember(self, layer: object, state: State) -> None:
        """Store the states of the module `layer`."""
        self._states[layer] = state
