"""A diagnosis uses the run's own threshold and the verdicts that its watcher kept."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from diagnosing import (
    MISSING_AND_DESYNC,
    RANK_2_MISSING,
    SECOND,
    THREE_ENDED,
    WORLD,
    any_verdict,
    received_verdict,
    unfinished,
)
from worlds import MS, START, group_of, together, write_world

from rankcall.analysis.report_reading import read_report
from rankcall.analysis.verdicts import diagnose, missing
from rankcall.analysis.verdicts.facts import Fact, Ranks, Relation
from rankcall.cli import main
from rankcall.job.keep import keep_verdict
from rankcall.ring.layout import offset_of
from rankcall.run.exits import Exit, note_exit
from rankcall.run.hangs import note_over
from rankcall.run.load import load
from rankcall.testing.model import Planted
from rankcall.testing.synthetic import synthetic_run

WHEN = int(time.mktime((2026, 11, 21, 3, 41, 30, 0, 0, -1))) * 10**9


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run of four ranks that rank 2's death hung."""
    return synthetic_run(tmp_path / "job", 4, 40, planted=Planted("dead", (2,), 21)).path


def test_a_kept_verdict_is_shown(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text has the time, the named ranks and the place of the stacks; also for an archive."""
    monkeypatch.setenv("COLUMNS", "300")  # so that no path is wrapped
    keep_verdict(
        run, received_verdict(MISSING_AND_DESYNC, WHEN), {2: "Thread 1", 3: "Thread 2"}, any_verdict
    )
    assert main(["diagnose", str(run)]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    entry = "2026-11-21 03:41:30 missing: rank 2; desync (with 2 stacks), in"
    assert f"What the job's own watcher said {entry} {run}/hangs/0001" in printed
    target = tmp_path / "all.tar.zst"
    assert main(["collect", str(run), "-o", str(target)]) == 0
    assert main(["diagnose", str(target)]) == 1
    assert f"{entry} hangs/0001" in " ".join(capsys.readouterr().out.split())
    main(["diagnose", "--json", str(target)])
    named = [{"kind": "missing", "ranks": [2]}, {"kind": "desync", "ranks": []}]
    assert json.loads(capsys.readouterr().out)["hangs"] == [
        {"place": "hangs/0001", "epoch_ns": WHEN, "causes": named, "stacks": 2, "over_s": None}
    ]


def test_damaged_verdicts_are_left_out(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run whose kept verdicts are damaged does not mention its watcher."""
    (run / "hangs/0001").mkdir(parents=True)
    odd = {"findings": [{"kind": 7, "ranks": "x"}], "hang": {"epoch_ns": 5}}
    (run / "hangs/0001/verdict.json").write_text(json.dumps(odd))
    (run / "hangs/0002").mkdir()
    (run / "hangs/0002/verdict.json").write_text("[]")
    assert main(["diagnose", str(run)]) == 1
    assert "watcher" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "threshold"),
    [(3, 3.0), (7.5, 7.5), (0, 60.0), (None, 60.0), ("5", 60.0), (-1, 60.0), (10**40, 60.0)],
)
def test_the_jobs_own_threshold(tmp_path: Path, given: Any, threshold: float) -> None:
    """By default, a call counts as hung after the threshold that the job was started with."""
    world = group_of(4)
    calls = [call for seq in range(1, 4) for call in together(seq, [0] * 4, seq * MS, world)]
    folder = write_world(tmp_path / "run", calls)
    (folder / "run.json").write_text(json.dumps({"hang_after_s": given}))
    diagnosis = diagnose(load(folder), now_ns=lambda: START + 9 * MS)
    assert diagnosis.hang_after == threshold
    assert diagnose(load(folder), 11.0).hang_after == 11.0


