"""Ranks that do not do the same: desync, mismatch, deadlock, and which side is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_diagnose_culprits import WORLD, S, look, said, stuck
from worlds import MS, Call, group_of, together

from rankcall.ring.tables import Group

BEFORE = [
    call
    for turn in range(4)
    for op, line, seq in (("all_reduce", 7, 2 * turn + 1), ("all_gather", 9, 2 * turn + 2))
    for call in together(seq, [0] * 4, seq * MS, WORLD, op=op, line=line, bytes=4096 * line)
]


def test_another_op_is_a_desync(tmp_path: Path) -> None:
    """Where one rank's op differs at one (group, seq) it is named, with both call sites."""
    calls = [
        *BEFORE,
        *stuck(WORLD, 9, (0, 1, 3), 9 * MS, line=7),
        *stuck(WORLD, 9, (2,), 9 * MS, op="barrier", line=30),
    ]
    found = look(tmp_path, calls, states={}).findings
    assert [(each.kind, each.ranks, each.victims) for each in found] == [
        ("desync", (2,), (0, 1, 3))
    ]
    assert found[0].confidence == "certain"
    assert found[0].seq == 9
    assert "barrier (train.py:30)" in found[0].summary
    assert "all_reduce (train.py:7)" in found[0].summary


def test_equal_sides_have_no_culprit(tmp_path: Path) -> None:
    """Two against two: both are shown, confidence at most likely, nobody is the culprit."""
    calls = [
        *BEFORE,
        *stuck(WORLD, 9, (0, 1), 9 * MS, line=7),
        *stuck(WORLD, 9, (2, 3), 9 * MS, op="barrier", line=30),
    ]
    found = look(tmp_path, calls, states={}).findings
    assert [(each.kind, each.ranks, each.victims) for each in found] == [
        ("desync", (), (0, 1, 2, 3))
    ]
    assert found[0].confidence == "likely"
    assert "ranks 0-1" in found[0].summary.lower()
    assert "ranks 2-3" in found[0].summary


@pytest.mark.parametrize(
    ("field", "theirs", "its", "words"),
    [
        ("bytes", 4096, 4000, "4,000 bytes against 4,096 bytes"),
        ("dtype", "float32", "float64", "float64 against float32"),
        ("reduce_op", "sum", "max", "max against sum"),
    ],
)
def test_mismatch(tmp_path: Path, field: str, theirs: object, its: object, words: str) -> None:
    """The same op with another size, dtype or reduce op: the field and the values are told."""
    calls = [
        *BEFORE,
        *stuck(WORLD, 9, (0, 1, 3), 9 * MS, line=7, **{field: theirs}),
        *stuck(WORLD, 9, (2,), 9 * MS, line=7, **{field: its}),
    ]
    found = look(tmp_path, calls, states={}).findings
    assert [(each.kind, each.ranks) for each in found] == [("mismatch", (2,))]
    assert words in found[0].summary


def test_another_root_is_a_mismatch(tmp_path: Path) -> None:
    """A broadcast from two roots names the rank that means another one."""
    calls = [
        *stuck(WORLD, 1, (0, 1, 3), 9 * MS, op="broadcast", root=0),
        *stuck(WORLD, 1, (2,), 9 * MS, op="broadcast", root=2),
    ]
    found = look(tmp_path, calls, states={}, seconds=400)
    assert said(found) == [("mismatch", (2,))]
    assert "rank 2 against rank 0" in found.findings[0].summary


def test_a_mismatch_that_went_through(tmp_path: Path) -> None:
    """What did not hang and is wrong all the same is found, beside another rank that hangs."""
    calls = [
        *together(1, [0] * 3, MS, group_of(3)),
        *[
            Call(rank, 2, MS, 2 * MS, dtype="int32" if rank == 1 else "float32", group=group_of(3))
            for rank in range(3)
        ],
        *stuck(group_of(3), 3, (0, 1), 3 * MS),
    ]
    found = look(tmp_path, calls, states={})
    assert sorted(said(found)) == [("mismatch", (1,)), ("missing", (2,))]


def test_a_desync_that_shows_later(tmp_path: Path) -> None:
    """A skipped call that the next one of the same size took the place of is found by its line."""
    lines = [7, 8, 9] * 4
    calls = [
        Call(rank, seq, seq * MS, seq * MS + 1, line=line, group=WORLD)
        for rank in range(4)
        for seq, line in enumerate(lines[:4] + lines[5:] if rank == 2 else lines, 1)
    ]
    waiting = [call for call in calls if call.seq < 12]
    waiting += stuck(WORLD, 12, (0, 1, 3), 12 * MS, line=9)
    found = look(tmp_path, waiting, states={}).findings
    assert [(each.kind, each.ranks, each.seq) for each in found] == [("desync", (2,), 5)]
    assert "skipped" in found[0].summary


