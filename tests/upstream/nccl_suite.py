"""PyTorch's own tests of its NCCL back end, on two devices, with and without recording.

They are in PyTorch's repository and in no wheel: ``--tests`` names the folder that has its
``test_c10d_nccl.py`` and ``test_c10d_common.py``, of about the torch that is installed. The devices
may be simulated. ``--record`` switches recording on in every rank first.

    devices exec --gpus 2 -- python tests/upstream/nccl_suite.py --tests DIR --out FILE
        [--record native|python --run-dir DIR] [--only CLASS.TEST ...]
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import signal
import sys
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.update(
    PYTORCH_NVML_BASED_CUDA_CHECK="1",  # CUDA's own check would keep forked ranks from using CUDA
    OMP_NUM_THREADS="1",
    GLOO_SOCKET_IFNAME="lo",
)
from outcomes import Outcomes

# What asks CUDA for a capability initialises it, and a process that has it cannot fork ranks that
# use it. Ranks are forked, so that none pays for importing torch.
with mock.patch("torch.utils._triton.has_triton", return_value=False):
    import torch
    from torch.testing._internal import common_device_type, common_distributed  # noqa: F401
    from torch.testing._internal.common_distributed import MultiProcessTestCase

TEST_SECONDS = 60
_RUN = MultiProcessTestCase._run.__func__  # type: ignore[attr-defined]


class _Limited(Outcomes):
    """Ends a test that waits for ever for a rank which has ended: forked ranks share pipes."""

    def startTest(self, test: unittest.TestCase) -> None:
        """Give the test its time."""
        super().startTest(test)
        signal.alarm(TEST_SECONDS + 30)

    def stopTest(self, test: unittest.TestCase) -> None:
        """Take back what is left of it."""
        signal.alarm(0)
        super().stopTest(test)


def _give_up(number: int, frame: object) -> None:
    raise TimeoutError(f"the test took more than {TEST_SECONDS + 30} s")


def _fork(method: str | None = None) -> Any:
    """Stand in for ``get_context``, with which the tests ask for the slower ``spawn``."""
    return multiprocessing.get_context("fork")


def _run_recorded(capture: str, run_dir: Path) -> Any:
    def run(cls: Any, *args: Any, **kwargs: Any) -> None:
        import rankcall

        # A test may end its process in the middle of an op: no ``with``, as in a user's script.
        rankcall.enable(run_dir, capture=capture)
        _RUN(cls, *args, **kwargs)

    return classmethod(run)


def _tests_of(folder: Path) -> list[unittest.TestCase]:
    sys.path.insert(0, str(folder))
    with mock.patch("torch.cuda.is_bf16_supported", return_value=True):
        module = importlib.import_module("test_c10d_nccl")
    assert not torch.cuda.is_initialized()
    found: list[unittest.TestCase] = []
    suites: list[Any] = [unittest.defaultTestLoader.loadTestsFromModule(module)]
    while suites:
        for test in suites.pop(0):
            (suites if isinstance(test, unittest.TestSuite) else found).append(test)
    # Those that use CUDA in this very process come last: it cannot fork ranks that do, after them.
    return sorted(found, key=lambda test: not isinstance(test, MultiProcessTestCase))


def main() -> None:
    """Run the tests, or those named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tests", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--record", default="", choices=["", "native", "python"])
    parser.add_argument("--run-dir", type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    options = parser.parse_args()
    tests = _tests_of(options.tests.resolve())
    if options.only:
        tests = [test for test in tests if any(name in test.id() for name in options.only)]
    common_distributed.TIMEOUT_DEFAULT = TEST_SECONDS
    signal.signal(signal.SIGALRM, _give_up)
    torch.multiprocessing.get_context = _fork
    if options.record:
        MultiProcessTestCase._run = _run_recorded(options.record, options.run_dir)
    unittest.TestSuite(tests).run(_Limited(options.out, parts=2))


if __name__ == "__main__":
    main()
