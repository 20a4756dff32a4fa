"""The scoreboard's rows get the right verdict: faults of MPI benchmarks, and sound programs."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import scoreboard_calls
from scoreboard_case import BUFFERS, CORRECT, Case
from scoreboard_facts import ScoreboardFacts
from scoreboard_run import run
from scoreboard_table import CASES, FAULTY, SOUND

from rankcall.analysis.verdicts.facts import CallFact, Fact, Ranks
from rankcall.analysis.verdicts.facts import Relation as R
from rankcall.analysis.verdicts.finding import Finding
from rankcall.analysis.verdicts.sentences import summary
from rankcall.process import host_name

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]

TIME_OUT_S = 10.0  # of the groups: far above what a busy machine holds a rank up for
# Those in `make test`: one or more of each class, most of which do not hang.
FAST = (
    "call matching: all_reduce as reduce on 1 of 4",
    "call ordering: all_reduce skipped on 2 of 4",
    "datatype: all_reduce int32 on 2 of 4",
    "datatype: message of the same size",
    "count: all_to_all 12 on 1 of 4",
    "operator: all_reduce MAX on 2 of 4",
    "operator: all_reduce MAX on 1 of 2",
    "invalid parameter: broadcast 9 on 2 of 4",
    "invalid parameter: negative tag on 1 of 4",
    "message race: any source takes a message of another size",
    "local concurrency: order: async all_reduces of two sizes in another order on 0 of 3",
    "correct: uneven all_to_all",
    "correct: any source, all messages alike",
    "correct: two threads with groups of their own",
    "correct: ranks end one after the other",
)


def _marked(case: Case) -> object:
    marks = [] if case.name in FAST else [pytest.mark.slow]
    if case.kind_of_fault == BUFFERS:
        why = "a record does not tell when the program reads or writes a tensor"
        marks.append(pytest.mark.xfail(reason=why, strict=True))
    return pytest.param(case, id=case.name.replace(" ", "-"), marks=marks)


@pytest.mark.parametrize("case", [_marked(case) for case in CASES])
def test_row(case: Case, tmp_path: Path) -> None:
    """A diagnosis names exactly what was planted, and each of its facts is true.

    torch says nothing about a silent fault.
    """
    judged = run(case, tmp_path, TIME_OUT_S, torch_detail=False)
    assert not judged.problem, [judged.problem, *judged.errors["plain"], *judged.findings]
    assert not judged.false, "\n".join(judged.false)
    if case.silent or case.kind_of_fault == CORRECT:
        assert judged.torch == {"plain": "nothing"}


BY_NAME = {case.name: case for case in CASES}
PIDS = [100, 101, 102, 103]
REDUCED = "call matching: all_reduce as reduce on 1 of 4"
DTYPE = "datatype: all_reduce int32 on 2 of 4"
SHORT = "call ordering: all_reduce left out on 1 of 4"
TWINS = "communicator: groups in opposite order on one rank"
SENT = "tag: wrong tag of a send"
MESSAGE = "datatype: message of the same size"
REFUSED = "invalid parameter: negative tag on 1 of 4"


def _at(op: str) -> str:
    """Return the line of an op's step."""
    function = getattr(scoreboard_calls, f"_{op}")
    return f"{scoreboard_calls.__file__}:{inspect.getsourcelines(function)[1] + 4}"


def _call(op: str, seq: int = 7, group: str = "0", **more: Any) -> CallFact:
    return CallFact(op, seq, group, line=_at(op), **more)


def _ranks(*numbers: int) -> Ranks:
    return Ranks(numbers, (host_name(),), 100 + numbers[0] if len(numbers) == 1 else 0)


