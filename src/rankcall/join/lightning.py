"""Uneven inputs under Lightning: a callback, and a wrapper for the training loader.

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

from rankcall.join import Join
from rankcall.join.joinables import RankGroup

try:
    from lightning.pytorch import Callback
except ImportError as error:  # pragma: no cover
    raise ImportError(
        "rankcall.join.lightning needs Lightning: pip install 'rankcall[lightning]'"
    ) from error

T = TypeVar("T")


class Loader(Generic[T]):
    """A training loader that goes on until all ranks are done; its length is the longest one's."""

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
            table = RankGroup.of(group).begin_exchange([own]).table()
            self._longest = max(row[0] for row in table)
        return self._longest

    def __iter__(self) -> Iterator[T]:
        # Lightning makes the iterator before it calls on_train_start, so read ``join`` only here.
        join = self._callback.join
        yield from self._loader if join is None else join.batches(self._loader)


class JoinCallback(Callback):  # type: ignore[misc, unused-ignore]
    """Keep ranks in step during ``Trainer.fit``, even if their numbers of batches differ.

    While training runs, ``join`` is the block, with ``join.active`` and ``join.summary``. With
    automatic optimization, this callback multiplies the loss with ``join.weight``. In manual
    optimization, ``training_step`` has to do that. Every loader needs a length.
    """

    def __init__(self, divide_by: Literal["world", "active"] = "world", group: Any = None) -> None:
        super().__init__()
        self.divide_by = divide_by
        self.group = group
        self.join: Join | None = None
        self._undo: Callable[[], None] | None = None

    def loader(self, loader: Iterable[T]) -> Loader[T]:
        """Return a loader to pass to ``fit`` instead of ``loader``."""
        return Loader(self, loader)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Enter the block, and weight the loss from here on."""
        if not (dist.is_available() and dist.is_initialized()):
            return
        self.join = Join(
            group=self.group or dist.group.WORLD, on_exhausted="replay", divide_by=self.divide_by
        ).__enter__()
        plugin = trainer.strategy.precision_plugin
        pre_backward, join = plugin.pre_backward, self.join
        plugin.pre_backward = lambda loss, module: pre_backward(loss, module) * join.weight
        self._undo = lambda: delattr(plugin, "pre_backward")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Leave the block."""
        self._leave(None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave the block with the error, which the other ranks then raise as ``PeerError``."""
        self._leave(exception)

    def _leave(self, error: BaseException | None) -> None:
        if self._undo is not None:
            self._undo()
            self._undo = None
            assert self.join is not None
            self.join.__exit__(type(error) if error else None, error, None)
