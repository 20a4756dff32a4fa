"""Stragglers and slow links in jobs that go on, and jobs that are healthy."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from worlds import MS, START, Call, group_of, together, write_world

from rankcall.analysis.verdicts import diagnose
from rankcall.analysis.verdicts.diagnosis import Diagnosis
from rankcall.run.load import load
from rankcall.testing.model import Op, Pace
from rankcall.testing.synthetic import synthetic_run

MESSAGES = (Op("exchange", 1 << 20, line=5), Op("all_reduce", 1 << 20, line=6))
WORLD = group_of(4)
PAIRS = {"tp": [[0, 1], [2, 3], [4, 5], [6, 7]]}


def look(folder: Path, ranks: int, collectives: int, **options: object) -> Diagnosis:
    """Diagnose a synthetic run."""
    synthetic_run(folder / "run", ranks, collectives, **options)  # type: ignore[arg-type]
    return diagnose(load(folder / "run"))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("ranks", [2, 4, 64])
def test_healthy(tmp_path: Path, ranks: int, seed: int) -> None:
    """A job whose ranks all jitter by the same amount is healthy."""
    diagnosis = look(tmp_path, ranks, 200, pace=Pace(jitter_ms=1.0), seed=seed)
    assert (diagnosis.kind, diagnosis.findings) == ("healthy", [])


@pytest.mark.parametrize("ranks", [4, 64])
def test_straggler(tmp_path: Path, ranks: int) -> None:
    """A rank that is late before every op is named, with its share and the line."""
    findings = look(tmp_path, ranks, 200, straggler=3, straggler_ms=5.0).findings
    assert [(finding.kind, finding.ranks) for finding in findings] == [("straggler", (3,))]
    assert findings[0].group == "0"
    assert findings[0].call_site.startswith("train.py:")
    assert len(findings[0].victims) == ranks - 1


def test_straggler_with_clocks_apart(tmp_path: Path) -> None:
    """Hosts whose clocks are a second apart do not make their ranks stragglers, or hide one."""
    options = {"hosts": 4, "clock_offsets_ns": [0, 10**9, -(10**9), 5 * 10**8]}
    assert look(tmp_path / "healthy", 8, 200, **options).findings == []
    findings = look(tmp_path / "late", 8, 200, straggler=5, straggler_ms=5.0, **options).findings
    assert [(finding.kind, finding.ranks) for finding in findings] == [("straggler", (5,))]


def test_nothing_has_ended_yet(tmp_path: Path) -> None:
    """A job in its first collective is healthy, without a warning from numpy."""
    first = [replace(call, end=None) for call in together(1, [0, 0, 0, 1], MS, WORLD)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        diagnosis = diagnose(
            load(write_world(tmp_path / "run", first)),
            state_of=lambda header: "alive",
            now_ns=lambda: START + 5 * MS,
        )
    assert (diagnosis.kind, diagnosis.findings) == ("healthy", [])


def test_two_stragglers(tmp_path: Path) -> None:
    """Two ranks that are late together are one finding."""
    findings = look(tmp_path, 8, 200, straggler=(2, 6), straggler_ms=5.0).findings
    assert [(finding.kind, finding.ranks) for finding in findings] == [("straggler", (2, 6))]


def test_a_single_pause_is_no_habit(tmp_path: Path) -> None:
    """One long pause (a checkpoint) of one rank is healthy."""
    calls = []
    for seq in range(1, 101):
        start = seq * 10 * MS + (900 * MS if seq > 60 else 0)
        late = [0, 0, 900 * MS, 0] if seq == 60 else [0, 0, 0, 0]
        calls += together(seq, [start + delay for delay in late], start + max(late) + MS, WORLD)
    assert diagnose(load(write_world(tmp_path / "run", calls))).findings == []


def test_slow_link(tmp_path: Path) -> None:
    """A pair whose transfers take many times as long as those of equal pairs is named."""
    families = {"slow": [PAIRS["tp"][2]], "fast": [p for p in PAIRS["tp"] if p != PAIRS["tp"][2]]}
    program = (
        Op("all_reduce", 1 << 20, "fast", line=5, transfer_ms=2.0),
        Op("all_reduce", 1 << 20, "slow", line=5, transfer_ms=12.0),
    )
    findings = look(tmp_path, 8, 200, groups=families, program=program, hosts=2).findings
    assert [(finding.kind, finding.ranks) for finding in findings] == [("slow_link", (4, 5))]
    assert findings[0].hosts == ("node-1",)


@pytest.mark.parametrize(
    ("steps", "slow_ms", "is_told"),
    [(200, 12.0, True), (60, 12.0, False), (200, 2.8, False), (400, 2.8, True)],
)
def test_a_second_says_nothing_about_a_link(
    tmp_path: Path, steps: int, slow_ms: float, is_told: bool
) -> None:
    """A job of less than a second, or a link that cost less than 0.2 s, is not judged.

    A pipeline of a second, whose ranks waited for a CPU, was said to have a slow link.
    """
    families = {"slow": [PAIRS["tp"][2]], "fast": [p for p in PAIRS["tp"] if p != PAIRS["tp"][2]]}
    program = (
        Op("all_reduce", 1 << 20, "fast", line=5, transfer_ms=1.0),
        Op("all_reduce", 1 << 20, "slow", line=5, transfer_ms=slow_ms),
    )
    pace = Pace(compute_ms=10.0)
    diagnosis = look(tmp_path, 8, steps, groups=families, program=program, hosts=2, pace=pace)
    assert [finding.ranks for finding in diagnosis.findings] == ([(4, 5)] if is_told else [])


# How long the messages between neighbours of a pipeline of four equal stages took, once both ends
# had come, in ms: on two cores that some 20 processes shared (2026-11-26, load average 15).
NOISY_MS = (
    "75.5 77.5 14.8 23.3 55.6 33.8 26.4 2.4 77.2 49.3 0.2 4.7 47.5 0.8 10.7 35.2 0.3 11.4 19.4 "
    "17.4 7.3 16.2 57.2 17.2 37.2 10.4",
    "34.6 18.1 19.5 0.2 0.3 178.6 11.4 10.6 14.1 3.6 0.2 0.5 1.4 0.3 15.6 0.9 15.6 12.2 5.7 39.6 "
    "0.3 37.4 7.5 61.1 3.3 3.8",
    "37.8 7.0 8.0 16.9 58.9 0.3 3.8 20.5 6.7 0.3 7.8 9.3 0.7 0.3 10.8 13.6 12.5 32.4 25.4 37.1 "
    "20.3 16.2 6.8 31.8 44.7 86.3",
)


def pipeline(folder: Path, slower_ms: float, every_ms: int, api: str = "recv") -> Diagnosis:
    """Diagnose such a pipeline, whose first link is slower by so much, with a step so often.

    ``api``: the function that receives.
    """
    calls = []
    for link, line in enumerate(NOISY_MS):
        for number, noise_ms in enumerate(map(float, line.split())):
            at = number * every_ms * MS
            took = int((noise_ms + (slower_ms if link == 0 else 0.0)) * MS)
            sent = Call(link, 1 + number, at, at + MS, "send", group=WORLD, peer=link + 1)
            received = Call(link + 1, 1 + number, at, at + took, "recv", group=WORLD, peer=link)
            calls += [sent, replace(received, api=api)]
    return diagnose(load(write_world(folder, calls)))


def test_links_of_a_busy_machine(tmp_path: Path) -> None:
    """Noise makes no link slow, and it hides no link that is slow; one that costs little is not."""
    assert pipeline(tmp_path / "noise", 0.0, 200).findings == []
    (found,) = pipeline(tmp_path / "slow", 80.0, 200).findings
    assert (found.kind, found.ranks) == ("slow_link", (0, 1))
    assert pipeline(tmp_path / "rare", 80.0, 20_000).findings == []


@pytest.mark.parametrize("api", ["irecv", "batch_isend_irecv"])
def test_a_receive_that_was_issued_ahead_tells_nothing_of_its_link(
    tmp_path: Path, api: str
) -> None:
    """Its end is noticed when its caller waits for it, after what the caller does before.

    In an exchange of five ranks, whose waits for their sends came first, the rank before a busy one
    was said to have a slow link.
    """
    assert pipeline(tmp_path / "ahead", 80.0, 200, api).findings == []


def test_messages_between_equals_are_healthy(tmp_path: Path) -> None:
    """Links of equal speed are healthy."""
    assert look(tmp_path, 8, 200, program=MESSAGES, groups=PAIRS).findings == []


@pytest.mark.parametrize("compute_ms", [0, 60, 600])
def test_who_is_late_by_a_slow_link_is_no_straggler(tmp_path: Path, compute_ms: int) -> None:
    """The link is named; its receiver only if it makes the others wait for more than the link does.

    Each rank of a ring sends to the next one and receives from the one before. The link from 1 to
    2 takes 200 ms, the others 1, and rank 2 computes before it sends.
    """
    ready, calls = [0] * 4, []
    for step in range(1, 31):
        sent = [now + (compute_ms * MS if rank == 2 else 0) for rank, now in enumerate(ready)]
        for rank in range(4):
            before, after = (rank - 1) % 4, (rank + 1) % 4
            took = (200 if rank == 2 else 1) * MS
            ready[rank] = max(sent[before], sent[rank]) + took
            at, end = sent[rank], ready[rank]
            calls += [
                Call(rank, step, at, at + MS, "send", group=WORLD, peer=after, api="isend"),
                Call(rank, step, at, end, "recv", group=WORLD, peer=before, api="recv"),
            ]
    diagnosis = diagnose(load(write_world(tmp_path, calls)))
    named = {(finding.kind, finding.ranks) for finding in diagnosis.findings}
    late = {("straggler", (2,))} if compute_ms == 600 else set()
    assert named == {("slow_link", (1, 2))} | late
