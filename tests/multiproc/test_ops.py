"""Every op on four real ranks and three groups: the records are those of the issued ops.

All cases run within one set of processes per capture; each test then looks at the part of the
records that one case issued.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import pytest
from op_cases.recorded import CAPTURES, CASES, Recorded, recorded_run
from world import differences

pytestmark = pytest.mark.multiproc

FILES = {case.__name__: case.__code__.co_filename for case in CASES}


@pytest.fixture(params=CAPTURES)
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Return the run of a capture."""
    return recorded_run(request.param, tmp_path_factory)


@pytest.mark.parametrize("name", FILES)
def test_op(recorded: Recorded, name: str) -> None:
    """Every column of every record of a case is right, on all ranks and groups, and its results."""
    wrong = []
    for rank, parts in enumerate(recorded.parts):
        mine = [part for part in parts if part["case"] == name]
        assert mine, f"rank {rank} did not run {name}"
        for part in mine:
            rows = recorded.rows[rank][part["first"] : part["last"]]
            problems = differences(part["expected"], rows, FILES[name])
            problems += [part["problem"]] if part["problem"] else []
            wrong += [f"rank {rank}, group {part['group']}: {problem}" for problem in problems]
    assert not wrong, "\n".join(wrong)


def test_nothing_is_lost_or_added(recorded: Recorded, request: pytest.FixtureRequest) -> None:
    """The wanted capture recorded, dropped nothing, and saw what the cases issued and no more."""
    assert recorded.capture == request.node.callspec.params["recorded"]
    assert recorded.problems == []
    assert set(recorded.dropped.values()) == {0}
    for rank, parts in enumerate(recorded.parts):
        assert len(recorded.rows[rank]) == sum(len(part["expected"]) for part in parts)
        assert [row["index"] for row in recorded.rows[rank]] == list(range(parts[-1]["last"]))


def test_members_agree_on_collectives(recorded: Recorded) -> None:
    """A (group, seq) is the same op on every member, and every member has it."""
    seen: dict[Any, list[Any]] = defaultdict(list)
    for row in (row for rows in recorded.rows for row in rows if row["kind"] == "collective"):
        key = (row["group"], row["seq"])
        seen[key].append((row["rank"], row["variant"], row["call_site"], tuple(row["group_ranks"])))
    for key, calls in seen.items():
        assert sorted(rank for rank, *_ in calls) == list(calls[0][3]), key
        assert len({tuple(rest) for _, *rest in calls}) == 1, (key, calls)
    for group in {group for group, _ in seen}:
        numbers = sorted(seq for name, seq in seen if name == group)
        assert numbers == list(range(1, len(numbers) + 1))


def test_both_ends_agree_on_messages(recorded: Recorded) -> None:
    """A (group, source, destination, tag, seq) is sent once and received once, with equal bytes."""
    ends: dict[Any, Counter[str]] = defaultdict(Counter)
    for row in (row for rows in recorded.rows for row in rows if row["kind"] == "p2p"):
        pair = (row["rank"], row["peer"])
        source, target = pair if row["op"] == "send" else pair[::-1]
        key = (row["group"], source, target, row["tag"], row["seq"], row["message_bytes"])
        ends[key][row["op"]] += 1
    assert ends
    assert {key: end for key, end in ends.items() if end != {"send": 1, "recv": 1}} == {}


def test_both_captures_write_the_same(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Apart from times, threads and numbers of calls the captures' records are equal."""
    native, python = (recorded_run(capture, tmp_path_factory).rows for capture in CAPTURES)
    differ = {"enqueued_ns", "started_ns", "completed_ns", "thread", "correlation"}
    for ours, theirs in zip(native, python, strict=True):
        for our_row, their_row in zip(ours, theirs, strict=True):
            left = {
                key: (our_row[key], their_row[key])
                for key in our_row
                if our_row[key] != their_row[key]
            }
            assert left.keys() <= differ, left
            assert our_row["thread"] > 0
