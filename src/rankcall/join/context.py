"""``Join``: the context manager."""

from __future__ import annotations

import re
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from rankcall import _joins
from rankcall._joins import JoinSummary, RankSummary
from rankcall.capture import session
from rankcall.errors import PeerError, UnevenInputs
from rankcall.join.batches import Batches
from rankcall.join.exchange import Exchange
from rankcall.join.groups import Span
from rankcall.join.joinables import Joined, sort_out
from rankcall.join.protocol import DETECTED, announce, notify, tell
from rankcall.join.watch import Watch
from rankcall.join.weight import Weight

T = TypeVar("T")
Policy = Literal["shadow", "replay", "stop", "raise"]
POLICIES = ("shadow", "replay", "stop", "raise")
DIVISORS = ("world", "active")
SKEW_WARNED = 1000
_TRANSPORT = re.compile(
    r"gloo[/\\]transport|connection (closed|reset|refused)|broken pipe|\bNCCL\b|aborted",
    re.IGNORECASE,
)


class Join:
    """Let ranks with different numbers of inputs train together.

    As torch's ``Join``, and more::

        with Join([model]) as join:
            for batch in join.batches(loader):
                ...

    ``joinables``: DistributedDataParallel models, ZeroRedundancyOptimizers, plain optimizers and
    schedulers, and objects of your own that are ``Joinable``; FSDP2 models for the policies that
    need no shadow. ``group``: where inputs may differ (a process group or a device mesh; default:
    the joinables' own). ``on_exhausted``: what a rank without inputs does: ``shadow`` (answer the
    others' collectives), ``replay`` (go on with its last batch, at ``weight`` 0), ``stop`` (all
    ranks end with the first), ``raise`` (all raise at the same step). ``divide_by``: whether
    gradients are divided by the ``world`` or by the ``active`` ranks. ``enable=False`` switches all
    of it off. ``throw_on_early_termination=True`` is ``on_exhausted="raise"``. ``same_data``: a
    group or mesh of ranks that get the same batches, as in tensor parallelism: they are checked to
    run dry together. Other keywords go to each ``join_hook``.

    Enter, iterate and leave it on every rank alike. Raises ``ValueError`` and ``TypeError`` for
    arguments that make no sense, ``UnevenInputs`` where that is the policy or ranks are out of
    step, and ``PeerError`` where another rank failed inside the block.
    """

    def __init__(
        self,
        joinables: Sequence[Any] = (),
        enable: bool = True,
        throw_on_early_termination: bool = False,
        *,
        group: Any = None,
        on_exhausted: Policy | None = None,
        divide_by: Literal["world", "active"] | None = None,
        same_data: Any = None,
        **kwargs: Any,
    ) -> None:
        self.policy = _policy(on_exhausted, throw_on_early_termination)
        self.divide_by = _divisor(divide_by, kwargs)
        self.off = not enable
        self.active = True
        self.weight: float = Weight(1.0)
        self.summary: JoinSummary | None = None
        self._joined: Joined = sort_out(
            joinables, group, same_data, self.policy, self.divide_by == "active", kwargs
        )
        self._entered = False

    # Where it stands.

    @property
    def group(self) -> Any:
        """The process group through which the ranks agree."""
        return self._joined.span.group

    @property
    def ranks(self) -> list[int]:
        """The world's ranks in that group."""
        return self._joined.span.ranks

    @property
    def device(self) -> torch.device:
        """The device of what they exchange."""
        return self._joined.span.device

    @property
    def same_data(self) -> Span | None:
        """The ranks that get the same batches as this one."""
        return self._joined.same_data

    @property
    def rank(self) -> int:
        """This rank, in the world."""
        return dist.get_rank()

    @property
    def index(self) -> int:
        """This rank, in the group."""
        return self.ranks.index(self.rank)

    @property
    def weight_tensor(self) -> torch.Tensor:
        """``weight`` as a tensor of no dimensions, always the same one: for torch.compile."""
        return self._weight_tensor

    def __enter__(self) -> Join:
        if self._entered:
            raise RuntimeError("this Join is entered already: make another one for a nested block")
        if self.off:
            return self
        self._joined.check_free()
        self.own = RankSummary(self.rank)
        self.summary = None
        self._steps = 0
        self._open = False  # a batches() iteration is under way
        self._tail = False  # notifications are on
        self._posted = False  # the post hooks have run since the last batch
        self._weight_tensor = torch.ones((), device=self.device)
        self._set_weight(1.0, True)
        scope = self.ranks if self.same_data is None else range(dist.get_world_size())
        self._watch = Watch(scope, lambda: self._steps)
        self._call_site = _caller()
        self._entered = True
        self._joined.attach(self._announce)
        self._watch.start()
        if self.policy in ("shadow", "raise"):
            self._switch(True)  # until batches() tells more
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.off or not self._entered:
            return
        try:
            if error is None:
                try:
                    self._finish()
                except BaseException as failure:
                    self._fail(failure)
                    raise
            else:
                self._fail(error)
        finally:
            self._entered = False
            self._watch.close()
            self._joined.detach()

    @staticmethod
    def notify_join_context(joinable: Any) -> Any:
        """Say that this rank begins an iteration; a joinable calls it before its collectives.

        Returns the Work of the notification for the first joinable of an enabled ``Join``, else
        None. Raises ``RuntimeError`` where a rank ran out of inputs and the policy is ``raise``.
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
        """Return an iterable over ``loader`` that keeps the ranks in step; use it in the block.

        ``length``: how many to take, where ``len(loader)`` does not say or is wrong. Where
        any rank does not know, ranks look ``window`` batches ahead and exchange what they see once
        a window. ``example``: what ``replay`` hands out on a rank that has no batch at all. It may
        be called several times in a block, on every rank alike.
        """
        return Batches(self, loader, length, window, example)

    # What batches() calls.

    def begin(self) -> None:
        """Begin an iteration over batches: nothing is sent until the first rank runs dry."""
        if not self._entered:
            raise RuntimeError("batches() works inside the block: with Join(...) as join:")
        if self._open:
            self._end_early()
        self._open, self._posted = True, False
        self._switch(False)

    def hand_out(self, batch: T, active: int | None = None, replayed: bool = False) -> T:
        """Note that a batch is handed out, and check that the other ranks are still there."""
        self._steps += 1
        self._posted = False
        self._watch.check()
        self.own.batches += not replayed
        self.own.replayed += replayed
        if active is not None:
            by_active = self.divide_by == "active"
            share = len(self.ranks) / active if by_active else 1.0
            self._set_weight(0.0 if replayed else share, not replayed)
        return batch

    def begin_tail(self) -> None:
        """Switch notifications on: some rank has run dry."""
        self._switch(True)

    def complete(self) -> None:
        """Note that the next batch is the last on every rank: leaving after it is not early."""
        self._open = False

    def end(self) -> None:
        """End an iteration over batches on this rank; answer the others until all have ended."""
        self._open = False
        self._set_weight(1.0, True)
        if self._tail:
            self._settle()
            self._switch(False)

    def agreed(self, message: str) -> UnevenInputs:
        """Return an error that every rank raises at this point by itself."""
        error = UnevenInputs(message)
        error.agreed = True  # type: ignore[attr-defined]
        return error

    def settings(self) -> list[int]:
        """Return what must be the same on every rank, as numbers."""
        return [POLICIES.index(self.policy), DIVISORS.index(self.divide_by)]

    def compare_settings(self, rows: Iterable[list[int]]) -> None:
        """Raise ``ValueError`` on every rank where they are not."""
        found = [(POLICIES[policy], DIVISORS[divide]) for policy, divide in rows]
        if len(set(found)) > 1:
            each = "; ".join(
                f"rank {rank}: on_exhausted={policy!r}, divide_by={divide!r}"
                for rank, (policy, divide) in zip(self.ranks, found, strict=True)
            )
            error = ValueError(f"ranks entered Join with different settings: {each}")
            error.agreed = True  # type: ignore[attr-defined]
            raise error

    # The protocol.

    def _announce(self) -> Any:
        return announce(self.device, self.group, self.policy == "raise")

    def _switch(self, on: bool) -> None:
        self._tail = on
        self._joined.switch(on, self.policy == "raise")

    def _set_weight(self, weight: float, active: bool) -> None:
        if weight != self.weight or active != self.active:
            self.weight, self.active = Weight(weight), active
            self._weight_tensor.fill_(weight)

    def _settle(self) -> None:
        """Shadow the others' iterations until there are none, then run the post hooks."""
        began, rounds = time.perf_counter(), 0
        while tell(0, self.device, self.group):
            if self.policy == "raise":
                tell(1, self.device, self.group)
                raise self.agreed(f"Rank {self.rank} exhausted all inputs.")
            self._joined.shared.begin()
            for hook in self._joined.hooks:
                hook.main_hook()
            for model in self._joined.models:
                model.drop_gradients()
            rounds += 1
            self.own.shadowed += 1
            if rounds == SKEW_WARNED + 1:
                warnings.warn(
                    f"rank {self.rank} has over {SKEW_WARNED:,} fewer inputs than others; it goes "
                    "on shadowing their iterations",
                    stacklevel=3,
                )
        self._post(is_last_joiner=rounds == 0)
        self.own.extra_s += time.perf_counter() - began

    def _post(self, is_last_joiner: bool) -> None:
        self._posted = True
        for hook in self._joined.hooks:
            hook.post_hook(is_last_joiner)

    def _end_early(self) -> None:
        """End an iteration that was left by ``break``."""
        self._open = False
        self._set_weight(1.0, True)
        if self._tail:
            self._settle()
        else:
            self._watch.leave()

    def _finish(self) -> None:
        """Leave the block without an error."""
        if self._open:
            self._end_early()
        elif self._tail:
            self._settle()
        self._watch.check()
        if not self._posted:
            self._post(is_last_joiner=True)
        table = Exchange(self.own.pack(), self.group, self.device).wait()
        ranks = [RankSummary.unpack(row) for row in table]
        self.summary = JoinSummary(self.policy, self.divide_by, self._call_site, ranks)
        recording = session.current()
        if recording is not None and recording.run_dir is not None and self.index == 0:
            _joins.append(recording.run_dir, self.summary)

    def _fail(self, error: BaseException) -> None:
        """Leave the block with an error: tell the others, or say what it comes from."""
        if getattr(error, "agreed", False) or isinstance(error, PeerError):
            return
        if str(error) == DETECTED:
            return
        if _from_a_collective(error):
            cause = self._watch.explain(error)
            if cause is not None:
                if isinstance(cause, UnevenInputs):
                    self._watch.publish(cause)
                raise cause from error
        self._watch.publish(error)


