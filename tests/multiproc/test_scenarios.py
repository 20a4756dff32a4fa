"""The scenario suite: planted faults, real ranks, the right cause named every way there is."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import scenario_programs
from scenario_facts import ScenarioFacts
from scenario_run import run
from scenarios import ALL, FAST, Scenario

from rankcall.analysis.snapshot import Snapshot
from rankcall.analysis.verdicts import diagnose, facts, kind
from rankcall.analysis.verdicts.dead import Dead
from rankcall.analysis.verdicts.facts import CallFact, Fact, Ranks
from rankcall.analysis.verdicts.facts import Relation as R
from rankcall.analysis.verdicts.finding import Finding
from rankcall.analysis.verdicts.sentences import evidence, summary
from rankcall.process import host_name
from rankcall.run.load import load

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(400)]


def _marked(scenario: Scenario) -> object:
    marks = [] if scenario.name in FAST else [pytest.mark.slow]
    return pytest.param(scenario, id=scenario.name, marks=marks)


@pytest.mark.parametrize("scenario", [_marked(scenario) for scenario in ALL])
def test_scenario(scenario: Scenario, tmp_path: Path) -> None:
    """The watcher, and a diagnosis from outside or afterwards, name exactly what was planted.

    Every fact of theirs is true (``scenario_facts``), and their words are those of their facts.
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
    kinds = [name for scenario in ALL for name, _ in scenario.causes]
    for name in (
        "missing",
        "dead",
        "stopped",
        "exhausted",
        "desync",
        "mismatch",
        "deadlock",
        "straggler",
    ):
        assert kinds.count(name) >= 3, name


_, FIRST = inspect.getsourcelines(scenario_programs.plain)
# Rank 2 hangs, before call 20.
HANGS = next(scenario for scenario in ALL if scenario.name == "python-hang")
KILLED = next(scenario for scenario in ALL if scenario.name == "killed")
LINE = f"{scenario_programs.__file__}:{FIRST + 5}"
CALL = CallFact("broadcast", 20, "0", line=LINE)


def _ranks(*numbers: int) -> Ranks:
    return Ranks(numbers, (host_name(),), 100 + numbers[0] if len(numbers) == 1 else 0)


TRUE = [
    Fact(R.NOT_COME, _ranks(2), values=(("line", LINE), ("function", "plain"))),
    Fact(R.HELD_UP, _ranks(0), CALL, _ranks(2), number=2.3, unit="s"),
    Fact(R.HELD_UP_ELSEWHERE, _ranks(1, 3)),
    Fact(R.LAST_LEFT, _ranks(2), replace(CALL, op="all_reduce", seq=19), number=2.3, unit="s"),
    Fact(R.WAITS_IN, _ranks(0), CALL, number=2.3, unit="s"),
]


def false_of(stated: Sequence[Fact], words: str = "") -> list[str]:
    """Return what the check says about a finding with these facts, or with other words."""
    row = {"op": "broadcast", "seq": 20, "group": "0", "call_site": LINE, "status": "started"}
    rows = [
        {**row, "rank": 2, "op": "all_reduce", "seq": 19, "status": "completed"},
        {**row, "rank": 0},
        *({**row, "rank": rank, "op": "all_gather", "seq": 21} for rank in (1, 3)),
    ]
    said, shown = stated[:3], stated[3:]
    finding = Finding("missing", (2,), (0, 1, 3), facts=tuple(stated))
    finding = replace(finding, summary=words or summary(said), evidence=evidence(shown))
    return list(ScenarioFacts(HANGS, [100, 101, 102, 103], 10.0, rows).false(finding))


def test_what_is_so_is_accepted() -> None:
    """The facts that follow from the plan and the records are not false."""
    assert false_of(TRUE) == []


