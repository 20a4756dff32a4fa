"""Keep a call within its timeout, whatever the store does.

Two things make a TCPStore's calls take longer than they were given. None of its timeouts applies
while its host is stopped. And torch's warning about a failed or timed-out call resolves addresses,
which takes five seconds or more where reverse look-ups are not answered. So in the last seconds
before a deadline nothing is done on the caller's thread: a helper asks, and never blocks for long,
and the caller waits for the helper, but no longer than it may.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from torch.distributed import Store

from rankcall.background import BackgroundCall
from rankcall.store._connection import answers_slowly, borrowed, own
from rankcall.store._errors import StoreLost
from rankcall.store._link import Link, lost, where
from rankcall.store._member import Call

__all__ = ["BEYOND_S", "blocking", "told", "within"]

BEYOND_S = 0.85  # what a call may take beyond its timeout: to name the missing, or give up
_HEARD_S = 1.5  # a store that answered so lately is there, and only this machine too busy
_STALL_S = 12.0  # what a call may be held up by look-ups
_WORTH_S = 3.0  # less time than this to block in is not worth a connection
_SILENT_S = 30.0  # a host that has not answered a plain request for so long is lost

T = TypeVar("T")
Step = Callable[[Link, Call, float], T | None]


def blocking(timeout: float) -> tuple[float, float] | None:
    """Return how long an answer may take and how long to block in a wait; None: do not block.

    A wait that is over asks once more, to cancel it: one after the other, then a look-up, fit into
    the timeout.
    """
    direct = timeout - _STALL_S
    if not direct >= _WORTH_S:
        return None
    answer = min(_SILENT_S, direct / 2)
    return answer, direct - answer


def within(
    store: Store,
    timeout: float,
    step: Step[T],
    last: Step[T],
    unnamed: Callable[[], Exception] | None = None,
    saying: str = "",
) -> T:
    """Run ``step(link, call, until)``; where it returns None at ``until``, run ``last``.

    ``step`` may be called twice, the second time to go on where it was. ``last`` has to return or
    raise. Neither is on this thread near the deadline, where the store is a TCPStore. Raises
    ``StoreLost`` where there is no answer ``BEYOND_S`` after the timeout, or what ``unnamed``
    returns where the store was there a moment ago and is only too slow for ``last``. ``saying``
    begins a ``StoreLost``: what was being done.
    """
    try:
        return _within(store, timeout, step, last, unnamed)
    except StoreLost as error:
        raise told(error, saying) from error.__cause__


def told(error: StoreLost, saying: str) -> StoreLost:
    """Return the error with what was being done."""
    return StoreLost(f"{saying}: {error}", host=error.host) if saying else error


def _within(
    store: Store,
    timeout: float,
    step: Step[T],
    last: Step[T],
    unnamed: Callable[[], Exception] | None,
) -> T:
    call, deadline = Call(), time.monotonic() + timeout

    def whole(link: Link) -> T:
        found = step(link, call, deadline)
        if found is None:
            call.late = True
            found = last(link, call, deadline)
            assert found is not None
        return found

    if not answers_slowly(store):
        with borrowed(store) as link:
            return whole(link)
    times = blocking(timeout)
    if times is not None:
        answer, wait = times
        with own(store, answer) as link:
            found = step(link, call, time.monotonic() + wait)
        if found is not None:
            return found

    def aside() -> T:
        with borrowed(store) as link:
            call.link = link
            return whole(link)

    return _aside(aside, call, deadline + BEYOND_S, store, timeout, unnamed)


def _aside(
    work: Callable[[], T],
    call: Call,
    until: float,
    store: Store,
    timeout: float,
    unnamed: Callable[[], Exception] | None,
) -> T:
    helper = BackgroundCall(work, "rankcall-store")
    try:
        ended = helper.ended(until - time.monotonic())
    except BaseException:  # an interrupt
        call.abandon()
        raise
    if not ended and call.abandon():
        if unnamed is not None and (call.late or call.heard_within(_HEARD_S)):
            raise unnamed()
        raise lost(where(store), f"no answer within the timeout of {timeout:g} s")
    if not helper.ended(_HEARD_S):  # it had its result a moment ago
        raise lost(where(store), f"no answer within the timeout of {timeout:g} s")
    return helper.outcome()
