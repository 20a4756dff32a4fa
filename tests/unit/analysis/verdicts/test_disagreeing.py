"""Ranks that issue different calls: desync, mismatch and deadlock, and which side is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from diagnosing import SECOND, THREE_ENDED, WORLD, causes, diagnose_calls, unfinished
from worlds import MS, Call, group_of, together

from rankcall.analysis.verdicts.finding import Finding
from rankcall.report import diagnosis_text, top
from rankcall.ring.tables import Group

TWO_OPS_ENDED = [
    call
    for turn in range(4)
    for op, line, seq in (("all_reduce", 7, 2 * turn + 1), ("all_gather", 9, 2 * turn + 2))
    for call in together(seq, [0] * 4, seq * MS, WORLD, op=op, line=line, bytes=4096 * line)
]


def test_another_op_is_a_desync(tmp_path: Path) -> None:
    """A rank whose op differs at one (group, seq) is named, with both call sites."""
    calls = [
        *TWO_OPS_ENDED,
        *unfinished(WORLD, 9, (0, 1, 3), 9 * MS, line=7),
        *unfinished(WORLD, 9, (2,), 9 * MS, op="barrier", line=30),
    ]
    findings = diagnose_calls(tmp_path, calls, states={}).findings
    assert [(finding.kind, finding.ranks, finding.victims) for finding in findings] == [
        ("desync", (2,), (0, 1, 3))
    ]
    assert findings[0].confidence == "certain"
    assert findings[0].seq == 9
    assert "barrier (train.py:30)" in findings[0].summary
    assert "all_reduce (train.py:7)" in findings[0].summary


def test_equal_sides_have_no_culprit(tmp_path: Path) -> None:
    """With two ranks against two, both sides are shown, no rank is named, at most as likely."""
    calls = [
        *TWO_OPS_ENDED,
        *unfinished(WORLD, 9, (0, 1), 9 * MS, line=7),
        *unfinished(WORLD, 9, (2, 3), 9 * MS, op="barrier", line=30),
    ]
    findings = diagnose_calls(tmp_path, calls, states={}).findings
    assert [(finding.kind, finding.ranks, finding.victims) for finding in findings] == [
        ("desync", (), (0, 1, 2, 3))
    ]
    assert findings[0].confidence == "likely"
    assert "ranks 0-1" in findings[0].summary.lower()
    assert "ranks 2-3" in findings[0].summary


@pytest.mark.parametrize(
    ("field", "theirs", "its", "words"),
    [
        ("bytes", 4096, 4000, "4,000 bytes against 4,096 bytes"),
        ("dtype", "float32", "float64", "float64 against float32"),
        ("reduce_op", "sum", "max", "max against sum"),
    ],
)
def test_mismatch(tmp_path: Path, field: str, theirs: object, its: object, words: str) -> None:
    """If the op is the same but its size, dtype or reduce op differs, both values are shown."""
    calls = [
        *TWO_OPS_ENDED,
        *unfinished(WORLD, 9, (0, 1, 3), 9 * MS, line=7, **{field: theirs}),
        *unfinished(WORLD, 9, (2,), 9 * MS, line=7, **{field: its}),
    ]
    findings = diagnose_calls(tmp_path, calls, states={}).findings
    assert [(finding.kind, finding.ranks) for finding in findings] == [("mismatch", (2,))]
    assert words in findings[0].summary


@pytest.mark.parametrize("other_line", [7, 8])
def test_a_mismatch_of_two_lines_may_be_two_calls(tmp_path: Path, other_line: int) -> None:
    """A rank that left the loop calls the metric's all_reduce where the others call the loop's."""
    calls = [
        *together(1, [0] * 4, MS, WORLD, line=7),
        *unfinished(WORLD, 2, (0, 1, 3), 9 * MS, line=7),
        *unfinished(WORLD, 2, (2,), 9 * MS, line=other_line, bytes=4),
    ]
    (finding,) = diagnose_calls(tmp_path, calls, states={}).findings
    assert (finding.kind, finding.ranks) == ("mismatch", (2,))
    assert ("a call more or less" in finding.advice) == (other_line != 7)


def test_another_root_is_a_mismatch(tmp_path: Path) -> None:
    """If the members of a broadcast name two roots, the rank in the minority is named."""
    calls = [
        *unfinished(WORLD, 1, (0, 1, 3), 9 * MS, op="broadcast", root=0),
        *unfinished(WORLD, 1, (2,), 9 * MS, op="broadcast", root=2),
    ]
    diagnosis = diagnose_calls(tmp_path, calls, states={}, seconds=400)
    assert causes(diagnosis) == [("mismatch", (2,))]
    assert "rank 2 against rank 0" in diagnosis.findings[0].summary


def test_a_mismatch_that_went_through(tmp_path: Path) -> None:
    """A mismatch that did not hang is found, beside a rank that hangs."""
    calls = [
        *together(1, [0] * 3, MS, group_of(3)),
        *[
            Call(rank, 2, MS, 2 * MS, dtype="int32" if rank == 1 else "float32", group=group_of(3))
            for rank in range(3)
        ],
        *unfinished(group_of(3), 3, (0, 1), 3 * MS),
    ]
    diagnosis = diagnose_calls(tmp_path, calls, states={})
    assert sorted(causes(diagnosis)) == [("mismatch", (1,)), ("missing", (2,))]


def test_a_desync_that_shows_later(tmp_path: Path) -> None:
    """If the next call of the same size matched a skipped one, the call site shows the skip."""
    lines = [7, 8, 9] * 4
    calls = [
        Call(rank, seq, seq * MS, seq * MS + 1, line=line, group=WORLD)
        for rank in range(4)
        for seq, line in enumerate(lines[:4] + lines[5:] if rank == 2 else lines, 1)
    ]
    waiting = [call for call in calls if call.seq < 12]
    waiting += unfinished(WORLD, 12, (0, 1, 3), 12 * MS, line=9)
    findings = diagnose_calls(tmp_path, waiting, states={}).findings
    assert [(finding.kind, finding.ranks, finding.seq) for finding in findings] == [
        ("desync", (2,), 5)
    ]
    assert "skipped" in findings[0].summary


def test_order_of_two_calls_of_one_op(tmp_path: Path) -> None:
    """A different size from a line that the others call later is a wrong order, not a mismatch."""

    def line(seq: int) -> dict[str, int]:
        return {"line": 7 + seq % 2, "bytes": 4096 * (1 + seq % 2)}

    calls = [
        call for seq in range(1, 9) for call in together(seq, [0] * 4, seq * MS, WORLD, **line(seq))
    ]
    calls += unfinished(WORLD, 9, (0, 1, 3), 9 * MS, **line(9)) + unfinished(
        WORLD, 9, (2,), 9 * MS, **line(10)
    )
    assert causes(diagnose_calls(tmp_path, calls, states={})) == [("desync", (2,))]


A, B = Group("1", 0, "gloo", "", (0, 1)), Group("2", 0, "gloo", "", (0, 1, 2))


def test_two_groups_in_opposite_order(tmp_path: Path) -> None:
    """Ranks that wait for each other in two groups are a deadlock; the third is a victim."""
    calls = [*TWO_OPS_ENDED, *unfinished(A, 1, (0,), 9 * MS), *unfinished(B, 1, (1, 2), 9 * MS)]
    findings = diagnose_calls(tmp_path, calls, states={}).findings
    assert [(finding.kind, finding.ranks, finding.victims) for finding in findings] == [
        ("deadlock", (0, 1), (2,))
    ]
    assert findings[0].confidence == "certain"


def message(rank: int, op: str, peer: int, **fields: object) -> Call:
    """Return one end of a message that does not end; ``tag`` and ``api`` may be given."""
    return Call(rank, 1, 9 * MS, None, op=op, peer=peer, group=WORLD, **fields)  # type: ignore[arg-type]


def test_both_receive_first(tmp_path: Path) -> None:
    """Two ranks that each wait to receive from the other are a deadlock."""
    calls = [*TWO_OPS_ENDED, message(0, "recv", 1), message(1, "recv", 0)]
    assert causes(diagnose_calls(tmp_path, calls, states={})) == [("deadlock", (0, 1))]


def test_how_far_both_had_come(tmp_path: Path) -> None:
    """A deadlock says once who waits for whom, and how many messages went through before."""
    calls = [*TWO_OPS_ENDED]
    for seq in range(1, 84):
        for source, target in ((0, 1), (1, 0)):
            at, ended = seq * MS, {"group": WORLD, "peer": target, "line": 3}
            calls.append(Call(source, seq, at, at + 1, "send", **ended))
            calls.append(Call(target, seq, at, at + 1, "recv", **{**ended, "peer": source}))
    at = 90 * MS
    calls += [Call(rank, 84, at, None, "recv", group=WORLD, peer=1 - rank) for rank in (0, 1)]
    calls.sort(key=lambda call: call.at)
    (finding,) = diagnose_calls(tmp_path, calls, states={}).findings
    assert finding.kind == "deadlock"
    assert set(finding.evidence) == {
        "rank 0 has sent 83 messages to rank 1 (tag 0, group 0); the 84th is awaited",
        "rank 1 has sent 83 messages to rank 0 (tag 0, group 0); the 84th is awaited",
    }
    assert finding.summary.count("recv #84") == 2


def test_tags_that_do_not_match(tmp_path: Path) -> None:
    """A send and a receive with different tags are a deadlock, and the summary has both tags."""
    calls = [*TWO_OPS_ENDED, message(0, "send", 1, tag=1), message(1, "recv", 0, tag=2)]
    diagnosis = diagnose_calls(tmp_path, calls, states={})
    assert causes(diagnosis) == [("deadlock", (0, 1))]
    assert "tag 1 and tag 2" in diagnosis.findings[0].summary


def test_a_receive_without_a_sender(tmp_path: Path) -> None:
    """A rank that receives and a sender that went on to a collective wait for each other."""
    calls = [*TWO_OPS_ENDED, message(0, "recv", 1), *unfinished(WORLD, 9, (1, 2, 3), 9 * MS)]
    diagnosis = diagnose_calls(tmp_path, calls, states={})
    assert [(finding.kind, finding.ranks, finding.victims) for finding in diagnosis.findings] == [
        ("deadlock", (0, 1), (2, 3))
    ]


def test_a_message_of_two_sizes(tmp_path: Path) -> None:
    """A receive whose size differs from its send is a mismatch of two equal sides."""
    calls = [*TWO_OPS_ENDED, message(0, "send", 1, bytes=4096), message(1, "recv", 0, bytes=4000)]
    diagnosis = diagnose_calls(tmp_path, calls, states={})
    assert causes(diagnosis) == [("mismatch", ())]
    assert diagnosis.findings[0].victims == (0, 1)


def test_an_isend_that_was_received_is_no_hang(tmp_path: Path) -> None:
    """An isend that was received has ended, even if its own record says that it is in flight."""
    calls = [*TWO_OPS_ENDED, message(0, "send", 1, api="isend")]
    calls += [Call(1, 1, 9 * MS, 10 * MS, op="recv", peer=0, group=WORLD)]
    calls += together(9, [70 * SECOND - MS] * 4, 70 * SECOND, WORLD, line=7, op="all_reduce")
    assert causes(diagnose_calls(tmp_path, calls, states={})) == []


def test_an_isend_whose_receive_is_missing(tmp_path: Path) -> None:
    """If both ranks stand still, the rank that never receives is missing."""
    calls = [*TWO_OPS_ENDED, message(0, "send", 1, api="isend")]
    assert causes(diagnose_calls(tmp_path, calls, states={})) == [("missing", (1,))]


def test_a_late_receiver_is_no_hang(tmp_path: Path) -> None:
    """An isend not yet received is no hang while both its ends go on."""
    calls = [*TWO_OPS_ENDED, message(0, "send", 1, api="isend")]
    calls += together(9, [70 * SECOND - MS] * 4, 70 * SECOND, WORLD, line=7, op="all_reduce")
    assert causes(diagnose_calls(tmp_path, calls, states={})) == []


def test_all_there_and_stuck(tmp_path: Path) -> None:
    """If all ranks are alive in the same call, the transfer is to blame, with low confidence."""
    diagnosis = diagnose_calls(
        tmp_path, [*TWO_OPS_ENDED, *unfinished(WORLD, 9, (0, 1, 2, 3), 9 * MS, line=7)], states={}
    )
    assert causes(diagnosis) == [("slow_link", ())]
    assert diagnosis.findings[0].confidence == "possible"


def alternating(count: int) -> list[Call]:
    """Return a program that all ranks issue: an all_reduce and an all_gather in turn."""
    return [
        Call(
            rank,
            seq,
            seq * MS,
            seq * MS + 1,
            line=7 + 2 * (seq % 2),
            group=WORLD,
            op=("all_gather", "all_reduce")[seq % 2],
        )
        for seq in range(1, count + 1)
        for rank in range(4)
    ]


@pytest.mark.parametrize(
    ("op", "line"), [("all_gather", 7), ("broadcast", 12), ("all_gather", 20), ("barrier", 7)]
)
def test_a_single_other_call_is_no_shift(tmp_path: Path, op: str, line: int) -> None:
    """One call that differs may be swapped, replaced or skipped, so the finding does not guess.

    The finding has the calls of both sides, and does not say "behind".
    """
    calls = alternating(8) + unfinished(WORLD, 9, (0, 1, 3), 9 * MS, line=9)
    calls += unfinished(WORLD, 9, (2,), 9 * MS, op=op, line=line)
    (finding,) = diagnose_calls(tmp_path, calls, states={}).findings
    assert (finding.kind, finding.ranks, finding.seq) == ("desync", (2,), 9)
    assert f"issued {op} (train.py:{line}) as #9 of group 0" in finding.summary
    assert "against all_reduce (train.py:9) of ranks 0-1,3" in finding.summary
    for word in ("behind", "ahead", "skipped", "too many", "later", "earlier"):
        assert word not in finding.summary


def passed(seq: int, **ends: dict[str, object]) -> list[Call]:
    """Return a message from rank 0 to rank 1; ``ends`` has the fields by which its ends differ."""
    both = (("send", 0, 1), ("recv", 1, 0))
    return [
        Call(rank, seq, 9 * MS, 10 * MS, op, peer=peer, group=WORLD, **ends.get(op, {}))  # type: ignore[arg-type]
        for op, rank, peer in both
    ]


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        ({"recv": {"dtype": "int32"}}, "sends float32 and rank 1 receives int32"),
        ({"recv": {"bytes": 8192}}, "sends 4,096 bytes and rank 1 receives 8,192 bytes"),
    ],
)
def test_a_message_that_went_through_and_is_wrong(
    tmp_path: Path, ends: dict[str, dict[str, object]], words: str
) -> None:
    """A message whose ends differ is reported after the fact, once for a pair of ranks."""
    calls = [*TWO_OPS_ENDED, *passed(1, **ends), *passed(2, **ends)]
    diagnosis = diagnose_calls(tmp_path, calls, seconds=2, states={})
    assert causes(diagnosis) == [("mismatch", ())]
    (finding,) = diagnosis.findings
    assert finding.victims == (0, 1)
    assert words in finding.summary
    assert "It went through all the same" in finding.summary
    assert (
        causes(
            diagnose_calls(tmp_path / "same", [*TWO_OPS_ENDED, *passed(1)], seconds=2, states={})
        )
        == []
    )


def test_splits_that_do_not_add_up(tmp_path: Path) -> None:
    """Members of an all_to_all may differ in size, but what is sent must be received."""
    sizes = [(100, 300), (300, 100), (50, 50), (0, 0)]
    for name, extra, expected in (("good", 0, []), ("bad", 8, [("mismatch", ())])):
        calls = [
            Call(
                rank,
                9,
                9 * MS,
                10 * MS,
                "all_to_all",
                max(pair),
                in_bytes=pair[0],
                out_bytes=pair[1] + (extra if rank == 2 else 0),
                shape_hash=1,
                group=WORLD,
            )
            for rank, pair in enumerate(sizes)
        ]
        diagnosis = diagnose_calls(tmp_path / name, [*TWO_OPS_ENDED, *calls], seconds=2, states={})
        assert causes(diagnosis) == expected, name
    assert "send 450 bytes in all" in diagnosis.findings[0].summary
    assert "to receive 458" in diagnosis.findings[0].summary


@pytest.mark.parametrize(("shape_hash", "expected"), [(0, [("mismatch", (1,))]), (1, [])])
def test_an_all_to_all_of_another_size(
    tmp_path: Path, shape_hash: int, expected: list[object]
) -> None:
    """Without splits all members must pass one size; with splits each may have a size of its own.

    Each member sends as much as it receives, so that the sums over all members are equal.
    """
    sizes = [128, 192, 128, 128]
    calls = [
        Call(
            rank,
            9,
            9 * MS,
            10 * MS,
            "all_to_all",
            size,
            in_bytes=size,
            out_bytes=size,
            shape_hash=shape_hash,
            group=WORLD,
        )
        for rank, size in enumerate(sizes)
    ]
    diagnosis = diagnose_calls(tmp_path, [*TWO_OPS_ENDED, *calls], seconds=2, states={})
    assert causes(diagnosis) == expected
    assert all("192 bytes against 128 bytes" in finding.summary for finding in diagnosis.findings)


def test_a_root_outside_the_group(tmp_path: Path) -> None:
    """A rank that names a root outside the group fails; it is named, not the ranks that wait."""
    failed = {"status": "failed", "op": "broadcast"}
    calls = [
        *TWO_OPS_ENDED,
        *[Call(rank, 9, 9 * MS, 80 * MS, root=0, group=WORLD, **failed) for rank in (0, 1, 3)],
        Call(2, 9, 9 * MS, 10 * MS, root=9, group=WORLD, **failed),
    ]
    exits = {rank: (1, 0.02 if rank == 2 else 0.1) for rank in range(4)}
    states = dict.fromkeys(range(4), "gone")
    diagnosis = diagnose_calls(tmp_path, calls, states=states, exits=exits)
    assert causes(diagnosis) == [("mismatch", (2,))]
    assert "a rank outside the group against rank 0" in diagnosis.findings[0].summary


@pytest.mark.parametrize(("peer", "tag"), [(9, 0), (0, -1)])
def test_a_message_that_is_refused(tmp_path: Path, peer: int, tag: int) -> None:
    """A rank that failed by its own arguments waits for no rank: it died of its own error."""
    calls = [
        *TWO_OPS_ENDED,
        *[Call(rank, 9, 9 * MS, 80 * MS, group=WORLD, status="failed") for rank in (0, 2, 3)],
        Call(1, 1, 9 * MS, 10 * MS, "send", peer=peer, tag=tag, group=WORLD, status="failed"),
    ]
    exits = {rank: (1, 0.02 if rank == 1 else 0.1) for rank in range(4)}
    states = dict.fromkeys(range(4), "gone")
    diagnosis = diagnose_calls(tmp_path, calls, states=states, exits=exits)
    assert causes(diagnosis) == [("dead", (1,))]


def test_ranks_that_wait_for_a_rank_that_waits_for_any_of_them(tmp_path: Path) -> None:
    """If all possible sources wait for the receiver, none can ever send: a deadlock of all."""
    calls = [
        *TWO_OPS_ENDED,
        *unfinished(WORLD, 9, (1, 2, 3), 9 * MS, line=7),
        Call(0, 1, 9 * MS, None, "recv", group=WORLD, api="recv"),
    ]
    assert causes(diagnose_calls(tmp_path, calls, states={})) == [("deadlock", (0, 1, 2, 3))]


def test_a_receive_without_a_message_has_no_number(tmp_path: Path) -> None:
    """A receive from any source gets its number with the message; until then none is shown."""
    calls = [
        *TWO_OPS_ENDED,
        *unfinished(WORLD, 9, (1, 2, 3), 9 * MS, line=7),
        Call(0, 0, 9 * MS, None, "recv", group=WORLD, api="recv"),
    ]
    diagnosis = diagnose_calls(tmp_path, calls, states={})
    (finding,) = diagnosis.findings
    shown = diagnosis_text.diagnosis_text(diagnosis, 120), top.render(diagnosis, 120)
    texts = [finding.summary, *finding.evidence, *shown]
    assert any("recv from any rank" in text for text in texts)
    assert all("in recv" in text for text in shown)
    assert not any("#0" in text for text in texts)


def test_a_rank_that_may_still_send_is_missing(tmp_path: Path) -> None:
    """If one possible source is in user code, the receive from any source waits for that one."""
    calls = [
        *TWO_OPS_ENDED,
        *unfinished(WORLD, 9, (1, 2), 9 * MS, line=7),
        Call(0, 1, 9 * MS, None, "recv", group=WORLD, api="recv"),
    ]
    assert causes(diagnose_calls(tmp_path, calls, states={})) == [("missing", (3,))]


@pytest.mark.parametrize(("sent", "expected"), [(8192, [("mismatch", ())]), (4096, [])])
def test_a_message_too_long_for_a_receive_from_any_source(
    tmp_path: Path, sent: int, expected: list[object]
) -> None:
    """The only message on its way to a failed receive from any source is compared with it."""
    calls = [
        *TWO_OPS_ENDED,
        Call(0, 1, 9 * MS, 20 * MS, "recv", 4096, group=WORLD, api="recv", status="failed"),
        Call(2, 1, 9 * MS, 20 * MS, "send", sent, peer=0, group=WORLD, api="send", status="failed"),
    ]
    findings = diagnose_calls(tmp_path, calls, states={}).findings
    mismatches = [finding for finding in findings if finding.kind == "mismatch"]
    assert [(mismatch.kind, mismatch.ranks) for mismatch in mismatches] == expected
    assert all(
        "Rank 2 sends 8,192 bytes and rank 0 receives 4,096" in mismatch.summary
        for mismatch in mismatches
    )


def answered(seq: int, line: int, api: str) -> list[Call]:
    """Return a call of ranks 1 to 3 that the Join of rank 0, which has no inputs, answers."""
    sites = [(36, "Join"), *[(line, api)] * 3]
    return [
        Call(rank, seq, seq * MS, seq * MS + 1000, group=WORLD, line=at, bytes=4, api=name)
        for rank, (at, name) in enumerate(sites)
    ]


MODEL_CALLS = [call for seq in range(1, 8) for call in answered(seq, 38, "backward")]


def test_a_rank_that_shadows_in_a_join(tmp_path: Path) -> None:
    """A collective of the program's own meets the Join's of a rank without inputs: it says so.

    That calls of a Join pair with those of any line is no difference.
    """
    calls = [
        *MODEL_CALLS,
        *unfinished(WORLD, 8, (0,), 9 * MS, line=36, bytes=4, api="Join"),
        *unfinished(WORLD, 8, (1, 2, 3), 9 * MS, line=30, bytes=8, api="all_reduce"),
    ]
    (finding,) = diagnose_calls(tmp_path, calls, states={}).findings
    _says_that_a_join_answered(finding)
    assert any("one of its Join's own" in line for line in finding.evidence)


@pytest.mark.parametrize("op", ["all_reduce", "broadcast"])
def test_an_answer_of_a_join_that_went_through(tmp_path: Path, op: str) -> None:
    """The program's own call is named, and not the later messages of the Joins, which differ.

    It had the size of a Join's message. What a Join answered before, the calls of a model, was as
    it should be.
    """
    calls = [
        *MODEL_CALLS,
        *answered(8, 30, "all_reduce"),
        *unfinished(WORLD, 9, (0,), 9 * MS, op=op, line=36, bytes=8, api="Join"),
        *unfinished(WORLD, 9, (1, 2, 3), 9 * MS, line=38, bytes=4, api="Join"),
    ]
    (finding,) = diagnose_calls(tmp_path, calls, states={}).findings
    _says_that_a_join_answered(finding)


def _says_that_a_join_answered(finding: Finding) -> None:
    """Check that call 8 is named, which the program of ranks 1 to 3 has made at line 30."""
    assert (finding.kind, finding.ranks, finding.seq) == ("desync", (0,), 8)
    assert "issued Join's all_reduce (train.py:36) as #8" in finding.summary
    assert "against all_reduce (train.py:30) of ranks 1-3" in finding.summary
    assert 'on_exhausted="replay"' in finding.advice


def test_two_calls_at_one_line_are_told_apart(tmp_path: Path) -> None:
    """If a line issues both, as a framework's does, the functions that it called are named."""
    calls = [
        *THREE_ENDED,
        *unfinished(WORLD, 4, (0, 1, 3), 9 * MS, line=7, bytes=64, api="backward"),
        *unfinished(WORLD, 4, (2,), 9 * MS, line=7, bytes=8, api="all_gather_object"),
    ]
    (finding,) = diagnose_calls(tmp_path, calls, states={}).findings
    assert finding.kind == "mismatch"
    sides = [line for line in finding.evidence if "train.py:7" in line]
    assert any("backward's all_reduce at train.py:7" in line for line in sides)
    assert any("all_gather_object's all_reduce at train.py:7" in line for line in sides)
