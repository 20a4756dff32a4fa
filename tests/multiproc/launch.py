"""Start ``rankcall`` commands as a person would, with a hard timeout and nothing left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

RANKCALL = Path(sys.executable).with_name("rankcall")
_MARK = "RANKCALL_TEST_PROCESS"


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    status: int
    out: str
    err: str

    @property
    def ours(self) -> list[str]:
        """Return what rankcall itself said."""
        return [line for line in self.err.splitlines() if line.startswith("rankcall: ")]


class Launch:
    """A running ``rankcall`` command, or another program, and everything below it."""

    def __init__(
        self,
        *args: str | Path,
        cwd: Path,
        env: Mapping[str, str] | None = None,
        program: Sequence[str | Path] | None = None,
    ) -> None:
        self._mark = uuid.uuid4().hex
        self._out = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed by finish()
        self._err = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [*map(str, (RANKCALL,) if program is None else program), *map(str, args)],
            cwd=cwd,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
                "PYTHONFAULTHANDLER": "1",  # SIGABRT dumps the stacks of whoever hangs
                "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5",
                **(env or {}),
                _MARK: self._mark,
            },
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._err,
        )

    def printed(self) -> str:
        """Return what has come to stdout so far."""
        return os.pread(self._out.fileno(), 1 << 20, 0).decode()

    def finish(self, timeout: float = 240, linger: float = 0) -> Ended:
        """Wait for the end and return it; raise with every stack if time is up.

        ``linger``: how long other processes may outlive the command. Lightning's first rank, for
        example, does not wait for the others.
        """
        late = False
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            late = True
            self._signal_all(signal.SIGABRT)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
        until = time.monotonic() + linger
        while not late and self._marked() and time.monotonic() < until:
            time.sleep(0.05)
        survivors = self._signal_all(signal.SIGKILL)
        self.process.wait()
        ended = Ended(self.process.returncode, _text(self._out), _text(self._err))
        if late:
            raise AssertionError(f"not done after {timeout:g} s\n{ended.out}\n{ended.err}")
        assert not survivors, f"processes outlived the launcher: {survivors}\n{ended.err}"
        return ended

    def wait_for(self, path: Path, timeout: float = 240) -> None:
        """Wait until a file of the job is there."""
        deadline = time.monotonic() + timeout
        while not path.exists():
            if time.monotonic() > deadline or self.process.poll() is not None:
                self.process.kill()
                raise AssertionError(f"no {path}\n{self.finish()}")
            time.sleep(0.02)

    def _marked(self) -> list[int]:
        """Return the ids of the processes that carry our mark."""
        pids = []
        for environ in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if f"{_MARK}={self._mark}".encode() in environ.read_bytes():
                    pids.append(int(environ.parent.name))
        return pids

    def _signal_all(self, sig: signal.Signals) -> list[int]:
        """Signal every process that carries our mark; return their ids."""
        pids = self._marked()
        for pid in pids:
            with suppress(OSError):
                os.kill(pid, sig)
        return pids


def _text(file: tempfile._TemporaryFileWrapper[str]) -> str:
    file.seek(0)
    text = file.read()
    file.close()
    return text


def launch(
    *args: str | Path,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    timeout: float = 240,
    linger: float = 0,
) -> Ended:
    """Run a ``rankcall`` command to its end."""
    return Launch(*args, cwd=cwd, env=env).finish(timeout, linger)


def run_program(
    *args: str | Path, cwd: Path, env: Mapping[str, str] | None = None, timeout: float = 240
) -> Ended:
    """Run a program without rankcall to its end."""
    return Launch(*args, cwd=cwd, env=env, program=()).finish(timeout, linger=60)
