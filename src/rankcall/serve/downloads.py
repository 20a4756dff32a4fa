"""The report, the timeline and the archive of a run, made by rankcall's own commands when asked.

Each is made by a process of its own with a low priority, so a large run neither blocks the page
nor takes the cores that the job needs. One file is made at a time; viewers that want the same one
meanwhile get the same file.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rankcall.errors import RankcallError
from rankcall.interpreter import run_command
from rankcall.printable import clean

LIMIT_S = 600.0  # far more than the report of a thousand ranks takes, which is seconds
_KEPT_S = 15.0  # a file is offered again without being made anew
_LEFT_OUT = 1  # the exit status of a command that has done its work but met problems


@dataclass(frozen=True)
class Download:
    """A file that viewers can ask for. ``arguments``: of rankcall; RUN and FILE are replaced."""

    name: str
    media_type: str
    arguments: tuple[str, ...]
    shown: bool = False  # in the browser, not saved
    takes_attempt: bool = True  # the command reads one attempt if it is asked to


class Downloads:
    """Makes files of one run in a temporary folder, which ``close`` removes."""

    def __init__(self) -> None:
        self._folder: Path | None = None  # made when it is needed: the page needs no disk
        self._turn = asyncio.Lock()
        self._made: dict[tuple[str, Path], tuple[float, Path]] = {}

    async def make(self, kind: Download, run: Path) -> Path:
        """Return the file. Raises ``RankcallError`` if it cannot be made in ``LIMIT_S`` seconds."""
        try:
            await asyncio.wait_for(self._turn.acquire(), LIMIT_S)
        except asyncio.TimeoutError:
            raise RankcallError("another file is being made: ask again later") from None
        try:
            made = self._made.get((kind.name, run))
            if made is None or time.monotonic() - made[0] > _KEPT_S or not made[1].exists():
                path = await asyncio.to_thread(self._run, kind, run)
                self._made[kind.name, run] = time.monotonic(), path
            return self._made[kind.name, run][1]
        finally:
            self._turn.release()

    def _run(self, kind: Download, run: Path) -> Path:
        try:
            return self._run_command(kind, run)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RankcallError(f"{kind.name} cannot be made: {error}") from error

    def _run_command(self, kind: Download, run: Path) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="rankcall-serve-"))
        target = Path(tempfile.mkdtemp(dir=self._folder)) / kind.name
        filled = {"RUN": str(run), "FILE": str(target)}
        command = run_command(*(filled.get(a, a) for a in kind.arguments))
        with contextlib.ExitStack() as stack:
            out = None
            if "FILE" not in kind.arguments:
                out = stack.enter_context(target.open("wb"))
            done = subprocess.run(
                ["nice", "-n", "10", *command] if shutil.which("nice") else command,
                stdin=subprocess.DEVNULL,
                stdout=out or subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=LIMIT_S,
                check=False,
            )
        if done.returncode > _LEFT_OUT or not target.exists():
            lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
            why = clean(lines[-1]) if lines else f"exit status {done.returncode}"
            raise RankcallError(f"{kind.name} cannot be made: {why}")
        for key, (_, older) in list(self._made.items()):
            if key[0] == kind.name:  # a viewer that still receives it has it open
                shutil.rmtree(older.parent, ignore_errors=True)
                del self._made[key]
        return target

    def close(self) -> None:
        """Remove all files."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
