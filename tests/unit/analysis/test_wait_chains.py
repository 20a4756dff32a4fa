"""Waits for messages are charged to the rank at the end of their chain."""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path

import pytest
from worlds import MS, Call, group_of, together, write_world

from rankcall.analysis.details import detail
from rankcall.analysis.recent_figures import recent_figures
from rankcall.analysis.run_snapshot import snapshot_of_run
from rankcall.analysis.summary import Summary
from rankcall.run.load import load


def message(
    source: int, target: int, seq: int, sent: int, asked: int, *, api: str = "send", size: int = 4
) -> list[Call]:
    """Return both ends of a message that takes 1 ms once both have come; times in ms."""
    group, end = group_of(size), (max(sent, asked) + 1) * MS
    return [
        Call(source, seq, sent * MS, end, "send", group=group, peer=target, api=api),
        Call(target, seq, asked * MS, end, "recv", group=group, peer=source, api="recv"),
    ]


def caused(folder: Path, calls: list[Call], size: int = 4) -> dict[int, float]:
    """Return the waiting in ms that each rank caused, without those that caused none."""
    path = write_world(folder / "run", calls, world_size=size, ranks=range(size))
    summary = detail(load(path)).summary
    rows = {row.rank: row.caused_wait_ms or 0.0 for row in summary.stragglers}
    return {rank: pytest.approx(ms) for rank, ms in rows.items() if ms}


def test_a_wait_is_followed_to_its_end(tmp_path: Path) -> None:
    """Rank 0 waits for 1, which waits for 2, which waits for nobody: 2 is to blame for all."""
    calls = message(1, 0, 1, sent=31, asked=0) + message(2, 1, 1, sent=30, asked=0)
    assert caused(tmp_path, calls) == {2: 30 + 30, 1: 1}


def test_only_the_time_in_which_the_other_waits_is_passed_on(tmp_path: Path) -> None:
    """Rank 1 computes 10 ms before it waits: these are its own."""
    calls = message(1, 0, 1, sent=40, asked=0) + message(2, 1, 1, sent=30, asked=10)
    # Rank 0 waits 40 ms: 10 for rank 1 itself, 20 for rank 2, and 10 for rank 1 again.
    assert caused(tmp_path, calls) == {2: 20 + 20, 1: 10 + 10}


def test_a_send_that_blocks_waits(tmp_path: Path) -> None:
    """A blocking send waits for its receiver; its time is no transfer."""
    path = write_world(tmp_path / "run", message(0, 1, 1, sent=0, asked=20), world_size=4)
    details = detail(load(path))
    sender, receiver = details.splits
    assert (sender.waiting_ms, sender.transfer_ms) == (20.0, 1.0)
    assert (receiver.waiting_ms, receiver.transfer_ms) == (0.0, 1.0)
    (worst,) = [row for row in details.summary.stragglers if row.caused_wait_ms]
    assert (worst.rank, worst.caused_wait_ms) == (1, 20.0)


@pytest.mark.parametrize("api", ["isend", "batch_isend_irecv"])
def test_a_send_that_does_not_block_is_no_wait(tmp_path: Path, api: str) -> None:
    """Its rank may compute until it waits for it, so nobody knows that it waited."""
    assert caused(tmp_path, message(0, 1, 1, sent=0, asked=20, api=api)) == {}


def test_a_send_into_a_buffer_is_no_wait(tmp_path: Path) -> None:
    """A send that was over before its receiver came has not waited for it."""
    sent, asked = message(0, 1, 1, sent=0, asked=20)
    early = Call(**{**vars(sent), "end": MS})
    assert caused(tmp_path, [early, asked]) == {}


def test_two_that_wait_for_each_other_by_their_clocks(tmp_path: Path) -> None:
    """Clocks that disagree can show a circle; the charge stays within what was waited."""
    calls = message(1, 0, 1, sent=10, asked=0) + message(0, 1, 1, sent=10, asked=0)
    assert sum(caused_ms.expected for caused_ms in caused(tmp_path, calls).values()) == 20


def random_messages(rng: random.Random, size: int) -> list[Call]:
    """Return messages of ranks that do one thing after the other, as in a program."""
    now, calls = [0] * size, []
    seqs: dict[tuple[int, int], int] = defaultdict(int)
    for _ in range(rng.randint(1, 14)):
        source, target = rng.sample(range(size), 2)
        seqs[source, target] += 1
        sent, asked = (now[rank] + rng.randint(1, 9) for rank in (source, target))
        end, seq = max(sent, asked) + rng.randint(1, 3), seqs[source, target]
        group = group_of(size)
        calls.append(Call(source, seq, sent, end, "send", group=group, peer=target, api="send"))
        calls.append(Call(target, seq, asked, end, "recv", group=group, peer=source, api="recv"))
        now[source] = now[target] = end
    return calls


def by_moment(calls: list[Call]) -> dict[int, float]:
    """Return what each rank caused, by following the chain anew at every moment."""
    ends = {(c.rank, c.peer, c.seq, c.op): c for c in calls}
    waits = []  # rank, begin, end, other
    for call in calls:
        other = ends[call.peer, call.rank, call.seq, "recv" if call.op == "send" else "send"]
        if other.at > call.at:
            waits.append((call.rank, call.at, other.at, call.peer))
    total: dict[int, float] = defaultdict(float)
    for moment in range(max(call.end or 0 for call in calls)):
        waits_for = {rank: other for rank, begin, end, other in waits if begin <= moment < end}
        for rank in waits_for:
            last = waits_for[rank]
            while last in waits_for:
                last = waits_for[last]
            total[last] += 1
    return {rank: ns for rank, ns in total.items() if ns}


@pytest.mark.parametrize("seed", range(40))
def test_blame_is_what_a_look_at_every_moment_finds(tmp_path: Path, seed: int) -> None:
    """On random programs of messages, each rank caused what a look at every moment says."""
    rng = random.Random(seed)
    size = rng.randint(2, 6)
    calls = random_messages(rng, size)
    expected = {rank: pytest.approx(ns / MS) for rank, ns in by_moment(calls).items()}
    found = caused(tmp_path, calls, size)
    assert {rank: ms.expected for rank, ms in found.items()} == expected


def test_the_live_view_charges_as_the_report_does(tmp_path: Path) -> None:
    """The same chain in a snapshot's newest calls."""
    calls = message(1, 0, 1, sent=31, asked=0) + message(2, 1, 1, sent=30, asked=0)
    run = load(write_world(tmp_path / "run", calls, world_size=3))
    (first, *_) = recent_figures(snapshot_of_run(run)).late
    assert (first.rank, first.share) == (2, pytest.approx(60 / 61))


def test_ops_that_differ_are_not_merged(tmp_path: Path) -> None:
    """A number at which one rank issued a barrier and the others an all_reduce is a row alone."""
    group = group_of(3)
    calls = together(1, [0, 0, 0], MS, group) + together(2, [2 * MS] * 3, 3 * MS, group)
    calls += [
        Call(0, 3, 4 * MS, None, "barrier", 1, group=group),
        Call(1, 3, 9 * MS, None, group=group),
        Call(2, 3, 5 * MS, None, group=group),
    ]
    summary: Summary = detail(load(write_world(tmp_path / "run", calls))).summary
    rows = {row.op: (row.count, row.unfinished) for row in summary.collectives}
    assert rows == {"all_reduce": (2, 0), "(differ)": (1, 1)}
    assert summary.waiting_ms == 0
