"""A DataLoader that is opened in the first step after a restart: it draws from the generator that was just restored."""

from collections.abc import Callable
from typing import TypeVar

import torch

_MOST_DRAWS = 4
"""Of one step: a DataLoader draws one number, and another one where it shuffles."""
REASON = (
    "the first take() after the restart opened a DataLoader, which drew from torch's global generator, as the loss "
    "does. Unless the undisturbed run opened it in this step too, its dropout and the like are others: open it in "
    "load_state_dict() or seek(), or give it a generator of its own"
)

Batches = TypeVar("Batches")


class LoaderDraws:
    """Watches torch's CPU generator during two steps; data that draws in the second one too draws in every step."""

    def __init__(self, *, restored: int) -> None:
        """`restored`: the step of the checkpoint, 0 for none: then nothing is watched."""
        self.restored, self._left = restored, 2 if restored else 0
        self._taken: torch.Tensor | None = None
        self._is_shifted = False

    def take(self, take: Callable[[], Batches]) -> Batches:
        """Return what `take` does; in a step that is watched, see what it draws."""
        if not self._left:
            return take()
        self._left -= 1
        before = torch.get_rng_state()
        batches = take()
        after = torch.get_rng_state()
        if self._left:
            self._taken = after if _is_drawn_by_loaders(before, after) else None
        else:
            self._is_shifted = self._is_shifted and torch.equal(before, after)
        return batches

    def reason(self) -> str:
        """Return after the passes of a step, once, why the random numbers may be others; empty if they are not."""
        if self._left:
            self._is_shifted = self._taken is not None and not torch.equal(self._taken, torch.get_rng_state())
            return ""
        found, self._is_shifted = REASON if self._is_shifted else "", False
        return found


def _is_drawn_by_loaders(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether the state after is that of a few draws as `iter(DataLoader)` makes them, and of nothing else."""
    if torch.equal(before, after):
        return False
    generator = torch.Generator()
    generator.set_state(before)
    for _ in range(_MOST_DRAWS):
        torch.empty((), dtype=torch.int64).random_(generator=generator)
        if torch.equal(generator.get_state(), after):
            return True
    return False