def _policy(on_exhausted: str | None, throws: bool) -> Policy:
    if on_exhausted is not None and on_exhausted not in POLICIES:
        raise ValueError(f"on_exhausted must be one of {', '.join(POLICIES)}; got {on_exhausted!r}")
    if throws and on_exhausted not in (None, "raise"):
        raise ValueError(
            f"throw_on_early_termination=True is on_exhausted='raise', not {on_exhausted!r}"
        )
    return "raise" if throws else on_exhausted or "shadow"  # type: ignore[return-value]


def _divisor(divide_by: str | None, kwargs: dict[str, Any]) -> Literal["world", "active"]:
    """Return what to divide by; torch's keyword for it counts as well."""
    if divide_by is not None and divide_by not in DIVISORS:
        raise ValueError(f"divide_by must be 'world' or 'active'; got {divide_by!r}")
    torchs = kwargs.get("divide_by_initial_world_size")
    if torchs is None:
        return divide_by or "world"  # type: ignore[return-value]
    meant: Literal["world", "active"] = "world" if torchs else "active"
    if divide_by not in (None, meant):
        raise ValueError(f"divide_by_initial_world_size={torchs} is divide_by={meant!r}")
    return meant


def _from_a_collective(error: BaseException) -> bool:
    """Whether an error is that of a collective whose peer went away, or that was aborted."""
    kind = isinstance(error, (RuntimeError, dist.DistError))
    return kind and _TRANSPORT.search(str(error)) is not None


def _caller() -> str:
    """Return file and line of the ``with`` statement."""
    frame = sys._getframe(2)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
