"""One rank inside an entered ``Join``: its steps, its weight, and what it owes the other ranks.

``Join`` makes a ``Block`` when it is entered and ends it when it is left. ``batches()`` tells the
block which batches it yields, and when this rank has none left.
"""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

from rankcall.errors import PeerError, UnevenInputsError
from rankcall.join.error_channel import ErrorChannel
from rankcall.join.joinables import Joined
from rankcall.join.rank_group import DETECTED, RankGroup
from rankcall.join.stopping import Stopping
from rankcall.run.joins import JoinSummary, RankSummary

T = TypeVar("T")
POLICIES = ("shadow", "replay", "stop", "raise")
DIVISORS = ("world", "active")
SKEW_WARNED = 1000  # shadowed iterations after which torch's Join warns as well
# torch raises a plain RuntimeError or DistError if a peer goes away. Only its text tells that from
# an error of the user's own code, which the other ranks have to be told as it is.
_TRANSPORT = re.compile(
    r"gloo[/\\]transport|connection (closed|reset|refused)|broken pipe|\bNCCL\b|aborted",
    re.IGNORECASE,
)
_PRODUCTS = ("mul", "mul_", "__mul__", "__rmul__", "__imul__", "multiply", "multiply_")


class Block:
    """The state of this rank from the beginning to the end of one ``with Join(...)`` block.

    Args:
        joined: The joinables, with their group and their hooks.
        policy: The policy for a rank without inputs.
        divide_by: The divisor of gradients: ``world`` or ``active``.
        weight_tensor: The tensor to write the weight into.
        call_site: The file and line of the ``with`` statement.
    """

    def __init__(
        self,
        joined: Joined,
        policy: str,
        divide_by: str,
        weight_tensor: torch.Tensor,
        call_site: str,
    ) -> None:
        self.policy = policy
        self.members: RankGroup = joined.members
        self.same_data: RankGroup | None = joined.same_data
        self.rank = dist.get_rank()
        self.index = self.members.ranks.index(self.rank)  # within the group
        self.own = RankSummary(self.rank)
        self.active = True
        self.weight: float = Weight(1.0)
        self.is_last: bool | None = False  # no rank makes a step after this one
        self._joined = joined
        self._divide_by = divide_by
        self._weight_tensor = weight_tensor.fill_(1.0)
        self._call_site = call_site
        self._steps = 0
        self._is_iterating = False  # a batches() iteration runs, and no rank should leave it yet
        self._is_open = False  # a batches() iteration has begun, and its end has not been passed
        self._announces = False  # each iteration is announced, because a rank may have run dry
        self._has_posted = False  # the post hooks have run since the last batch
        covered = self.members.ranks if self.same_data is None else range(dist.get_world_size())
        self.stopping = Stopping(
            lambda: self._channel.request_stop(), lambda: self._channel.agree_on_stop()
        )
        self._channel = ErrorChannel(covered, lambda: self._steps, self.stopping.freeze)

    def enter(self) -> None:
        """Begin to observe the joinables and to listen for the errors of other ranks."""
        self._joined.attach(lambda: self.members.announce(self.policy == "raise"))
        self._channel.start()
        if self.policy in ("shadow", "raise"):
            self._switch(True)  # until batches() begins

    def close(self) -> None:
        """Stop listening and restore the joinables."""
        self._channel.close()
        self._joined.detach()

    # Called by batches().

    def begin_iteration(self) -> bool:
        """Begin an iteration over batches; announce nothing until the first rank has run dry.

        Returns False if all ranks have stopped: then no iteration begins on any of them.
        """
        if self._is_iterating:
            self._end_early()
        if self._is_open:
            self._pass_end()
        if self.stopping.is_stopped:
            return False
        self._is_iterating = self._is_open = True
        self._has_posted = False
        self._switch(False)
        return True

    def begin_step(self) -> None:
        """Count a step that is about to begin; raise ``StoppedBefore`` if no rank makes it."""
        if not self.stopping.pass_point():
            raise StoppedBefore
        self._steps += 1

    def next_batch(self, batch: T, active: int | None = None, replayed: bool = False) -> T:
        """Count the batch of this step; raise if another rank failed or left.

        Args:
            batch: The batch.
            active: How many ranks still have inputs; None if the policy is not ``replay``.
            replayed: Whether this rank has yielded the batch before.

        Returns:
            ``batch``.
        """
        self._has_posted = False
        self._channel.check()
        self.own.batches += not replayed
        self.own.replayed += replayed
        if active is not None:
            by_active = self._divide_by == "active"
            share = len(self.members.ranks) / active if by_active else 1.0
            self._set_weight(0.0 if replayed else share, not replayed)
        return batch

    def begin_tail(self) -> None:
        """Announce each iteration from now on, because a rank has run dry."""
        self._switch(True)

    def expect_end(self) -> None:
        """Note that the next batch is the last on every rank; leaving after it is not early."""
        self._is_iterating = False

    def end_iteration(self) -> None:
        """End an iteration; shadow the other ranks until all of them have ended it."""
        self._is_iterating = False
        self.is_last = False
        self._set_weight(1.0, True)
        if self._announces:
            self._settle()
            self._switch(False)
        self._pass_end()

    def _pass_end(self) -> None:
        """Pass the end of an iteration, or note there that all ranks have stopped."""
        self._is_open = False
        self.stopping.pass_point()

    def settings(self) -> list[int]:
        """Return the settings that must be the same on every rank, as numbers."""
        return [POLICIES.index(self.policy), DIVISORS.index(self._divide_by)]

    def compare_settings(self, rows: Iterable[list[int]]) -> None:
        """Raise ``ValueError`` on every rank if the ranks' settings differ."""
        settings = [(POLICIES[policy], DIVISORS[divide]) for policy, divide in rows]
        if len(set(settings)) > 1:
            listed = "; ".join(
                f"rank {rank}: on_exhausted={policy!r}, divide_by={divide!r}"
                for rank, (policy, divide) in zip(self.members.ranks, settings, strict=True)
            )
            error = ValueError(f"ranks entered Join with different settings: {listed}")
            error.agreed = True  # type: ignore[attr-defined]
            raise error

    # The end of the block.

    def finish(self) -> JoinSummary:
        """Leave the block without an error, once all ranks have; return what each of them did."""
        if self._is_iterating:
            self._end_early()
        elif self._announces:
            self._settle()
        self._channel.check()
        if not self._has_posted:
            self._post(is_last_joiner=True)
        table = self.members.begin_exchange(self.own.pack()).table()
        rows = [RankSummary.unpack(row) for row in table]
        return JoinSummary(self.policy, self._divide_by, self._call_site, rows)

    def fail(self, error: BaseException) -> None:
        """Leave the block with an error: report it to the other ranks, or raise its cause."""
        if getattr(error, "agreed", False) or isinstance(error, PeerError):
            return
        if str(error) == DETECTED:
            return
        if _is_from_a_collective(error):
            cause = self._channel.explain(error)
            if cause is not None:
                if isinstance(cause, UnevenInputsError):
                    self._channel.publish(cause)
                raise cause from error
        self._channel.publish(error)

    def _end_early(self) -> None:
        """End an iteration that the user left with ``break``."""
        self._is_iterating = False
        self._set_weight(1.0, True)
        if self._announces:
            self._settle()
        else:
            self._channel.leave()

    # The protocol of torch's Join.

    def _switch(self, on: bool) -> None:
        self._announces = on
        self._joined.switch(on, self.policy == "raise")

    def _set_weight(self, weight: float, active: bool) -> None:
        if weight != self.weight or active != self.active:
            self.weight, self.active = Weight(weight), active
            self._weight_tensor.fill_(weight)

    def _settle(self) -> None:
        """Shadow the iterations of the other ranks until they end; then run the post hooks."""
        began, rounds = time.perf_counter(), 0
        while self.members.add_up(0):
            if self.policy == "raise":
                self.members.add_up(1)
                raise agreed_error(f"Rank {self.rank} exhausted all inputs.")
            # Counted as a step, so that all ranks count the same steps, also in the next epoch.
            self._steps += 1
            self.stopping.follow()
            self._joined.shadow_iteration()
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
        self._has_posted = True
        for hook in self._joined.hooks:
            hook.post_hook(is_last_joiner)


