"""PyTorch's own distributed tests, as they ship in the wheel, on two ranks on Gloo or on NCCL.

Run by ``upstream.py`` as a script of its own: the module they come from reads its settings from the
environment when it is imported. ``--record`` switches recording on in every rank first.

    python tests/upstream/c10d_suite.py --out FILE [--record native|python] [--only NAME ...]

On NCCL it needs two devices, which may be simulated, and expecttest:

    BACKEND=nccl UPSTREAM_RUN_DIR=DIR devices exec -- python tests/upstream/c10d_suite.py ...
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.update(
    BACKEND=os.environ.get("BACKEND", "gloo"),
    WORLD_SIZE="2",
    INIT_METHOD="env://",
    PYTORCH_NVML_BASED_CUDA_CHECK="1",  # CUDA's own check would keep forked ranks from using CUDA
    OMP_NUM_THREADS="1",
    GLOO_SOCKET_IFNAME="lo",
    TEMP_DIR=os.environ.get("TEMP_DIR") or tempfile.mkdtemp(prefix="rankcall-upstream-"),
)
from outcomes import Outcomes

# To look for Triton uses CUDA, and a process that has used CUDA cannot fork ranks that do.
with mock.patch("torch.utils._triton.has_triton", return_value=False):
    from torch.testing._internal import common_device_type, common_distributed  # noqa: F401
    from torch.testing._internal.distributed.distributed_test import (
        DistributedTest,
        TestDistBackend,
    )

RECORD = ""  # the capture to record with; forked ranks inherit it
TEST_SECONDS = 60


class TestC10d(TestDistBackend, DistributedTest._DistTestBase):
    """Each test runs on ranks forked from here, so that none pays for importing torch."""

    def setUp(self) -> None:
        """Start the ranks."""
        super().setUp()
        self._start_processes(multiprocessing.get_context("fork").Process)

    @classmethod
    def _run(cls, *args: Any, **kwargs: Any) -> None:
        if not RECORD:
            return super()._run(*args, **kwargs)
        import rankcall

        with rankcall.enable(os.environ["UPSTREAM_RUN_DIR"], capture=RECORD):
            super()._run(*args, **kwargs)


def main() -> None:
    """Run the tests, or those named."""
    global RECORD
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--record", default="", choices=["", "native", "python"])
    parser.add_argument("--only", nargs="*")
    options = parser.parse_args()
    RECORD = options.record
    common_distributed.TIMEOUT_DEFAULT = TEST_SECONDS
    names = options.only or unittest.defaultTestLoader.getTestCaseNames(TestC10d)
    unittest.TestSuite(map(TestC10d, names)).run(Outcomes(options.out))


if __name__ == "__main__":
    main()
