"""``rankcall top`` fits on one screen, however many ranks there are."""

from __future__ import annotations

from pathlib import Path

import pytest
from diagnosing import RANK_2_MISSING, diagnose_calls, diagnose_parallel_job
from worlds import write_world

import golden
import rankcall
from rankcall.cli import main
from rankcall.cli.top import look as look_once
from rankcall.report.top import bar, render
from rankcall.run.stacks import OWN_FILES, tidy
from rankcall.testing.model import Planted


def test_a_large_world(tmp_path: Path) -> None:
    """1,024 ranks take a few rows, below the verdict."""
    diagnosis = diagnose_parallel_job(tmp_path, Planted("stopped", (341,), 57))
    for width in (80, 110):
        text = render(diagnosis, width)
        golden.check(f"top-1024-{width}.txt", text)
        assert max(map(len, text.splitlines())) <= width
        assert len(text.splitlines()) <= 20


def test_a_live_job(tmp_path: Path) -> None:
    """For a hang in a live job, the screen has the cause and the advice."""
    golden.check("top-missing.txt", render(diagnose_calls(tmp_path, RANK_2_MISSING, states={})))


def test_healthy(tmp_path: Path) -> None:
    """If all ranks go on, the screen has one green line and one row."""
    golden.check("top-healthy.txt", render(diagnose_parallel_job(tmp_path, ranks=64)))


def test_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--once prints one screen and exits with diagnose's status; an ended job is not followed."""
    diagnose_parallel_job(tmp_path / "hung", Planted("dead", (3,), 21), ranks=8)
    diagnose_parallel_job(tmp_path / "fine", ranks=8)
    assert main(["top", "--once", str(tmp_path / "hung" / "run")]) == 1
    assert "Rank 3 (node-0, pid 1003) was killed by SIGKILL" in capsys.readouterr().out
    assert main(["top", str(tmp_path / "fine" / "run")]) == 0
    assert "healthy  the job has ended" in capsys.readouterr().out
    assert main(["top", "--once", str(tmp_path / "none")]) == 2


def test_ranks_that_have_issued_nothing(tmp_path: Path) -> None:
    """A job that has only begun is healthy, in every view."""
    run = write_world(tmp_path / "run", [], ranks=range(4))
    diagnosis = look_once(run, 60.0)
    assert diagnosis.verdict == "healthy"
    assert "nothing yet" in render(diagnosis)
    assert main(["diagnose", str(run)]) == 0


def test_bars() -> None:
    """A small share is visible, and a full share fills the bar."""
    assert [bar(0), bar(0.0001), bar(1), len(bar(0.5))] == ["", "▏", "█" * 12, 6]


def test_stacks_begin_with_the_users() -> None:
    """The main thread comes first; the recorder's own threads are left out."""
    ours = "\n\n".join(
        f'Thread 0x{n}:\n  File "/x/rankcall/{name}.py", line 83 in _run'
        for n, name in enumerate(OWN_FILES, 4)
    )
    pool = 'Thread 0x2:\n  File "/x/pool.py", line 1 in run'
    main_thread = 'Current thread 0x3:\n  File "/tmp/loop.py", line 8 in <module>'
    assert tidy("\n\n".join([ours, pool, main_thread])) == f"{main_thread}\n\n{pool}"


def test_the_main_thread_is_shown_wherever_it_stands() -> None:
    """It may hang in a file whose threads only observe, for example in ``watch.start``."""
    main_thread = (
        'Current thread 0x3:\n  File "/x/rankcall/job/watcher.py", line 78 in start\n'
        '  File "/tmp/loop.py", line 8 in <module>'
    )
    pool = 'Thread 0x2:\n  File "/x/pool.py", line 1 in run'
    assert tidy(f"{pool}\n\n{main_thread}") == f"{main_thread}\n\n{pool}"


def test_the_files_of_our_own_threads_are_known() -> None:
    """Every file that starts a thread which only observes is in the list, and no other."""
    root = Path(rankcall.__file__).parent
    starting = {
        path.relative_to(root).with_suffix("").as_posix()
        for path in root.rglob("*.py")
        if "threading.Thread(" in path.read_text()
    }
    # These two do what the user's code asks for: a stack that waits in them is worth showing.
    assert starting - {"background", "join/error_channel"} == set(OWN_FILES)
