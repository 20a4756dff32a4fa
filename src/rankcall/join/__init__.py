"""Uneven inputs with any parallelism: no hang, exact gradients, no cost while inputs are even.

``Join`` follows the protocol of ``torch.distributed.algorithms.join``, and ``Joinable`` and
``JoinHook`` are torch's own classes. So torch's joinables work with this ``Join``, and joinables
written for this package work with torch's.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import torch
from torch.distributed.algorithms.join import Joinable, JoinHook

from rankcall.capture import session
from rankcall.errors import UnevenInputs
from rankcall.join.block import DIVISORS, POLICIES, Block, agreed_error
from rankcall.join.joinables import Joined, notify, prepare
from rankcall.record import format_ranks
from rankcall.run.outcomes import JoinSummary, RankSummary, append_join

# ``join.batches()``: yield batches in step with the other ranks, and know which have any left.
#
# Ranks exchange how many batches they have once per window, and send nothing within a window. If
# every rank knows the length of its input, the window is the whole input. Otherwise it is a few
# batches of look-ahead, which a rank fetches while it works on the batches before them.


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
        self._begin(block)
        block.begin_iteration()
        if block.policy == "replay":
            yield from self._replay()
        elif block.policy == "shadow":
            yield from self._shadow()
        else:
            yield from self._until_the_first(block.policy == "raise")
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
            for batch in self._take(min(window.counts)):
                yield self._block.next_batch(batch)
            if window.last and min(window.counts) != max(window.counts):
                self._block.begin_tail()
                for batch in self._rest():
                    yield self._block.next_batch(batch)
        self._nothing_left()

    def _replay(self) -> Iterator[T]:
        """Yield the last batch again, with weight zero, until every rank is done."""
        index = self._block.index
        for window in self._windows():
            self._check_replayable(window)
            own, steps = self._take(window.counts[index]), max(window.counts)
            for step in range(steps):
                if window.last and step == steps - 1:
                    self._block.expect_end()
                active = sum(step < count for count in window.counts)
                if step < window.counts[index]:
                    self._replayed = next(own)
                    yield self._block.next_batch(self._replayed, active)
                else:
                    began = time.perf_counter()
                    yield self._block.next_batch(self._replayed, active, replayed=True)
                    self._block.own.extra_s += time.perf_counter() - began
        self._nothing_left()

    def _until_the_first(self, throws: bool) -> Iterator[T]:
        """Yield as many batches as every rank has; then end, or raise on every rank."""
        index, ranks = self._block.index, self._block.members.ranks
        for window in self._windows():
            fewest = min(window.counts)
            for batch in self._take(fewest):
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
            raise UnevenInputs(
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
            raise UnevenInputs(
                f"rank {self._block.rank}'s loader ended after {self._taken} of the {self._length} "
                "batches that its length promised: pass batches(..., length=...) the true number"
            ) from None

    def _rest(self) -> Iterator[T]:
        """Take the remaining batches; after the first rank has run dry, their number is free."""
        while self._ahead:
            self._taken += 1
            yield self._ahead.popleft()
        if self._capped():
            return
        for batch in self._source:
            if self._known and self._taken == self._length:
                raise self._too_many()
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

    def _too_many(self) -> UnevenInputs:
        return UnevenInputs(
            f"rank {self._block.rank}'s loader goes on after the {self._length} batches that its "
            "length promised: pass batches(..., length=...) the true number"
        )


def _length_of(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


# ``Join``: the context manager.


Policy = Literal["shadow", "replay", "stop", "raise"]
Divisor = Literal["world", "active"]


class Join:
    """Let ranks with different numbers of inputs train together.

    It does what torch's ``Join`` does, and more::

        with Join([model]) as join:
            for batch in join.batches(loader):
                ...

    Every rank must enter the block, iterate over ``batches()`` and leave the block. After the
    block, ``summary`` says what each rank did.

    Args:
        joinables: DistributedDataParallel models, ZeroRedundancyOptimizers, plain optimizers and
            schedulers, and your own ``Joinable`` objects. FSDP2 models work with every policy but
            ``shadow``.
        enable: False switches everything off.
        throw_on_early_termination: True means ``on_exhausted="raise"``, as in torch.
        group: The ranks whose inputs may differ, as a process group or a device mesh. The default
            is the joinables' own group.
        on_exhausted: The policy for a rank without inputs: ``shadow`` (answer the collectives of
            the other ranks), ``replay`` (go on with its last batch, with ``weight`` 0), ``stop``
            (all ranks end with the first one) or ``raise`` (all raise at the same step).
        divide_by: Whether gradients are divided by the ``world`` or by the ``active`` ranks.
        same_data: A group or mesh of ranks that get the same batches, as in tensor parallelism.
            ``Join`` checks that they run dry together.
        **kwargs: Passed to each ``join_hook``.

    Raises:
        ValueError: An argument is invalid, or ranks use different settings.
        TypeError: An argument has the wrong type.
        UnevenInputs: The policy is ``raise`` and a rank ran dry, or ranks are out of step.
        PeerError: Another rank failed inside the block.
    """

    def __init__(
        self,
        joinables: Sequence[Any] = (),
        enable: bool = True,
        throw_on_early_termination: bool = False,
        *,
        group: Any = None,
        on_exhausted: Policy | None = None,
        divide_by: Divisor | None = None,
        same_data: Any = None,
        **kwargs: Any,
    ) -> None:
        self.summary: JoinSummary | None = None
        self._policy = _policy(on_exhausted, throw_on_early_termination)
        self._divide_by = _divisor(divide_by, kwargs)
        self._is_enabled = enable
        self._joined: Joined = prepare(
            joinables, group, same_data, self._policy, self._divide_by == "active", kwargs
        )
        self._weight_tensor = torch.ones((), device=self._joined.members.device)
        self._block: Block | None = None  # of this rank, while or after it is in the block
        self._is_entered = False

    @property
    def active(self) -> bool:
        """Whether the batch is this rank's own, and not replayed."""
        return self._block is None or self._block.active

    @property
    def weight(self) -> float:
        """The number to multiply the loss with under ``replay``; 0 for a replayed batch."""
        return 1.0 if self._block is None else self._block.weight

    @property
    def weight_tensor(self) -> torch.Tensor:
        """``weight`` as a scalar tensor, always the same object, for use in torch.compile."""
        return self._weight_tensor

    def __enter__(self) -> Join:
        if self._is_entered:
            raise RuntimeError("this Join is entered already: make another one for a nested block")
        if not self._is_enabled:
            return self
        self._joined.check_free()
        self.summary = None
        self._block = Block(
            self._joined, self._policy, self._divide_by, self._weight_tensor, _caller()
        )
        self._is_entered = True
        self._block.enter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._block is None or not self._is_entered:
            return
        try:
            if error is not None:
                self._block.fail(error)
                return
            try:
                self.summary = self._block.finish()
                self._record(self.summary)
            except BaseException as failure:
                self._block.fail(failure)
                raise
        finally:
            self._is_entered = False
            self._block.close()

    @staticmethod
    def notify_join_context(joinable: Any) -> Any:
        """Announce that this rank begins an iteration.

        A joinable calls this before its collectives.

        Returns the Work of the announcement for the first joinable of an enabled ``Join``, else
        None. Raises ``RuntimeError`` if a rank ran out of inputs and the policy is ``raise``.
        """
        return notify(joinable)

    def batches(
        self,
        loader: Iterable[T],
        *,
        length: int | None = None,
        window: int = 8,
        example: T | None = None,
    ) -> Batches[T]:
        """Return an iterable over ``loader`` that keeps the ranks in step.

        Use it inside the block. It may be used several times in a block, equally on every rank.

        Args:
            loader: The batches of this rank.
            length: How many batches to take; needed if ``len(loader)`` fails or is wrong.
            window: If a rank does not know its length, ranks look this many batches ahead, and
                exchange how many they have once per window.
            example: The batch that ``replay`` yields on a rank that has no batch at all.

        Returns:
            An iterable over the batches.

        Raises:
            ValueError: ``length`` is negative, or ``window`` is below 1.
        """
        return Batches(self._running_block, loader, length, window, example)

    def _running_block(self) -> Block | None:
        """Return the block that batches are yielded in, or None if this ``Join`` is disabled."""
        if not self._is_enabled:
            return None
        if not self._is_entered:
            raise RuntimeError("batches() works inside the block: with Join(...) as join:")
        return self._block

    def _record(self, summary: JoinSummary) -> None:
        """Append the summary to the run, on one rank, if this process records."""
        assert self._block is not None
        recording = session.current()
        if recording is not None and recording.run_dir is not None and self._block.index == 0:
            append_join(recording.run_dir, summary)


