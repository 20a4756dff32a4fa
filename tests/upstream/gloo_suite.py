"""PyTorch's own distributed tests, as they ship in the wheel, on two Gloo ranks.

Run by ``upstream.py`` as a script of its own: the module they come from reads its settings from the
environment when it is imported. ``--record`` switches recording on in every rank first.

    python tests/upstream/gloo_suite.py --out FILE [--record native|python] [--only NAME ...]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
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


class Outcomes(unittest.TestResult):
    """Keeps how each test ended, and writes it down after each."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.of: dict[str, str] = {}
        self._file = file
        self._began = 0.0

    def startTest(self, test: unittest.TestCase) -> None:
        """Note the time."""
        super().startTest(test)
        self._began = time.monotonic()

    def stopTest(self, test: unittest.TestCase) -> None:
        """Write down what there is, for a run that is cut off."""
        super().stopTest(test)
        took, name = time.monotonic() - self._began, test.id().rpartition(".")[2]
        print(f"{took:6.1f} s  {self.of.setdefault(name, 'passed'):12.60}  {name}", flush=True)
        self._file.write_text(json.dumps(self.of))

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        """A skip counts with its reason."""
        self.of[test.id().rpartition(".")[2]] = f"skipped: {reason}"

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        """A failure counts as such; its text may differ from run to run."""
        super().addFailure(test, err)
        self.of[test.id().rpartition(".")[2]] = "failed"
        print(self.failures[-1][1], file=sys.stderr, flush=True)

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        """So does an error."""
        super().addError(test, err)
        self.of[test.id().rpartition(".")[2]] = "failed"
        print(self.errors[-1][1], file=sys.stderr, flush=True)


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