@pytest.mark.parametrize(
    ("at", "changes"),
    [
        (0, {"ranks": Ranks((2,), (host_name(),), 103)}),
        (0, {"ranks": Ranks((2,), ("elsewhere",), 102)}),
        (0, {"ranks": _ranks(1)}),
        (0, {"values": (("line", f"{scenario_programs.__file__}:{FIRST + 300}"),)}),
        (0, {"values": (("line", f"{__file__}:{FIRST + 5}"),)}),
        (0, {"relation": R.STOPPED_RECORDING}),
        (0, {"relation": R.STOPPED}),
        (0, {"relation": R.DOES_NOT_ANSWER}),
        (1, {"ranks": _ranks(0, 1)}),
        (1, {"call": replace(CALL, op="all_gather")}),
        (1, {"call": replace(CALL, seq=19)}),
        (1, {"call": replace(CALL, group="1")}),
        (1, {"call": replace(CALL, line=f"{LINE}0")}),
        (1, {"number": 99.0}),
        (1, {"number": -1.0}),
        (1, {"others": _ranks(3)}),
        (2, {"ranks": _ranks(0, 1, 3)}),
        (2, {"ranks": _ranks(2, 3)}),
        (3, {"call": replace(CALL, op="all_reduce", seq=16)}),
        (3, {"relation": R.LAST_IS_IN}),
        (3, {"ranks": _ranks(0)}),
        (4, {"ranks": _ranks(1)}),
    ],
)
def test_a_false_fact_is_noticed(at: int, changes: dict[str, Any]) -> None:
    """One part of a true fact is replaced by a false one."""
    changed = list(TRUE)
    changed[at] = replace(changed[at], **changes)
    assert false_of(changed)


def test_words_that_no_fact_says_are_noticed() -> None:
    """The words of a finding are those that its facts render to."""
    assert false_of(TRUE, summary(TRUE[:3]).replace("2.3 s", "2.4 s"))
    assert false_of(TRUE, "Rank 2 is at fault.")
    assert false_of([])


# Faults of the product: what each makes of a part of it.
MUTANTS: dict[str, tuple[object, str, Any]] = {
    "a wrong process": (
        kind,
        "ranks_of",
        lambda snapshot, ranks: replace(facts.ranks_of(snapshot, ranks), pid=1),
    ),
    "a host left out": (
        kind,
        "ranks_of",
        lambda snapshot, ranks: replace(facts.ranks_of(snapshot, ranks), hosts=()),
    ),
    "the call before": (
        kind,
        "call_of_wait",
        lambda snapshot, wait: replace(
            facts.call_of_wait(snapshot, wait), seq=facts.call_of_wait(snapshot, wait).seq - 1
        ),
    ),
    "the last call of another rank": (
        kind,
        "last_call",
        lambda snapshot, rank: replace(
            facts.last_call(snapshot, (rank + 1) % 4), ranks=facts.ranks_of(snapshot, [rank])
        ),
    ),
    "the first call as the last": (
        kind,
        "last_call",
        lambda snapshot, rank: facts.last_call(
            replace(snapshot, calls=snapshot.calls[snapshot.calls["seq"] < 18]), rank
        ),
    ),
    "another line": (
        Snapshot,
        "shown_site",
        lambda snapshot, number: f"{scenario_programs.__file__}:{FIRST + 60}",
    ),
    "another op": (Snapshot, "op", lambda snapshot, row: "barrier"),
    "a longer wait": (
        kind,
        "_held_up",
        lambda *arguments: [replace(f, number=900.0) for f in HELD_UP(*arguments)],
    ),
    "victims that do not wait": (
        kind,
        "_held_up",
        lambda *arguments: [
            replace(f, ranks=facts.ranks_of(arguments[0], [0, 1, 2, 3]))
            for f in HELD_UP(*arguments)
        ],
    ),
    "stopped for killed": (
        Dead,
        "state",
        lambda self, snapshot, states, held_s: Fact(
            R.STOPPED, facts.ranks_of(snapshot, [state.rank for state in states])
        ),
    ),
    "another signal": (
        Dead,
        "state",
        lambda *arguments: replace(STATE(*arguments), values=(("signal", "SIGSEGV"),)),
    ),
    "words of its own": (kind, "summary", lambda said, live: "Rank 2 was killed."),
    "evidence of its own": (kind, "written", lambda shown, live: ("rank 2: gone",)),
}
HELD_UP, STATE = kind._held_up, Dead.state


def test_a_faulty_product_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mutant of what chooses facts and words states something false of a killed rank."""
    outcome = run(KILLED, tmp_path)
    assert not outcome.wrong, outcome.wrong
    records = load(tmp_path / "run").records.to_dicts()
    pids = [result.pid for result in outcome.results]
    check = ScenarioFacts(KILLED, pids, outcome.took, records)
    for name, (owner, part, mutant) in MUTANTS.items():
        with monkeypatch.context() as patch:
            patch.setattr(owner, part, mutant)
            (finding,) = diagnose(load(tmp_path / "run"), KILLED.hang_after).findings
        assert list(check.false(finding)), name
