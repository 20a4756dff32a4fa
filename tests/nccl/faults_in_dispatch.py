"""Plant the faults of a plan in front of the native capture, which passes each op on in C++."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from rankcall.capture.fallback.numbering import Groups, device_of, number_ahead, number_p2p
from rankcall.capture.fallback.schema import Op, c10d_ops
from rankcall.testing import FaultPlan, injection


def _in_rankcall(function: Any) -> Any:
    """Have a function's frames count as rankcall's: an op is issued from the nearest other one."""
    assert isinstance(function, FunctionType)
    function.__code__ = function.__code__.replace(co_filename=injection.__file__)
    return function


class FaultsInDispatch(TorchDispatchMode):
    """While it is on, the faults of one rank strike at the c10d ops of this thread.

    They strike as well in backward, whose threads take over the modes of the thread that called it.
    """

    def __init__(self, plan: FaultPlan, rank: int) -> None:
        super().__init__()
        self._faults = injection.PlantedFaults(plan.faults, rank)
        self._ops: dict[Any, Op] = {op.overload: op for op in c10d_ops()}
        # Ops are numbered as records are, but nothing is written down.
        self._groups = Groups(SimpleNamespace(group=lambda _: 0))  # type: ignore[arg-type]

    @_in_rankcall
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Issue an op, or what the plan makes of it."""
        op = self._ops.get(func)
        if op is None:
            return func(*args, **kwargs or {})
        return self._faults.issue(op, number_ahead(op, args, self._groups), self._issue(op), args)

    def _issue(self, op: Op) -> Callable[..., Any]:
        @_in_rankcall
        def issue(*args: Any) -> Any:
            process_group = dist.ProcessGroup.unbox(args[op.process_group])
            group = self._groups.state_of(process_group, device_of(op, args))
            if op.p2p:
                number_p2p(op, args, group)
            else:
                group.collectives += 1
            return op.overload(*args)

        return issue
