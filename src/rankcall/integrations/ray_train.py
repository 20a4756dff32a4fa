"""Ray Train callbacks: ``RunConfig(callbacks=[RankcallCallback(), RaiseOnHang()])``."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rankcall.analysis.verdicts.kept import kept_in
from rankcall.capture import session
from rankcall.capture.phases import expect
from rankcall.durations import Duration, seconds
from rankcall.integrations.reporter import EVERY_S, Reporter
from rankcall.job.news import leaves_open
from rankcall.ring.layout import read_header

try:
    import ray
    import ray.train
    from ray.train.v2._internal.execution.callback import (
        TrainContextCallback,
        WorkerCallback,
        WorkerGroupCallback,
    )
    from ray.train.v2._internal.execution.context import get_train_context
    from ray.train.v2.api.exceptions import WorkerGroupError
except ImportError as error:  # pragma: no cover
    raise ImportError("this callback needs Ray Train V2: pip install 'ray[train]'") from error

_logger = logging.getLogger("ray.train.rankcall")
_ASK_EVERY_S = 1.0


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


@dataclass(frozen=True)
class _Hang:
    """What a worker knows of the hang that it is part of."""

    kind: str
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    summary: str


class HangError(WorkerGroupError):  # type: ignore[misc, unused-ignore]
    """A job of Ray Train hangs. Ray's failure policy gets it, and so does who calls ``fit``.

    Attributes:
        kind: The kind of the verdict, such as ``missing`` or ``stopped``.
        ranks: The culprits; none if no rank is named.
        hosts: Their hosts.
        summary: The verdict in a sentence.
    """

    def __init__(
        self, kind: str, ranks: tuple[int, ...], hosts: tuple[str, ...], summary: str
    ) -> None:
        super().__init__(summary, {rank: RuntimeError(summary) for rank in ranks})
        self.kind, self.ranks, self.hosts, self.summary = kind, ranks, hosts, summary

    def __reduce__(self) -> tuple[Any, ...]:
        return HangError, (self.kind, self.ranks, self.hosts, self.summary)


class RaiseOnHang(WorkerGroupCallback):  # type: ignore[misc, unused-ignore]
    """Have Ray Train take a hang for a failure, once rankcall has its verdict.

    Ray's controller calls this object, which asks the workers once a second for a verdict, and
    never waits for one: a rank that is stopped does not answer. Ray then ends all workers, starts
    them again if ``FailureConfig(max_failures=...)`` lets it, and raises ``HangError`` otherwise.
    The workers must be watched (``rankcall exec``), without ``--on-hang abort`` or ``recover``,
    which would end them first.
    """

    def __init__(self) -> None:
        self._group: Any = None
        self._asked: dict[int, Any] = {}  # by rank, the answer that has not come
        self._next = 0.0

    def after_worker_group_training_start(self, worker_group: Any) -> None:
        """Begin to ask the workers of an attempt."""
        self._group, self._asked = worker_group, {}

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        """Raise ``HangError`` if a worker has told of a hang since the last look."""
        try:
            hang = self._told()
        except Exception as error:  # Ray's own interface has changed
            _logger.warning("rankcall: the workers cannot be asked for a verdict: %r", error)
            self._group = None
            return
        if hang is not None:
            self._group, self._asked = None, {}
            raise HangError(hang.kind, hang.ranks, hang.hosts, hang.summary)

    def _told(self) -> _Hang | None:
        """Return what a worker has said of a hang, and ask again once all had time to answer."""
        if self._group is None:
            return None
        pending = list(self._asked.values())
        if pending:
            answers, _ = ray.wait(pending, num_returns=len(pending), timeout=0)
            for rank in [rank for rank, answer in self._asked.items() if answer in answers]:
                with contextlib.suppress(ray.exceptions.RayError):  # the worker has ended
                    hang: _Hang | None = ray.get(self._asked.pop(rank))
                    if hang is not None:
                        return hang
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _ASK_EVERY_S
            # A stopped worker has one question to answer, however long it is stopped.
            for rank in set(range(len(self._group))) - self._asked.keys():
                ask = self._group.execute_single_async
                self._asked[rank] = ask(rank, _hang_of_this_worker)
        return None


def _hang_of_this_worker() -> _Hang | None:
    """Return the verdict on this attempt, if there is a hang that lasts and ranks may be ended."""
    recording = session.current()
    header = read_header(recording.path) if recording is not None and recording.path else None
    if recording is None or recording.run_dir is None or header is None:
        return None
    for kept in reversed(kept_in(recording.run_dir)):
        verdict = kept.verdict
        if verdict.origin.epoch_ns < header.anchor_epoch_ns:
            return None
        if verdict.stops and kept.over_s is None and not leaves_open(verdict.findings):
            finding = verdict.findings[0]
            return _Hang(finding.kind, finding.ranks, finding.hosts, finding.summary)
    return None


def _training_error() -> BaseException | None:
    """Return the exception of this worker's training function, without Ray's wrapper."""
    caught: Any = get_train_context().execution_context.training_thread_runner.get_error()
    error: BaseException | None = getattr(caught, "_base_exc", caught)
    return error


def _log(figures: dict[str, float]) -> None:
    _logger.info(" ".join(f"{name}={value:.3g}" for name, value in figures.items()))
