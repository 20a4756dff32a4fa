"""A Lightning callback: ``Trainer(callbacks=[RankcallCallback()])``."""

from __future__ import annotations

import contextlib
from typing import Any

from rankcall.capture.own_ring import expect
from rankcall.integrations import EVERY_S, Reporter, check_seconds

try:
    from lightning.pytorch import Callback
    from lightning_utilities.core.rank_zero import rank_zero_warn
except ImportError as error:  # pragma: no cover
    raise ImportError("this callback needs Lightning: pip install 'rankcall[lightning]'") from error


class RankcallCallback(Callback):  # type: ignore[misc, unused-ignore]
    """Declare checkpoints and evaluation, and log rankcall's figures and verdicts on rank 0.

    The figures go to the trainer's loggers at the end of an epoch, and the verdicts to Lightning's
    own warnings, there and when training ends or fails.

    Args:
        checkpoint_s: How long a rank may be silent in a checkpoint, in seconds.
        evaluation_s: How long it may be silent in validation, testing or prediction.
        every_s: The least time between two looks at the records.
    """

    def __init__(
        self, checkpoint_s: float = 1800.0, evaluation_s: float = 1800.0, every_s: float = EVERY_S
    ) -> None:
        check_seconds(checkpoint_s, evaluation_s)
        self._seconds = {"checkpoint": checkpoint_s, "evaluation": evaluation_s}
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
