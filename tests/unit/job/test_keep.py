"""Verdicts in the run directory have a number each, and are read back unchanged."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest
from diagnosing import (
    MISSING_AND_DESYNC,
    RANK_2_MISSING,
    any_verdict,
    diagnose_calls,
    received_verdict,
)

from rankcall.analysis.verdicts.decoding import decode
from rankcall.analysis.verdicts.encoding import encode
from rankcall.analysis.verdicts.finding import Finding
from rankcall.analysis.verdicts.kept import kept_in, whole_verdict
from rankcall.analysis.verdicts.verdict import Verdict
from rankcall.job import keep
from rankcall.job.keep import keep_verdict, text_of
from rankcall.job.news import is_news
from rankcall.run.hangs import kept_lines
from rankcall.run.paths import live_dir
from rankcall.run.settle import settle


def later_than_5(kept: Verdict) -> bool:
    """Say so of verdicts that were made later than 5 ns."""
    return kept.origin.epoch_ns > 5


def test_findings_come_back() -> None:
    """Findings are the same after JSON, and the text names the first one."""
    verdict = received_verdict(MISSING_AND_DESYNC)
    assert verdict.findings == MISSING_AND_DESYNC
    assert "missing" in text_of(verdict)


def test_a_verdict_reads_as_its_judge_printed_it(tmp_path: Path) -> None:
    """Every node renders the verdict that it receives; its text is the judge's."""
    ends = {1: (-9, 61.0)}
    for name, options in (
        ("missing", {"states": {}, "hosts": {0: "a", 1: "a", 2: "b", 3: "b"}}),
        ("dead", {"states": {1: "gone"}, "exits": ends}),
        ("ended", {"states": dict.fromkeys(range(4), "gone"), "closed": (0,)}),
    ):
        calls = RANK_2_MISSING if name != "dead" else [c for c in RANK_2_MISSING if c.rank != 1]
        judged = diagnose_calls(tmp_path / name, calls, **options)  # type: ignore[arg-type]
        read = decode(encode(judged))
        assert text_of(read) == text_of(judged)
        assert (read.kind, read.culprits, read.problems) == (
            judged.kind,
            judged.culprits,
            judged.problems,
        )
        assert [place.shown_state for place in read.ranks] == [
            place.shown_state for place in judged.ranks
        ]
        assert decode(encode(judged), with_ranks=False).ranks == []


POSITION = json.loads(encode(received_verdict(MISSING_AND_DESYNC)))["ranks"][0]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, value) for key in ("rank", "pid", "exit", "seq") for value in ("1", 1.5, 1 << 70)),
        *((key, 7) for key in ("host", "state", "group", "op", "call_site", "user_line")),
        ("rank", -1),
        ("op", "x" * (1 << 15)),
        ("age_s", "now"),
        ("age_s", float("nan")),
        ("group_size", [1]),
    ],
)
def test_a_hostile_position_is_refused(key: str, value: object) -> None:
    """Anybody can write into a store; a verdict with a damaged position is damaged."""
    verdict = json.loads(encode(received_verdict(MISSING_AND_DESYNC)))
    verdict["ranks"][0] = {**POSITION, key: value}
    with pytest.raises(ValueError, match=r"not a|too long|impossible"):
        decode(json.dumps(verdict).encode())


def test_numbers_and_stacks(tmp_path: Path) -> None:
    """A verdict has a folder with text, JSON and stacks; damaged or partial ones are left out."""
    first = keep_verdict(
        tmp_path, received_verdict(MISSING_AND_DESYNC, 5), {2: "Thread 1"}, any_verdict
    )
    second = keep_verdict(tmp_path, received_verdict(MISSING_AND_DESYNC, 9), {}, later_than_5)
    assert (first, second) == (tmp_path / "hangs/0001", tmp_path / "hangs/0002")
    assert (tmp_path / "hangs/0001/stacks/rank-00002.txt").read_text() == "Thread 1\n"
    assert not (tmp_path / "hangs/0002/stacks").exists()
    assert "missing" in (tmp_path / "hangs/0001/verdict.txt").read_text()
    assert json.loads((tmp_path / "hangs/0001/verdict.json").read_text())["verdict"] == "missing"
    (tmp_path / "hangs/0003").mkdir()
    (tmp_path / "hangs/0004").mkdir()
    (tmp_path / "hangs/0004/verdict.json").write_text("[1, 2")
    assert [kept.verdict.origin.epoch_ns for kept in kept_in(tmp_path)] == [5, 9]
    written = (tmp_path / "hangs/0001/verdict.txt").read_text()
    assert text_of(whole_verdict(kept_in(tmp_path)[0])) == written


