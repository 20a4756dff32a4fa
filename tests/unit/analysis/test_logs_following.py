"""Logs that are still written: when a verdict is given, and what rotation and truncation lose."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rankcall.analysis.logs.following import follow_logs
from rankcall.analysis.verdicts.verdict import Verdict
from rankcall.cli import main
from rankcall.errors import CorruptRunError

REAL = Path(__file__).parents[2] / "logs"
RAISE = (REAL / "gloo-raise.log").read_text()


class Clock:
    """A clock that does what a test planned for each second, and counts them."""

    def __init__(self, plan: dict[int, Callable[[], object]] | None = None) -> None:
        self.seconds = 0.0
        self.plan = plan or {}

    def __call__(self) -> float:
        """Return the time."""
        return self.seconds

    def sleep(self, seconds: float) -> None:
        """Let time go on."""
        before, self.seconds = int(self.seconds), self.seconds + seconds
        for moment in range(before, int(self.seconds)):
            self.plan.get(moment, lambda: None)()

    def follow(self, *paths: Path, seconds: float = 100.0) -> Verdict:
        """Follow logs by this clock."""
        return follow_logs(paths, seconds, now=self, sleep=self.sleep)


def write(path: Path, text: str) -> Callable[[], object]:
    """Return the act of a program that appends to a log."""

    def act() -> None:
        with path.open("a") as file:
            file.write(text)

    return act


def cause(verdict: Verdict) -> tuple[str, tuple[int, ...]]:
    """Return the kind and the ranks of the first finding."""
    return verdict.findings[0].kind, verdict.findings[0].ranks


def test_a_verdict_once_the_log_is_clear(tmp_path: Path) -> None:
    """The log begins later, grows by half lines, and is judged 5 s after its last line."""
    log, cut = tmp_path / "job.log", len(RAISE) // 2
    clock = Clock({3: write(log, "step 1\n"), 20: write(log, RAISE[:cut])})
    clock.plan[22] = write(log, RAISE[cut:])
    assert cause(clock.follow(log)) == ("dead", (2,))
    assert 26 <= clock.seconds <= 30


def test_a_log_that_never_is_quiet(tmp_path: Path) -> None:
    """Ranks that go on to write about the failure put the verdict off by 30 s at most."""
    log = tmp_path / "job.log"
    log.write_text(RAISE)
    line = "[rank0]: RuntimeError: Connection closed by peer [::1]:1\n"
    clock = Clock(dict.fromkeys(range(100), write(log, line)))
    assert cause(clock.follow(log)) == ("dead", (2,))
    assert 30 <= clock.seconds <= 32


def test_what_names_nobody_is_followed_to_the_deadline(tmp_path: Path) -> None:
    """An undecided log goes on, and the verdict at the deadline says what is known."""
    log = tmp_path / "job.log"
    log.write_text((REAL / "gloo-timeout.log").read_text())
    clock = Clock()
    assert cause(clock.follow(log, seconds=50.0)) == ("undecided", ())
    assert clock.seconds == pytest.approx(50.0)
    clock = Clock({60: write(log, RAISE)})
    assert cause(clock.follow(log)) == ("dead", (2,))


def test_a_healthy_log(tmp_path: Path) -> None:
    """A job that goes on to the deadline has nothing found."""
    log = tmp_path / "job.log"
    clock = Clock(dict.fromkeys(range(50), write(log, "step loss 0.1\n")))
    assert cause(clock.follow(log, seconds=40.0)) == ("nothing_found", ())


@pytest.mark.parametrize("name", ["job.log.1", "job-20260314.log"])
def test_a_rotated_log(tmp_path: Path, name: str) -> None:
    """The lines before the rotation count as well, in another file beside the new one."""
    log, lines = tmp_path / "job.log", RAISE.splitlines(keepends=True)
    half = len(lines) // 2
    log.write_text("".join(lines[:half]))
    clock = Clock({2: lambda: os.rename(log, tmp_path / name)})
    clock.plan[3] = write(log, "".join(lines[half:]))
    verdict = clock.follow(log)
    assert cause(verdict) == ("dead", (2,))
    assert verdict.problems == []
    assert {line.partition(":")[0] for line in verdict.findings[0].evidence} & {"job.log", name}


@pytest.mark.parametrize("how", ["truncated", "replaced"])
def test_a_log_that_loses_its_lines(tmp_path: Path, how: str) -> None:
    """The verdict is that of the rest, and a problem says that lines are lost."""
    log = tmp_path / "job.log"
    log.write_text("step 1\n" * 10_000)

    def lose() -> None:
        if how == "truncated":
            log.write_text("")
        else:
            (tmp_path / "new").write_text("")
            os.replace(tmp_path / "new", log)

    clock = Clock({2: lose, 4: write(log, RAISE)})
    verdict = clock.follow(log)
    assert cause(verdict) == ("dead", (2,))
    (problem,) = verdict.problems
    assert problem.startswith(f"job.log: was {how} while it was followed")


def test_a_folder_that_gets_logs(tmp_path: Path) -> None:
    """Logs of ranks that begin later are followed as well."""
    clock = Clock({5: write(tmp_path / "rank_2.log", RAISE)})
    assert cause(clock.follow(tmp_path)) == ("dead", (2,))


def test_no_log_at_all(tmp_path: Path) -> None:
    """A log that never comes is an error at the deadline, and not before."""
    clock = Clock()
    with pytest.raises(CorruptRunError, match=r"never\.log"):
        clock.follow(tmp_path / "never.log", seconds=9.0)
    assert clock.seconds == pytest.approx(9.0)


def test_the_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--follow`` has a deadline, exits like ``diagnose``, and needs files."""
    log = tmp_path / "job.log"
    log.write_text(RAISE)
    assert main(["diagnose", "--log", str(log), "--follow", "0"]) == 1
    assert capsys.readouterr().out.startswith("dead (likely): Rank 2")
    assert main(["diagnose", "--follow", "1"]) == 2
    assert main(["diagnose", "--log", "-", "--follow", "1"]) == 2
    assert "--follow needs the files" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--log", "--follow", "job.log"], "--log needs a file, and --follow is none"),
        (["--log", "job.log", "--follow", "job.log"], "not a number of seconds: 'job.log'"),
        (["--log", "job.log", "--follow", "nan"], "not a number of seconds: 'nan'"),
    ],
)
def test_options_in_the_wrong_order(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An option is not read as a file, nor a file as seconds; the error shows what to write."""
    assert main(["diagnose", *arguments]) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert "write it as in --log FILE --follow 600" in error
