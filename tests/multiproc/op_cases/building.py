"""Parts of the op cases. A case checks its op's result and states the record that it expects.

Sizes are worked out by hand from the shapes: 4 bytes a float32, 8 an int64. Roots and peers are
global ranks. ``here()`` stands on the line before each call.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch


class Cases(list[Callable[..., None]]):
    """The cases of a module, in the order in which they are run."""

    def add(self, function: Callable[..., None]) -> Callable[..., None]:
        """List a case."""
        self.append(function)
        return function


def filled(size: tuple[int, ...], value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor that holds one value."""
    return torch.full(size, value, dtype=dtype)


def check(tensor: torch.Tensor, *rows: float) -> None:
    """Assert that each row of a tensor (or the whole of it) holds one value."""
    parts = tensor.chunk(len(rows)) if len(rows) > 1 else [tensor]
    for part, value in zip(parts, rows, strict=True):
        assert part.eq(value).all(), f"{part} is not {value}"


def ended(work: Any) -> None:
    """Wait for the Work of an asynchronous call; a synchronous one returns none."""
    if work is not None:
        work.wait()


def pickled(value: Any) -> int:
    """Return how many bytes a pickled object takes."""
    return len(pickle.dumps(value))