def test_of_two_equal_verdicts_one_is_kept(tmp_path: Path) -> None:
    """If several leaders give the same verdict at once, one is kept, and it is complete."""
    others = [Finding("stopped", (3,))]
    places: list[Path | None] = []

    def keep(findings: list[Finding], epoch_ns: int) -> None:
        places.append(keep_verdict(tmp_path, received_verdict(findings, epoch_ns), {}, any_verdict))

    threads = [
        threading.Thread(target=keep, args=(findings, 5 + number))
        for number, findings in enumerate([MISSING_AND_DESYNC] * 3 + [others] * 3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(place.name for place in places if place) == ["0001", "0002"]
    assert places.count(None) == 4
    kinds = [kept.verdict.kind for kept in kept_in(tmp_path)]
    assert sorted(kinds) == ["missing", "stopped"]
    assert sorted(place.name for place in (tmp_path / "hangs").iterdir()) == ["0001", "0002"]


def test_the_stacks_of_other_nodes_are_added(tmp_path: Path) -> None:
    """A second node adds its stacks to a kept verdict, and keeps no second one."""
    places = {
        keep_verdict(
            tmp_path, received_verdict(MISSING_AND_DESYNC, 5), {rank: f"of {rank}"}, any_verdict
        )
        for rank in (2, 3)
    }
    assert places == {tmp_path / "hangs/0001"}
    stacks = {file.name: file.read_text() for file in (tmp_path / "hangs/0001/stacks").iterdir()}
    assert stacks == {"rank-00002.txt": "of 2\n", "rank-00003.txt": "of 3\n"}


def program(folder: Path, name: str) -> tuple[str, str]:
    """Write a program that is older than this process; return its second line, and a stack."""
    file = folder / name
    file.write_text("import time\n    time.sleep(60)  #  no  answer\n")
    os.utime(file, (1, 1))
    return (
        f"{file}:2",
        f'  File "{file}", line 2 in load_batch\n  File "{file}", line 1 in <module>',
    )


def test_the_source_text_of_where_ranks_stood_is_kept(tmp_path: Path) -> None:
    """Each node keeps that of its ranks, but none of a file that may not be what they run."""
    verdict, texts = received_verdict(MISSING_AND_DESYNC, 5), {}
    for rank, name in enumerate(("first.py", "second.py")):
        line, stack = program(tmp_path, name)
        place = keep_verdict(tmp_path / "run", verdict, {rank: stack}, any_verdict)
        assert place is not None
        texts[line] = "time.sleep(60) # no answer"
        assert kept_lines(place) == texts
    _, stack = program(tmp_path, "changed.py")
    os.utime(tmp_path / "changed.py")
    assert keep_verdict(tmp_path / "run", verdict, {2: stack}, any_verdict) == place
    assert kept_lines(place) == texts


def test_a_disk_that_has_the_program_and_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verdict and the stacks are kept without the source text."""
    _, stack = program(tmp_path, "train.py")
    answers = threading.Event()

    def text_at(_file: str, _line: int) -> str:
        answers.wait(100)
        return "too late"

    monkeypatch.setattr(keep, "text_at", text_at)
    monkeypatch.setattr(keep, "_READ_S", 0.01)
    try:
        verdict = received_verdict(MISSING_AND_DESYNC, 5)
        place = keep_verdict(tmp_path / "run", verdict, {0: stack}, any_verdict)
    finally:
        answers.set()
    assert place is not None
    assert (place / "stacks/rank-00000.txt").read_text() == f"{stack}\n"
    assert kept_lines(place) == {}


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'{"train.py:7": 3}', b"[" * 100_000, b"\xff"])
def test_damaged_source_text_is_none(raw: bytes, tmp_path: Path) -> None:
    """The file is read as hostile."""
    (tmp_path / "lines.json").write_bytes(raw)
    assert kept_lines(tmp_path) == {}


def test_no_verdicts(tmp_path: Path) -> None:
    """A run without a hang has no verdicts."""
    assert kept_in(tmp_path) == []


def test_what_is_new() -> None:
    """A finding is news unless an earlier verdict named its ranks."""
    now = time.time_ns()
    earlier = [received_verdict([Finding("missing", (2,))], now)]
    assert not is_news([], [])
    assert is_news([Finding("missing", (2,))], [])
    assert is_news([Finding("desync", ())], [])
    assert not is_news([Finding("missing", (2,))], earlier)
    assert not is_news([Finding("dead", (2,))], earlier)
    assert not is_news([Finding("desync", ())], earlier)
    assert is_news([Finding("missing", (2,)), Finding("stopped", (3,))], earlier)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"{}",
        b'{"findings": 3}',
        b'{"findings": [], "hang": 7}',
        b'{"findings": ["x"], "hang": {"epoch_ns": 1}}',
        b'{"findings": [], "hang": {"epoch_ns": 1e300}}',
        b'{"findings": [], "hang": {"epoch_ns": Infinity}}',
        b'{"findings": [], "hang": {"epoch_ns": 1, "mono_ns": "soon"}}',
        b'{"findings": [], "hang": {"epoch_ns": 1, "mono_ns": -1}}',
        b"[" * 100_000,
        b"\x80\x04.",
    ],
)
def test_a_damaged_verdict_is_refused(raw: bytes, tmp_path: Path) -> None:
    """``decode`` raises for a damaged verdict, and a reader of the run leaves it out."""
    with pytest.raises(ValueError, match=r"."):
        decode(raw)
    place = tmp_path / "hangs/0001"
    place.mkdir(parents=True)
    (place / "verdict.json").write_bytes(raw)
    assert kept_in(tmp_path) == []


def test_a_run_that_this_user_may_not_read(tmp_path: Path) -> None:
    """After setuid, a run may be closed to its own process: it then has no verdicts."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    verdict = received_verdict(MISSING_AND_DESYNC, 5)
    keep_verdict(tmp_path / "run", verdict, {}, any_verdict)
    for closed in (tmp_path / "run/hangs", tmp_path / "run"):
        tmp_path.chmod(0o755)
        closed.chmod(0o700)
        os.seteuid(65534)
        try:
            assert kept_in(tmp_path / "run") == []
        finally:
            os.seteuid(0)
    assert len(kept_in(tmp_path / "run")) == 1


def test_a_run_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the run directory is read-only, the verdict is kept beside the live rings, then moved."""
    monkeypatch.setenv("RANKCALL_SHM", str(tmp_path / "shm"))
    run = tmp_path / "run"
    run.mkdir()
    (run / "hangs").write_text("in the way")
    place = keep_verdict(run, received_verdict(MISSING_AND_DESYNC, 5), {2: "Thread 1"}, any_verdict)
    assert place == live_dir(run) / "hangs/0001"
    assert [kept.verdict.origin.epoch_ns for kept in kept_in(run)] == [5]
    settle(run)
    assert [kept.folder for kept in kept_in(run)] == [place]
    (run / "hangs").unlink()
    settle(run)
    (kept,) = kept_in(run)
    assert kept.folder == run / "hangs/0001"
    assert (run / "hangs/0001/stacks/rank-00002.txt").read_text() == "Thread 1\n"
    assert (run / "hangs/0001/verdict.txt").read_text() == text_of(whole_verdict(kept))
    assert not live_dir(run).exists()
