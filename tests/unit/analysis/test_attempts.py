"""All attempts of a job on one line of time: which there were, and when nothing went on."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankcall.analysis.attempts import Attempt, Attempts, attempts_of
from rankcall.cli import main
from rankcall.printable import always_writable
from rankcall.report.attempts_line import bar, in_words
from rankcall.run.recoveries import AttemptEnd, AttemptStart, Signature, file_of, note
from rankcall.serve.history import History
from rankcall.serve.live_run import LiveRun
from rankcall.serve.view import sections
from rankcall.testing import synthetic_run

S = 1_000_000_000


def end(restart: int, fault_s: int, stopped_s: int, **more: object) -> AttemptEnd:
    """Return the end of an attempt by a fault at a time, whose workers were gone at another."""
    ended = AttemptEnd(
        restart,
        Signature("stopped"),
        "machine",
        culprits=(1,),
        step=12,
        fault_ns=fault_s * S,
        noticed_ns=stopped_s * S - 1,
        stopped_ns=stopped_s * S,
        decision="restart",
    )
    return replace(ended, **more)  # type: ignore[arg-type]


def noted(run_dir: Path, agent: int, *events: AttemptStart | AttemptEnd) -> None:
    """Have an agent of node-a note events."""
    for event in events:
        note(file_of(run_dir, "node-a", agent), event)


def spans(known: Attempts) -> list[tuple[int, float, float]]:
    """Return restart, begin and end of each attempt's work, in s."""
    return [
        (attempt.restart, attempt.began_ns / S, attempt.worked_until_ns / S)
        for attempt in known.attempts
    ]


def test_a_restart(tmp_path: Path) -> None:
    """Nothing went on from the fault until the next attempt began."""
    noted(tmp_path, 1, AttemptStart(0, 10 * S), end(0, 30, 38), AttemptStart(1, 40 * S))
    known = attempts_of(tmp_path, 110 * S)
    assert spans(known) == [(0, 10, 30), (1, 40, 110)]
    assert known.downs_ns == [(30 * S, 40 * S)]
    assert bar(known, 10) == "██░███████"
    assert bar(known, 5) == "█▒███"
    assert sum(known.down_shares(7)) / 7 == pytest.approx(10 / 100)
    assert in_words(known) == ("2 attempts, 10.0 s down; last failure: stopped (rank 1) at step 12")


def test_a_short_pause_is_seen(tmp_path: Path) -> None:
    """A column in which nothing went on for a thousandth of its time is not a full one."""
    noted(tmp_path, 1, AttemptStart(0, S), end(0, 1500, 1501), AttemptStart(1, 1502 * S))
    drawn = bar(attempts_of(tmp_path, 10_001 * S), 4)
    assert drawn == "▓███"


def test_a_job_that_ended_by_its_failure(tmp_path: Path) -> None:
    """The line goes on to the end of its workers."""
    noted(tmp_path, 1, AttemptStart(0, 10 * S), end(0, 30, 50, decision="stop"))
    known = attempts_of(tmp_path, 31 * S)
    assert spans(known) == [(0, 10, 30)]
    assert known.downs_ns == [(30 * S, 50 * S)]


def test_launchers_one_after_the_other(tmp_path: Path) -> None:
    """One that was killed noted no end; what came after it is on the same line."""
    noted(tmp_path, 1, AttemptStart(0, 10 * S))
    noted(tmp_path, 2, AttemptStart(0, 60 * S), end(0, 70, 80))
    noted(tmp_path, 3, AttemptStart(0, 100 * S))
    assert spans(attempts_of(tmp_path, 110 * S)) == [(0, 10, 60), (0, 60, 70), (0, 100, 110)]


def test_nodes_beside_each_other_count_once(tmp_path: Path) -> None:
    """Each node's agent notes the same attempts."""
    for agent in (1, 2):
        noted(
            tmp_path,
            agent,
            AttemptStart(0, 10 * S + agent),
            end(0, 30, 38),
            AttemptStart(1, 40 * S + agent),
        )
    assert len(attempts_of(tmp_path, 50 * S).attempts) == 2


def test_a_job_that_was_not_supervised(tmp_path: Path) -> None:
    """There is no line, of whatever length."""
    known = attempts_of(tmp_path, 50 * S)
    assert (known.attempts, known.down_shares(3), bar(known, 3)) == ((), [], "")


def test_times_that_contradict_each_other(tmp_path: Path) -> None:
    """A clock was put back: no share is above 1 or below 0, and no attempt ends before it began."""
    noted(tmp_path, 1, AttemptStart(0, 90 * S), end(0, 5, 99), AttemptStart(1, 95 * S))
    known = attempts_of(tmp_path, 1)
    assert all(attempt.began_ns <= attempt.worked_until_ns for attempt in known.attempts)
    assert all(0 <= share <= 1 for share in known.down_shares(9))


