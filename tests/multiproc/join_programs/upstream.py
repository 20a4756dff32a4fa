"""PyTorch's own uneven-input tests with our Join in place of theirs, on Gloo and the CPU.

They ask for two CUDA devices, of which they need only the name: here their calls of ``.cuda()``,
``device_ids`` and ``device=rank`` lead to the CPU. Left out, because the CPU cannot do it: the
SyncBatchNorm half of one test (BatchNorm without running statistics stands in), and one large
convolution (a small one stands in).
"""

from __future__ import annotations

import inspect
import os
import tempfile
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

QUICK = (
    "test_ddp_grad_div_uneven_inputs",
    "test_ddp_join_model_equivalence",
    "test_ddp_join_respects_forward_sync_buffers_false",
    "test_ddp_uneven_inputs_stop_iteration_sync_bn",
    "test_ddp_uneven_input_join_disable",
    "test_ddp_uneven_input_exception",
)
LONG = ("test_ddp_uneven_inputs",)


class OnCpu(TorchFunctionMode):
    """Make tensors on the CPU if the caller names a CUDA device by its number."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace the device."""
        kwargs = dict(kwargs or {})
        if isinstance(kwargs.get("device"), int):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def _without_statistics(module: nn.Module) -> nn.Module:
    for name, layer in module.named_children():
        if isinstance(layer, nn.BatchNorm1d):
            setattr(module, name, nn.BatchNorm1d(layer.num_features, track_running_stats=False))
    return module


def _redirect_cuda() -> None:
    def stays(self: Any, *_: Any, **__: Any) -> Any:
        return self

    nn.Module.cuda = stays  # type: ignore[method-assign]
    torch.Tensor.cuda = stays  # type: ignore[method-assign, assignment]
    torch.cuda.set_device = torch.cuda.synchronize = lambda *_, **__: None  # type: ignore[assignment]
    torch.cuda.manual_seed = lambda *_: None  # type: ignore[assignment]
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    nn.SyncBatchNorm.convert_sync_batchnorm = staticmethod(_without_statistics)  # type: ignore[method-assign, assignment]
    ddp: Any = nn.parallel.DistributedDataParallel
    made = ddp.__init__

    def init(self: Any, module: Any, device_ids: Any = None, **options: Any) -> None:
        made(self, module, **options)

    ddp.__init__ = init


def run_upstream(rank: int, world_size: int, names: list[str], ours: bool) -> dict[str, int]:
    """Run torch's tests on this rank; return how many of our Joins each entered."""
    torch.set_num_threads(1)
    os.environ.update(BACKEND="gloo", INIT_METHOD="env://", TEMP_DIR=tempfile.gettempdir())
    from torch.nn.parallel import distributed as ddp_module
    from torch.testing._internal.distributed import distributed_test as theirs

    from rankcall.join import Join

    entered = 0

    class Counted(Join):
        def __enter__(self) -> Join:
            nonlocal entered
            entered += 1
            return super().__enter__()

    if ours:
        ddp_module.Join = Counted  # type: ignore[attr-defined, misc, assignment]

    class Tests(
        theirs.DistributedTest._DistTestBase, torch.testing._internal.common_utils.TestCase
    ):
        def _run_uneven_inputs_test(self, test_case: Any, *rest: Any, **options: Any) -> None:
            if test_case.name == "large_conv_model":
                small = nn.Sequential(nn.Conv2d(1, 8, 5), nn.ReLU(), nn.Conv2d(8, 16, 5), nn.ReLU())
                test_case = test_case._replace(model=small, inp=torch.ones(1, 1, 16, 16))
            super()._run_uneven_inputs_test(test_case, *rest, **options)

    _redirect_cuda()
    counts = {}
    for name in names:
        tests = Tests()
        tests.rank, tests._world_size, entered = rank, world_size, 0  # type: ignore[attr-defined]
        with OnCpu():
            inspect.unwrap(getattr(Tests, name))(tests)
        counts[name] = entered
    return counts
