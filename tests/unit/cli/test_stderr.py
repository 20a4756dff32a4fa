"""The launcher keeps the end of each rank's stderr, and harms neither the rank nor its words.

A rank is played by descriptors that are opened as torchrun opens them. The launcher's own stderr is
a pipe of the test.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankcall.cli import stderr
from rankcall.process import host_name
from rankcall.run.stderr_tails import KEPT, STDERR, tails_of


class Launcher:
    """A launcher whose stderr is a pipe, and what can be read from it."""

    def __init__(self, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run_dir, self.restarts = run_dir, 0
        self.reading, self.writing = os.pipe()
        monkeypatch.setattr(stderr, "OWN", self.writing)  # pytest has replaced descriptor 2
        monkeypatch.setenv(stderr.FOLDER, str(run_dir))

    def start(self, ranks: int = 1, **stderrs: str) -> tuple[list[str], list[dict[str, str]]]:
        """Return the files and the environment of ranks that torchrun is about to start."""
        envs = {
            number: {"RANK": str(number), "TORCHELASTIC_RESTART_COUNT": str(self.restarts)}
            for number in range(ranks)
        }
        files = {number: stderrs.get(f"of_{number}", "") for number in range(ranks)}
        stderr.keep(files, envs)
        self.restarts += 1
        return [files[number] for number in range(ranks)], [envs[n] for n in range(ranks)]

    def read_until(self, end: bytes) -> bytes:
        """Return what comes out of the launcher's stderr, up to these bytes."""
        data = b""
        while not data.endswith(end):
            piece = os.read(self.reading, 65536)
            assert piece, data
            data += piece
        return data

    def close(self) -> None:
        """End the thread, and close the pipe."""
        stderr.finish()
        os.close(self.writing)
        os.close(self.reading)


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launcher]:
    """Return a launcher, and take it down."""
    made = Launcher(tmp_path, monkeypatch)
    try:
        yield made
    finally:
        made.close()


def opened(name: str, flags: int = os.O_TRUNC) -> int:
    """Open a rank's stderr as ``open(name, "w")`` does, which is how torchrun opens it."""
    return os.open(name, os.O_WRONLY | flags)


def test_words_arrive_and_are_kept(launcher: Launcher) -> None:
    """Lines of two ranks come out of the launcher, each whole; the run has each rank's own."""
    (first, second), _ = launcher.start(2)
    for number, name in enumerate((first, second)):
        os.write(opened(name), f"line of {number}\nhalf".encode())
    stderr.finish()
    out = launcher.read_until(b"half")
    assert sorted(out.decode().replace("half", "").splitlines()) == ["line of 0", "line of 1"]
    tails = tails_of(launcher.run_dir, [0, 1])
    assert {tail.rank: tail.text() for tail in tails} == {
        0: "line of 0\nhalf",
        1: "line of 1\nhalf",
    }
    assert {tail.host for tail in tails} == {host_name()}
    assert {oct(tail.path.stat().st_mode & 0o777) for tail in tails} == {"0o600"}


