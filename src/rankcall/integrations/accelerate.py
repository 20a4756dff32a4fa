"""Accelerate: ``follow`` reports on the job, ``join_uneven_inputs`` is for uneven inputs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rankcall.capture.phases import expect
from rankcall.durations import Duration, seconds
from rankcall.integrations.reporter import EVERY_S, Reporter
from rankcall.join import Join

try:
    from accelerate.logging import get_logger
    from accelerate.tracking import GeneralTracker
except ImportError as error:  # pragma: no cover
    raise ImportError(
        "rankcall.integrations.accelerate needs Accelerate: pip install 'rankcall[accelerate]'"
    ) from error

_CHECKPOINTS = ("save_state", "load_state", "save_model")


class RankcallTracker(GeneralTracker):  # type: ignore[misc, unused-ignore]
    """Logs rankcall's figures to the other trackers at each ``accelerator.log``; see ``follow``."""

    name = "rankcall"
    requires_logging_directory = False
    main_process_only = True

    def __init__(self, accelerator: Any, every_s: Duration) -> None:
        super().__init__()
        self._accelerator, self._step = accelerator, 0
        say = get_logger("rankcall").warning
        main = accelerator.is_main_process
        self._reporter = Reporter(self._log, say, every_s) if main else None

    @property
    def tracker(self) -> RankcallTracker:
        """Return this object, which is all that there is."""
        return self

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Do nothing: there is nothing to configure."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log what is known of the run, beside what the program logs now."""
        self._step = self._step + 1 if step is None else step
        if self._reporter is not None:
            self._reporter.update()

    def finish(self) -> None:
        """Log once more, and leave the accelerator as it was."""
        for name in _CHECKPOINTS:
            vars(self._accelerator).pop(name, None)
        if self._reporter is not None:
            self._reporter.close()
            self._reporter = None

    def _log(self, figures: dict[str, float]) -> None:
        for tracker in self._accelerator.trackers:
            if tracker is not self:
                tracker.log(figures, step=self._step)


def follow(
    accelerator: Any, checkpoint_s: Duration = 1800.0, every_s: Duration = EVERY_S
) -> Callable[[float, str], Any]:
    """Declare the accelerator's checkpoints, and log rankcall's figures and verdicts with it.

    Call it on every rank after ``accelerator.init_trackers``. ``accelerator.end_training`` ends it.

    Args:
        accelerator: The ``Accelerator``.
        checkpoint_s: How long a rank may be silent in ``save_state``, ``load_state`` or
            ``save_model``, in seconds.
        every_s: The least time between two looks at the records.

    Returns:
        ``rankcall.expect``, for evaluation: Accelerate does not know when that begins.
    """
    silent_s = seconds(checkpoint_s, "checkpoint_s")  # ``expect`` would raise within the job
    accelerator.trackers.append(RankcallTracker(accelerator, every_s))
    for name in _CHECKPOINTS:
        call = getattr(accelerator, name)
        setattr(accelerator, name, functools.wraps(call)(expect(silent_s, "a checkpoint")(call)))
    return expect


@contextlib.contextmanager
def join_uneven_inputs(
    accelerator: Any, joinables: Sequence[Any], **options: Any
) -> Iterator[Join]:
    """Enter ``Join`` with all its features, with objects that ``accelerator.prepare`` returned.

    ::

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        with join_uneven_inputs(accelerator, [model, optimizer]) as join:
            for batch in join.batches(loader):
                ...
                accelerator.backward(loss)

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
