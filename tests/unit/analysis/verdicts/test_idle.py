"""``idle`` tells ranks that wait for work from ranks that hang: declared, or learned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from diagnosing import (
    RANK_2_MISSING,
    SECOND,
    THREE_ENDED,
    WORLD,
    any_verdict,
    causes,
    received_verdict,
    unfinished,
)
from worlds import MS, START, Call, write_world

from rankcall.analysis.snapshot import ALIVE, STOPPED
from rankcall.analysis.verdicts import diagnose, with_stacks
from rankcall.analysis.verdicts.diagnosis import Diagnosis
from rankcall.analysis.verdicts.finding import Finding
from rankcall.analysis.verdicts.kept import kept_in
from rankcall.cli import main
from rankcall.job.keep import keep_verdict
from rankcall.report.diagnosis_text import diagnosis_text
from rankcall.ring.layout import FOREVER_NS, offset_of
from rankcall.run.hangs import note_over
from rankcall.run.load import load

HANG_AFTER_S = 10
LINE = "train.py:7"  # of all calls in these worlds


def write_run(folder: Path, calls: list[Call], seconds: float) -> Path:
    """Write a run whose ranks have a heartbeat until ``seconds`` after its start."""
    beats = {rank: (round(seconds * SECOND),) * 2 for rank in range(4)}
    return write_world(folder / "run", calls, closed=lambda rank: False, beats=beats)


def declare(run: Path, rank: int, until_ns: int, what: str = "requests") -> None:
    """Write into a rank's ring what it would declare by ``rankcall.expect``."""
    (ring,) = (run / "rings").glob(f"*{rank:05d}*.ring")
    with ring.open("r+b") as file:
        for field, value in (
            ("expect_what", what.encode()),
            ("expect_until_ns", until_ns.to_bytes(8, "little")),
        ):
            file.seek(offset_of(field))
            file.write(value)


def look(run: Path, seconds: float, states: Mapping[int, str] | None = None) -> Diagnosis:
    """Diagnose a run as of so many seconds after its start; ranks without a state are alive."""
    return diagnose(
        load(run),
        HANG_AFTER_S,
        state_of=lambda header: (states or {}).get(header.rank, ALIVE),
        now_ns=lambda: START + round(seconds * SECOND),
    )


def remember(run: Path, line: str, seconds: float | None) -> None:
    """Keep a verdict about a hang at a line, which ended after so many seconds, or not."""
    finding = Finding("missing", (2,), (0, 1, 3), call_site=line)
    place = keep_verdict(run, received_verdict([finding]), {}, any_verdict)
    assert place is not None
    if seconds is not None:
        note_over(place, seconds)


def test_a_declared_wait_for_work(tmp_path: Path) -> None:
    """If one rank waits for requests, and all others wait for it, the job is idle, not hung."""
    run = write_run(tmp_path, RANK_2_MISSING, 70)
    assert causes(look(run, 70)) == [("missing", (2,))]
    declare(run, 2, FOREVER_NS)
    diagnosis = look(run, 70)
    assert causes(diagnosis) == [("idle", (2,))]
    (finding,) = diagnosis.findings
    assert (finding.victims, finding.confidence, finding.stops) == ((0, 1, 3), "certain", False)
    assert "has waited for work (requests) for 70 s, and 3 ranks with it" in finding.summary
    assert diagnosis.kind == "idle"
    assert diagnosis_text(diagnosis).startswith("idle: Rank 2")


def test_a_server_that_is_busy_is_not_idle(tmp_path: Path) -> None:
    """It is not said of a job in which a rank computes, or that has only just become idle."""
    run = write_run(tmp_path, RANK_2_MISSING, 70)
    declare(run, 2, FOREVER_NS)
    assert causes(look(run, 9)) == []
    at_work = [call for call in RANK_2_MISSING if (call.rank, call.seq) != (3, 4)]
    run = write_run(tmp_path / "at work", at_work, 70)
    declare(run, 2, FOREVER_NS)
    assert ("idle", (2,)) not in causes(look(run, 70))


def test_a_phase_with_an_end_is_no_wait_for_work(tmp_path: Path) -> None:
    """A checkpoint that was declared to take long is healthy, and no verdict calls it idle."""
    run = write_run(tmp_path, RANK_2_MISSING, 70)
    declare(run, 2, START + 500 * SECOND, "checkpoint")
    assert causes(look(run, 70)) == []


