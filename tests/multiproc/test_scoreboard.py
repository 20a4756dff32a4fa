"""The scoreboard's rows get the right verdict: faults of MPI benchmarks, and sound programs."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import scoreboard_calls
from scoreboard_case import BUFFERS, CORRECT, Case
from scoreboard_run import run
from scoreboard_sentences import Sentences
from scoreboard_table import CASES, FAULTY, SOUND

from rankcall.analysis.verdicts.finding import Finding
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
    """A diagnosis names exactly what was planted, and each of its sentences is true.

    torch says nothing about a silent fault.
    """
    judged = run(case, tmp_path, TIME_OUT_S, torch_detail=False)
    assert not judged.problem, [judged.problem, *judged.errors["plain"], *judged.findings]
    assert not judged.false, "\n".join(judged.false)
    if case.silent or case.kind_of_fault == CORRECT:
        assert judged.torch == {"plain": "nothing"}


BY_NAME = {case.name: case for case in CASES}
PIDS = [100, 101, 102, 103]


def _at(op: str) -> str:
    """Return the line of an op's step."""
    function = getattr(scoreboard_calls, f"_{op}")
    return f"{scoreboard_calls.__file__}:{inspect.getsourcelines(function)[1] + 4}"


def _all_of(rank: int) -> str:
    return f"rank {rank} ({host_name()}, pid {100 + rank})"


REDUCED = "call matching: all_reduce as reduce on 1 of 4"
DESYNC = (
    f"Rank 1 ({host_name()}, pid 101) issued reduce ({_at('reduce')}) as #7 of group 0, against "
    f"all_reduce ({_at('all_reduce')}) of ranks 0,2-3 ({host_name()})."
)
DTYPE = "datatype: all_reduce int32 on 2 of 4"
MISMATCH = (
    f"Rank 2 ({host_name()}, pid 102) and ranks 0-1,3 ({host_name()}) differ in dtype in "
    "all_reduce #7 of group 0: int32 against float32. It went through all the same: the results "
    "are wrong."
)
SHORT = "call ordering: all_reduce left out on 1 of 4"
EXHAUSTED = (
    f"Rank 1 ({host_name()}, pid 101) left the loop and exited with code 0, 0.2 s before the end. "
    f"3 ranks had waited 0.6 s for it in all_reduce #7 of group 0 at {_at('all_reduce')}."
)
TWINS = "communicator: groups in opposite order on one rank"
DEADLOCK = (
    f"Ranks 0-3 ({host_name()}) wait for each other: ranks 0-1,3 ({host_name()}) in all_reduce #1 "
    f"of group 1 at {_at('all_reduce')}, for {_all_of(2)}; {_all_of(2)} in all_reduce #1 of group "
    f"2 at {_at('all_reduce')}, for ranks 0-1,3 ({host_name()})."
)
SENT = "tag: wrong tag of a send"
TAGS = (
    f"Ranks 0-1 ({host_name()}) wait for each other: tag 4 and tag 5 do not match, from rank 0 to "
    "rank 1."
)
SENDS = f"{_all_of(0)} in send #1 to rank 1 (tag 5, group 0) at {_at('send')}, for {_all_of(1)}"
MESSAGE = "datatype: message of the same size"
RECEIVES = (
    "Rank 0 sends float32 and rank 1 receives int32, in message #1 of group 0. It went through all "
    "the same: the received data is wrong or incomplete."
)
REFUSED = "invalid parameter: negative tag on 1 of 4"
DEAD = (
    f"Rank 1 ({host_name()}, pid 101) exited with code 1, 0.5 s before the end. 3 ranks had waited "
    f"0.8 s for it in all_reduce #7 of group 0 at {_at('all_reduce')}."
)
PASSED = f"{_all_of(2)}: all_reduce at {_at('all_reduce')}, int32"