class StoppedBefore(Exception):
    """Raised where a step would begin if all ranks have stopped; ``batches()`` ends there."""


def agreed_error(message: str) -> UnevenInputsError:
    """Return an error that every rank raises here; no rank has to send it to the others."""
    error = UnevenInputsError(message)
    error.agreed = True  # type: ignore[attr-defined]
    return error


def _is_from_a_collective(error: BaseException) -> bool:
    """Whether a collective raised this error because its peer went away or it was aborted."""
    is_torchs = isinstance(error, (RuntimeError, dist.DistError))
    return is_torchs and _TRANSPORT.search(str(error)) is not None


class Weight(float):
    """``join.weight``, a float. Zero times a loss that is not finite is zero, also its gradients.

    It warns the first time. The loss of a replayed batch is not used, but the same batch may also
    have a loss that is not finite when it counts.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run ``func`` with plain floats; for a product with zero, make the tensor finite first."""
        if getattr(func, "__name__", "") in _PRODUCTS and any(
            isinstance(arg, cls) and arg == 0.0 for arg in args
        ):
            args = [_silenced(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
        plain = tree_map(lambda arg: float(arg) if isinstance(arg, cls) else arg, list(args))
        return func(*plain, **dict(kwargs or {}))


def _silenced(loss: torch.Tensor) -> torch.Tensor:
    """Return ``loss`` if it is finite, else a finite loss whose gradients are all zero.

    Zero times infinity is NaN in each backward step as well. So a hook sets the result of every
    step to zero.
    """
    if bool(torch.isfinite(loss.detach()).all()):
        return loss
    warnings.warn(
        "the loss of a replayed batch is not finite; its gradients are taken as zero",
        RuntimeWarning,
        stacklevel=4,
    )
    seen, todo = set(), [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        node.register_hook(_zeros)
        todo += [before for before, _ in node.next_functions]
    return torch.nan_to_num(loss, nan=0.0, posinf=0.0, neginf=0.0)


def _zeros(gradients: tuple[Any, ...], _: Any) -> tuple[Any, ...]:
    return tuple(None if gradient is None else torch.zeros_like(gradient) for gradient in gradients)