def test_a_rank_that_is_stopped_is_not_idle(tmp_path: Path) -> None:
    """A process that a signal stopped cannot wait for work, declared or learned."""
    run = write_run(tmp_path, RANK_2_MISSING, 70)
    declare(run, 2, FOREVER_NS)
    assert "idle" not in dict(causes(look(run, 70, {2: STOPPED})))
    run = write_run(tmp_path / "learned", RANK_2_MISSING, 70)
    remember(run, LINE, 60.0)
    assert causes(look(run, 70, {2: STOPPED})) == [("stopped", (2,))]


def test_all_ranks_wait_for_work(tmp_path: Path) -> None:
    """Every rank may wait for work of its own."""
    run = write_run(tmp_path, THREE_ENDED, 70)
    for rank in range(4):
        declare(run, rank, FOREVER_NS)
    assert causes(look(run, 70)) == [("idle", (0, 1, 2, 3))]


@pytest.mark.parametrize(
    ("line", "lasted", "kind"),
    [
        (LINE, 65.0, "idle"),
        (LINE, 7.5, "idle"),  # a tenth of this wait
        (LINE, 6.0, "missing"),
        (LINE, None, "missing"),  # that hang never ended
        ("train.py:8", 65.0, "missing"),
        ("", 65.0, "missing"),
    ],
)
def test_a_wait_as_before(tmp_path: Path, line: str, lasted: float | None, kind: str) -> None:
    """A wait is likely idle if one at the same line passed, and was not much shorter."""
    run = write_run(tmp_path, RANK_2_MISSING, 70)
    remember(run, line, lasted)
    diagnosis = look(run, 70)
    assert causes(diagnosis) == [(kind, (2,))]
    (finding,) = diagnosis.findings
    if kind == "idle":
        assert finding.confidence == "likely"
        assert not finding.stops
        assert f"a wait at {LINE} lasted" in finding.evidence[0]
        assert "rankcall.expect(math.inf" in finding.advice


def test_a_rank_elsewhere_is_not_idle(tmp_path: Path) -> None:
    """A stack that shows a hanging data loader says more than an earlier wait."""
    run = write_run(tmp_path, RANK_2_MISSING, 70)
    remember(run, LINE, 60.0)
    loader = "torch/utils/data/dataloader.py"
    stack = (
        f'Current thread 0x1 (most recent call first):\n  File "/x/{loader}", line 9 in __next__\n'
        '  File "train.py", line 5 in <module>'
    )
    diagnosis = with_stacks(load(run), look(run, 70), {2: stack})
    assert causes(diagnosis) == [("missing", (2,))]


def test_another_fault_beside_it(tmp_path: Path) -> None:
    """A rank that hangs for another reason is named, although a rank waits for work."""
    calls = [*THREE_ENDED, *unfinished(WORLD, 4, (0, 1), 5 * MS, line=7)]
    run = write_run(tmp_path, [replace(call) for call in calls], 70)
    declare(run, 2, FOREVER_NS)
    assert causes(look(run, 70)) == [("missing", (3,))]


def test_an_idle_job_is_no_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``diagnose`` and ``top`` exit with 0: nothing is wrong."""
    run = write_run(tmp_path, RANK_2_MISSING, 70)
    declare(run, 2, FOREVER_NS)
    idle = look(run, 70)
    monkeypatch.setattr("rankcall.cli.diagnose.diagnose_asking", lambda *_: idle)
    monkeypatch.setattr("rankcall.cli.top.look", lambda *_: idle)
    for command in (["diagnose"], ["top", "--once"]):
        assert main([*command, str(run)]) == 0
        assert "idle" in capsys.readouterr().out


def test_when_a_hang_was_over(tmp_path: Path) -> None:
    """It is kept beside the verdict, and shown; a damaged note counts as none."""
    run = write_run(tmp_path, RANK_2_MISSING, 70)
    remember(run, LINE, 73.25)
    (hang,) = look(run, 70).kept
    assert hang.over_s == pytest.approx(73.25, abs=0.1)
    assert ", over after 73 s" in diagnosis_text(look(run, 70), 120)
    (note,) = run.glob("hangs/*/over.json")
    for text in ("", "{}", '{"seconds": "x"}', '{"seconds": -1}', '{"seconds": NaN}', "[" * 9999):
        note.write_text(text)
        assert kept_in(run)[0].over_s is None, text