def test_order_of_two_calls_of_one_op(tmp_path: Path) -> None:
    """Another size from a line that the others call elsewhere is order, not size."""

    def line(seq: int) -> dict[str, int]:
        return {"line": 7 + seq % 2, "bytes": 4096 * (1 + seq % 2)}

    calls = [
        call for seq in range(1, 9) for call in together(seq, [0] * 4, seq * MS, WORLD, **line(seq))
    ]
    calls += stuck(WORLD, 9, (0, 1, 3), 9 * MS, **line(9)) + stuck(
        WORLD, 9, (2,), 9 * MS, **line(10)
    )
    assert said(look(tmp_path, calls, states={})) == [("desync", (2,))]


A, B = Group("1", 0, "gloo", "", (0, 1)), Group("2", 0, "gloo", "", (0, 1, 2))


def test_two_groups_in_opposite_order(tmp_path: Path) -> None:
    """Ranks that wait for each other in two groups are a deadlock; the third is a victim."""
    calls = [*BEFORE, *stuck(A, 1, (0,), 9 * MS), *stuck(B, 1, (1, 2), 9 * MS)]
    found = look(tmp_path, calls, states={}).findings
    assert [(each.kind, each.ranks, each.victims) for each in found] == [("deadlock", (0, 1), (2,))]
    assert found[0].confidence == "certain"


def message(rank: int, op: str, peer: int, **fields: object) -> Call:
    """Return one end of a message that does not end; ``tag`` and ``api`` may be given."""
    return Call(rank, 1, 9 * MS, None, op=op, peer=peer, group=WORLD, **fields)  # type: ignore[arg-type]


def test_both_receive_first(tmp_path: Path) -> None:
    """Two ranks that each wait to receive from the other."""
    calls = [*BEFORE, message(0, "recv", 1), message(1, "recv", 0)]
    assert said(look(tmp_path, calls, states={})) == [("deadlock", (0, 1))]


def test_tags_that_do_not_match(tmp_path: Path) -> None:
    """A send and a receive with different tags are a deadlock that tells the tags."""
    calls = [*BEFORE, message(0, "send", 1, tag=1), message(1, "recv", 0, tag=2)]
    found = look(tmp_path, calls, states={})
    assert said(found) == [("deadlock", (0, 1))]
    assert "tag 1 and tag 2" in found.findings[0].summary


def test_a_receive_nobody_sends_to(tmp_path: Path) -> None:
    """One waits to receive; the other has gone on to a collective, where it waits for the first."""
    calls = [*BEFORE, message(0, "recv", 1), *stuck(WORLD, 9, (1, 2, 3), 9 * MS)]
    found = look(tmp_path, calls, states={})
    assert [(each.kind, each.ranks, each.victims) for each in found.findings] == [
        ("deadlock", (0, 1), (2, 3))
    ]


def test_a_message_of_two_sizes(tmp_path: Path) -> None:
    """A receive that does not fit its send: a mismatch of two equal sides."""
    calls = [*BEFORE, message(0, "send", 1, bytes=4096), message(1, "recv", 0, bytes=4000)]
    found = look(tmp_path, calls, states={})
    assert said(found) == [("mismatch", ())]
    assert found.findings[0].victims == (0, 1)


def test_an_isend_that_was_received_is_no_hang(tmp_path: Path) -> None:
    """A send that nobody waited for and that has been received has ended, whatever it says."""
    calls = [*BEFORE, message(0, "send", 1, api="isend")]
    calls += [Call(1, 1, 9 * MS, 10 * MS, op="recv", peer=0, group=WORLD)]
    calls += together(9, [70 * S - MS] * 4, 70 * S, WORLD, line=7, op="all_reduce")
    assert said(look(tmp_path, calls, states={})) == []


def test_an_isend_whose_receive_is_missing(tmp_path: Path) -> None:
    """The rank that never receives is missing, where both stand still."""
    calls = [*BEFORE, message(0, "send", 1, api="isend")]
    assert said(look(tmp_path, calls, states={})) == [("missing", (1,))]


def test_nobody_waits_for_a_late_receiver(tmp_path: Path) -> None:
    """An isend not yet received is no hang while both its ends go on."""
    calls = [*BEFORE, message(0, "send", 1, api="isend")]
    calls += together(9, [70 * S - MS] * 4, 70 * S, WORLD, line=7, op="all_reduce")
    assert said(look(tmp_path, calls, states={})) == []


def test_all_there_and_stuck(tmp_path: Path) -> None:
    """All have come, do the same, live, and do not get out: the transfer, with low confidence."""
    found = look(tmp_path, [*BEFORE, *stuck(WORLD, 9, (0, 1, 2, 3), 9 * MS, line=7)], states={})
    assert said(found) == [("slow_link", ())]
    assert found.findings[0].confidence == "possible"
