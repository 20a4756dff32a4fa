"""A program on NCCL behaves the same whether or not it is recorded; see tests/multiproc."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from samejob.compare import compare
from samejob.harness import Harness
from samejob.modes import OFF

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(500)]
FAST = ("ddp", "fsdp2", "batches")
# The other programs use what only Gloo has (sparse tensors, receives from any source, an error in
# place of a hang), or fork a process that has used a device.
PROGRAMS = (
    *FAST,
    "probe",
    "functional",
    "objects",
    "errors",
    "unwaited",
    "subgroups",
    "tensor_parallel",
    "pipeline",
    "exits",
    "killed",
)


@pytest.fixture(scope="module")
def harness(devices: None) -> Iterator[Harness]:
    """Return the harness that forks the ranks of all tests here."""
    from simulated_devices import environment

    made = Harness(Path(os.environ["RANKCALL_SHM"]), "cuda", environment(gpus=2, memory="1GiB"))
    yield made
    made.close()


@pytest.mark.parametrize(
    "program",
    [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in PROGRAMS],
)
def test_same_job(
    program: str, capture: str, harness: Harness, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Results, errors, output, exit, threads, descriptors, garbage and memory are the same."""
    usual = harness.run(program, OFF, tmp_path_factory.mktemp(program))
    assert not usual.hung, f"{program} hung without recording\n{usual.stacks}"
    deviations = compare(harness, usual, capture, tmp_path_factory.mktemp)
    assert not deviations, f"{program} is not the same\n" + "\n".join(map(str, deviations))
