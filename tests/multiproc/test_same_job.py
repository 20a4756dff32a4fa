"""A program behaves the same whether or not it is recorded."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from samejob import programs
from samejob.compare import compare, differences
from samejob.harness import Harness, RunReport
from samejob.modes import MODES, OFF

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(500)]
Run = Callable[[str, str], RunReport]


@pytest.fixture(scope="session")
def harness() -> Iterator[Harness]:
    """Return the harness that forks the ranks of all tests here."""
    made = Harness(Path(os.environ["RANKCALL_SHM"]))
    yield made
    made.close()


@pytest.fixture(scope="session")
def usual_runs() -> dict[str, RunReport]:
    """Return a table for the runs without recording: one a program is enough."""
    return {}


@pytest.fixture
def usual(
    harness: Harness, usual_runs: dict[str, RunReport], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], RunReport]:
    """Return a function that returns how a program runs without recording."""

    def run(program: str) -> RunReport:
        if program not in usual_runs:
            report = harness.run(program, OFF, tmp_path_factory.mktemp(program))
            assert not report.hung, f"{program} hung without recording\n{report.stacks}"
            usual_runs[program] = report
        return usual_runs[program]

    return run


_EVERY_MODE = ("ddp", "toggles", "errors")  # the others switch on or off in mid-job in the long run


def _is_slow(name: str, program: programs.Program, mode: str) -> bool:
    if mode == "python" and name in ("compiled", "pipeline", "tensor_parallel", "hsdp"):
        return True  # torch.compile and the like, which take long; the native mode stays
    return program.slow or (name not in _EVERY_MODE and mode in ("late", "stopped"))


CASES = [
    pytest.param(
        name,
        mode,
        marks=[pytest.mark.slow] if _is_slow(name, program, mode) else [],
        id=f"{name}-{mode}",
    )
    for name, program in programs.PROGRAMS.items()
    if name != "probe"
    for mode in MODES
]


@pytest.mark.parametrize(("program", "mode"), CASES)
def test_same_job(
    program: str,
    mode: str,
    harness: Harness,
    usual: Callable[[str], RunReport],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Results, errors, output, exit, threads, descriptors, garbage and memory are the same."""
    deviations = compare(harness, usual(program), mode, tmp_path_factory.mktemp)
    assert not deviations, f"{program} is not the same in mode {mode}\n" + "\n".join(
        map(str, deviations)
    )


HARM: list[tuple[str, set[str]]] = [
    ("nothing", set()),
    ("keeps_group", {"alive", "threads", "descriptors"}),
    ("keeps_store", {"alive"}),
    ("keeps_tensor", {"alive"}),
    ("keeps_memory_of_tensor", {"alive"}),
    ("keeps_work", {"alive", "threads", "descriptors"}),
    ("changes_bit", {"result"}),
    ("changes_work", {"result"}),
    ("changes_error", {"error"}),
    ("prints", {"stdout"}),
    ("warns", {"stderr"}),
    ("leaves_thread", {"threads"}),
    ("leaves_descriptor", {"descriptors"}),
    ("leaves_socket", {"descriptors"}),
    ("leaves_process", {"processes"}),
    ("takes_memory", {"memory"}),
    ("changes_status", {"status"}),
]
_QUICK_HARM = (
    "nothing",
    "keeps_tensor",
    "changes_bit",
    "leaves_thread",
    "leaves_descriptor",
    "takes_memory",
)


@pytest.mark.parametrize(
    ("mutant", "kinds"),
    [
        pytest.param(
            mutant, kinds, marks=[] if mutant in _QUICK_HARM else [pytest.mark.slow], id=mutant
        )
        for mutant, kinds in HARM
    ],
)
def test_harm_is_reported(
    mutant: str,
    kinds: set[str],
    harness: Harness,
    usual: Callable[[str], RunReport],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """A fake recording that breaks one rule is reported for that and for nothing else."""
    deviations = compare(harness, usual("probe"), f"mutant:{mutant}", tmp_path_factory.mktemp)
    assert {difference.kind for difference in deviations} == kinds, list(map(str, deviations))


def test_a_hang_is_reported(
    harness: Harness,
    usual: Callable[[str], RunReport],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Ranks that hang are ended at the deadline, and the report has their stacks."""
    folder = tmp_path_factory.mktemp("probe")
    before = usual("probe")
    deviations = differences(
        before, harness.run("probe", "mutant:hangs", folder, before, deadline=8.0)
    )
    hang = next(difference for difference in deviations if difference.kind == "hang")
    assert "in hangs" in hang.text
    assert "rank 1:" in hang.text
