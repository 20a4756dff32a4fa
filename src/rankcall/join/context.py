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
from rankcall.join.error_channel import ErrorChannel
from rankcall.join.exchange import Exchange
from rankcall.join.groups import Span
from rankcall.join.joinables import Joined, sort_out
from rankcall.join.protocol import DETECTED, add_up, announce, notify
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

    It does what torch's ``Join`` does, and more::

        with Join([model]) as join:
            for batch in join.batches(loader):
                ...

    Every rank must enter the block, iterate over ``batches()`` and leave the block.

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

    # Properties.

    @property
    def group(self) -> Any:
        """The process group through which the ranks agree."""
        return self._joined.span.group

    @property
    def ranks(self) -> list[int]:
        """The global ranks of that group."""
        return self._joined.span.ranks

    @property
    def device(self) -> torch.device:
        """The device of the tensors that the ranks exchange."""
        return self._joined.span.device

    @property
    def same_data(self) -> Span | None:
        """The ranks that get the same batches as this one."""
        return self._joined.same_data

    @property
    def rank(self) -> int:
        """This process's global rank."""
        return dist.get_rank()

    @property
    def index(self) -> int:
        """This process's rank within the group."""
        return self.ranks.index(self.rank)

    @property
    def weight_tensor(self) -> torch.Tensor:
        """``weight`` as a scalar tensor, always the same object, for use in torch.compile."""
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
        self._open = False  # a batches() iteration is running
        self._tail = False  # each iteration is announced, because a rank may have run dry
        self._posted = False  # the post hooks have run since the last batch
        self._weight_tensor = torch.ones((), device=self.device)
        self._set_weight(1.0, True)
        scope = self.ranks if self.same_data is None else range(dist.get_world_size())
        self._channel = ErrorChannel(scope, lambda: self._steps)
        self._call_site = _caller()
        self._entered = True
        self._joined.attach(self._announce)
        self._channel.start()
        if self.policy in ("shadow", "raise"):
            self._switch(True)  # until batches() begins
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
            self._channel.close()
            self._joined.detach()

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
        return Batches(self, loader, length, window, example)

    # Called by batches().

    def begin(self) -> None:
        """Begin an iteration over batches; announce nothing until the first rank has run dry."""
        if not self._entered:
            raise RuntimeError("batches() works inside the block: with Join(...) as join:")
        if self._open:
            self._end_early()
        self._open, self._posted = True, False
        self._switch(False)

    def hand_out(self, batch: T, active: int | None = None, replayed: bool = False) -> T:
        """Count a batch that is about to be yielded; raise if another rank failed or left.

        Args:
            batch: The batch.
            active: How many ranks still have inputs; None if the policy is not ``replay``.
            replayed: Whether this rank has yielded the batch before.

        Returns:
            ``batch``.
        """
        self._steps += 1
        self._posted = False
        self._channel.check()
        self.own.batches += not replayed
        self.own.replayed += replayed
        if active is not None:
            by_active = self.divide_by == "active"
            share = len(self.ranks) / active if by_active else 1.0
            self._set_weight(0.0 if replayed else share, not replayed)
        return batch

    def begin_tail(self) -> None:
        """Announce each iteration from now on, because a rank has run dry."""
        self._switch(True)

    def complete(self) -> None:
        """Note that the next batch is the last on every rank; leaving after it is not early."""
        self._open = False

    def end(self) -> None:
        """End an iteration over batches; shadow the other ranks until all of them have ended it."""
        self._open = False
        self._set_weight(1.0, True)
        if self._tail:
            self._settle()
            self._switch(False)

    def agreed(self, message: str) -> UnevenInputs:
        """Return an error that every rank raises here; no rank has to send it to the others."""
        error = UnevenInputs(message)
        error.agreed = True  # type: ignore[attr-defined]
        return error

    def settings(self) -> list[int]:
        """Return the settings that must be the same on every rank, as numbers."""
        return [POLICIES.index(self.policy), DIVISORS.index(self.divide_by)]

    def compare_settings(self, rows: Iterable[list[int]]) -> None:
        """Raise ``ValueError`` on every rank if the ranks' settings differ."""
        settings = [(POLICIES[policy], DIVISORS[divide]) for policy, divide in rows]
        if len(set(settings)) > 1:
            listed = "; ".join(
                f"rank {rank}: on_exhausted={policy!r}, divide_by={divide!r}"
                for rank, (policy, divide) in zip(self.ranks, settings, strict=True)
            )
            error = ValueError(f"ranks entered Join with different settings: {listed}")
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
        """Shadow the iterations of the other ranks until they end; then run the post hooks."""
        began, rounds = time.perf_counter(), 0
        while add_up(0, self.device, self.group):
            if self.policy == "raise":
                add_up(1, self.device, self.group)
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
        """End an iteration that the user left with ``break``."""
        self._open = False
        self._set_weight(1.0, True)
        if self._tail:
            self._settle()
        else:
            self._channel.leave()

    def _finish(self) -> None:
        """Leave the block without an error."""
        if self._open:
            self._end_early()
        elif self._tail:
            self._settle()
        self._channel.check()
        if not self._posted:
            self._post(is_last_joiner=True)
        table = Exchange(self.own.pack(), self.group, self.device).wait()
        ranks = [RankSummary.unpack(row) for row in table]
        self.summary = JoinSummary(self.policy, self.divide_by, self._call_site, ranks)
        recording = session.current()
        if recording is not None and recording.run_dir is not None and self.index == 0:
            _joins.append(recording.run_dir, self.summary)

    def _fail(self, error: BaseException) -> None:
        """Leave the block with an error: report it to the other ranks, or raise its cause."""
        if getattr(error, "agreed", False) or isinstance(error, PeerError):
            return
        if str(error) == DETECTED:
            return
        if _from_a_collective(error):
            cause = self._channel.explain(error)
            if cause is not None:
                if isinstance(cause, UnevenInputs):
                    self._channel.publish(cause)
                raise cause from error
        self._channel.publish(error)


def _policy(on_exhausted: str | None, throws: bool) -> Policy:
    if on_exhausted is not None and on_exhausted not in POLICIES:
        raise ValueError(f"on_exhausted must be one of {', '.join(POLICIES)}; got {on_exhausted!r}")
    if throws and on_exhausted not in (None, "raise"):
        raise ValueError(
            f"throw_on_early_termination=True is on_exhausted='raise', not {on_exhausted!r}"
        )
    return "raise" if throws else on_exhausted or "shadow"  # type: ignore[return-value]


def _divisor(divide_by: str | None, kwargs: dict[str, Any]) -> Literal["world", "active"]:
    """Return the divisor from ``divide_by`` or from torch's own keyword."""
    if divide_by is not None and divide_by not in DIVISORS:
        raise ValueError(f"divide_by must be 'world' or 'active'; got {divide_by!r}")
    by_world = kwargs.get("divide_by_initial_world_size")
    if by_world is None:
        return divide_by or "world"  # type: ignore[return-value]
    meant: Literal["world", "active"] = "world" if by_world else "active"
    if divide_by not in (None, meant):
        raise ValueError(f"divide_by_initial_world_size={by_world} is divide_by={meant!r}")
    return meant


def _from_a_collective(error: BaseException) -> bool:
    """Whether a collective raised this error because its peer went away or it was aborted."""
    kind = isinstance(error, (RuntimeError, dist.DistError))
    return kind and _TRANSPORT.search(str(error)) is not None


def _caller() -> str:
    """Return file and line of the ``with`` statement."""
    frame = sys._getframe(2)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
