"""The Python stacks of a run's ranks that run on this host: by py-spy, or else from the ranks.

``own_stacks`` asks the ranks. ``frames`` says where a rank stands by such a text.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rankcall.process import has_tracer
from rankcall.ring.layout import Header
from rankcall.run.load import Run
from rankcall.run.own_stacks import other_threads_of, request_stacks, training_thread_of
from rankcall.run.stack_text import mark_thread, mark_training_thread, tidy

_PY_SPY_TIMEOUT_S = 30.0  # for one process
_MOST_SPIED = 8  # ranks; each takes a second, and the job's ranks are paused meanwhile
_MOST_PY_SPY_CHARS = 1 << 16


def stacks_of(
    run: Run, ranks: Sequence[int], others: Mapping[int, Mapping[int, str]] | None = None
) -> dict[int, str]:
    """Return the stacks of those of the ranks that run on this host and can be inspected.

    An archive gives none: what its ranks do now says nothing about the time when it was made.

    py-spy, if it is installed, inspects the first ranks; it takes a second for each. The others
    dump their stacks themselves. ``others``: see ``request_stacks``.
    """
    others = others or {}
    if run.source is not None and not run.source.is_dir():
        return {}
    wanted = set(ranks)
    headers = [head.header for head in run.heads if head.header.rank in wanted]
    here = [header for header in headers if header.process_state() in ("alive", "stopped")]
    stacks: dict[int, str] = {}
    spy = py_spy()
    if spy is not None and here:
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(4) as pool:
            first = sorted(here, key=lambda header: ranks.index(header.rank))[:_MOST_SPIED]
            texts = pool.map(lambda header: _spied(spy, header), first)
            for header, text in zip(first, texts, strict=True):
                if text:
                    thread = training_thread_of(header)
                    text = mark_training_thread(text, str(thread or ""))
                    for other, mark in other_threads_of(header, others).items():
                        text = mark_thread(text, str(other), mark)
                    stacks[header.rank] = text
    rest = [header for header in here if header.rank not in stacks]
    stacks.update(request_stacks(rest, others))
    return {rank: tidy(stacks[rank]) for rank in ranks if rank in stacks}


def py_spy() -> str | None:
    """Return the path of py-spy; None if it is not installed."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def _spied(spy: str, header: Header) -> str:
    """Dump one process, with native frames if that works; return "" if it is not allowed.

    py-spy pauses a process while it reads the stacks. It cannot pause one that is stopped or has a
    tracer already, so that one is read without a pause and without native frames.
    """
    is_held = header.process_state() == "stopped" or has_tracer(header.pid)
    for options in [["--nonblocking"]] if is_held else [["--native"], []]:
        try:
            done = subprocess.run(
                [spy, "dump", *options, "--pid", str(header.pid)],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_PY_SPY_TIMEOUT_S,
                stdin=subprocess.DEVNULL,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0:
            _, begins, threads = done.stdout.partition("\nThread ")  # after the command line
            return (begins + threads).strip()[:_MOST_PY_SPY_CHARS]
    return ""