def test_a_rank_never_waits_for_a_reader(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If nobody reads the launcher's stderr, the rank writes on, and the tail is kept."""
    monkeypatch.setattr(stderr, "EXIT_S", 0.2)
    (name,), _ = launcher.start()
    rank = opened(name)
    for _ in range(64):
        os.write(rank, b"x" * 65535 + b"\n")  # 4 MiB; a pipe would have taken 64 KiB
    stderr.finish()  # gives up after its deadline
    kept = tails_of(launcher.run_dir, [0])[0].text()
    assert KEPT - 65536 <= len(kept) <= KEPT
    assert set(kept) == {"x", "\n"}


def test_memory_is_given_back(launcher: Launcher) -> None:
    """What was copied is cut out of the file, so it holds no more than what nobody has read."""
    (name,), _ = launcher.start()
    rank = opened(name)
    drained = threading.Thread(target=launcher.read_until, args=(b"end\n",))
    drained.start()
    for _ in range(8):
        os.write(rank, b"x" * 65535 + b"\n")
    os.write(rank, b"end\n")
    drained.join(20)
    assert not drained.is_alive()
    size = os.fstat(rank).st_size
    assert size == 8 * 65536 + 4
    stderr.finish()
    assert os.fstat(rank).st_blocks * 512 <= 65536


def test_a_rank_outlives_the_launcher(launcher: Launcher) -> None:
    """After the launcher has stopped reading, a rank writes without an error."""
    (name,), _ = launcher.start()
    rank = opened(name)
    stderr.finish()
    assert os.write(rank, b"still here\n") == 11


def test_a_reader_that_went_away_does_no_harm(launcher: Launcher) -> None:
    """If the reader of the launcher's stderr has closed it, words are kept all the same."""
    (name,), _ = launcher.start()
    os.close(launcher.reading)
    launcher.reading = os.open(os.devnull, os.O_RDONLY)
    os.write(opened(name), b"last words\n")
    stderr.finish()
    assert tails_of(launcher.run_dir, [0])[0].text() == "last words\n"


@pytest.mark.parametrize("flags", [os.O_TRUNC, os.O_APPEND])
def test_programs_that_open_stderr_anew(launcher: Launcher, flags: int) -> None:
    """A shell's ``> /dev/stderr`` and ``>> /dev/stderr`` lose no line of those around them."""
    (name,), (variables,) = launcher.start()
    rank = opened(name)
    status = os.fstat(rank)
    assert variables["RANKCALL_STDERR_FILE"] == f"{status.st_dev}:{status.st_ino}"
    os.set_blocking(rank, True)
    os.close(rank)
    rank = opened(name, os.O_APPEND)  # as ``_rankcall_hook`` makes it
    os.write(rank, b"before, and long\n")
    assert launcher.read_until(b"long\n") == b"before, and long\n"
    # Until the copy is cut out, a file that was emptied looks like one that grew.
    while os.pread(descriptor := os.open(name, os.O_RDONLY), 1, 0) != b"\0":
        os.close(descriptor)
    os.close(descriptor)
    os.write(opened(name, flags), b"from a shell\n")
    os.write(rank, b"after, longer than all that there was before\n")
    out = launcher.read_until(b"there was before\n")
    assert out == b"from a shell\nafter, longer than all that there was before\n"


def test_a_file_of_the_user_is_only_read(launcher: Launcher, tmp_path: Path) -> None:
    """With --redirects or --tee, torchrun sends stderr into a file: it stays where it is."""
    log = tmp_path / "stderr.log"
    (name,), (variables,) = launcher.start(of_0=str(log))
    assert name == str(log)
    assert "RANKCALL_STDERR_FILE" not in variables
    log.write_text("into the file\n")
    stderr.finish()
    assert log.read_text() == "into the file\n"
    assert tails_of(launcher.run_dir, [0])[0].text() == "into the file\n"
    os.set_blocking(launcher.reading, False)
    with pytest.raises(BlockingIOError):
        os.read(launcher.reading, 1)


def test_restarts_keep_the_newest_tails(launcher: Launcher) -> None:
    """torchrun may restart the ranks for days: the tails of the last four starts are kept."""
    for restart in range(7):
        (name,), _ = launcher.start()
        os.write(opened(name), f"start {restart}\n".encode())
    stderr.finish()
    texts = [tail.text() for tail in tails_of(launcher.run_dir, [0])]
    assert texts == [f"start {restart}\n" for restart in (6, 5, 4, 3)]


def test_a_terminal_is_left_alone(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """If stderr is a terminal, the rank inherits it, as programs look for one there."""
    monkeypatch.setattr(os, "isatty", lambda fd: True)
    (name,), (variables,) = launcher.start()
    assert name == ""
    assert "RANKCALL_STDERR_FILE" not in variables
    assert not (tmp_path / STDERR).exists()


def test_without_a_folder_words_go_on(launcher: Launcher) -> None:
    """A run directory that cannot be written costs the tails, and nothing else."""
    (launcher.run_dir / STDERR).write_text("in the way")
    (name,), _ = launcher.start()
    os.write(opened(name), b"words\n")
    assert launcher.read_until(b"words\n") == b"words\n"


def test_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's own --logs-specs, --run-path and the switch leave torchrun as it is."""
    found = ["an entry point"]
    monkeypatch.setattr(stderr, "entry_points", lambda **_: found)
    assert stderr.options_for(["--nproc-per-node", "2", "train.py"]) == ["--logs-specs=rankcall"]
    assert stderr.options_for(["--logs_specs=mine", "train.py"]) == []
    assert stderr.options_for(["--run-path", "train.py"]) == []
    monkeypatch.setenv(stderr.SWITCH, "0")
    assert stderr.options_for(["train.py"]) == []
    monkeypatch.delenv(stderr.SWITCH)
    found.clear()  # rankcall was installed before this version, or torchrun is another Python's
    assert stderr.options_for(["train.py"]) == []


def test_a_process_without_stderr_is_recorded() -> None:
    """The hook goes on if stderr, which it would share with the launcher, is closed."""
    source = Path(__file__).parents[3] / "src"
    program = (
        f"import os, sys; os.close(2); sys.path.insert(0, {str(source)!r})\n"
        "import _rankcall_hook as hook; "
        "hook.install(); print([type(f).__name__ for f in sys.meta_path].count('_Finder'))"
    )
    env = {**os.environ, "RANKCALL": "1", "RANKCALL_STDERR_FILE": "1:1"}
    command = [sys.executable, "-S", "-c", program]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, timeout=60, check=False)
    assert done.stdout == b"1\n"
