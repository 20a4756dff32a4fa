"""PyTorch's own RPC tests, as they ship in the wheel, through their fixture class, on a back end.

Run as a script of its own: the modules they come from read their settings from the environment
when they are imported.

    python tests/upstream/rpc_suite.py --backend ZMQ --out FILE [--jobs N] [--only Class[.test] ...]
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import multiprocessing
import os
import tempfile
import unittest
from pathlib import Path
from typing import Any

os.environ.update(
    OMP_NUM_THREADS="1",
    GLOO_SOCKET_IFNAME="lo",
    TP_SOCKET_IFNAME="lo",
    TEMP_DIR=os.environ.get("TEMP_DIR") or tempfile.mkdtemp(prefix="rankcall-upstream-"),
)
import torch.distributed.rpc as torch_rpc
from outcomes import Outcomes
from torch.testing._internal import common_distributed
from torch.testing._internal.distributed import rpc_utils
from torch.testing._internal.distributed.rpc.rpc_agent_test_fixture import RpcAgentTestFixture

from rankcall.rpc import backend_registry

TEST_SECONDS = 100


class Fixture(RpcAgentTestFixture):
    """A back end of rankcall's, with the settings that torch's tests use."""

    name = "ZMQ"

    @property
    def rpc_backend(self) -> Any:
        """The registry's member for this back end."""
        return backend_registry.BackendType[self.name]

    @property
    def rpc_backend_options(self) -> Any:
        """Options with the test's own store."""
        return backend_registry.construct_rpc_backend_options(
            self.rpc_backend, init_method=self.init_method, **self.extra_options()
        )

    def extra_options(self) -> dict[str, Any]:
        """Return this back end's options other than the store."""
        return {}

    def get_shutdown_error_regex(self) -> str:
        """Accept any error, as torch does for TensorPipe."""
        return ".*"

    def get_timeout_error_regex(self) -> str:
        """Return the text of torch's own agent."""
        return "RPC ran for more than"


class TensorPipeFixture(Fixture):
    """torch's agent, brought up by rankcall."""

    name = "TENSORPIPE"

    def extra_options(self) -> dict[str, Any]:
        """Return the transports that torch's own fixture uses."""
        return {"_transports": common_distributed.tp_transports()}


class TorchFixture(TensorPipeFixture):
    """torch's agent, brought up by torch; the other fixtures are compared with it."""

    name = "torch"

    @property
    def rpc_backend(self) -> Any:
        """torch's member."""
        return torch_rpc.backend_registry.BackendType["TENSORPIPE"]


class Forked:
    """Each test's workers are forked from here, so that none pays for importing torch."""

    def setUp(self) -> None:
        """Start the workers."""
        super().setUp()  # type: ignore[misc]
        context = multiprocessing.get_context("fork")
        self._start_processes(context.Process)  # type: ignore[attr-defined]


def suites(fixture: type[Fixture]) -> dict[str, type[unittest.TestCase]]:
    """Return the test classes for a fixture, by torch's names."""
    tests = list(rpc_utils.GENERIC_TESTS)
    if fixture is not Fixture:
        tests += rpc_utils.TENSORPIPE_TESTS
    bases = (fixture, Forked, common_distributed.MultiProcessTestCase)
    classes = {mixin.__name__: type(mixin.__name__, (mixin, *bases), {}) for mixin in tests}
    for name, test_class in classes.items():  # some tests pickle their own class
        test_class.__module__ = __name__
        globals()[name] = test_class
    return classes


def chosen(only: list[str], classes: dict[str, Any]) -> list[unittest.TestCase]:
    """Return the tests that ``only`` names as ``Class`` or ``Class.test``; all if it is empty."""
    tests: list[unittest.TestCase] = []
    for selector in only or list(classes):
        name, _, test = selector.partition(".")
        names = [test] if test else unittest.defaultTestLoader.getTestCaseNames(classes[name])
        tests += map(classes[name], names)
    return tests


def run(tests: list[unittest.TestCase], jobs: int, out: Path) -> None:
    """Run the tests in ``jobs`` forked processes, each of which takes the next test."""
    context = multiprocessing.get_context("fork")
    taken = context.Value("i", 0)
    parts = [out.with_suffix(f".{job}") for job in range(jobs)]
    gc.freeze()  # a collection in a forked worker would copy every page of the heap

    def take() -> int:
        with taken.get_lock():
            taken.value += 1
            return int(taken.value) - 1

    def job(part: Path) -> None:
        outcomes = Outcomes(part, parts=2)
        while (number := take()) < len(tests):
            tests[number].run(outcomes)

    processes = [context.Process(target=job, args=(part,)) for part in parts]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0, f"a job ended with {process.exitcode}"
    reports = [json.loads(part.read_text()) for part in parts if part.exists()]
    out.write_text(json.dumps({name: how for report in reports for name, how in report.items()}))


def main() -> None:
    """Run the tests, or those named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", required=True, choices=["ZMQ", "TENSORPIPE", "torch"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=1, help="how many tests at once")
    parser.add_argument("--only", nargs="*", help="Class or Class.test")
    options = parser.parse_args()
    logging.disable(logging.INFO)
    common_distributed.TIMEOUT_DEFAULT = TEST_SECONDS
    fixtures = {fixture.name: fixture for fixture in (Fixture, TensorPipeFixture, TorchFixture)}
    classes = suites(fixtures[options.backend])
    if options.backend == "ZMQ":
        from rankcall.rpc.backends.zmq.agent_module import agent_module

        agent_module()  # once, not in each worker
    run(chosen(options.only or [], classes), options.jobs, options.out)


if __name__ == "__main__":
    main()
