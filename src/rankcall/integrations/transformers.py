"""A callback of Transformers' Trainer: ``Trainer(callbacks=[RankcallCallback()])``."""

from __future__ import annotations

import contextlib
from typing import Any

from rankcall.capture.phases import expect
from rankcall.durations import Duration, seconds
from rankcall.integrations.reporter import EVERY_S, Reporter

try:
    from transformers import TrainerCallback
    from transformers.utils.logging import get_logger
except ImportError as error:  # pragma: no cover
    raise ImportError("this callback needs Transformers: pip install transformers") from error


class RankcallCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Declare checkpoints and evaluation, and log rankcall's figures and verdicts on rank 0.

    The figures join what the trainer logs: its log history, and the callbacks behind this one. A
    trainer puts the user's callbacks last; ``trainer.callback_handler.callbacks.insert(0, ...)``
    puts this one before TensorBoard's. Verdicts go to Transformers' own logger.

    Args:
        silent_s: How long a rank may be silent in an evaluation or a checkpoint, in seconds.
        every_s: The least time between two looks at the records.
    """

    def __init__(self, silent_s: Duration = 1800.0, every_s: Duration = EVERY_S) -> None:
        # Checked here, because ``expect`` would raise in the middle of the job.
        self._silent_s, self._every_s = seconds(silent_s, "silent_s"), every_s
        self._reporter: Reporter | None = None
        self._figures: dict[str, float] = {}
        self._declared = contextlib.ExitStack()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to report on rank 0."""
        if state.is_world_process_zero:
            say = get_logger("transformers.rankcall").warning
            self._reporter = Reporter(self._figures.update, say, self._every_s)

    def _before(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._after()
        if control.should_evaluate:
            self._declared.enter_context(expect(self._silent_s, "evaluation"))
        else:
            self.on_evaluate(args, state, control)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Declare the checkpoint that follows, if one does."""
        self._after()
        if control.should_save:
            self._declared.enter_context(expect(self._silent_s, "a checkpoint"))

    def _after(self, *_: Any, **kwargs: Any) -> None:
        self._declared.close()

    # The trainer evaluates and saves right after these, and goes on with those.
    on_step_end = on_epoch_end = _before
    on_step_begin = on_epoch_begin = on_save = _after

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Log what is known of the run, beside what the trainer logs now."""
        if self._reporter is None:
            return
        self._reporter.update()
        self._add(logs, state)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log once more."""
        self._after()
        if self._reporter is not None:
            self._reporter.close()
            self._reporter = None
            self._add(None, state)

    def _add(self, logs: dict[str, Any] | None, state: Any) -> None:
        for entry in (logs, *state.log_history[-1:]):
            if entry is not None:
                entry.update(self._figures)