def test_where_it_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Report, page, JSON and ``top`` have it for two attempts, and nothing for one."""
    run = tmp_path / "run"
    synthetic_run(run, 2, 40)
    noted(run, 1, AttemptStart(0, 10 * S))
    assert main(["report", str(run)]) == 0
    assert "All attempts" not in capsys.readouterr().out
    noted(run, 1, end(0, 30, 38), AttemptStart(1, 40 * S))
    words = "last failure: stopped (rank 1) at step 12"
    assert main(["report", str(run)]) == 0
    out = capsys.readouterr().out
    assert "All attempts" in out
    assert words in out
    main(["top", "--once", str(run)])
    assert words in capsys.readouterr().out
    assert main(["report", str(run), "--json"]) == 0
    attempts = json.loads(capsys.readouterr().out)["attempts"]
    assert [attempt["restart"] for attempt in attempts] == [0, 1]
    assert (attempts[0]["kind"], attempts[0]["culprits"]) == ("stopped", [1])
    assert attempts[1]["kind"] is None
    assert main(["report", str(run), "-o", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert words in page
    (width,) = re.findall(r'<rect class="down" x="[0-9.]+" width="([0-9.]+)"', page)
    assert float(width) == 0.1, "10 s of decades are seen all the same"


def test_the_live_page(tmp_path: Path) -> None:
    """It has the same line above its verdict, at each look at a job that is over or runs."""
    pytest.importorskip("jinja2", reason="needs rankcall[report]")
    run = tmp_path / "run"
    synthetic_run(run, 2, 40)
    live = LiveRun(run)
    noted(run, 1, AttemptStart(0, 10 * S))
    assert 'class="attempts"' not in sections(live.look(), History())["verdict"]
    noted(run, 1, end(0, 30, 38), AttemptStart(1, 40 * S))
    for _ in range(2):  # the second look takes the verdict of the first
        verdict = sections(live.look(), History())["verdict"]
        assert verdict.count('<rect class="down"') == 1
        assert "last failure: stopped (rank 1) at step 12" in verdict


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=8),
    st.integers(0, 40),
    st.integers(1, 60),
)
def test_shares_are_those_of_counting_every_nanosecond(
    lengths: list[int], until_ns: int, parts: int
) -> None:
    """Attempts and pauses of some nanoseconds, against a count of the nanoseconds of each part."""
    times = list(accumulate(lengths, initial=1000))
    attempts = [Attempt(0, begin, end) for begin, end in zip(times[::2], times[1::2], strict=False)]
    known = Attempts(attempts, times[-1] + until_ns)
    whole = range(known.began_ns, known.until_ns)
    is_down = {time for begin, end in known.downs_ns for time in range(begin, end)}
    cuts = [len(whole) * part // parts for part in range(parts + 1)]
    cut = [whole[since:until] for since, until in pairwise(cuts)] if whole else []
    expected = [sum(time in is_down for time in part) / max(1, len(part)) for part in cut]
    assert known.down_shares(parts) == pytest.approx(expected)


def test_of_a_file_with_very_many_events_the_newest_are_read(tmp_path: Path) -> None:
    """Whoever can write the file cannot keep a reader busy for hours."""
    file = file_of(tmp_path, "node-a", 1)
    noted(tmp_path, 1, AttemptStart(0, S))
    line = json.dumps({"start": {"restart": 1, "epoch_ns": 2 * S}})
    with file.open("a") as out:
        out.write(f"{line}\n" * 200_000)
    known = attempts_of(tmp_path, 3 * S)
    assert known.began_ns == 2 * S
    assert len(known.attempts) < 10_000


def test_the_line_can_be_read_without_blocks(tmp_path: Path) -> None:
    """In ASCII, a column in which nothing went on differs from one in which an attempt worked."""
    noted(tmp_path, 1, AttemptStart(0, 10 * S), end(0, 30, 38), AttemptStart(1, 40 * S))
    drawn = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    always_writable(drawn)
    drawn.write(bar(attempts_of(tmp_path, 110 * S), 10))
    drawn.flush()
    assert drawn.buffer.getvalue() == b"##-#######"  # type: ignore[attr-defined]


def test_an_end_without_a_start(tmp_path: Path) -> None:
    """It is no attempt whose time is known, and the attempts of other agents are shown."""
    note(file_of(tmp_path, "node-a", 1), end(0, 5, 6))
    assert attempts_of(tmp_path, 9 * S) == Attempts()
    note(file_of(tmp_path, "node-b", 1), AttemptStart(0, 1 * S))
    assert [attempt.began_ns for attempt in attempts_of(tmp_path, 9 * S).attempts] == [1 * S]
