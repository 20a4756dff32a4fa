"""``join.weight``: a float to multiply the loss with, which keeps a zero zero."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

_PRODUCTS = ("mul", "mul_", "__mul__", "__rmul__", "__imul__", "multiply", "multiply_")


class Weight(float):
    """A float; zero times a loss that is not finite is zero, and so are the gradients.

    The first time that happens it warns: in the loss of a replayed batch nobody is interested, but
    the same batch may do it again when it counts.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run ``func`` with plain floats; a product with zero silences the tensor first."""
        if getattr(func, "__name__", "") in _PRODUCTS and any(
            isinstance(each, cls) and each == 0.0 for each in args
        ):
            args = [silenced(each) if isinstance(each, torch.Tensor) else each for each in args]
        plain = tree_map(lambda each: float(each) if isinstance(each, cls) else each, list(args))
        return func(*plain, **dict(kwargs or {}))


def silenced(loss: torch.Tensor) -> torch.Tensor:
    """Return a loss that is finite and has zero gradients only; as it is where it is finite.

    Zero times infinity is NaN in each backward step as well, so every step's result is made zero.
    """
    if bool(torch.isfinite(loss.detach()).all()):
        return loss
    warnings.warn(
        "the loss of a replayed batch is not finite; its gradients are taken as zero",
        RuntimeWarning,
        stacklevel=4,
    )
    seen, todo = set(), [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        node.register_hook(_zeros)
        todo += [before for before, _ in node.next_functions]
    return torch.nan_to_num(loss, nan=0.0, posinf=0.0, neginf=0.0)


def _zeros(gradients: tuple[Any, ...], _: Any) -> tuple[Any, ...]:
    return tuple(None if each is None else torch.zeros_like(each) for each in gradients)
