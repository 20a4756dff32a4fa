"""What makes a job slow that goes on: stragglers and slow links, as findings."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rankcall.analysis.finding import Finding, less_sure
from rankcall.analysis.hang import explain
from rankcall.analysis.slowness.call_tables import tables_of
from rankcall.analysis.slowness.links import SlowLink, slow_links
from rankcall.analysis.slowness.straggler import Straggler, straggler
from rankcall.analysis.state.snapshot import Calls, Snapshot
from rankcall.record import OPS

_MOST_LINKS = 4
_RECENT = 384  # calls of a rank


def find_slow(snapshot: Snapshot) -> list[Finding]:
    """Return the straggler and the slow links of a job in which nothing hangs."""
    snapshot = replace(snapshot, calls=_recent(snapshot.calls))
    tables, clocks = tables_of(snapshot)
    found = []
    late = straggler(snapshot, tables, clocks)
    if late is not None:
        found.append(_of_straggler(snapshot, late))
    links = slow_links(snapshot, tables, clocks)
    return [*found, *(_of_link(snapshot, link) for link in links[:_MOST_LINKS])]


def _recent(calls: Calls) -> Calls:
    """Return each rank's newest calls: what was an hour ago slows nobody now."""
    if not len(calls):
        return calls
    newest = np.zeros(int(calls["rank"].max()) + 1, np.int64)
    np.maximum.at(newest, calls["rank"], calls["index"])
    recent: Calls = calls[calls["index"] > newest[calls["rank"]] - _RECENT]
    return recent


def _of_straggler(snapshot: Snapshot, late: Straggler) -> Finding:
    table, column = late.table, late.column
    group = snapshot.groups.index(table.group)
    calls = snapshot.calls
    seq = int(table.seq[column])
    there = (calls["group"] == group) & (calls["seq"] == seq) & (calls["rank"] == late.ranks[0])
    site = snapshot.site(int(calls["site"][there.argmax()])) if there.any() else ""
    op = OPS[int(table.op[column])]
    name = explain.who(snapshot, late.ranks)
    verb = "comes" if len(late.ranks) == 1 else "come"
    since = f", since step {late.since_step:,}" if late.since_step is not None else ""
    victims = tuple(rank for rank in table.ranks.tolist() if rank not in late.ranks)
    return Finding(
        "straggler", late.ranks, victims,
        tuple(dict.fromkeys(snapshot.ranks[r].host for r in late.ranks if snapshot.ranks[r].host)),
        snapshot.labels[group], seq, op, site, late.span_s,
        "likely" if not snapshot.problems else less_sure("likely"),
        f"{name[0].upper()}{name[1:]} {verb} late to {op} of group {snapshot.labels[group]}"
        f"{f' at {site}' if site else ''}, by {explain.ms(late.late_s)} at the median, last of all "
        f"in {late.last_in:.0%}{since}: {late.share:.0%} of all waiting, which costs the others "
        f"{late.cost:.0%} of their time.",
        (f"on record: {len(table.seq):,} collectives of the group, {explain.lasts(late.span_s)}",),
        f"Look at what rank {late.ranks[0]} does before that line: its data, its CPU, its GPU's "
        "clock; rankcall report has the figures.",
    )  # fmt: skip


def _of_link(snapshot: Snapshot, link: SlowLink) -> Finding:
    ends = (
        f"{explain.who(snapshot, link.ranks[:1])} to {explain.who(snapshot, link.ranks[1:])}"
        if link.op == "send"
        else f"between {explain.who(snapshot, link.ranks)}"
    )
    what = "messages from" if link.op == "send" else f"{link.op}"
    return Finding(
        "slow_link", tuple(sorted(link.ranks)), (), link.hosts, op=link.op, since_s=link.seconds,
        confidence="likely",
        summary=f"Slow: {what} {ends} take {explain.ms(link.seconds)} once both ends have come, "
        f"{link.seconds / link.usual:.1f} times the {explain.ms(link.usual)} of {link.compared} "
        "others like it.",
        evidence=(f"over {link.count:,} transfers of up to {link.bytes:,} bytes",),
        advice="Look at the network between "
        + (" and ".join(link.hosts) if len(link.hosts) > 1 else "these ranks")
        + ": errors, speed, a shared uplink.",
    )  # fmt: skip
