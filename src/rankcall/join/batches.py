"""``join.batches()``: yield batches in step with the other ranks, and know which have any left.

Ranks exchange how many batches they have once per window, and send nothing within a window. If
every rank knows the length of its input, the window is the whole input. Otherwise it is a few
batches of look-ahead, which a rank fetches while it works on the batches before them.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

from rankcall.errors import UnevenInputsError
from rankcall.join.block import Block, StoppedBefore, agreed_error
from rankcall.ranks import format_ranks

T = TypeVar("T")
UNKNOWN = -1


class Window(NamedTuple):
    """How many batches each rank has within one window."""

    counts: list[int]
    last: bool  # no window follows


class Batches(Generic[T]):
    """The batches of one loader. Iterate over it inside the ``Join`` it belongs to.

    ``running_block`` returns the entered block, or None if the ``Join`` is disabled, and raises
    outside the block.
    """

    def __init__(
        self,
        running_block: Callable[[], Block | None],
        loader: Iterable[T],
        length: int | None,
        window: int,
        example: T | None,
    ) -> None:
        if window < 1:
            raise ValueError(f"window must be at least 1; got {window}")
        if length is not None and length < 0:
            raise ValueError(f"length must not be negative; got {length}")
        self._running_block = running_block
        self._loader = loader
        self._given_length = length
        self._size = window
        self._example = example

    def __iter__(self) -> Iterator[T]:
        block = self._running_block()
        if block is None:
            yield from self._loader
            return
        if not block.begin_iteration():
            return
        self._begin(block)
        try:
            if block.policy == "replay":
                yield from self._replay()
            elif block.policy == "shadow":
                yield from self._shadow()
            else:
                yield from self._until_the_first(block.policy == "raise")
        except StoppedBefore:
            pass
        block.end_iteration()

    def _begin(self, block: Block) -> None:
        self._block = block
        given = self._given_length
        self._length = _length_of(self._loader) if given is None else given
        self._source = iter(self._loader)
        self._ahead: deque[T] = deque()
        self._taken = 0
        self._replayed: Any = self._example
        self._known = False  # whether every rank knows its number of batches

    # The policies: which batches this rank yields.

    def _shadow(self) -> Iterator[T]:
        """Yield all batches; once the first rank has run dry, announce each iteration."""
        for window in self._windows():
            fewest, most = min(window.counts), max(window.counts)
            for step, batch in enumerate(self._take(fewest)):
                self._note_last(step, most)
                yield self._block.next_batch(batch)
            if window.last and fewest != most:
                self._block.begin_tail()
                for step, batch in enumerate(self._rest(), fewest):
                    self._note_last(step, most)
                    yield self._block.next_batch(batch)
        self._nothing_left()

    def _replay(self) -> Iterator[T]:
        """Yield the last batch again, with weight zero, until every rank is done."""
        index = self._block.index
        for window in self._windows():
            self._check_replayable(window)
            own, steps = self._take(window.counts[index]), max(window.counts)
            for step in range(steps):
                self._note_last(step, steps)
                if window.last and step == steps - 1:
                    self._block.expect_end()
                active = sum(step < count for count in window.counts)
                if step < window.counts[index]:
                    self._replayed = next(own)
                    yield self._block.next_batch(self._replayed, active)
                else:
                    began = time.perf_counter()
                    self._block.begin_step()
                    yield self._block.next_batch(self._replayed, active, replayed=True)
                    self._block.own.extra_s += time.perf_counter() - began
        self._nothing_left()

    def _until_the_first(self, throws: bool) -> Iterator[T]:
        """Yield as many batches as every rank has; then end, or raise on every rank."""
        index, ranks = self._block.index, self._block.members.ranks
        for window in self._windows():
            fewest = min(window.counts)
            for step, batch in enumerate(self._take(fewest)):
                self._note_last(step, fewest)
                yield self._block.next_batch(batch)
            if throws and window.last and fewest != max(window.counts):
                pairs = zip(ranks, window.counts, strict=True)
                dry = [rank for rank, count in pairs if count == fewest]
                raise agreed_error(
                    f"Rank {ranks[index]} exhausted all inputs."
                    if window.counts[index] == fewest
                    else "Detected at least one rank that exhausted inputs. Throwing across all "
                    f"ranks. (Rank {format_ranks(dry)} had {self._taken} batches.)"
                )

    def _note_last(self, step: int, steps: int) -> None:
        """Note whether the batch about to be yielded is in the last step that any rank makes.

        ``steps`` is how many steps the ranks make together in this window. If no rank has as many
        batches as a window of look-ahead holds, no window with batches follows.
        """
        is_end = step + 1 >= steps
        self._block.is_last = None if is_end and not self._ends_within(steps) else is_end

    def _ends_within(self, steps: int) -> bool:
        return self._known or steps < self._size

    # The windows: the numbers of batches of all ranks.

    def _windows(self) -> Iterator[Window]:
        block = self._block
        facts = (UNKNOWN if self._length is None else self._length, self._example is not None)
        table = block.members.begin_exchange([*facts, *block.settings()]).table()
        block.compare_settings(row[2:] for row in table)
        self._replayable = [bool(row[1]) for row in table]
        lengths = [row[0] for row in table]
        if UNKNOWN not in lengths:
            self._known = True
            self._check_shared(self._length)
            yield Window(lengths, last=True)
            return
        self._length = None
        full = max if block.policy == "replay" else min
        last = False
        while not last:
            counts = self._counts_ahead()
            self._check_shared(counts[block.index])
            last = full(counts) < self._size
            yield Window(counts, last)

    def _counts_ahead(self) -> list[int]:
        """Fetch this rank's part of a window; return how many batches each rank has in it."""
        self._fetch(self._size - len(self._ahead))
        table = self._block.members.begin_exchange([len(self._ahead)]).table()
        return [row[0] for row in table]

    def _fetch(self, count: int) -> None:
        """Fetch up to ``count`` batches in advance."""
        self._ahead.extend(itertools.islice(self._source, count))

    def _check_shared(self, count: int | None) -> None:
        """Check that ranks which share data run dry together."""
        shared = self._block.same_data
        if shared is None or count is None:
            return
        counts = [row[0] for row in shared.begin_exchange([count]).table()]
        if len(set(counts)) > 1:
            raise UnevenInputsError(
                f"ranks {format_ranks(shared.ranks)} share their data and must run dry together, "
                f"but have {', '.join(map(str, counts))} batches"
            )

    def _check_replayable(self, window: Window) -> None:
        """Raise on every rank if one of them has no batch to replay."""
        if not max(window.counts):
            return
        rows = zip(self._block.members.ranks, window.counts, self._replayable, strict=True)
        unable = [rank for rank, count, can in rows if not count and not can]
        self._replayable = [True] * len(window.counts)
        if unable:
            raise agreed_error(
                f"rank {format_ranks(unable)} has no batch at all, so nothing to replay: "
                "pass batches(..., example=a batch of the usual shape)"
            )

    # The batches of this rank.

    def _take(self, count: int) -> Iterator[T]:
        """Take ``count`` batches, which exist according to the window."""
        for _ in range(count):
            # Before the batch is taken: if the ranks stop here, the loader still has it.
            self._block.begin_step()
            if self._known:
                batch = self._next_or_raise(count)
            else:
                batch = self._ahead.popleft()
                self._fetch(1)
            self._taken += 1
            yield batch

    def _next_or_raise(self, promised: int) -> T:
        try:
            return next(self._source)
        except StopIteration:
            raise UnevenInputsError(
                f"rank {self._block.rank}'s loader ended after {self._taken} of the {self._length} "
                "batches that its length promised: pass batches(..., length=...) the true number"
            ) from None

    def _rest(self) -> Iterator[T]:
        """Take the remaining batches; after the first rank has run dry, their number is free."""
        while self._ahead:
            self._block.begin_step()
            self._taken += 1
            yield self._ahead.popleft()
        if self._capped():
            return
        for batch in self._source:
            if self._known and self._taken == self._length:
                raise self._too_many()
            self._block.begin_step()  # only now: without a batch, it is no step of this rank
            self._taken += 1
            yield batch
            if self._capped():
                return

    def _nothing_left(self) -> None:
        """Raise if a loader has more batches than it promised; they would be lost silently."""
        if self._known and self._taken == self._length and self._given_length is None:
            for _ in self._source:
                raise self._too_many()

    def _capped(self) -> bool:
        """Whether this rank has yielded as many batches as ``length`` says."""
        return self._given_length is not None and self._known and self._taken == self._length

    def _too_many(self) -> UnevenInputsError:
        return UnevenInputsError(
            f"rank {self._block.rank}'s loader goes on after the {self._length} batches that its "
            "length promised: pass batches(..., length=...) the true number"
        )


def _length_of(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None
