"""Findings in words: what a person needs at two in the morning, and nothing else."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence

import numpy as np

from rankcall.analysis.hang.disagree import SIZE_IN
from rankcall.analysis.hang.waits import Wait
from rankcall.analysis.state.snapshot import FAILED, SEND, RankState, Snapshot
from rankcall.record import DTYPES, OPS, REDUCE_OPS
from rankcall.run import format_ranks

_LONGEST = 40  # of a list of ranks, in characters; a longer one is counted


def many(count: int, one: str) -> str:
    """Write a count with its noun: ``1 rank``, ``1,023 ranks``."""
    return f"{count:,} {one}{'' if count == 1 else 's'}"


def lasts(seconds: float) -> str:
    """Write a time as a person would: ``0.4 s``, ``72 s``, ``12 min``, ``3.1 h``."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 300:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 3 * 3600 else f"{seconds / 3600:.1f} h"


def ms(seconds: float) -> str:
    """Write a short time: ``0.35 ms``, ``20 ms``, ``1.2 s``."""
    if seconds >= 1:
        return lasts(seconds)
    value = seconds * 1e3
    return f"{value:.0f} ms" if value >= 10 else f"{value:.2g} ms"


def ago(snapshot: Snapshot, seconds: float) -> str:
    """Write when something was: ``12 s ago``, of a dead run ``12 s before its end``."""
    if snapshot.live:
        return f"{lasts(seconds)} ago"
    return f"{lasts(seconds)} before the end" if seconds >= 0.05 else "at the end"


def who(snapshot: Snapshot, ranks: Sequence[int]) -> str:
    """Name ranks: ``rank 2 (node-a, pid 4711)``, ``ranks 8-15 (node-b)``."""
    if len(ranks) == 1:
        state = snapshot.ranks[ranks[0]]
        where = [state.host, f"pid {state.pid}" if state.pid else ""]
        inside = ", ".join(text for text in where if text)
        return f"rank {state.rank}{f' ({inside})' if inside else ''}"
    hosts = list(dict.fromkeys(snapshot.ranks[rank].host for rank in ranks))
    named = [host for host in hosts if host]
    if len(named) > 3:
        inside = f"on {len(named):,} hosts"
    else:
        inside = ", ".join(named)
    text = format_ranks(ranks)
    if len(text) > _LONGEST:
        return f"{len(ranks):,} ranks{f' ({inside})' if inside else ''}"
    return f"ranks {text}{f' ({inside})' if inside else ''}"


def hosts(snapshot: Snapshot, ranks: Iterable[int]) -> tuple[str, ...]:
    """Return the hosts of some ranks, each once."""
    hosts = dict.fromkeys(snapshot.ranks[rank].host for rank in ranks)
    return tuple(host for host in hosts if host)


def call(snapshot: Snapshot, row: int, *, line: bool = True) -> str:
    """Name a call: ``all_reduce #51 of group 0 at train.py:13``."""
    found = snapshot.calls[row]
    text = f"{OPS[int(found['op'])]} #{int(found['seq'])} of group {label(snapshot, found)}"
    site = snapshot.site(int(found["site"]))
    return f"{text} at {site}" if line and site else text


def label(snapshot: Snapshot, found: np.void) -> str:
    """Return the label of a call's group."""
    return snapshot.labels[int(found["group"])]


def what(snapshot: Snapshot, wait: Wait) -> str:
    """Name what ranks wait in: a collective, or one end of a message."""
    if wait.channel is None:
        return call(snapshot, int(wait.rows[0]), line=False) + at_line(snapshot, wait)
    source, target, tag = wait.channel
    found = snapshot.calls[int(wait.rows[0])]
    if int(found["op"]) == SEND:
        text = f"send #{wait.seq} to rank {target}"
    else:
        text = f"recv #{wait.seq} from {f'rank {source}' if source >= 0 else 'any rank'}"
    text += f" (tag {tag}, group {label(snapshot, found)})"
    return text + at_line(snapshot, wait)


def common_site(snapshot: Snapshot, wait: Wait) -> str:
    """Return the line that most of the waiting are at."""
    sites, counts = np.unique(snapshot.calls["site"][wait.rows], return_counts=True)
    return snapshot.site(int(sites[np.argmax(counts)]))


def at_line(snapshot: Snapshot, wait: Wait) -> str:
    """Return `` at FILE:LINE`` where it is known."""
    site = common_site(snapshot, wait)
    return f" at {site}" if site else ""


def ending(state: RankState, *, one: bool = True) -> str:
    """Say how a process (or several alike) ended: ``was killed by SIGKILL``, ``is gone``."""
    if state.exit is None:
        return "is gone" if one else "are gone"
    was, its = ("was", "its") if one else ("were", "their")
    if state.launcher_signal:
        told = signal_name(state.launcher_signal)
        return f"{was} ended with {its} launcher, which {told} told to stop,"
    if state.exit < 0:
        return f"{was} killed by {signal_name(-state.exit)}"
    return f"exited with code {state.exit}"


def signal_name(number: int) -> str:
    """Return ``SIGKILL`` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def last_call(snapshot: Snapshot, rank: int) -> str:
    """Say where a rank was last seen: its newest call, and when it left it."""
    rows = np.flatnonzero(snapshot.calls["rank"] == rank)
    if not len(rows):
        return "it has issued nothing"
    row = int(rows[np.argmax(snapshot.calls["index"][rows])])
    ended, age = (float(snapshot.calls[name][row]) for name in ("ended_s", "age_s"))
    if snapshot.calls["status"][row] == FAILED:
        return f"{call(snapshot, row)} failed {ago(snapshot, ended)}"
    if np.isnan(ended):
        return f"in {call(snapshot, row)} for {lasts(age)}"
    return f"last in {call(snapshot, row)}, which it left {ago(snapshot, ended)}"


def value(snapshot: Snapshot, row: int, name: str) -> str:
    """Return what a call has in one of the fields that members must agree on."""
    found = snapshot.calls[row]
    if name == "op":
        return OPS[int(found["op"])]
    if name == "dtype":
        return DTYPES[int(found["dtype"])]
    if name == "reduce_op":
        return REDUCE_OPS[int(found["reduce_op"])]
    if name == "root":
        return f"rank {int(found['root'])}"
    return f"{int(found[SIZE_IN.get(OPS[int(found['op'])], 'message_bytes')]):,} bytes"
