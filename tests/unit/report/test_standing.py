"""Where a rank stands: one rule, which all views show in the same words."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from diagnosing import diagnose_calls
from worlds import MS, Call

from rankcall.analysis.snapshot import CALL, NOTICED_S, SEND, RankPosition, standings
from rankcall.analysis.verdicts.decoding import decode
from rankcall.analysis.verdicts.encoding import encode
from rankcall.record import FLAG_ABANDONED, FLAG_DEVICE, STATUSES
from rankcall.report import top
from rankcall.report.diagnosis_text import diagnosis_text
from rankcall.serve.history import History
from rankcall.serve.live_run import Look
from rankcall.serve.view import sections

OLD, NEW = NOTICED_S + 1, NOTICED_S - 1


def call(status: str, age_s: float, flags: int = 0, **fields: Any) -> dict[str, Any]:
    """Return a call; one that is over ended when it was issued."""
    is_over = status in ("completed", "failed")
    ended = age_s if is_over else math.nan
    return {"status": STATUSES.index(status), "age_s": age_s, "ended_s": ended, "flags": flags} | (
        fields
    )


DONE, FAILED = call("completed", OLD), call("failed", OLD)
ON_CPU, ON_DEVICE = call("started", NEW), call("enqueued", OLD, FLAG_DEVICE)
JUST_ISSUED = call("enqueued", NEW, FLAG_DEVICE)
JUST_STARTED = call("started", NEW, FLAG_DEVICE)
NEVER_WAITED_FOR = call("started", OLD, FLAG_ABANDONED)
CLOSED = call("enqueued", OLD, FLAG_DEVICE | FLAG_ABANDONED)
SENT = call("started", OLD, op=SEND)


@pytest.mark.parametrize(
    ("calls", "at", "how"),
    [
        ([DONE, DONE], 1, "left"),
        ([DONE, ON_CPU], 1, "in"),
        ([DONE, ON_DEVICE, ON_DEVICE], 1, "in"),
        ([DONE, ON_DEVICE, JUST_ISSUED], 1, "in"),  # it is stuck behind the old one
        ([DONE, JUST_ISSUED, JUST_ISSUED], 2, "end_unknown"),
        ([DONE, JUST_STARTED], 1, "end_unknown"),
        ([DONE, JUST_ISSUED, DONE], 2, "left"),  # in another group
        ([DONE, NEVER_WAITED_FOR], 1, "end_unknown"),
        ([DONE, CLOSED], 1, "end_unknown"),
        ([NEVER_WAITED_FOR, DONE], 1, "left"),
        ([CLOSED, ON_DEVICE, JUST_ISSUED], 1, "in"),
        ([DONE, FAILED], 1, "failed"),
        ([FAILED, DONE], 1, "left"),
        ([DONE, SENT], 1, "in"),
        ([SENT, DONE], 1, "left"),  # it was not waited for yet
        ([SENT, SENT, DONE], 2, "left"),
        ([DONE, SENT, DONE | {"thread": 7}], 1, "in"),  # another thread has gone on
        ([SENT, DONE, ON_CPU], 2, "in"),
        ([SENT, DONE, SENT], 2, "in"),
        ([ON_CPU, DONE], 0, "in"),
        ([SENT | {"status": STATUSES.index("failed")}, DONE], 1, "left"),
        ([SENT, DONE, JUST_ISSUED], 2, "end_unknown"),
    ],
)
def test_where_a_rank_stands(calls: list[dict[str, Any]], at: int, how: str) -> None:
    """In the oldest call that it is stuck in; else with its newest call, if known, at its end."""
    rows = np.zeros(2 * len(calls), CALL)
    rows["noticed_s"] = NOTICED_S
    for rank in (0, 3):  # whatever stands beside it
        for index, values in enumerate(calls):
            row = rows[index + (len(calls) if rank else 0)]
            row["rank"], row["index"] = rank, index
            for name, value in values.items():
                row[name] = value
    found = standings(rows[::-1])
    assert rows[::-1]["index"][found.rows].tolist() == [at, at]
    assert found.how == [how, how]


def test_all_views_say_the_same(tmp_path: Path) -> None:
    """A rank that has just issued an op on its device is shown neither in it nor as out of it."""
    ended = [Call(rank, 1, 0, MS, flags=FLAG_DEVICE) for rank in (0, 1)]
    new = Call(0, 2, 69_500 * MS, None, flags=FLAG_DEVICE)
    diagnosis = diagnose_calls(tmp_path, [*ended, new], states={1: "stopped"}, hang_after=0.1)
    first = diagnosis.ranks[0]
    assert (first.seq, first.how, round(first.age_s, 1)) == (2, "end_unknown", 0.5)
    assert "issued all_reduce #2, group 0, end unknown" in " ".join(
        diagnosis_text(diagnosis, 200).split()
    )
    assert "issued all_reduce #2, end unknown" in top.render(diagnosis, 200)
    page = "".join(sections(Look("live", 70.0, diagnosis=diagnosis), History()).values())
    assert "issued all_reduce #2, end unknown" in page
    assert "issued, end unknown" in page  # the key of the grid
    written = json.loads(encode(diagnosis))["ranks"]
    assert [(row["stands"], row["in_call"]) for row in written] == [
        ("end_unknown", None),
        ("left", False),
    ]
    assert [position.how for position in decode(encode(diagnosis)).ranks] == ["end_unknown", "left"]


@pytest.mark.parametrize(
    ("in_call", "failed", "how"),
    [(True, False, "in"), (True, True, "failed"), (False, False, "left")],
)
def test_a_verdict_of_an_older_version(
    tmp_path: Path, in_call: bool, failed: bool, how: str
) -> None:
    """Version 0.1 says how a rank stands by two flags. The job has one rank, and so its group."""
    written = json.loads(encode(diagnose_calls(tmp_path, [Call(0, 1, 0, MS)], states={})))
    row = written["ranks"][0]
    del row["stands"]
    row |= {"in_call": in_call, "failed": failed}
    (position,) = decode(json.dumps(written).encode()).ranks
    assert position == RankPosition(
        position.process, how, "0", 1, 1, "all_reduce", "train.py:1", "", position.age_s
    )