# What is true of a row: facts whose rendering is the finding's words.
TRUE: dict[str, tuple[str, tuple[int, ...], list[Fact]]] = {
    REDUCED: (
        "desync",
        (1,),
        [
            Fact(R.ISSUED, _ranks(1), _call("reduce")),
            Fact(R.ISSUED, _ranks(0, 2, 3), _call("all_reduce")),
        ],
    ),
    DTYPE: (
        "mismatch",
        (2,),
        [
            Fact(R.PASSED, _ranks(2), _call("all_reduce"), values=(("dtype", "int32"),)),
            Fact(R.PASSED, _ranks(0, 1, 3), _call("all_reduce"), values=(("dtype", "float32"),)),
            Fact(R.WENT_THROUGH, call=_call("all_reduce")),
        ],
    ),
    SHORT: (
        "exhausted",
        (1,),
        [
            Fact(R.LEFT_LOOP, _ranks(1), values=(("end", "exited"),), number=0.2, unit="s"),
            Fact(R.HELD_UP, _ranks(0, 2, 3), _call("all_reduce"), _ranks(1), (), 0.6, "s"),
        ],
    ),
    TWINS: (
        "deadlock",
        (0, 1, 2, 3),
        [
            Fact(R.WAIT_FOR_EACH_OTHER, _ranks(0, 1, 2, 3)),
            Fact(R.WAITS_FOR, _ranks(0, 1, 3), _call("all_reduce", 1, "1"), _ranks(2)),
            Fact(R.WAITS_FOR, _ranks(2), _call("all_reduce", 1, "2"), _ranks(0, 1, 3)),
        ],
    ),
    SENT: (
        "deadlock",
        (0, 1),
        [
            Fact(R.WAIT_FOR_EACH_OTHER, _ranks(0, 1)),
            Fact(R.TAGS_DIFFER, _ranks(0), others=_ranks(1), values=(("tags", "4 5"),)),
            Fact(R.WAITS_FOR, _ranks(0), _call("send", 1, peer=1, tag=5), _ranks(1)),
        ],
    ),
    MESSAGE: (
        "mismatch",
        (0, 1),
        [
            Fact(R.SENDS, _ranks(0), _call("send", 1), values=(("dtype", "float32"),)),
            Fact(R.RECEIVES, _ranks(1), _call("recv", 1), values=(("dtype", "int32"),)),
            Fact(R.WENT_THROUGH, call=_call("send", 1)),
        ],
    ),
    REFUSED: (
        "dead",
        (1,),
        [
            Fact(R.EXITED_WITH, _ranks(1), values=(("code", "1"),), number=0.5, unit="s"),
            Fact(R.HELD_UP, _ranks(0, 2, 3), _call("all_reduce"), _ranks(1), (), 0.8, "s"),
        ],
    ),
}


def false_of(name: str, facts: Sequence[Fact], ended: bool = True) -> list[str]:
    """Return what the check says about a finding with these facts. ``ended``: of the call."""
    kind, ranks, _ = TRUE[name]
    came = {"group": "0", "seq": 7, "op": "all_reduce", "status": "completed"}
    rows = [
        {**came, "rank": rank} for rank in range(4) if name not in (SHORT, REFUSED) or rank != 1
    ]
    rows[-1]["status"] = "completed" if ended else "started"
    rows += [{**came, "op": op, "seq": 1, "rank": r} for r, op in enumerate(("send", "recv"))]
    for rank, group in enumerate("1121"):
        rows.append({**came, "rank": rank, "group": group, "seq": 1, "status": "started"})
    count = BY_NAME[name].world_size
    victims = tuple(rank for rank in range(count) if rank not in ranks)
    finding = Finding(kind, ranks, victims, group="0", seq=7, op="all_reduce")
    finding = replace(finding, facts=tuple(facts), summary=summary(facts, live=False))
    return list(ScoreboardFacts(BY_NAME[name], PIDS, 10.0, rows).false(finding))


@pytest.mark.parametrize("name", TRUE)
def test_what_is_so_is_accepted(name: str) -> None:
    """The facts that follow from a row's program are not false."""
    assert false_of(name, TRUE[name][2]) == []


