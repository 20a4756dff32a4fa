"""Uneven inputs under Accelerate: ``join_uneven_inputs`` with all features of ``Join``.

::

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with join_uneven_inputs(accelerator, [model, optimizer]) as join:
        for batch in join.batches(loader):
            ...
            accelerator.backward(loss)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from rankcall.join import Join


@contextlib.contextmanager
def join_uneven_inputs(
    accelerator: Any, joinables: Sequence[Any], **options: Any
) -> Iterator[Join]:
    """Enter ``Join`` with objects that ``accelerator.prepare`` returned.

    Inside the block, prepared loaders of map-style data return each sample once, instead of
    repeating some so that all ranks have the same number (``even_batches``). ``accumulate`` does
    not synchronise at the end of a loader, because that is not the same step on every rank.

    Args:
        accelerator: The ``Accelerator``.
        joinables: Prepared models, optimizers and schedulers.
        options: Further arguments of ``Join``. ``enable`` is by default false outside a
            distributed job.

    Yields:
        The ``Join``.
    """
    inner = [getattr(prepared, "optimizer", prepared) for prepared in joinables]
    options.setdefault("enable", accelerator.num_processes > 1)
    with contextlib.ExitStack() as stack:
        for loader in accelerator._dataloaders:
            sampler: Any = getattr(loader, "batch_sampler", None)
            if hasattr(sampler, "even_batches"):
                stack.callback(setattr, sampler, "even_batches", sampler.even_batches)
                sampler.even_batches = False
        settings = accelerator.gradient_state.plugin_kwargs
        before = settings.get("sync_with_dataloader", True)
        stack.callback(settings.__setitem__, "sync_with_dataloader", before)
        settings["sync_with_dataloader"] = False
        yield stack.enter_context(Join(inner, **options))
