"""A Ray Train callback: ``RunConfig(callbacks=[RankcallCallback()])``."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from rankcall.capture import session
from rankcall.capture.phases import expect
from rankcall.durations import Duration, seconds
from rankcall.integrations.reporter import EVERY_S, Reporter

try:
    import ray.train
    from ray.train.v2._internal.execution.callback import TrainContextCallback, WorkerCallback
    from ray.train.v2._internal.execution.context import get_train_context
except ImportError as error:  # pragma: no cover
    raise ImportError("this callback needs Ray Train V2: pip install 'ray[train]'") from error

_logger = logging.getLogger("ray.train.rankcall")


class RankcallCallback(TrainContextCallback, WorkerCallback):  # type: ignore[misc, unused-ignore]
    """Declare reports and checkpoints, log figures and verdicts, and record a worker's exception.

    Ray copies this object to each worker and calls it there. On rank 0, the figures and verdicts go
    to Ray Train's own logger at each ``ray.train.report`` and at the end. Ray catches the exception
    of a training function before Python notes how the worker ended, so this callback notes it.

    Ray Train does not know when an evaluation begins: declare that with ``rankcall.expect``.

    Args:
        report_s: How long a rank may be silent in ``ray.train.report``, which waits for the other
            ranks and saves the checkpoint, in seconds.
        every_s: The least time between two looks at the records.
    """

    def __init__(self, report_s: Duration = 1800.0, every_s: Duration = EVERY_S) -> None:
        # Checked here, because ``expect`` would raise in the middle of the job.
        self._report_s, self._every_s = seconds(report_s, "report_s"), every_s
        self._reporter: Reporter | None = None

    def after_init_train_context(self) -> None:
        """Begin to report on rank 0."""
        if ray.train.get_context().get_world_rank() == 0:
            self._reporter = Reporter(_log, _logger.warning, self._every_s)

    @contextlib.contextmanager
    def on_report(self) -> Iterator[None]:
        """Declare a report and its checkpoint, and log what is known of the run."""
        with expect(self._report_s, "a report or checkpoint"):
            yield
        if self._reporter is not None:
            self._reporter.update()

    def before_worker_shutdown(self) -> None:
        """Note the exception that ended the training function, and log once more.

        Ray waits five seconds for this, and then ends the worker by a signal.
        """
        try:
            error = _training_error()
            if error is not None:
                session.note_end(error)
        except Exception as failure:  # Ray's own interface has changed
            _logger.warning("rankcall: this worker's exception is not known: %r", failure)
        if self._reporter is not None:
            self._reporter.close()
            self._reporter = None


def _training_error() -> BaseException | None:
    """Return the exception of this worker's training function, without Ray's wrapper."""
    caught: Any = get_train_context().execution_context.training_thread_runner.get_error()
    error: BaseException | None = getattr(caught, "_base_exc", caught)
    return error


def _log(figures: dict[str, float]) -> None:
    _logger.info(" ".join(f"{name}={value:.3g}" for name, value in figures.items()))