@pytest.mark.parametrize(
    ("name", "at", "changes"),
    [
        (REDUCED, 0, {"call": _call("broadcast")}),
        (REDUCED, 0, {"ranks": Ranks((1,), (host_name(),), 102)}),
        (REDUCED, 0, {"ranks": Ranks((1,), ("elsewhere",), 101)}),
        (REDUCED, 0, {"ranks": _ranks(0)}),
        (REDUCED, 0, {"call": _call("reduce", 6)}),
        (REDUCED, 1, {"ranks": _ranks(0, 1, 2, 3)}),
        (REDUCED, 0, {"call": replace(_call("reduce"), line=_at("gather"))}),
        (DTYPE, 0, {"values": (("size", "32 bytes"),)}),
        (DTYPE, 0, {"values": (("dtype", "float64"),)}),
        (DTYPE, 1, {"values": (("dtype", "int32"),)}),
        (DTYPE, 1, {"ranks": _ranks(0, 1, 2)}),
        (SHORT, 1, {"number": 99.0}),
        (SHORT, 1, {"ranks": _ranks(0, 2)}),
        (SHORT, 1, {"call": _call("all_gather")}),
        (SHORT, 1, {"call": _call("all_reduce", 5)}),
        (SHORT, 1, {"others": _ranks(0)}),
        (SHORT, 0, {"values": (("end", "ended"),)}),
        (SHORT, 0, {"relation": R.STOPPED}),
        (TWINS, 1, {"call": _call("all_reduce", 1, "2")}),
        (TWINS, 1, {"call": _call("barrier", 1, "1")}),
        (TWINS, 0, {"ranks": _ranks(0, 1, 2)}),
        (SENT, 1, {"values": (("tags", "6 5"),)}),
        (SENT, 1, {"ranks": _ranks(1), "others": _ranks(0)}),
        (SENT, 2, {"call": _call("send", 1, peer=1, tag=4)}),
        (SENT, 2, {"call": _call("recv", 1, peer=1, tag=5)}),
        (SENT, 2, {"others": _ranks(2)}),
        (MESSAGE, 1, {"values": (("dtype", "float32"),)}),
        (MESSAGE, 0, {"values": (("size", "16 bytes"),)}),
        (REFUSED, 0, {"values": (("code", "2"),)}),
        (REFUSED, 0, {"relation": R.KILLED_BY, "values": (("signal", "SIGSEGV"),)}),
        (REFUSED, 0, {"ranks": _ranks(2)}),
    ],
)
def test_a_false_fact_is_noticed(name: str, at: int, changes: dict[str, Any]) -> None:
    """One part of a true fact is replaced by a false one."""
    facts = list(TRUE[name][2])
    facts[at] = replace(facts[at], **changes)
    assert false_of(name, facts)


def test_what_did_not_go_through_is_noticed() -> None:
    """The records of one rank show that its call has not ended."""
    (problem,) = false_of(DTYPE, TRUE[DTYPE][2], ended=False)
    assert problem.startswith("it did not go through")


def test_the_table_is_complete() -> None:
    """The table has 60 faults and 30 sound programs or more, and several rows for each class."""
    assert len({case.name for case in CASES}) == len(CASES)
    assert len(FAULTY) >= 60
    assert len(SOUND) >= 30
    assert set(FAST) <= {case.name for case in CASES}
    assert min(Counter(case.kind_of_fault for case in FAULTY).values()) >= 2
    assert all(2 <= case.world_size <= 4 for case in CASES)


def test_the_commands_name_a_silent_fault(tmp_path: Path) -> None:
    """``diagnose`` and ``report`` say which rank passed another dtype to a call that ended well."""
    (case,) = [case for case in FAULTY if case.name == "datatype: all_reduce int32 on 2 of 4"]
    run(case, tmp_path, TIME_OUT_S, torch_detail=False)
    for command, arguments in (("diagnose", []), ("report", []), ("report", ["--json"])):
        done = subprocess.run(
            [sys.executable, "-m", "rankcall", command, str(tmp_path / "run"), *arguments],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        text = " ".join(done.stdout.split())
        assert "int32 against float32" in text, (command, done.stdout, done.stderr)
        assert "results are wrong" in text, command
        if arguments:
            assert json.loads(done.stdout)["findings"][0]["ranks"] == [2]
