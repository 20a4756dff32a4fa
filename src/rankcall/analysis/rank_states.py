"""The state of each rank's process at one moment of its host, from its ring and its noted end.

Rings are read one after the other, so the moments at which they were read differ. All ranks of a
host get one moment, so that their times compare.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from rankcall.analysis.last_attempt import APART_S
from rankcall.analysis.process_ends import End, ProcessEnds
from rankcall.analysis.rpc_calls import with_ages
from rankcall.analysis.snapshot import GONE, RankState
from rankcall.analysis.windows import LARGEST
from rankcall.ring.layout import FOREVER_NS, Header
from rankcall.run.exits import Noted

_BEATS_S = 2.0  # two heartbeats: signs of life this close together may be of one moment
_S = 1e9

Host = tuple[str, str]  # its name and boot id


class SeenRing(NamedTuple):
    """One rank's ring as it was read."""

    header: Header
    state: str  # of its process
    last_ns: int  # its last sign of life
    read_ns: int | None  # when it was read, by this host's clock; None: its process ran elsewhere
    groups: int
    dropped: int

    @property
    def host(self) -> Host:
        """Its host, of which another boot has another clock."""
        return self.header.host, self.header.boot_id


def beats(head: Header) -> tuple[int, ...]:
    """Return the times of a ring's own signs of life, ns."""
    return (
        head.native_heartbeat_ns,
        head.python_heartbeat_ns,
        head.closed_ns,
        head.anchor_mono_ns,
    )


def is_outdated(noted: Noted, header: Header) -> bool:
    """Return whether a process has ended, or has gone on for long, since its state was noted."""
    later = max(beats(header)) - noted.mono_ns > APART_S * _S
    return noted.state != GONE and (later or header.closed_ns > noted.mono_ns)


def moments_of(seen: Mapping[int, SeenRing], ends: ProcessEnds) -> dict[int, int]:
    """Return each rank's moment: when its host's rings were read, or the last sign of life.

    All ranks of a host have the same moment.
    """
    running = {
        ring.host for ring in seen.values() if ring.read_ns is not None and ring.state != GONE
    }
    last: dict[Host, int] = {}
    for rank, ring in seen.items():
        moment, end = ring.last_ns, ends.of(rank)
        if ring.host in running:
            moment = moment if ring.read_ns is None else ring.read_ns
        elif end is not None:
            moment = max(moment, end.mono_ns)
        last[ring.host] = max(last.get(ring.host, 0), moment)
    return {rank: last[ring.host] for rank, ring in seen.items()}


def states_of(
    seen: Mapping[int, SeenRing],
    ends: ProcessEnds,
    moments: Mapping[int, int],
    *,
    has_launcher: bool,
) -> dict[int, RankState]:
    """Return the state of each rank that left a ring.

    Args:
        seen: The rings, by rank.
        ends: The noted ends of their processes.
        moments: What ``moments_of`` returned.
        has_launcher: Whether a launcher of rankcall's notes the ends of the processes.
    """
    last_of_host: dict[Host, int] = {}
    for ring in seen.values():
        last_of_host[ring.host] = max(last_of_host.get(ring.host, 0), ring.last_ns)
    states = {}
    for rank, ring in seen.items():
        state, end = _running(rank, ring, ends, moments[rank]), ends.of(rank)
        if end is not None:
            state = _ended(state, end, moments[rank])
        elif state.state == GONE:
            # Its launcher would have noted an earlier end. A launcher lives as long as its ranks.
            last = last_of_host[ring.host]
            existed = has_launcher and last - ring.last_ns > _BEATS_S * _S
            gone_s = (moments[rank] - last) / _S if existed else state.silent_s
            state = replace(state, gone_s=gone_s)
        states[rank] = state
    return states


def _running(rank: int, ring: SeenRing, ends: ProcessEnds, moment: int) -> RankState:
    """Return the state that a ring shows, without the noted end of its process."""
    head = ring.header
    # The heartbeat of a process that runs here goes on while the rings of others are read.
    seen_ns = moment if ring.read_ns is None or ring.state == GONE else ring.read_ns
    return RankState(
        rank,
        head.host,
        head.pid,
        head.attempt,
        ring.state,
        silent_s=max(0.0, (seen_ns - ring.last_ns) / _S),
        gil_s=max(0.0, (seen_ns - head.python_heartbeat_ns) / _S),
        in_store_s=(seen_ns - head.in_store_ns) / _S if head.in_store_ns else None,
        idle_s=(seen_ns - head.idle_ns) / _S if head.idle_ns else None,
        needs_gil=head.capture == "python",
        closed=head.closed_ns != 0,
        closed_s=max(0.0, (moment - head.closed_ns) / _S) if head.closed_ns else None,
        leaving=head.left_ns != 0,
        failure=head.failure,
        told_s=ends.told_s(head, moment),
        aborted=head.aborted_ns != 0,
        expects=(head.expect_what or "a long phase") if moment < head.expect_until_ns else "",
        waits_for_work=head.expect_until_ns >= FOREVER_NS,
        expected_s=(moment - head.expect_until_ns) / _S if head.expect_until_ns else None,
        steps=min(head.step, LARGEST),
        started_s=max(0.0, (moment - head.anchor_mono_ns) / _S),
        groups=ring.groups,
        dropped=ring.dropped,
        tables_lost=min(head.tables_lost, LARGEST),
        rpc=with_ages(head.rpc, moment),
    )


def _ended(state: RankState, end: End, moment: int) -> RankState:
    return replace(
        state,
        state=GONE,
        exit=end.noted.code,
        gone_s=max(0.0, (moment - end.mono_ns) / _S),
        ended_by_launcher=end.by_launcher,
        launcher_signal=end.launcher_signal,
    )
