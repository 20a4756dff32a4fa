"""Lightning: ``RankcallCallback`` reports on the job, ``JoinCallback`` is for uneven inputs.

::

    uneven = JoinCallback()
    trainer = Trainer(callbacks=[RankcallCallback(), uneven], ...)
    trainer.fit(module, uneven.loader(DataLoader(...)))

With ``JoinCallback``, ranks replay at weight zero (``on_exhausted="replay"``). So any strategy
works.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, Literal, TypeVar

import torch.distributed as dist

from rankcall.capture.phases import expect
from rankcall.durations import Duration, seconds
from rankcall.integrations.reporter import EVERY_S, Reporter
from rankcall.join import Join
from rankcall.join.rank_group import RankGroup

try:
    from lightning.pytorch import Callback
    from lightning_utilities.core.rank_zero import rank_zero_warn
except ImportError as error:  # pragma: no cover
    raise ImportError(
        "rankcall.integrations.lightning needs Lightning: pip install 'rankcall[lightning]'"
    ) from error


class RankcallCallback(Callback):  # type: ignore[misc, unused-ignore]
    """Declare checkpoints and evaluation, and log rankcall's figures and verdicts on rank 0.

    The figures go to the trainer's loggers at the end of an epoch, and the verdicts to Lightning's
    own warnings, there and when training ends or fails.

    Args:
        checkpoint_s: How long a rank may be silent in a checkpoint, in seconds or as a
            ``timedelta``, as the others.
        evaluation_s: How long it may be silent in validation, testing or prediction.
        every_s: The least time between two looks at the records.
    """

    def __init__(
        self,
        checkpoint_s: Duration = 1800.0,
        evaluation_s: Duration = 1800.0,
        every_s: Duration = EVERY_S,
    ) -> None:
        # Checked here, because ``expect`` would raise in the middle of the job.
        self._seconds = {
            "checkpoint": seconds(checkpoint_s, "checkpoint_s"),
            "evaluation": seconds(evaluation_s, "evaluation_s"),
        }
        self._every_s = every_s
        self._reporter: Reporter | None = None
        self._evaluation = contextlib.ExitStack()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Declare each checkpoint of this trainer from now on."""
        if trainer.is_global_zero:
            self._reporter = Reporter(_logger_of(trainer), rank_zero_warn, self._every_s)
        if "save_checkpoint" not in vars(trainer):
            declared = expect(self._seconds["checkpoint"], "a checkpoint")
            trainer.save_checkpoint = declared(trainer.save_checkpoint)

    def _begin(self, trainer: Any, pl_module: Any) -> None:
        self._evaluation.close()
        self._evaluation.enter_context(expect(self._seconds["evaluation"], "evaluation"))

    def _end(self, trainer: Any, pl_module: Any) -> None:
        self._evaluation.close()

    on_validation_start = on_test_start = on_predict_start = _begin
    on_validation_end = on_test_end = on_predict_end = _end

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Log what is known of the run."""
        if self._reporter is not None:
            self._reporter.update()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Say why, if the records tell."""
        self.teardown(trainer, pl_module, "")

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Log once more, and leave the trainer as it was."""
        self._evaluation.close()
        vars(trainer).pop("save_checkpoint", None)
        if self._reporter is not None:
            self._reporter.close()
            self._reporter = None


def _logger_of(trainer: Any) -> Any:
    def log(figures: dict[str, float]) -> None:
        for logger in trainer.loggers:
            logger.log_metrics(figures, step=trainer.global_step)

    return log


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
