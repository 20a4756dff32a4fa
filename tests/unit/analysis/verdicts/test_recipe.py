"""A new kind of verdict is one class: no report knows the kinds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from worlds import MS, group_of, together, write_world

from rankcall.analysis import verdicts
from rankcall.analysis.details import detail
from rankcall.analysis.verdicts import diagnose
from rankcall.analysis.verdicts.diagnosis import Diagnosis
from rankcall.analysis.verdicts.encoding import verdict_object
from rankcall.analysis.verdicts.evidence import HangEvidence
from rankcall.analysis.verdicts.facts import CallFact, Fact, Ranks, Relation
from rankcall.analysis.verdicts.finding import Finding, Predicate
from rankcall.analysis.verdicts.kind import Kind
from rankcall.analysis.verdicts.recent_calls import RecentCalls
from rankcall.report import diagnosis_text as diagnosis_report
from rankcall.report import summary_text, top
from rankcall.report.html import render
from rankcall.report.html.first_screen import items, verdict_of_finding
from rankcall.run.load import Run, load
from rankcall.testing.model import Planted
from rankcall.testing.synthetic import synthetic_run


class Haunted(Kind):
    """A toy: every job that does not go on is haunted by rank 2."""

    kind = "haunted"
    order = 1
    predicate = Predicate("is haunted", "are haunted")

    def in_hang(self, evidence: HangEvidence) -> Iterator[Finding]:
        """Yield rank 2."""
        if evidence.in_flight.any():
            yield self.finding(
                [2],
                hosts=("node-a",),
                summary="Rank 2 sees ghosts.",
                evidence=("it rattles",),
                advice="Call an exorcist.",
            )


class Drowsy(Kind):
    """A toy: rank 1 is slow in every job that goes on."""

    kind = "drowsy"
    order = 1
    stops = False
    predicate = Predicate("nods off", "nod off")

    def in_running_job(self, recent: RecentCalls) -> Iterator[Finding]:
        """Yield rank 1."""
        if recent.tables:
            yield self.finding([1], summary="Rank 1 yawns.", advice="Make coffee.")


@pytest.fixture
def with_toys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the toys to the kinds, which is all that a new kind needs."""
    monkeypatch.setattr(verdicts, "KINDS", (*verdicts.KINDS, Haunted(), Drowsy()))


def job(folder: Path, *planted: Planted) -> tuple[Run, Diagnosis]:
    """Return a job of four ranks with its diagnosis."""
    synthetic_run(folder / "run", 4, 80, planted=planted)
    run = load(folder / "run")
    return run, diagnose(run)


@pytest.mark.usefixtures("with_toys")
def test_a_new_kind_is_in_every_report(tmp_path: Path) -> None:
    """Its rank among the findings, its words and its next step are those of its class."""
    run, diagnosis = job(tmp_path, Planted("stopped", (3,), 57))
    assert diagnosis.kind == "haunted"
    assert "stopped" in [finding.kind for finding in diagnosis.findings]
    first = json.loads(json.dumps(verdict_object(diagnosis)))["findings"][0]
    assert first["kind"] == "haunted"
    assert first["ranks"] == [2]
    assert first["advice"] == "Call an exorcist."
    for text in (diagnosis_report.diagnosis_text(diagnosis), top.render(diagnosis)):
        assert "haunted" in text
        assert "Rank 2 sees ghosts." in text
        assert "Call an exorcist." in text
    assert "Rank 2 is haunted" in render(detail(run), diagnosis.findings)


@pytest.mark.usefixtures("with_toys")
def test_a_kind_that_only_slows_does_not_stop_a_run(tmp_path: Path) -> None:
    """A kind says itself whether it stops a run: the page then names no cause of a stop."""
    run, diagnosis = job(tmp_path)
    assert diagnosis.kind == "drowsy"
    assert "Rank 1 yawns." in diagnosis_report.diagnosis_text(diagnosis)
    page = render(detail(run), diagnosis.findings)
    assert "Rank 1 nods off" not in page
    assert "Rank 1 yawns." in page


