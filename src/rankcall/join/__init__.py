"""Uneven inputs with any parallelism: no hang, exact gradients, no cost while inputs are even.

``Join`` follows the protocol of ``torch.distributed.algorithms.join``, and ``Joinable`` and
``JoinHook`` are torch's own classes. So torch's joinables work with this ``Join``, and joinables
written for this package work with torch's.

``joinables`` checks what the user passes, and ``block`` is one rank inside an entered ``Join``.
``batches`` are what ``join.batches()`` yields. The ranks agree in two ways: by small collectives
(``rank_group``), and by a log in the job's store (``shared_log``). ``shadow`` answers the
collectives of the others on a rank without inputs. ``stopping`` knows where all ranks stop,
``error_channel`` passes failures on, and ``connections`` ends the collectives that wait for them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Literal, TypeVar

import torch
from torch.distributed.algorithms.join import Joinable, JoinHook

from rankcall.capture import session
from rankcall.join.batches import Batches
from rankcall.join.block import DIVISORS, POLICIES, Block
from rankcall.join.joinables import Joined, notify, prepare
from rankcall.run.joins import JoinSummary, RankSummary, append_join

T = TypeVar("T")

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
        UnevenInputsError: The policy is ``raise`` and a rank ran dry, or ranks are out of step.
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
        self._stop_asked = False

    @property
    def active(self) -> bool:
        """Whether the batch is this rank's own, and not replayed."""
        return self._block is None or self._block.active

    @property
    def is_last(self) -> bool | None:
        """Whether no rank makes a step after this one, so that gradients must be reduced now.

        None if the ranks cannot know it yet: the length of an input is unknown, and the batches
        that were looked ahead end with this one. Outside the loop it is False.
        """
        return False if self._block is None else self._block.is_last

    @property
    def stopped(self) -> bool:
        """Whether all ranks stopped because one was asked to; see ``stop``.

        After a loop over ``batches()`` that was not left with ``break``, it is equal on all ranks.
        """
        return self._block is not None and self._block.stopping.is_stopped

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
        if self._stop_asked:  # before the block was made
            self._block.stopping.ask()
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

    def stop(self) -> None:
        """Ask all ranks to stop at the same step; a signal handler may call it on any rank.

        It sets a flag and returns. At its next batch this rank requests the stop; all ranks then
        go on to the newest step that any of them has begun, and their loops over ``batches()``
        end after it. Later loops of the block yield nothing, and ``stopped`` is true.

        Before a rank has asked, this costs no message. A rank without inputs that shadows the
        others can ask, too. If all ranks have begun their last step when the request arrives, the
        loops end as without it, and ``stopped`` becomes true in the next one, if there is one.
        """
        self._stop_asked = True
        if self._block is not None:
            self._block.stopping.ask()

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