def _policy(on_exhausted: str | None, throws: bool) -> str:
    if on_exhausted is not None and on_exhausted not in POLICIES:
        raise ValueError(f"on_exhausted must be one of {', '.join(POLICIES)}; got {on_exhausted!r}")
    if throws and on_exhausted not in (None, "raise"):
        raise ValueError(
            f"throw_on_early_termination=True is on_exhausted='raise', not {on_exhausted!r}"
        )
    return "raise" if throws else on_exhausted or "shadow"


def _divisor(divide_by: str | None, kwargs: dict[str, Any]) -> str:
    """Return the divisor from ``divide_by`` or from torch's own keyword."""
    if divide_by is not None and divide_by not in DIVISORS:
        raise ValueError(f"divide_by must be 'world' or 'active'; got {divide_by!r}")
    by_world = kwargs.get("divide_by_initial_world_size")
    if by_world is None:
        return divide_by or "world"
    meant = "world" if by_world else "active"
    if divide_by not in (None, meant):
        raise ValueError(f"divide_by_initial_world_size={by_world} is divide_by={meant!r}")
    return meant


def _caller() -> str:
    """Return file and line of the ``with`` statement."""
    frame = sys._getframe(2)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


__all__ = ["Join", "JoinHook", "JoinSummary", "Joinable", "RankSummary"]
