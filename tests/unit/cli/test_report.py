"""``rankcall report`` as a command: what it prints, where, and how it exits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torchless import without_torch
from worlds import MS, PAIR, Call, group_of, together, write_world

from rankcall import cli
from rankcall.budget import Budget
from rankcall.cli import main
from rankcall.ring.reader import Ring, read_ring
from rankcall.ring.tables import Group
from rankcall.run.paths import create_run
from rankcall.testing.synthetic import synthetic_run

SRC = Path(cli.__file__).parents[2]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run of two ranks; rank 1 comes 60 ms late to each of twenty collectives."""
    return write_world(
        tmp_path / "run", [call for n in range(20) for call in late_collective(n, group_of(2))]
    )


def late_collective(number: int, group: Group) -> list[Call]:
    """Return a collective that rank 1 is late to."""
    start = 100 * number * MS
    return together(number + 1, [start, start + 60 * MS], start + 80 * MS, group)


def rankcall(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own."""
    env = {**os.environ, "PYTHONPATH": str(SRC), **options.pop("env", {})}  # type: ignore[dict-item]
    command = [sys.executable, "-m", "rankcall", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=240, env=env, check=False, **options
    )  # type: ignore[call-overload]


def test_report(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The report goes to stdout, nothing to stderr, and the status is 0."""
    assert main(["report", str(run)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("Rank 1 (node-a) came last in 100 % of 20 collectives")
    assert err == ""


def test_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--json prints one object and nothing else."""
    assert main(["report", "--json", str(run)]) == 0
    assert json.loads(capsys.readouterr().out)["stragglers"][0]["rank"] == 1


@pytest.mark.parametrize(
    ("command", "closed", "again"),
    [
        # Rank 1's, for the lines between which it spends its time, and those it is compared with.
        (["report"], True, 3),
        (["report"], False, 3),
        (["report", "--json"], False, 3),
        (["report", "-o", "page.html"], False, 4),  # rank 1's, also for the line it came late from
        (["diagnose"], False, 0),
        (["export", "--to=parquet"], False, 0),
    ],
)
def test_each_ring_is_read_once(
    command: list[str],
    closed: bool,
    again: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A command reads the records of each ring once, but for the few ranks that it looks closer at.

    ``again`` is the number of rings that are read a second time; it does not grow with the ranks. A
    run of several hosts is the exception for ``export``, which compares their clocks before it
    writes.
    """
    world = group_of(3)
    calls = [*together(1, [0, 3 * MS, 0], 4 * MS, world), Call(0, 2, 9 * MS, None, group=world)]
    run = write_world(tmp_path / "run", calls[: None if not closed else 3], closed=lambda _: closed)
    monkeypatch.chdir(tmp_path)
    reads: list[str] = []

    def counting(path: Path, newest: int | None = None, budget: Budget | None = None) -> Ring:
        reads.append(path.name)
        return read_ring(path, newest, budget=budget)

    monkeypatch.setattr("rankcall.run.load.read_ring", counting)
    assert main([command[0], str(run), *command[1:]]) in (0, 1)
    assert len(reads) == 3 + again
    assert len(set(reads)) == 3


def test_the_latest_run(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an argument the latest run below the working directory is meant."""
    monkeypatch.chdir(run.parent)
    target = create_run(Path("rankcall-runs") / "one", {})
    for ring in (run / "rings").iterdir():
        ring.rename(target / "rings" / ring.name)
    assert main(["report"]) == 0
    assert capsys.readouterr().out.startswith("Rank 1")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: None, "no such run"),
        (lambda path: path.mkdir(), "no ring files"),
        (lambda path: path.write_bytes(b"junk"), "not a rankcall ring file"),
        (lambda path: path.write_bytes(b"RANKCALL" + b"\x07" * 9000), "schema"),
    ],
)
def test_what_is_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: object, words: str
) -> None:
    """An error is one line on stderr without a traceback, and the status is 2."""
    make(tmp_path / "x")  # type: ignore[operator]
    assert main(["report", str(tmp_path / "x")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("rankcall: error: ")
    assert words in err
    assert err.count("\n") == 1


def test_damage_is_told_after_the_report(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing rank and a bad ring: the report of the rest, a line each on stderr, status 1."""
    (run / "rings" / "bad.ring").write_bytes(b"\x1b[31mnothing")
    next((run / "rings").glob("rank-00000*")).unlink()
    assert main(["report", str(run)]) == 1
    out, err = capsys.readouterr()
    assert "no records of rank 0" in out
    assert [line.startswith("rankcall: problem: ") for line in err.splitlines()] == [True, True]


@pytest.mark.parametrize("ended", [False, True])
def test_what_stopped_the_run_comes_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ended: bool
) -> None:
    """The missing rank of a hung run is named before the stragglers."""
    calls = [call for number in range(20) for call in late_collective(number, PAIR)]
    if not ended:
        calls.append(Call(0, 21, 2000 * MS, None, line=17))
    beats = None if ended else dict.fromkeys(range(2), (90_000 * MS, 90_000 * MS))
    run = write_world(tmp_path / "run", calls, closed=lambda rank: ended, beats=beats)
    assert main(["report", str(run)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    late = out.index("Rank 1 (node-a) came last in 100 % of 20 collectives")
    if ended:
        assert late == 0
        assert "rankcall diagnose" not in out
    else:
        first = out[:late]
        assert first.startswith("Rank 1 (node-a, pid ")
        assert "all_reduce #21 of group 0 at train.py:17" in first
        assert first.endswith("Where each rank stands: rankcall diagnose. Until then ")


def test_nothing_to_say_is_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No collectives, and a world of one: clear words and status 0."""
    assert main(["report", str(write_world(tmp_path / "a", [], ranks=[0, 1]))]) == 0
    assert "No collectives were recorded" in capsys.readouterr().out
    assert (
        main(["report", str(write_world(tmp_path / "b", [Call(0, 1, 0, MS, group=group_of(1))]))])
        == 0
    )
    assert "A world of one rank" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["report", "--nonsense"], ["report", "a", "b"]]
)
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A run that cannot be understood is one line on stderr."""
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("rankcall: error: ")
    assert err.count("\n") == 1


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a command, and with --help, the commands are listed."""
    assert main([]) == 0
    assert main(["--help"]) == 0
    assert main(["report", "--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("run", "report", "build", "--json"))


def test_interrupted(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C is status 130 and no traceback."""

    def interrupt(*given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rankcall.cli.report.open_run", interrupt)
    assert main(["report", str(run)]) == 130


def test_a_closed_pipe_is_quiet(run: Path) -> None:
    """``rankcall report | head -0`` says nothing on stderr."""
    command = f"'{sys.executable}' -m rankcall report '{run}' | true"
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    done = subprocess.run(["bash", "-c", command], capture_output=True, timeout=240, env=env)
    assert done.stderr == b""


def test_a_terminal_without_unicode(run: Path) -> None:
    """An ASCII terminal gets the report with other characters, not an error."""
    done = rankcall("report", run, env={"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
    assert (done.returncode, done.stderr) == (0, "")
    assert "Rank 1" in done.stdout


def test_reading_imports_no_torch(run: Path) -> None:
    """The report works without torch, and does not import it if it is installed."""
    done = without_torch("report", run, then="assert 'polars' not in sys.modules")
    assert done.returncode == 0, done.stderr


def test_width_follows_the_terminal(run: Path) -> None:
    """COLUMNS decides for a pipe; no line is wider."""
    for width in ("80", "120"):
        out = rankcall("report", run, env={"COLUMNS": width}).stdout
        assert max(map(len, out.splitlines())) <= int(width)


@pytest.mark.parametrize("command", ["report", "diagnose"])
def test_a_pipe_gets_whole_lines(
    tmp_path: Path,
    command: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sentence stays on its line, for grep; COLUMNS still decides if it is set."""
    run = synthetic_run(tmp_path / "run", 4, 400, straggler=3).path
    monkeypatch.delenv("COLUMNS", raising=False)
    main([command, str(run)])
    whole = capsys.readouterr().out
    assert len(whole.splitlines()[0]) > 80
    assert whole.splitlines()[0].endswith(".")
    monkeypatch.setenv("COLUMNS", "60")
    main([command, str(run)])
    wrapped = capsys.readouterr().out
    assert max(map(len, wrapped.splitlines())) <= 60
