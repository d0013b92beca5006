"""The states of recurrent layers after the text so far, so that a new token costs one token's work.

Where attention remembers every token, Mamba has a state of fixed size. Prompts of different lengths are packed end to
end for the rest of the model; here each becomes a row of its own, so that the states of its last token are the row's:

    packed     a b c d x y          fold      a b c d        unfold     a b c d x y
                                              . . x y        (zeros before a shorter text: a recurrence that begins
                                                             at zero stays there)
    a step     e z                  fold      e
                                              z
"""

from collections.abc import Sequence

import torch
from torch import Tensor

State = tuple[Tensor, ...]


class RecurrentStates:
    """States of some texts, by layer: what layers ask of ``ctx.states``, and what the decode loop does."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = device
        self._states: dict[object, State] = {}
        self._slots: Tensor | None = None  # where each packed token is in the rows; None: one token a row
        self._shape = (0, 1)

    def prefill(self, lengths: Sequence[int]) -> None:
        """The next call has prompts of these lengths, packed end to end."""
        longest = max(lengths)
        ends = [(row + 1) * longest for row in range(len(lengths))]
        slots = [torch.arange(end - length, end) for end, length in zip(ends, lengths)]
        self._slots, self._shape = torch.cat(slots).to(self.device), (len(lengths), longest)

    def step(self) -> None:
        """The next call has one token of every text."""
        self._slots = None

    def keep(self, rows: Tensor) -> None:
        """Forget all texts but these."""
        self._states = {layer: tuple(each[rows] for each in state) for layer, state in self._states.items()}

    def fold(self, x: Tensor) -> Tensor:
        """``[tokens, features]`` → ``[texts, length, features]``, zeros before the shorter ones."""
        if self._slots is None:
            return x.unsqueeze(1)
        rows, longest = self._shape
        return x.new_zeros(rows * longest, x.shape[1]).index_copy_(0, self._slots, x).view(rows, longest, -1)

    def unfold(self, x: Tensor) -> Tensor:
        """The inverse of `fold`."""
        return x.flatten(0, 1) if self._slots is None else x.flatten(0, 1)[self._slots]

    def recall(self, layer: object) -> State | None:
        """What the module `layer` left, ``[texts, …]`` each; None: nothing yet."""
        return self._states.get(layer)

    def remember(self, layer: object, state: State) -> None:
        """Take what it leaves."""
        self._states[layer] = state
