"""``join.weight``: a float to multiply the loss with. Zero times any loss is zero."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

_PRODUCTS = ("mul", "mul_", "__mul__", "__rmul__", "__imul__", "multiply", "multiply_")


class Weight(float):
    """A float. Zero times a loss that is not finite is zero, and its gradients are zero.

    It warns the first time. The loss of a replayed batch is not used, but the same batch may also
    have a loss that is not finite when it counts.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run ``func`` with plain floats; for a product with zero, make the tensor finite first."""
        if getattr(func, "__name__", "") in _PRODUCTS and any(
            isinstance(arg, cls) and arg == 0.0 for arg in args
        ):
            args = [silenced(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
        plain = tree_map(lambda arg: float(arg) if isinstance(arg, cls) else arg, list(args))
        return func(*plain, **dict(kwargs or {}))


def silenced(loss: torch.Tensor) -> torch.Tensor:
    """Return ``loss`` if it is finite, else a finite loss whose gradients are all zero.

    Zero times infinity is NaN in each backward step as well. So a hook sets the result of every
    step to zero.
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
    return tuple(None if gradient is None else torch.zeros_like(gradient) for gradient in gradients)
