"""Run a program in a mode: order it from the process that forks ranks, collect what they saw."""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ports import free_port

from samejob.job import normalised
from samejob.modes import MODES, OFF
from samejob.programs import PROGRAMS

_START_SECONDS = 400.0  # to import torch and to compile the native recorder on two busy cores
_GRACE_SECONDS = 60.0  # from the deadline of a run to the answer
# Threads and files of a program may disappear for this long after its end. Without recording, a
# shorter time is enough: a thread that is still ending then only makes the comparison more lenient.
_PATIENCE, _USUAL_PATIENCE, _MUTANT_PATIENCE = 10.0, 1.0, 1.0
_REMARK = "rankcall: "  # begins each line that rankcall itself writes

# A frame of the Python capture in a traceback, or of the torch function by which it goes on.
_OUR_FRAME = re.compile(
    r'^(?P<prefix>.*)  File "[^"]*(?:/rankcall/capture/fallback/\w+|/torch/_ops)\.py", line .*\n'
    r"(?:(?P=prefix)    .*\n)+",
    re.MULTILINE,
)


@dataclass(frozen=True)
class RankReport:
    """What could be observed of one rank.

    ``seen`` holds the program's results. ``left`` holds the threads, descriptors and watched
    objects after the program; it is empty if the program ended early. ``our_threads`` are
    rankcall's own at that time. ``recorded`` is the number of records, or None if nothing recorded.
    """

    status: int
    seen: dict[str, Any]
    stdout: str
    stderr: str
    left: dict[str, list[str]]
    our_threads: list[str]
    recorded: int | None
    peak_kib: int


@dataclass(frozen=True)
class RunReport:
    """What could be observed of a run: its ranks, those that hung, processes left behind."""

    program: str
    mode: str
    ranks: list[RankReport]
    strays: list[str]
    hung: list[int]
    stacks: str


class Harness:
    """Runs programs, one at a time, through a process that forks their ranks.

    Args:
        shm: a folder for the rings.
        device: where the programs have their tensors, ``cpu`` with Gloo or ``cuda`` with NCCL.
        env: the environment, by default this process's.
    """

    def __init__(
        self, shm: Path, device: str = "cpu", env: Mapping[str, str] | None = None
    ) -> None:
        self._shm, self._device = shm, device
        self._runs = 0
        paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._zygote = subprocess.Popen(
            [sys.executable, "-m", "samejob.zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={
                **(os.environ if env is None else env),
                "PYTHONPATH": os.pathsep.join(paths),
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
                # One heap: which of several a thread allocates from is a matter of chance.
                "MALLOC_ARENA_MAX": "1",
            },
        )
        self._answer(_START_SECONDS)

    def close(self) -> None:
        """End the process that forks ranks."""
        assert self._zygote.stdin is not None
        assert self._zygote.stdout is not None
        self._zygote.stdin.close()
        try:
            self._zygote.wait(10)
        except subprocess.TimeoutExpired:
            self._zygote.kill()
            self._zygote.wait()
        self._zygote.stdout.close()

    def run(
        self,
        program: str,
        mode: str,
        folder: Path,
        usual: RunReport | None = None,
        deadline: float | None = None,
    ) -> RunReport:
        """Run a program in a mode.

        Args:
            program: its name in ``programs``.
            mode: ``off``, one of ``modes.MODES``, or ``mutant:NAME``.
            folder: an empty folder for its files.
            usual: the run without recording. The ranks wait for a moment until they have no more
                threads, descriptors and objects left than its ranks had.
            deadline: after how many seconds a run counts as hung; by default the program's own.
        """
        entry = PROGRAMS[program]
        deadline = deadline or entry.deadline
        self._runs += 1
        shm = self._shm / f"run-{os.getpid()}-{self._runs}"
        shm.mkdir(parents=True)
        order = {
            "program": program,
            "mode": mode,
            "world_size": entry.world_size,
            "device": self._device,
            "folder": str(folder),
            "shm": str(shm),
            "port": free_port(),
            "usual": usual and [rank.left for rank in usual.ranks],
            "patience": _patience(mode),
            "deadline": deadline,
        }
        assert self._zygote.stdin is not None
        self._zygote.stdin.write(json.dumps(order).encode() + b"\n")
        self._zygote.stdin.flush()
        try:
            answer = self._answer(deadline + _GRACE_SECONDS)
        finally:
            shutil.rmtree(shm)
        return RunReport(
            program,
            mode,
            [_report(folder, rank, status) for rank, status in enumerate(answer["statuses"])],
            answer["strays"],
            answer["hung"],
            _stacks(folder, answer["hung"]),
        )

    def _answer(self, seconds: float) -> Any:
        assert self._zygote.stdout is not None
        deadline = time.monotonic() + seconds
        text = b""
        while not text.endswith(b"\n"):
            left = max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([self._zygote.stdout], [], [], left)
            part = os.read(self._zygote.stdout.fileno(), 1 << 16) if ready else b""
            if not part:
                self._zygote.kill()
                raise AssertionError(
                    f"the process that forks ranks (pid {self._zygote.pid}) "
                    + ("has ended" if ready else f"gave no answer within {seconds:g} s")
                )
            text += part
        return json.loads(text)


def _patience(mode: str) -> float:
    if mode == OFF:
        return _USUAL_PATIENCE
    return _PATIENCE if mode in MODES else _MUTANT_PATIENCE


def _report(folder: Path, rank: int, status: int) -> RankReport:
    def output(name: str) -> str:
        lines = (folder / f"{name}.{rank}").read_text(errors="replace").splitlines(keepends=True)
        theirs = "".join(line for line in lines if not line.startswith(_REMARK))
        return normalised(_OUR_FRAME.sub("", theirs), folder)

    file = folder / f"report.{rank}"
    report = json.loads(file.read_text()) if file.exists() else {}
    kinds = ("threads", "descriptors", "alive")
    return RankReport(
        status,
        report.get("seen", {}),
        output("stdout"),
        output("stderr"),
        {kind: report[kind] for kind in kinds if kind in report},
        report.get("our_threads", []),
        report.get("recorded"),
        report.get("peak_kib", 0),
    )


def _stacks(folder: Path, hung: list[int]) -> str:
    return "\n".join(f"rank {rank}:\n{(folder / f'stacks.{rank}').read_text()}" for rank in hung)
