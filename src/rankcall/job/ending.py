"""End the workers of this node that a verdict names, so that the launcher restarts the job."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from rankcall.analysis.verdicts.verdict import Verdict
from rankcall.ring.layout import Header
from rankcall.run.exits import Exit, note_exit

_LIVE = ("alive", "stopped")


def workers_to_end(verdict: Verdict | None, headers: Mapping[int, Header]) -> list[Header]:
    """Return the workers of this node that end after a verdict; the other nodes end theirs.

    Those are the culprits of the likeliest cause. If no rank is named, or the named ones have ended
    already or have no ring on any node, one worker ends: the lowest rank that waits. One is enough
    for torchrun to restart all, and it ends those without a ring, too: they have not come to
    ``init_process_group``, so nobody here knows their processes.

    Args:
        verdict: The verdict; None if it cannot be read, which is as one that names no rank.
        headers: The ring headers of this node's ranks. Only these processes can be ended.
    """
    cause = verdict.findings[0] if verdict is not None and verdict.findings else None
    culprits = cause.ranks if cause is not None else ()
    here = [headers[rank] for rank in culprits if rank in headers]
    live = [header for header in here if header.process_state() in _LIVE]
    # The node of the others ends them, if they still run. The verdict has the hosts of those ranks
    # that have a ring.
    if live or (len(here) < len(culprits) and cause is not None and cause.hosts):
        return live
    waiting = (cause.victims if cause is not None else ()) or tuple(headers)
    lowest = headers.get(min(waiting, default=-1))
    return [] if lowest is None or lowest.process_state() not in _LIVE else [lowest]


def end_worker(header: Header, run_dir: Path | None) -> None:
    """End a worker of this node by SIGKILL, which a stopped process needs no SIGCONT for.

    That rankcall did so is noted in the run first, so that no reader takes it for the kernel's
    out-of-memory killer. Never raises: if the process cannot be ended, torchrun tries.
    """
    print(
        f"rankcall: ending rank {header.rank} (pid {header.pid}), because it holds the job up "
        "(on_hang=recover)",
        file=sys.stderr,
        flush=True,
    )
    try:
        process = os.pidfd_open(header.pid)  # so that the pid cannot be another process's later
    except OSError:  # it has ended, or there is no free descriptor
        return
    try:
        if header.process_state() in _LIVE:
            _note(header, run_dir)
            signal.pidfd_send_signal(process, signal.SIGKILL)
    except OSError:
        return
    finally:
        os.close(process)


def _note(header: Header, run_dir: Path | None) -> None:
    process = header.rank, header.attempt, header.host, header.pid
    ended = Exit(*process, -signal.SIGKILL, time.time_ns(), by_launcher=True)
    with contextlib.suppress(OSError):  # the disk is full: the exit is then noted by the launcher
        if run_dir is not None:
            note_exit(run_dir, ended)