@pytest.mark.parametrize(
    ("name", "text", "says", "instead_of"),
    [
        (REDUCED, DESYNC, "", ""),
        (REDUCED, DESYNC, "issued broadcast", "issued reduce"),
        (REDUCED, DESYNC, "pid 102", "pid 101"),
        (REDUCED, DESYNC, "Rank 0 (", "Rank 1 ("),
        (REDUCED, DESYNC, "#6", "#7"),
        (REDUCED, DESYNC, "ranks 0-3", "ranks 0,2-3"),
        (REDUCED, DESYNC, _at("gather"), _at("reduce")),
        (DTYPE, MISMATCH, "", ""),
        (DTYPE, MISMATCH, "in size in", "in dtype in"),
        (DTYPE, MISMATCH, "float64 against", "int32 against"),
        (DTYPE, MISMATCH, "float32 against int32", "int32 against float32"),
        (DTYPE, MISMATCH, "#5", "#7"),
        (SHORT, EXHAUSTED, "", ""),
        (SHORT, EXHAUSTED, "99 s for it", "0.6 s for it"),
        (SHORT, EXHAUSTED, "2 ranks had", "3 ranks had"),
        (SHORT, EXHAUSTED, "all_gather #7", "all_reduce #7"),
        (SHORT, EXHAUSTED, "#5 of", "#7 of"),
        (SHORT, EXHAUSTED, "crashed", "left the loop"),
        (TWINS, DEADLOCK, "", ""),
        (TWINS, DEADLOCK, "group 2", "group 1"),
        (TWINS, DEADLOCK, "barrier #1", "all_reduce #1"),
        (SENT, TAGS, "", ""),
        (SENT, TAGS, "tag 6", "tag 4"),
        (SENT, TAGS, "from rank 1 to rank 0", "from rank 0 to rank 1"),
        (SENT, SENDS, "", ""),
        (SENT, SENDS, "tag 4", "tag 5"),
        (SENT, SENDS, "recv #1", "send #1"),
        (MESSAGE, RECEIVES, "", ""),
        (MESSAGE, RECEIVES, "receives float32", "receives int32"),
        (MESSAGE, RECEIVES, "sends 16 bytes", "sends float32"),
        (REFUSED, DEAD, "", ""),
        (REFUSED, DEAD, "code 2", "code 1"),
        (REFUSED, DEAD, "was killed by SIGSEGV 0.5", "exited with code 1, 0.5"),
        (REFUSED, DEAD, "Rank 2 (", "Rank 1 ("),
        (DTYPE, PASSED, "", ""),
        (DTYPE, PASSED, "float32", "int32"),
        (DTYPE, PASSED, "broadcast at", "all_reduce at"),
    ],
)
def test_a_false_sentence_is_noticed(name: str, text: str, says: str, instead_of: str) -> None:
    """One word of a true sentence is replaced by a false one."""
    assert instead_of in text
    text = text.replace(instead_of, says, 1) if says else text
    came = {"group": "0", "seq": 7, "op": "all_reduce", "status": "completed"}
    rows = [
        {**came, "rank": rank} for rank in range(4) if name not in (SHORT, REFUSED) or rank != 1
    ]
    rows += [{**came, "op": op, "seq": 1, "rank": r} for r, op in enumerate(("send", "recv"))]
    for rank, group in enumerate("1121"):
        rows.append({**came, "rank": rank, "group": group, "seq": 1, "status": "started"})
    finding = Finding("any", summary=text, ranks=(0,), group="0", seq=7)
    false = list(Sentences(BY_NAME[name], PIDS, 10.0, rows).false(finding))
    assert bool(false) == bool(says), false


def test_what_did_not_go_through_is_noticed() -> None:
    """The records of one rank show that its call has not ended."""
    row = {"group": "0", "seq": 7, "op": "all_reduce", "status": "completed"}
    rows = [{**row, "rank": rank} for rank in range(4)]
    rows[3]["status"] = "started"
    finding = Finding("mismatch", summary=MISMATCH, ranks=(2,))
    assert list(Sentences(BY_NAME[DTYPE], PIDS, 10.0, rows).false(finding)) == [
        f"it did not go through: {MISMATCH}"
    ]


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
