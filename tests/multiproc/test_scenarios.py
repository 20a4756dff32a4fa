"""The scenario suite: planted faults, real ranks, the right cause named every way there is."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import scenario_programs
from scenario_run import run
from scenario_sentences import Claims
from scenarios import ALL, FAST, Scenario

from rankcall.process import host_name

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(400)]


def _marked(scenario: Scenario) -> object:
    marks = [] if scenario.name in FAST else [pytest.mark.slow]
    return pytest.param(scenario, id=scenario.name, marks=marks)


@pytest.mark.parametrize("scenario", [_marked(scenario) for scenario in ALL])
def test_scenario(scenario: Scenario, tmp_path: Path) -> None:
    """The watcher, and a diagnosis from outside or afterwards, name exactly what was planted.

    Every sentence of theirs is true (``scenario_sentences``).
    """
    outcome = run(scenario, tmp_path)
    assert not outcome.wrong, "\n".join(
        [*outcome.wrong, *(result.stderr[-3000:] for result in outcome.results)]
    )


def test_there_are_enough() -> None:
    """Names are unique; every verdict on a hang has several variants."""
    names = {scenario.name for scenario in ALL}
    assert len(names) == len(ALL) >= 40
    assert set(FAST) <= names
    kinds = [kind for scenario in ALL for kind, _ in scenario.causes]
    for kind in (
        "missing",
        "dead",
        "stopped",
        "exhausted",
        "desync",
        "mismatch",
        "deadlock",
        "straggler",
    ):
        assert kinds.count(kind) >= 3, kind


SOURCE, FIRST = inspect.getsourcelines(scenario_programs.plain)
# Rank 2 hangs, before call 20.
HANGS = next(scenario for scenario in ALL if scenario.name == "python-hang")
LINE = f"{scenario_programs.__file__}:{FIRST + 5}"
TRUE = (
    f"Rank 2 ({host_name()}, pid 102) has not come: it is in user code. 3 ranks cannot go on: "
    f"1 has waited 2.3 s for it in broadcast #20 of group 0 at {LINE}, and 2 are in other calls."
)


@pytest.mark.parametrize(
    ("says", "instead_of"),
    [
        ("", ""),
        ("pid 103", "pid 102"),
        ("Rank 1 (", "Rank 2 ("),
        ("(elsewhere,", f"({host_name()},"),
        ("2 have waited", "1 has waited"),
        ("all_gather", "broadcast"),
        ("#19", "#20"),
        ("group 1", "group 0"),
        ("99 s", "2.3 s"),
        (f".py:{FIRST + len(SOURCE) + 3}", f".py:{FIRST + 5}"),
        ("7 are in", "2 are in"),
        ("it is stuck", "it is in user code"),
        (
            "has stopped recording, to end or by rankcall.disable: whether it came is not known",
            "has not come: it is in user code",
        ),
    ],
)
def test_a_false_sentence_is_noticed(says: str, instead_of: str) -> None:
    """One word of a true sentence is replaced by a false one."""
    call = {"op": "broadcast", "seq": 20, "group": "0", "call_site": LINE, "status": "started"}
    rows = [{**call, "rank": 0}, *({**call, "rank": r, "status": "completed"} for r in (1, 3))]
    text = TRUE.replace(instead_of, says, 1) if says else TRUE
    finding = {"kind": "missing", "summary": text, "evidence": ()}
    false = list(Claims(HANGS, [100, 101, 102, 103], 10.0, rows).false(finding))
    assert bool(false) == bool(says), false
