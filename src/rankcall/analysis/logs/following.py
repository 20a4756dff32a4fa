"""Judge logs that are still written, as soon as they say why the job failed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rankcall.analysis.logs import NOTHING, UNDECIDED, diagnose_logs
from rankcall.analysis.verdicts.verdict import Verdict
from rankcall.errors import CorruptRunError
from rankcall.imports.logs.growth import Growth

_POLL_S = 1.0
# The ranks of a job that fails write within seconds of each other. A verdict on the first lines
# could name the rank whose lines came first. So the logs are judged once they are quiet about the
# failure, or after a time, because ranks that are being ended may write for minutes.
_QUIET_S, _LONGEST_S = 5.0, 30.0
# Each judgement reads the logs whole. One that names nobody is followed by a pause of so many times
# its own duration, so that following a log of gigabytes takes a sixth of a core at most.
_PAUSE = 5.0


def follow_logs(
    paths: Sequence[Path],
    seconds: float,
    *,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Verdict:
    """Wait until the logs of a job say why it failed; return the verdict, or what is known then.

    Args:
        paths: Files and folders, as of ``diagnose_logs``. They need not exist yet.
        seconds: After this time, the verdict is that of what is there.
        now: The clock.
        sleep: Waits between two looks.

    Raises:
        CorruptRunError: No log could be read in all that time.
    """
    growth = Growth(paths)
    deadline = now() + seconds
    first: float | None = None  # when news came that were not judged yet
    newest, not_before = 0.0, 0.0
    while True:
        has_news, moment = growth.has_news(), now()
        if has_news:
            first, newest = moment if first is None else first, moment
        is_over = moment >= deadline
        is_settled = first is not None and (
            moment - newest >= _QUIET_S or moment - first >= _LONGEST_S
        )
        if is_over or (is_settled and moment >= not_before):
            verdict, first = _judged(growth, paths, is_last=is_over), None
            not_before = now() + _PAUSE * (now() - moment)
            if verdict is not None and (is_over or _names_a_cause(verdict)):
                return replace(verdict, problems=[*verdict.problems, *growth.problems.values()])
        sleep(min(_POLL_S, max(deadline - now(), 0.0)))


def _judged(growth: Growth, paths: Sequence[Path], *, is_last: bool) -> Verdict | None:
    try:
        return diagnose_logs(growth.paths or paths)
    except CorruptRunError:  # for example, a log is being replaced
        if is_last:
            raise
        return None


def _names_a_cause(verdict: Verdict) -> bool:
    return verdict.findings[0].kind not in (NOTHING, UNDECIDED)