@pytest.mark.parametrize("command", ["diagnose", "top"])
def test_a_threshold_of_0_is_the_jobs_own(
    tmp_path: Path,
    command: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """RANKCALL_HANG_AFTER=0 switches watchers off; it does not make every call a hang."""
    run = write_world(tmp_path / "run", RANK_2_MISSING, closed=lambda rank: False)
    states: dict[str, Any] = {"boot_id": "", "mono_ns": START + 6 * MS, "processes": []}
    headers = [head.header for head in load(run).heads]
    for head in headers:
        states["boot_id"] = head.boot_id
        states["processes"].append({"pid": head.pid, "start": head.process_start, "state": "alive"})
    (run / "states").mkdir()
    (run / "states/node-a.json").write_text(json.dumps(states))
    monkeypatch.setenv("RANKCALL_HANG_AFTER", "0")
    assert main([command, *(["--once"] if command == "top" else []), str(run)]) == 0
    assert "healthy" in capsys.readouterr().out
    monkeypatch.setenv("RANKCALL_HANG_AFTER", "0.0001")
    assert main([command, *(["--once"] if command == "top" else []), str(run)]) == 1
    assert "missing" in capsys.readouterr().out


@pytest.mark.parametrize(
    "forged",
    [
        {"kind": [1], "ranks": [1]},
        {"kind": "no_progress"},
        {"kind": "no_progress", "ranks": 5},
        {"kind": "no_progress", "ranks": [-1]},
        {"kind": "no_progress", "ranks": [True]},
        {"kind": "no_progress", "ranks": [1], "victims": "all"},
        {"kind": "no_progress", "ranks": [1], "evidence": [None]},
        {"kind": "no_progress", "ranks": [1], "summary": 5},
        {"kind": "no_progress", "ranks": [1], "since_s": "long"},
        {"kind": "no_progress", "ranks": [1], "since_s": float("nan")},
        {"kind": "no_progress", "ranks": [1], "since_s": 10**400},
        {"kind": "no_progress", "ranks": [1], "confidence": "sworn"},
        {"kind": "no_progress", "ranks": [1], "confidence": []},
    ],
    ids=lambda forged: str(forged)[:60],
)
def test_a_forged_finding_is_left_out(tmp_path: Path, forged: dict[str, object]) -> None:
    """Any user may have written a verdict: one finding that is damaged does not count."""
    run = write_world(tmp_path / "run", ENDED_CALLS, closed=lambda rank: False, beats=LIVED)
    seen_by_watcher(run, "no_progress", (1,), 30 * SECOND)
    file = run / "hangs/0001/verdict.json"
    verdict = json.loads(file.read_text())
    file.write_text(json.dumps({**verdict, "findings": [forged, *verdict["findings"]]}))
    assert causes_after_the_end(run) == [("no_progress", (1,))]


def seen_by_watcher(
    run: Path, kind: str, ranks: tuple[int, ...], at: int, **fields: object
) -> None:
    """Keep a verdict that the watcher made ``at`` ns after START on the run's own host."""
    hang = {
        "id": f"x{at}",
        "boot_id": load(run).heads[0].header.boot_id,
        "mono_ns": START + at,
        "epoch_ns": WHEN,
        "by_pid": 1,
    }
    place = run / f"hangs/{1 + len(list(run.glob('hangs/*'))):04d}"
    place.mkdir(parents=True)
    finding = {"kind": kind, "ranks": list(ranks), "victims": [], "summary": f"it is {kind}."}
    finding |= fields
    (place / "verdict.json").write_text(json.dumps({"findings": [finding], "hang": hang}))


def causes_after_the_end(run: Path) -> list[tuple[str, tuple[int, ...]]]:
    """Diagnose a run whose processes are gone."""
    diagnosis = diagnose(
        load(run), 10, state_of=lambda header: "gone", now_ns=lambda: START + 80 * SECOND
    )
    return [(finding.kind, finding.ranks) for finding in diagnosis.findings]


ENDED_CALLS = [
    c for seq in (1, 2, 3) for c in together(seq, [0] * 4, seq * MS, group_of(4), line=7)
]
LIVED = dict.fromkeys(range(4), (60 * SECOND, 60 * SECOND))


STACK = """Thread 0x00007f0000000700 (most recent call first):
  File "/job/data.py", line 8 in fetch
  File "/job/train.py", line 41 in <module>
"""
AT_THE_LOADER = (
    "rank 2: at /job/data.py:8 in fetch when the job's own watcher looked, 30 s before the end"
)


def test_what_the_watcher_saw_is_evidence_afterwards(tmp_path: Path) -> None:
    """A hang without a call in flight is in no record; the watcher's verdict is the evidence."""
    run = write_world(tmp_path / "run", ENDED_CALLS, closed=lambda rank: False, beats=LIVED)
    assert causes_after_the_end(run) == []
    seen_by_watcher(run, "no_progress", (1,), 30 * SECOND)
    assert causes_after_the_end(run) == [("no_progress", (1,))]
    diagnosis = diagnose(
        load(run), 10, state_of=lambda header: "gone", now_ns=lambda: START + 80 * SECOND
    )
    assert "watcher saw, 30 s before the end: it is no_progress." in diagnosis.findings[0].summary


def test_a_rank_that_the_watcher_saw_stopped(tmp_path: Path) -> None:
    """A silent rank is dead, unless the watcher saw it stopped; a noted exit outranks both."""
    beats = LIVED | {2: (5 * SECOND, 5 * SECOND)}
    run = write_world(tmp_path / "run", RANK_2_MISSING, closed=lambda rank: False, beats=beats)
    assert causes_after_the_end(run) == [("dead", (2,))]
    seen_by_watcher(run, "stopped", (2,), 30 * SECOND)
    assert causes_after_the_end(run) == [("stopped", (2,))]
    note_exit(run, Exit(2, 0, "node-a", 1002, -9, 10**18 + 6 * SECOND))
    assert causes_after_the_end(run) == [("dead", (2,))]


def test_the_line_that_the_watcher_saw_is_told_afterwards(tmp_path: Path) -> None:
    """The watcher's stack shows where a missing rank was, if it was dumped during the hang."""
    run = write_world(tmp_path / "run", RANK_2_MISSING, closed=lambda rank: False, beats=LIVED)
    for at in (1 * MS, 30 * SECOND):  # before the hang, and in it
        seen_by_watcher(run, "missing", (2,), at)
        place = max((run / "hangs").iterdir())
        (place / "stacks").mkdir()
        (place / "stacks/rank-00002.txt").write_text(STACK)
        diagnosis = diagnose(
            load(run), 10, state_of=lambda header: "gone", now_ns=lambda: START + 80 * SECOND
        )
        (finding,) = diagnosis.findings
        assert (finding.kind, finding.ranks) == ("missing", (2,))
        watcher_lines = [line for line in finding.evidence if "watcher" in line]
        assert watcher_lines == ([] if at == 1 * MS else [AT_THE_LOADER])
        there = "had not come: it was at /job/data.py:8 in fetch, 30 s before the end."
        nothing = "had not come: it had issued nothing for 60 s."
        assert (nothing if at == 1 * MS else there) in finding.summary


@pytest.mark.parametrize("is_known", [True, False])
def test_the_next_step_of_a_rank_that_makes_a_group(tmp_path: Path, is_known: bool) -> None:
    """A rank that was in ``new_group`` is advised of that afterwards too, and by which verdict."""
    calls = RANK_2_MISSING if is_known else ENDED_CALLS
    run = write_world(tmp_path / "run", calls, closed=lambda rank: False, beats=LIVED)
    seen_by_watcher(run, "missing", (2,), 30 * SECOND)
    (run / "hangs/0001/stacks").mkdir()
    stack = STACK.replace(
        '  File "/job/data.py", line 8 in fetch',
        '  File "/site-packages/torch/distributed/distributed_c10d.py", line 5 in new_group',
    )
    (run / "hangs/0001/stacks/rank-00002.txt").write_text(stack)
    (finding,) = diagnose(
        load(run), 10, state_of=lambda header: "gone", now_ns=lambda: START + 80 * SECOND
    ).findings
    assert (finding.kind, finding.ranks) == ("missing", (2,))
    assert finding.advice == (
        "All members must call new_group at the same place of the program: the others are in "
        "another call."
    )
    _, (reported,) = read_report(load(run))
    assert (reported.kind, reported.ranks, reported.advice) == (
        "missing",
        (2,),
        finding.advice,
    )
    if is_known:
        assert reported.culprit_line == finding.culprit_line == "/job/train.py:41"


def test_the_reason_stands_beside_the_line_that_the_watcher_saw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The summary that names the line also says why the rank did not come, as the advice does."""
    values = (("cause", "data_loader"), ("seconds", "59"), ("of_s", "60"))
    why = Fact(
        Relation.ABSENT_BECAUSE, Ranks((2,), ("node-a",)), values=values, number=98.0, unit="%"
    )
    monkeypatch.setattr(missing, "reasons_for_absence", lambda snapshot, ranks: [why])
    run = write_world(tmp_path / "run", RANK_2_MISSING, closed=lambda rank: False, beats=LIVED)
    seen_by_watcher(run, "missing", (2,), 30 * SECOND)
    (run / "hangs/0001/stacks").mkdir()
    (run / "hangs/0001/stacks/rank-00002.txt").write_text(STACK)
    (finding,) = diagnose(
        load(run), 10, state_of=lambda header: "gone", now_ns=lambda: START + 80 * SECOND
    ).findings
    assert "it was at /job/data.py:8 in fetch" in finding.summary
    because = "Since its last call, it spent 59 s of 60 s in its data loader."
    assert finding.summary.endswith(because)


def test_a_hang_that_was_over_is_no_evidence(tmp_path: Path) -> None:
    """A verdict does not count if its ranks issued a call later, or if its kind is unknown."""
    later = together(4, [40 * SECOND] * 4, 40 * SECOND + MS, group_of(4), line=7)
    run = write_world(
        tmp_path / "run", [*ENDED_CALLS, *later], closed=lambda rank: False, beats=LIVED
    )
    seen_by_watcher(run, "no_progress", (1,), 30 * SECOND)
    assert causes_after_the_end(run) == []
    seen_by_watcher(run, "nonsense", (1,), 50 * SECOND)
    assert causes_after_the_end(run) == []


def seen_of_a_running_job(
    run: Path, at_s: float, hang_after: float | None = None
) -> list[tuple[str, tuple[int, ...], str]]:
    """Diagnose a run whose processes live, ``at_s`` after START: kinds, ranks and first words."""
    diagnosis = diagnose(
        load(run),
        hang_after,
        state_of=lambda header: "alive",
        now_ns=lambda: START + int(at_s * SECOND),
    )
    found = diagnosis.findings
    return [(finding.kind, finding.ranks, finding.summary.split(":")[0]) for finding in found]


def test_a_verdict_on_a_hang_that_lasts_is_given_at_once(tmp_path: Path) -> None:
    """The watcher knew after 1 s; the threshold of 60 s has not passed, and a longer one counts."""
    run = write_world(tmp_path / "run", RANK_2_MISSING, closed=lambda rank: False, beats=LIVED)
    assert seen_of_a_running_job(run, 4) == []
    seen_by_watcher(run, "dead", (2,), 1 * SECOND, victims=[0, 1, 3], group="0", seq=4)
    words = "The job's own watcher saw 3.0 s ago what has lasted since"
    assert seen_of_a_running_job(run, 4) == [("dead", (2,), words)]
    assert seen_of_a_running_job(run, 4, 60.0) == [("dead", (2,), words)]
    assert seen_of_a_running_job(run, 4, 100.0) == []
    ((kind, ranks, said),) = seen_of_a_running_job(run, 64)
    assert (kind, ranks) == ("missing", (2,))
    assert "watcher" not in said
    note_over(run / "hangs/0001", 2.0)
    assert seen_of_a_running_job(run, 4) == []


@pytest.mark.parametrize("kind", ["stopped", "nonsense", "missing"])
def test_a_verdict_on_a_hang_that_is_over_is_not(tmp_path: Path, kind: str) -> None:
    """Its calls ended, or others are in flight; and who is stopped is seen without a verdict."""
    calls = together(4, [5 * MS] * 4, 2 * SECOND, group_of(4), line=7)
    calls = [*THREE_ENDED, *calls, *unfinished(WORLD, 5, (0, 1, 3), 3 * SECOND, line=7)]
    calls = RANK_2_MISSING if kind == "stopped" else calls
    run = write_world(tmp_path / "run", calls, closed=lambda rank: False, beats=LIVED)
    seen_by_watcher(run, kind, (2,), 1 * SECOND, victims=[0, 1, 3], group="0", seq=4)
    assert seen_of_a_running_job(run, 6) == []


def test_a_verdict_of_an_earlier_attempt_did_not_last(tmp_path: Path) -> None:
    """The ranks began after it, and have not issued a call yet: nothing is left but their end."""
    run = write_world(tmp_path / "run", [], ranks=range(4), closed=lambda rank: False, beats=LIVED)
    seen_by_watcher(run, "no_progress", (1,), -1 * SECOND)
    assert seen_of_a_running_job(run, 2) == []
    assert causes_after_the_end(run) == [("dead", (0, 1, 2, 3))]
    seen_by_watcher(run, "no_progress", (1,), 1 * SECOND)
    assert [kind for kind, _, _ in seen_of_a_running_job(run, 2)] == ["no_progress"]


def test_the_watchers_threshold_is_the_runs(tmp_path: Path) -> None:
    """The watcher's threshold is in the rings, and diagnose uses it by default."""
    run = write_world(tmp_path / "run", RANK_2_MISSING)
    ring = next((run / "rings").glob("*.ring"))
    with ring.open("r+b") as file:
        file.seek(offset_of("hang_after_ms"))
        file.write((7500).to_bytes(8, "little"))
    assert diagnose(load(run)).hang_after == 7.5
    assert diagnose(load(run), 3).hang_after == 3
