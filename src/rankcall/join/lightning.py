"""Uneven inputs under Lightning: a callback, and what to wrap the training loader in.

::

    uneven = JoinCallback()
    trainer = Trainer(callbacks=[uneven], ...)
    trainer.fit(module, uneven.loader(DataLoader(...)))

Ranks replay at weight zero (``on_exhausted="replay"``), so any strategy works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, Literal, TypeVar

import torch.distributed as dist

from rankcall.join.context import Join
from rankcall.join.exchange import Exchange, device_of

try:
    from lightning.pytorch import Callback
except ImportError as error:  # pragma: no cover
    raise ImportError(
        "rankcall.join.lightning needs Lightning: pip install 'rankcall[lightning]'"
    ) from error

T = TypeVar("T")


class Loader(Generic[T]):
    """A training loader that goes on until every rank's is done; its length is the longest one."""

    def __init__(self, callback: JoinCallback, loader: Iterable[T]) -> None:
        self._callback = callback
        self._loader = loader
        self._longest: int | None = None

    def __len__(self) -> int:
        own = len(self._loader)  # type: ignore[arg-type]
        if not (dist.is_available() and dist.is_initialized()):
            return own
        if self._longest is None:
            group = self._callback.group or dist.group.WORLD
            table = Exchange([own], group, device_of(group)).wait()
            self._longest = max(row[0] for row in table)
        return self._longest

    def __iter__(self) -> Iterator[T]:
        # Lightning asks for the iterator before it says that training starts.
        join = self._callback.join
        yield from self._loader if join is None else join.batches(self._loader)


class JoinCallback(Callback):  # type: ignore[misc, unused-ignore]
    """Keep ranks in step during ``Trainer.fit``, whatever number of batches each has.

    ``join`` is the block while training runs (``join.active``, ``join.summary``). With automatic
    optimization the loss is multiplied with ``join.weight`` for you; in a manual
    ``training_step`` do it yourself. Every loader needs a length.
    """

    def __init__(self, divide_by: Literal["world", "active"] = "world", group: Any = None) -> None:
        super().__init__()
        self.divide_by = divide_by
        self.group = group
        self.join: Join | None = None
        self._undo: Callable[[], None] | None = None

    def loader(self, loader: Iterable[T]) -> Loader[T]:
        """Return what to give to ``fit`` in place of ``loader``."""
        return Loader(self, loader)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Enter the block, and weigh the loss from here on."""
        if not (dist.is_available() and dist.is_initialized()):
            return
        self.join = Join(
            group=self.group or dist.group.WORLD, on_exhausted="replay", divide_by=self.divide_by
        ).__enter__()
        plugin = trainer.strategy.precision_plugin
        weigh, join = plugin.pre_backward, self.join
        plugin.pre_backward = lambda loss, module: weigh(loss, module) * join.weight
        self._undo = lambda: delattr(plugin, "pre_backward")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Leave the block."""
        self._leave(None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave the block with the error: the other ranks hear of it."""
        self._leave(exception)

    def _leave(self, error: BaseException | None) -> None:
        if self._undo is not None:
            self._undo()
            self._undo = None
            assert self.join is not None
            self.join.__exit__(type(error) if error else None, error, None)
