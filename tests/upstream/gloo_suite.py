"""PyTorch's own distributed tests, as they ship in the wheel, on two Gloo ranks.

Run by ``upstream.py`` as a script of its own: the module they come from reads its settings from the
environment when it is imported. ``--record`` switches recording on in every rank first.

    python tests/upstream/gloo_suite.py --out FILE [--record native|python] [--only NAME ...]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import unittest
from pathlib import Path
from typing import Any

os.environ.update(
    BACKEND="gloo",
    WORLD_SIZE="2",
    INIT_METHOD="env://",
    OMP_NUM_THREADS="1",
    GLOO_SOCKET_IFNAME="lo",
    TEMP_DIR=os.environ.get("TEMP_DIR") or tempfile.mkdtemp(prefix="rankcall-upstream-"),
)
from outcomes import Outcomes
from torch.testing._internal import common_distributed
from torch.testing._internal.distributed.distributed_test import (
    DistributedTest,
    TestDistBackend,
)

RECORD = ""  # the capture to record with; forked ranks inherit it
TEST_SECONDS = 60


class TestGloo(TestDistBackend, DistributedTest._DistTestBase):
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
    names = options.only or unittest.defaultTestLoader.getTestCaseNames(TestGloo)
    unittest.TestSuite(map(TestGloo, names)).run(Outcomes(options.out))


if __name__ == "__main__":
    main()
