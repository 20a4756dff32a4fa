"""Stacks of the ranks on this host, from py-spy if it is installed, or else from their watcher."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rankcall import _stacks
from rankcall.analysis.diagnosis import Diagnosis
from rankcall.processes import process_state
from rankcall.ring.header import Header
from rankcall.run import load

_MOST = 8  # ranks; a screen holds no more stacks
_TIMEOUT_S = 30.0
_LONGEST = 1 << 16
_THREADS = re.compile(r"\n(?=Thread |Current thread )")
_MAIN = re.compile(r"<module>|^Thread .*\"MainThread\"$", re.MULTILINE)
_OURS = re.compile(r"rankcall/(watch/_loop|capture/recording|capture/delivery)\.py")


def of_interest(diagnosis: Diagnosis) -> list[int]:
    """Return the ranks that the findings name, and one victim of each; else the first ranks."""
    ranks: dict[int, None] = {}
    for finding in diagnosis.findings:
        ranks.update(dict.fromkeys(finding.ranks))
        ranks.update(dict.fromkeys(finding.victims[:1]))
    if not diagnosis.findings:
        ranks.update((state.rank, None) for state in diagnosis.snapshot.ranks)
    return list(ranks)[:_MOST]


def take(where: Path, ranks: Sequence[int]) -> dict[int, str]:
    """Return the stacks of those of the ranks that run on this host and can be inspected."""
    if not where.is_dir():
        return {}
    wanted = set(ranks)
    headers = [head.header for head in load(where).heads if head.header.rank in wanted]
    here = [header for header in headers if process_state(header) in ("alive", "stopped")]
    stacks: dict[int, str] = {}
    spy = _py_spy()
    if spy is not None and here:
        with ThreadPoolExecutor(4) as pool:
            texts = pool.map(lambda header: _spied(spy, header), here)
            for header, text in zip(here, texts, strict=True):
                if text:
                    stacks[header.rank] = text
    stacks.update(_stacks.ask([header for header in here if header.rank not in stacks]))
    return {rank: tidy(stacks[rank]) for rank in ranks if rank in stacks}


def tidy(text: str) -> str:
    """Put the main thread first, and leave out rankcall's own threads, which only watch."""
    threads = [stack.rstrip() for stack in _THREADS.split(text) if not _OURS.search(stack)]
    threads.sort(key=lambda stack: _MAIN.search(stack) is None)
    return "\n\n".join(threads) or text


def _py_spy() -> str | None:
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def _spied(spy: str, header: Header) -> str:
    """Dump one process, with native frames if that works; return "" if it is not allowed.

    py-spy pauses a process while it reads the stacks. It cannot pause a stopped process, so that
    one is read without a pause and without native frames.
    """
    stopped = process_state(header) == "stopped"
    for options in [["--nonblocking"]] if stopped else [["--native"], []]:
        try:
            done = subprocess.run(
                [spy, "dump", *options, "--pid", str(header.pid)],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_TIMEOUT_S,
                stdin=subprocess.DEVNULL,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0:
            _, begins, threads = done.stdout.partition("\nThread ")  # after the command line
            return (begins + threads).strip()[:_LONGEST]
    return ""