def test_every_kind_names_itself() -> None:
    """Names and orders are unique, so that every finding has one place."""
    assert len({kind.kind for kind in verdicts.KINDS}) == len(verdicts.KINDS)
    assert len({kind.order for kind in verdicts.KINDS}) == len(verdicts.KINDS)


TITLES = {
    "alone": ("does not leave a call", "do not leave a call"),
    "dead": ("died", "died"),
    "deadlock": ("waits for itself", "wait for each other"),
    "desync": ("calls something else", "call different things"),
    "exhausted": ("left the loop", "left the loop"),
    "idle": ("waits for work", "wait for work"),
    "mismatch": ("differs in one call", "differ in one call"),
    "missing": ("did not come", "did not come"),
    "no_progress": ("did not come", "did not come"),
    "rpc": ("does not answer", "do not answer"),
    "slow_link": ("is linked slowly", "are linked slowly"),
    "stopped": ("does not run", "do not run"),
    "straggler": ("comes late", "come late"),
    "stuck": (
        "does not leave a call that all have issued",
        "do not leave a call that all have issued",
    ),
}


# Of findings that name no rank.
OF_NOBODY = {
    "alone": "A call does not end on some ranks",
    "no_progress": "No rank goes on",
    "rpc": "RPCs are not answered",
    "slow_link": "A call that all have come to does not end",
    "stuck": "A call that all have issued does not end",
}


@pytest.mark.parametrize("kind", verdicts.KINDS, ids=lambda kind: str(kind.kind))
def test_a_title_agrees_with_the_number_of_ranks(kind: Kind) -> None:
    """It was "Rank 3 differ in one call"."""
    of_one, of_several = TITLES[kind.kind]
    one = verdict_of_finding(kind.finding([3], summary="s")).title
    several = verdict_of_finding(kind.finding([3, 4, 7], summary="s")).title
    assert one == f"Rank 3 {of_one}"
    assert several == f"Ranks 3-4,7 {of_several}"
    two = verdict_of_finding(kind.finding([0, 2], summary="s")).title
    assert two == f"Ranks 0 and 2 {of_several}"
    many = verdict_of_finding(kind.finding(range(512), summary="s")).title
    assert many == f"Ranks 0-511 {of_several}"
    nobody = verdict_of_finding(kind.finding([], summary="s")).title
    assert nobody == OF_NOBODY.get(kind.kind, f"The ranks {of_several}")


def issued(ranks: tuple[int, ...], op: str) -> Fact:
    """Return what a side of a desync issued."""
    return Fact(Relation.ISSUED, Ranks(ranks), CallFact(op, 7, "0"))


@pytest.mark.parametrize(
    ("mine", "title"),
    [
        ((0,), "Rank 0 called barrier where ranks 1-3 called all_reduce"),
        ((0, 5), "Ranks 0 and 5 called barrier where ranks 1-3 called all_reduce"),
    ],
)
def test_a_desync_is_named_by_its_calls(mine: tuple[int, ...], title: str) -> None:
    """It was "Rank 0 call different things"."""
    said = [issued(mine, "barrier"), issued((1, 2, 3), "all_reduce")]
    desync = next(kind for kind in verdicts.KINDS if kind.kind == "desync")
    finding = desync.finding(mine, said=said)
    assert verdict_of_finding(finding).title == title


def test_nobody_still_runs_below_a_verdict_that_says_who_died(tmp_path: Path) -> None:
    """It was "rank 0-511: still running, or killed", below "Rank 9 died"."""
    calls = [call for seq in range(1, 5) for call in together(seq, [0, 0, 0], MS, group_of(3))]
    run = load(write_world(tmp_path / "run", calls, closed=lambda rank: False))
    dead = next(kind for kind in verdicts.KINDS if kind.kind == "dead")
    details = detail(run)
    gap = "No normal end of ranks 0-2"
    assert gap in [item.title for item in items(details, [], [])]
    finding = dead.finding([1], summary="Rank 1 died.")
    titles = [item.title for item in items(details, [], [finding])]
    assert titles[0] == "Rank 1 died."
    assert gap not in titles
    assert "3 ranks still running or killed" in summary_text.render(details.summary, 120)
    assert "killed" not in summary_text.render(details.summary, 120, [finding])
