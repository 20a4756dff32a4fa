"""The words that all verdicts share: ranks, hosts, calls, lines, counts and durations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from rankcall.analysis.snapshot import COMPLETED, FAILED, SEND, Snapshot
from rankcall.analysis.verdicts.wait_graph import Wait
from rankcall.ranks import format_ranks
from rankcall.run.frames import LOADER, CodePlace

_NO_DESCRIPTIONS = ("default_pg", "undefined")  # torch's own descriptions

_LONGEST = 40  # characters of a list of ranks; a longer list is written as a count


def count_of(count: int, singular: str) -> str:
    """Write a count with its noun: ``1 rank``, ``1,023 ranks``."""
    return f"{count:,} {singular}{'' if count == 1 else 's'}"


def duration(seconds: float) -> str:
    """Write a duration: ``0.4 s``, ``72 s``, ``12 min``, ``3.1 h``."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 300:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 3 * 3600 else f"{seconds / 3600:.1f} h"


def short_duration(seconds: float) -> str:
    """Write a short duration: ``0.35 ms``, ``20 ms``, ``1.2 s``."""
    if seconds >= 1:
        return duration(seconds)
    value = seconds * 1e3
    return f"{value:.0f} ms" if value >= 10 else f"{value:.2g} ms"


def ago(snapshot: Snapshot, seconds: float) -> str:
    """Write a time in the past: ``12 s ago``, or for a dead run ``12 s before the end``."""
    if snapshot.live:
        return f"{duration(seconds)} ago"
    return f"{duration(seconds)} before the end" if seconds >= 0.05 else "at the end"


def name_ranks(snapshot: Snapshot, ranks: Sequence[int]) -> str:
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


def begin_sentence(text: str) -> str:
    """Return a text with a capital first letter."""
    return text[:1].upper() + text[1:]


class Verbs(NamedTuple):
    """The verbs and the pronoun that agree with some ranks, in the tense of the run."""

    be: str
    have: str
    do: str
    they: str


def verbs_for(snapshot: Snapshot, count: int) -> Verbs:
    """Return the verbs for so many ranks: past tense after the run has ended."""
    single, live = count == 1, snapshot.live
    be = ("is" if single else "are") if live else ("was" if single else "were")
    have = ("has" if single else "have") if live else "had"
    return Verbs(be, have, "does" if single else "do", "it" if single else "they")


def hosts_of(snapshot: Snapshot, ranks: Iterable[int]) -> tuple[str, ...]:
    """Return the hosts of some ranks, each once."""
    hosts = dict.fromkeys(snapshot.ranks[rank].host for rank in ranks)
    return tuple(host for host in hosts if host)


def numbered(op: str, seq: int) -> str:
    """Return ``recv #51``, or ``recv`` if it has no number before its message comes."""
    return f"{op} #{seq}" if seq > 0 else op


def name_call(snapshot: Snapshot, row: int, *, line: bool = True) -> str:
    """Name a call: ``all_reduce #51 of group 0 at train.py:13``."""
    call = snapshot.calls[row]
    function = snapshot.sites[int(call["site"])].api if snapshot.sites else ""
    whose = f"{function}'s " if "object" in function else ""  # it issues several ops
    group = name_group(snapshot, int(call["group"]))
    text = f"{whose}{numbered(snapshot.op(row), int(call['seq']))} of group {group}"
    site = snapshot.shown_site(int(call["site"]))
    return f"{text} at {site}" if line and site else text


def name_group(snapshot: Snapshot, number: int) -> str:
    """Name a group by its label, with its description if its maker gave one: ``3 (mesh_dp)``."""
    label, description = snapshot.labels[number], snapshot.groups[number].description
    if description in (*_NO_DESCRIPTIONS, "") or description in label:
        return label
    return f"{label} ({description})"


def name_wait(snapshot: Snapshot, wait: Wait) -> str:
    """Name the call that ranks wait in: a collective, or one end of a message."""
    if wait.channel is None:
        return name_call(snapshot, int(wait.rows[0]), line=False) + at_line(snapshot, wait)
    source, target, tag = wait.channel
    call = snapshot.calls[int(wait.rows[0])]
    if int(call["op"]) == SEND:
        text = f"{numbered('send', wait.seq)} to rank {target}"
    else:
        whom = f"rank {source}" if source >= 0 else "any rank"
        text = f"{numbered('recv', wait.seq)} from {whom}"
    text += f" (tag {tag}, group {name_group(snapshot, int(call['group']))})"
    return text + at_line(snapshot, wait)


def common_site(snapshot: Snapshot, wait: Wait) -> int:
    """Return the call site of most of the waiting ranks, as an index into the snapshot's."""
    sites, counts = np.unique(snapshot.calls["site"][wait.rows], return_counts=True)
    return int(sites[np.argmax(counts)])


def lines_of_site(snapshot: Snapshot, number: int) -> dict[str, str]:
    """Return the fields of a finding that name the line of a call."""
    return {"call_site": snapshot.site(number), "user_line": snapshot.user_line(number)}


def at_line(snapshot: Snapshot, wait: Wait) -> str:
    """Return `` at FILE:LINE``, or nothing if the line is not known."""
    site = snapshot.shown_site(common_site(snapshot, wait))
    return f" at {site}" if site else ""


def name_place(place: CodePlace) -> str:
    """Write the place at which a rank's code stands: ``in new_group at train.py:12``."""
    where = f"at {place.line}" if place.line else ""
    if place.inside == LOADER:
        return f"waiting for its data loader {where}".rstrip()
    if place.inside:
        return f"in {place.inside} {where}".rstrip()
    return f"{where} in {place.function}" if where and place.function else where


def last_call(snapshot: Snapshot, rank: int) -> str:
    """Write a rank's newest call, and when the rank left it."""
    rows = np.flatnonzero(snapshot.calls["rank"] == rank)
    if not len(rows):
        return "it has issued nothing"
    row = int(rows[np.argmax(snapshot.calls["index"][rows])])
    ended, age = (float(snapshot.calls[name][row]) for name in ("ended_s", "age_s"))
    if snapshot.calls["status"][row] == FAILED:
        return f"{name_call(snapshot, row)} failed {ago(snapshot, ended)}"
    if snapshot.calls["status"][row] == COMPLETED and np.isnan(ended):
        return f"last in {name_call(snapshot, row)}, which it left"
    if np.isnan(ended):
        return f"in {name_call(snapshot, row)} for {duration(age)}"
    return f"last in {name_call(snapshot, row)}, which it left {ago(snapshot, ended)}"
