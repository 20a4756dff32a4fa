"""The outcomes of PyTorch's own tests, written during the run, for the suites beside this file."""

from __future__ import annotations

import json
import sys
import time
import unittest
from pathlib import Path
from typing import Any


class Outcomes(unittest.TestResult):
    """A test result that writes down the outcomes after each test."""

    def __init__(self, file: Path, parts: int = 1) -> None:
        """``parts`` is how many parts of a test's dotted id name it; 2 if classes share names."""
        super().__init__()
        self._parts = parts
        self.of: dict[str, str] = {}
        self._file = file
        self._began = 0.0

    def _name(self, test: unittest.TestCase) -> str:
        return ".".join(test.id().split(".")[-self._parts :])

    def startTest(self, test: unittest.TestCase) -> None:
        """Note when the test starts."""
        super().startTest(test)
        self._began = time.monotonic()

    def stopTest(self, test: unittest.TestCase) -> None:
        """Write down the outcomes so far, in case the run is killed."""
        super().stopTest(test)
        took, name = time.monotonic() - self._began, self._name(test)
        print(f"{took:6.1f} s  {self.of.setdefault(name, 'passed'):12.60}  {name}", flush=True)
        self._file.write_text(json.dumps(self.of))

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        """Note a skip with its reason."""
        self.of[self._name(test)] = f"skipped: {reason}"

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        """Note a failure without its text, which may differ from run to run."""
        super().addFailure(test, err)
        self.of[self._name(test)] = "failed"
        print(self.failures[-1][1], file=sys.stderr, flush=True)

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        """Note an error like a failure."""
        super().addError(test, err)
        self.of[self._name(test)] = "failed"
        print(self.errors[-1][1], file=sys.stderr, flush=True)
