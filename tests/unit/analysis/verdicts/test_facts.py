# ruff: noqa: E501
# An expected sentence stays on one line, so that it can be searched for as a user reads it.
"""Each relation has one template, which is right for one rank and for many; facts survive JSON."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from diagnosing import RANK_2_MISSING, diagnose_calls

from rankcall.analysis.verdicts.decoding import facts_from, findings_from
from rankcall.analysis.verdicts.encoding import fact_object, finding_object
from rankcall.analysis.verdicts.facts import CallFact, Fact, Ranks, Relation
from rankcall.analysis.verdicts.sentences import evidence, summary

R = Relation
PAGE = (Path(__file__).parents[4] / "docs/diagnose-json.md").read_text(encoding="utf-8")
ONE, MANY = Ranks((2,), ("node-a",), 102), Ranks((1, 2, 3), ("node-a", "node-b"))
OTHER, OTHERS = Ranks((0,), ("node-a",), 100), Ranks((4, 5), ("node-c",))
CALL = CallFact("all_reduce", 7, "0", line="train.py:9")
SEND = CallFact("send", 3, "1", "mesh_pp", peer=4, tag=2, line="pipe.py:5")
NAME, NAMES = "rank 2 (node-a, pid 102)", "ranks 1-3 (node-a, node-b)"


def of(
    relation: Relation, number: float | None = None, call: CallFact | None = None, **values: str
):
    """Return a fact of one rank and the same of three, with one or two other ranks."""
    items = tuple(values.items())
    one = Fact(relation, ONE, call, OTHER, items, number)
    return one, replace(one, ranks=MANY, others=OTHERS)


# Of each relation that begins a summary, what the sentence says after the names: of one rank, of
# several, and of several once the run has ended ("" if that is the same).
STATES = [
    (
        of(R.KILLED_BY, 3, signal="SIGKILL"),
        "was killed by SIGKILL 3.0 s ago",
        "were killed by SIGKILL 3.0 s ago",
        "were killed by SIGKILL 3.0 s before the end",
    ),
    (
        of(R.EXITED_WITH, 3, code="1"),
        "exited with code 1, 3.0 s ago",
        "exited with code 1, 3.0 s ago",
        "exited with code 1, 3.0 s before the end",
    ),
    (
        of(R.FAILED_WITH, 0, error="KeyError: {x}"),
        "failed with KeyError: {x}, 0.0 s ago",
        "failed with KeyError: {x}, 0.0 s ago",
        "failed with KeyError: {x}, at the end",
    ),
    (
        of(R.ENDED_WITH_LAUNCHER, 3, signal="SIGTERM"),
        "was ended with its launcher, which SIGTERM told to stop, 3.0 s ago",
        "were ended with their launcher, which SIGTERM told to stop, 3.0 s ago",
        None,
    ),
    (of(R.GONE, 3), "disappeared 3.0 s ago", "disappeared 3.0 s ago", None),
    (of(R.ENDED_BADLY, 3), "ended badly, 3.0 s ago", "ended badly, 3.0 s ago", None),
    (
        of(R.CONNECTIONS_CLOSED, why="unheard"),
        "is gone: its connections were closed, and no word has come from where it ran",
        "are gone: their connections were closed, and no word has come from where they ran",
        "",
    ),
    (
        of(R.CONNECTIONS_CLOSED, why="no records"),
        "is gone: its connections were closed, and it left no records here",
        "are gone: their connections were closed, and they left no records here",
        "",
    ),
    (
        of(R.STOPPED),
        "is stopped (SIGSTOP)",
        "are stopped (SIGSTOP)",
        "were stopped (SIGSTOP)",
    ),
    (
        of(R.NO_PYTHON_THREAD, 9),
        "has run no Python thread for 9.0 s",
        "have run no Python thread for 9.0 s",
        "had run no Python thread for 9.0 s",
    ),
    (
        of(R.NO_SIGN_OF_LIFE, 9),
        "has given no sign of life for 9.0 s",
        "have given no sign of life for 9.0 s",
        "had given no sign of life for 9.0 s",
    ),
    (
        of(R.HOLDS_GIL, 9),
        "has held the GIL for 9.0 s",
        "have held the GIL for 9.0 s",
        "had held the GIL for 9.0 s",
    ),
    (
        of(R.LEFT_LOOP, 3, end="exited"),
        "left the loop and exited with code 0, 3.0 s ago",
        "left the loop and exited with code 0, 3.0 s ago",
        None,
    ),
    (
        of(R.LEFT_LOOP, 3, end="ended"),
        "left the loop and ended 3.0 s ago",
        "left the loop and ended 3.0 s ago",
        None,
    ),
    (
        of(R.LEFT_LOOP, end="closing"),
        "left the loop: it is closing down",
        "left the loop: they are closing down",
        "left the loop: they were closing down",
    ),
    (
        of(R.DOES_NOT_ANSWER),
        "does not answer: no word has come from where it ran",
        "do not answer: no word has come from where they ran",
        "",
    ),
    (
        of(R.LEFT_NO_RECORDS, kind="dump"),
        "has left no dump here",
        "have left no dump here",
        "had left no dump here",
    ),
    (
        of(R.STOPPED_RECORDING),
        "has stopped recording, to end or by rankcall.disable: whether it came is not known",
        "have stopped recording, to end or by rankcall.disable: whether they came is not known",
        "had stopped recording, to end or by rankcall.disable: whether they came is not known",
    ),
    (
        of(R.STILL_IN, call=CALL),
        "has not come: it is still in all_reduce #7 of group 0 at train.py:9",
        "have not come: they are still in all_reduce #7 of group 0 at train.py:9",
        "had not come: they were still in all_reduce #7 of group 0 at train.py:9",
    ),
    (
        of(R.NOT_STARTED, 34, CALL),
        "has not started all_reduce #7 of group 0 at train.py:9 on its device, 34 s after the issue; 1 other rank has",
        "have not started all_reduce #7 of group 0 at train.py:9 on their devices, 34 s after the issue; 2 other ranks have",
        "had not started all_reduce #7 of group 0 at train.py:9 on their devices, 34 s after the issue; 2 other ranks had",
    ),
    (
        of(R.DUMP_ENDS_BEFORE),
        "has not come: the calls that it dumped end before that",
        "have not come: the calls that they dumped end before that",
        "had not come: the calls that they dumped end before that",
    ),
    (
        of(R.NOT_COME, 9),
        "has not come: it has issued nothing for 9.0 s",
        "have not come: they have issued nothing for 9.0 s",
        "had not come: they had issued nothing for 9.0 s",
    ),
    (
        of(R.GOES_ON, call=CALL),
        "has not come, although it goes on: the newest call of rank 2 is all_reduce #7 of group 0 at train.py:9",
        "have not come, although they go on: the newest call of rank 1 is all_reduce #7 of group 0 at train.py:9",
        "had not come, although they went on: the newest call of rank 1 was all_reduce #7 of group 0 at train.py:9",
    ),
    (
        of(R.NOT_COME, line="a.py:1", inside="new_group"),
        "has not come: it is in new_group at a.py:1",
        "have not come: they are in new_group at a.py:1",
        "had not come: they were in new_group at a.py:1",
    ),
    (
        of(R.NOT_COME, 9, line="a.py:1", inside="new_group", seen_s="4.0"),
        "has not come: it is in new_group at a.py:1, 4.0 s before the end",
        "have not come: they are in new_group at a.py:1, 4.0 s before the end",
        "had not come: they were in new_group at a.py:1, 4.0 s before the end",
    ),
    (
        of(R.NOT_COME_AS_BEFORE),
        "has not come, as before: an earlier wait at the same line passed",
        "have not come, as before: an earlier wait at the same line passed",
        "had not come, as before: an earlier wait at the same line passed",
    ),
]


@pytest.mark.parametrize(("facts", "single", "several", "past"), STATES)
def test_the_state_of_ranks(
    facts: tuple[Fact, Fact], single: str, several: str, past: str | None
) -> None:
    """A state agrees with its subject in number, and with the run in tense."""
    one, many = facts
    assert summary([one]) == f"R{NAME[1:]} {single}."
    assert summary([many]) == f"R{NAMES[1:]} {several}."
    if past is not None:
        assert summary([many], live=False) == f"R{NAMES[1:]} {past or several}."


def test_who_is_held_up() -> None:
    """Ranks in the call that waits longest, and ranks in other calls, are counted apart."""
    here, gone = of(R.HELD_UP, 60, CALL), Fact(R.NOT_COME, ONE)
    where = "in all_reduce #7 of group 0 at train.py:9"
    more = Fact(R.HELD_UP_ELSEWHERE, OTHERS)
    assert summary([gone, here[0]]).endswith(f". 1 rank has waited 60 s for it {where}.")
    assert summary([gone, here[1]]).endswith(f". 3 ranks have waited 60 s for them {where}.")
    assert summary([gone, here[1]], live=False).endswith(
        f" 3 ranks had waited 60 s for them {where}."
    )
    assert summary([gone, here[0], more]).endswith(
        f". 3 ranks cannot go on: 1 has waited 60 s for it {where}, and 2 are in other calls."
    )
    assert summary([gone, here[1], replace(more, ranks=OTHER)], live=False).endswith(
        f" 4 ranks could not go on: 3 had waited 60 s for them {where}, and 1 was in another call."
    )


def test_other_summaries() -> None:
    """The sentences that compare ranks, or say that nothing moves, or that it is slow."""
    together = of(R.ENDED_TOGETHER)
    assert summary([together[0]]).startswith(f"R{NAME[1:]} ended; nobody noted how")
    copied = replace(together[1], values=(("copied", "yes"),))
    assert summary([copied]).startswith(
        f"R{NAMES[1:]} ended together, or still ran when these records were copied; nobody noted"
    )
    early = replace(together[1], values=(("early", "yes"),), others=None)
    assert summary([early]) == (
        f"R{NAMES[1:]} ended together, before their process group was made; nobody noted how."
    )
    assert summary([replace(early, others=ONE)]) == (
        f"R{NAME[1:]} left no records. R{NAMES[1:]} ended together, before their process group was "
        "made; nobody noted how."
    )
    one, many = of(R.ENDED_FIRST, 2, error="DistNetworkError: Broken pipe")
    assert summary([one]) == (
        f"R{NAME[1:]} ended, and rank 0 (node-a, pid 100) failed 2.0 s later with DistNetworkError: "
        "Broken pipe: it lost its connections to it, or to the store that it hosted."
    )
    assert summary([many]).endswith(
        "they lost their connections to them, or to the store that they hosted."
    )
    one, many = of(R.WAITS_FOR_WORK, 90, what="requests")
    assert summary([one]).endswith(" has waited for work (requests) for 90 s, and 1 rank with it.")
    assert summary([many]).endswith(" waited for work (requests) for 90 s, and 2 ranks with them.")
    issued = Fact(R.ISSUED, ONE, CALL), Fact(R.ISSUED, OTHERS, replace(CALL, op="barrier", line=""))
    desync = (
        "issued all_reduce (train.py:9) as #7 of group 0, against barrier of ranks 4-5 (node-c)."
    )
    assert summary(issued) == f"R{NAME[1:]} {desync}"
    for number, both, words in (
        (1, {}, "1 call later: it likely skipped 1 call before."),
        (-2, {}, "2 calls earlier: it likely issued 2 calls too many before."),
        (
            1,
            {"both_ways": "yes"},
            "1 call away: it likely skipped 1 call or issued 1 call too many.",
        ),
    ):
        shift, _ = of(R.SHIFTED, number, since="5", shown_by="7", **both)
        text = f"{desync} In 7 calls since #5, its calls were those of the others {words}"
        assert summary([*issued, shift]) == f"R{NAME[1:]} {text}"
    for turns, words in ((1, "once more"), (2, "twice more"), (7, "7 times more")):
        looped, _ = of(R.LOOPED_AGAIN, turns, CALL)
        text = (
            f"{desync} R{NAME[1:]} ran the loop with all_reduce (train.py:9) {words}, and then came to "
            "what rank 0 (node-a, pid 100) had issued in its place: likely the inputs are uneven."
        )
        assert summary([*issued, looped]) == f"R{NAME[1:]} {text}"
    sizes = [
        (("dtype", "int32"), ("reduce_op", "sum")),
        (("dtype", "float32"), ("reduce_op", "max")),
    ]
    sides = [
        Fact(R.PASSED, ranks, CALL, values=v)
        for ranks, v in zip((MANY, OTHERS), sizes, strict=True)
    ]
    differ = "differ in dtype and reduce op in all_reduce #7 of group 0: int32, sum against float32, max."
    assert summary(sides) == f"R{NAMES[1:]} and ranks 4-5 (node-c) {differ}"
    through = Fact(R.WENT_THROUGH, call=CALL)
    wrong = "It went through all the same: the results are wrong."
    assert summary([*sides, through]).endswith(f" float32, max. {wrong}")
    ends = [
        Fact(R.SENDS, OTHER, SEND, values=(("size", "8 bytes"),)),
        Fact(R.RECEIVES, ONE, SEND, values=(("size", "4 bytes"),)),
    ]
    assert summary([*ends, through]) == (
        "Rank 0 sends 8 bytes and rank 2 receives 4 bytes, in message #3 of group 1 (mesh_pp). "
        "It went through all the same: the received data is wrong or incomplete."
    )
    splits = of(R.UNEQUAL_SPLITS, call=replace(CALL, op="all_to_all"), sent="4096", received="1024")
    assert summary([splits[1]]) == (
        f"R{NAMES[1:]} send 4,096 bytes in all in all_to_all #7 of group 0, and expect to receive "
        "1,024: their split sizes do not add up."
    )
    circle, step = Fact(R.WAIT_FOR_EACH_OTHER, MANY), of(R.WAITS_FOR, call=SEND)[0]
    wait = f"{NAME} in send #3 to rank 4 (tag 2, group 1 (mesh_pp)) at pipe.py:5, for rank 0 (node-a, pid 100)"
    assert summary([circle, step]) == f"R{NAMES[1:]} wait for each other: {wait}."
    tags = of(R.TAGS_DIFFER, tags="4 5")[0]
    assert summary([circle, tags]).endswith(
        ": tag 4 and tag 5 do not match, from rank 2 to rank 0."
    )


def test_remote_calls() -> None:
    """A wait and its end are two sentences; a circle is one, with its first waits."""
    wait = of(R.RPC_WAITS, 45, worker="w1", function="f", line="a.py:1")[0]
    waits = "ank 2 (node-a, pid 102) has waited 45 s for worker 'w1', rank 0 (node-a, pid 100), to answer f, called at a.py:1"
    run = of(R.RPC_RUNS, 40, function="f", line="a.py:7")[0]
    assert summary([wait, run]) == f"R{waits}. Rank 2 has been in f for 40 s, at a.py:7."
    assert "Rank 2 (node-a, pid 102) had waited 45 s" in summary([wait], live=False)
    circle = of(R.RPC_CIRCLE)[1]
    assert summary([circle, wait, wait]) == (
        f"RPCs of {NAMES} wait for each other: r{waits}; r{waits}."
    )


def test_summaries_of_a_job_that_does_not_move_or_is_slow() -> None:
    """Who waits in which function for whom, who makes the others wait, and which link is slow."""
    for relation in (R.WAITS_IN_FUNCTION, R.ALL_WAIT_IN_FUNCTION):
        one, many = of(relation, 90, functions="new_group", line="a.py:1")
        begin = f"R{NAME[1:]} waits in new_group at a.py:1"
        if relation is R.ALL_WAIT_IN_FUNCTION:
            end = ": all ranks are there, and nothing has happened for 90 s."
            assert summary([many]).startswith(f"R{NAMES[1:]} wait in new_group at")
        else:
            end = " for rank 0 (node-a, pid 100), which has not come. No rank has issued anything for 90 s."
            assert "for ranks 4-5 (node-c), which have not come." in summary([many])
            alone = summary([replace(one, others=None)])
            assert alone.endswith("for 90 s; the stacks of the others are not known.")
        assert summary([one]) == f"{begin}{end}"
    one, many = of(R.WAITS_IN_STORE, 90, line="a.py:1")
    begin = f"R{NAME[1:]} waits for a key of the job's store at a.py:1"
    nothing = "No rank has issued anything for 90 s."
    assert summary([one]) == f"{begin}, and rank 0 (node-a, pid 100) does nothing. {nothing}"
    assert f"a.py:1, and ranks 4-5 (node-c) do nothing. {nothing}" in summary([many])
    assert summary([replace(one, others=None)]) == f"{begin}. {nothing}"
    one, _ = of(R.ALL_WAIT_IN_STORE, 90, line="a.py:1")
    assert summary([one]) == (
        f"{begin}: no rank is left that could write it, and nothing has happened for 90 s."
    )
    one, many = of(R.NO_GROUP_YET, 90)
    assert " has not made its process group; the other ranks have." in summary([one])
    assert " have not made their process group; the other ranks have." in summary([many])
    one, many = of(R.NONE_STARTED, 90)
    assert summary([one]).startswith("None of 1 rank has made a process group")
    assert summary([many]).startswith("None of 3 ranks has made a process group")
    one, many = of(R.NONE_ISSUES, 90)
    assert summary([replace(one, others=None)]).endswith("and none is in one, for 90 s.")
    assert summary([replace(one, others=many.ranks)]).startswith(
        "No rank has issued a collective or a message for 90 s. Whether the last one has ended is "
        "not known of rank"
    )
    cost, late = of(R.MAKES_WAIT, 31.2, since_step="1000"), of(R.COMES_LATE, 0.1, CALL)
    assert summary([cost[0]]) == (
        f"R{NAME[1:]} makes the others wait, since step 1,000: waiting for it costs each of them "
        "31 % of its time, on average."
    )
    assert summary([cost[1], late[1]]).endswith(
        " make the others wait, since step 1,000: waiting for them costs each of them 31 % of its "
        "time, on average. They come late to all_reduce of group 0 at train.py:9, by 100 ms at the "
        "median."
    )
    spent = {"cause": "gc", "seconds": "6.0", "of_s": "8.0"}
    why, since = of(R.LATE_BECAUSE, 75, **spent), of(R.ABSENT_BECAUSE, 75, **spent)
    assert summary([cost[0], why[0]]).endswith(
        " It spent 6.0 s of 8.0 s collecting garbage: that explains 75 % of its lateness."
    )
    assert summary([cost[1], why[1]]).endswith(
        " They spent 6.0 s of 8.0 s collecting garbage: that explains 75 % of their lateness."
    )
    assert summary([of(R.STOPPED)[1], since[1]]).endswith(
        " Since their last call, they spent 6.0 s of 8.0 s collecting garbage."
    )
    slow = of(R.SLOW_TRANSFER, 0.2, op="send", usual_s="0.001", compared="5")
    times = "take 200 ms once both ends have come, 200.0 times the 1 ms of 5 others like it."
    assert summary([slow[0]]) == f"Slow: messages from {NAME} to rank 0 (node-a, pid 100) {times}"
    group = replace(slow[1], others=None, values=(("op", "barrier"), *slow[1].values[1:]))
    assert summary([group]) == f"Slow: barrier between {NAMES} {times}"
    one, many = of(R.LEFT_BEHIND, 90, CALL)
    where = "been in all_reduce #7 of group 0 at train.py:9 for 90 s, although"
    assert summary([one]) == f"R{NAME[1:]} has {where} the other member has left it."
    assert (
        summary([many], live=False) == f"R{NAMES[1:]} had {where} the 2 other members had left it."
    )
    alone = replace(of(R.ALONE_IN, 90, CALL)[0], others=many.others)
    assert summary([alone]) == (
        f"R{NAME[1:]} is alone in all_reduce #7 of group 0 at train.py:9 for 90 s: none of the 2 "
        "other members has come, and none of them waits in another call."
    )
    one, many = of(R.STUCK_TRANSFER, 90, CALL)
    assert summary([one]).startswith("The only rank has come to all_reduce #7")
    assert summary([many]).endswith(
        "and 2 ranks did not get out for 90 s: the transfer itself is stuck."
    )
    call = "all_reduce #7 of group 0 at train.py:9"
    one, many = of(R.STARTED_NOWHERE, 90, CALL)
    assert summary([one]).startswith(f"The only rank has issued {call}, 90 s ago, and no device")
    assert summary([many]) == (
        f"All 3 ranks have issued {call}, 90 s ago, and no device has started it: "
        "what was issued before it does not end."
    )
    one, many = of(R.START_UNKNOWN, 90, CALL)
    assert "it does not end on 1 rank for 90 s." in summary([one])
    assert summary([many], live=False) == (
        f"All 3 ranks had issued {call}, and it did not end on 2 ranks for 90 s. "
        "Whether each device has started it is not known."
    )


LINES = [
    (
        of(R.LAST_LEFT, 3, CALL),
        "rank 2: last in all_reduce #7 of group 0 at train.py:9, which it left 3.0 s ago",
        None,
    ),
    (
        of(R.LAST_LEFT, None, CALL),
        "rank 2: last in all_reduce #7 of group 0 at train.py:9, which it left",
        None,
    ),
    (
        of(R.LAST_IS_IN, 3, CALL),
        "rank 2: in all_reduce #7 of group 0 at train.py:9 for 3.0 s",
        None,
    ),
    (
        of(R.LAST_ISSUED, 3, CALL),
        "rank 2: issued all_reduce #7 of group 0 at train.py:9 3.0 s ago, end unknown",
        None,
    ),
    (
        of(R.LAST_FAILED, 3, CALL),
        "rank 2: all_reduce #7 of group 0 at train.py:9 failed 3.0 s ago",
        None,
    ),
    (of(R.ISSUED_NOTHING), "rank 2: it has issued nothing", None),
    (
        of(R.WAITS_IN, 3, CALL),
        f"{NAME}: in all_reduce #7 of group 0 at train.py:9 for 3.0 s",
        f"{NAMES}: in all_reduce #7 of group 0 at train.py:9 for 3.0 s",
    ),
    (
        of(R.ENDED_WITHOUT_RECORDS),
        "rank 2: left no records, so it ended before it had made a process group, or was not recorded",
        f"{NAMES}: left no records, so they ended before they had made a process group, or were not recorded",
    ),
    (
        of(R.HAD_NO_GROUP),
        f"{NAME}: has not made its process group",
        f"{NAMES}: have not made their process group",
    ),
    (of(R.WAITS_IN_TURN), f"{NAME}: waits for those in turn", f"{NAMES}: wait for those in turn"),
    (
        of(R.WAITS_FOR, None, replace(SEND, op="recv", peer=-1)),
        f"{NAME} in recv #3 from any rank (tag 2, group 1 (mesh_pp)) at pipe.py:5, for rank 0 (node-a, pid 100)",
        f"{NAMES} in recv #3 from any rank (tag 2, group 1 (mesh_pp)) at pipe.py:5, for ranks 4-5 (node-c)",
    ),
    (
        of(R.MESSAGES_SO_FAR, 83, way="sent", tag="2", group="1"),
        "rank 2 has sent 83 messages to rank 0 (tag 2, group 1); the 84th is awaited",
        None,
    ),
    (
        of(R.MESSAGES_SO_FAR, 1, way="received", tag="2", group="1"),
        "rank 2 has received 1 message from rank 0 (tag 2, group 1); the 2nd waits to be received",
        None,
    ),
    (
        of(R.MESSAGES_SO_FAR, 0, way="sent", tag="2", group="1"),
        "rank 2 has sent no message to rank 0 (tag 2, group 1); the 1st is awaited",
        None,
    ),
    (of(R.TAGS_DIFFER, tags="4 5"), "tag 4 and tag 5 do not match, from rank 2 to rank 0", None),
    (
        of(R.PASSED, None, CALL, dtype="int32"),
        f"{NAME}: all_reduce at train.py:9, int32",
        f"{NAMES}: all_reduce at train.py:9, int32",
    ),
    (
        of(R.SENDS, None, CALL),
        f"{NAME}: all_reduce at train.py:9",
        f"{NAMES}: all_reduce at train.py:9",
    ),
    (
        of(R.RECEIVES, None, CALL),
        f"{NAME}: all_reduce at train.py:9",
        f"{NAMES}: all_reduce at train.py:9",
    ),
    (
        of(R.ISSUED, None, CALL),
        f"{NAME}: all_reduce at train.py:9",
        f"{NAMES}: all_reduce at train.py:9",
    ),
    (
        of(R.ISSUED, None, replace(CALL, function="Join")),
        f"{NAME}: Join's all_reduce at train.py:9",
        f"{NAMES}: Join's all_reduce at train.py:9",
    ),
    (
        of(R.TWO_THREADS, group="1"),
        f"{NAME}: two of its threads have calls in group 1 at once, and nothing keeps those in the order of the other members",
        f"{NAMES}: two of their threads have calls in group 1 at once, and nothing keeps those in the order of the other members",
    ),
    (
        of(R.IN_JOIN),
        f"{NAME}: that call is one of its Join's own; without inputs, it answers the calls of the joinables, and no others",
        f"{NAMES}: that call is one of their Join's own; without inputs, they answer the calls of the joinables, and no others",
    ),
    (
        of(R.OTHER_LINE, None, CALL, line="eval.py:3"),
        f"{NAME}: before, all_reduce #7 came from train.py:9, and from eval.py:3 on rank 0 "
        "(node-a, pid 100): it may be a call too many, or one in place of another",
        f"{NAMES}: before, all_reduce #7 came from train.py:9, and from eval.py:3 on ranks 4-5 "
        "(node-c): it may be a call too many, or one in place of another",
    ),
    (
        of(R.NOT_KNOWN, why="unheard"),
        f"nothing is known of {NAME}: no answer from there",
        f"nothing is known of {NAMES}: no answer from there",
    ),
    (
        of(R.NOT_KNOWN, why="no records"),
        f"nothing is known of {NAME}: no records of it here",
        f"nothing is known of {NAMES}: no records of it here",
    ),
    (
        of(R.OVERWRITTEN, 1),
        "1 record of rank 2 was overwritten, and none of this group is left: it may have been there",
        None,
    ),
    (
        of(R.SEEN_AT, 3, line="a.py:1", function="load"),
        "rank 2: at a.py:1 in load when the job's own watcher looked, 3.0 s before the end",
        None,
    ),
    (
        of(R.STANDS_AT, line="a.py:1", function="load"),
        f"{NAME}: at a.py:1 in load",
        f"{NAMES}: at a.py:1 in load",
    ),
    (
        of(R.STANDS_AT, line="a.py:1", function="load", inside="its data loader"),
        f"{NAME}: waiting for its data loader at a.py:1",
        f"{NAMES}: waiting for its data loader at a.py:1",
    ),
    (
        of(R.RPC_WAITS, 45, worker="w1", function="m.f", line="a.py:1"),
        f"{NAME} has waited 45 s for worker 'w1', rank 0 (node-a, pid 100), to answer m.f, called at a.py:1",
        None,
    ),
    (
        (Fact(R.RPC_WAITS, ONE, values=(("worker", "w1"), ("function", "f")), number=45.0),) * 2,
        f"{NAME} has waited 45 s for worker 'w1' to answer f",
        None,
    ),
    (
        of(R.RPC_RUNS, 45, function="m.f", line="a.py:1"),
        "rank 2 has been in m.f for 45 s, at a.py:1",
        None,
    ),
    (
        of(R.RPC_NOT_RUN, worker="w1", function="m.f"),
        "no thread of rank 2 runs m.f",
        None,
    ),
    (
        of(R.FAILED_LATER),
        "1 other rank failed after that: rank 0 (node-a, pid 100)",
        "2 other ranks failed after that: ranks 4-5 (node-c)",
    ),
    (
        of(R.FAILED_LATER, at_once="yes"),
        "1 other rank failed at that time, too: rank 0 (node-a, pid 100)",
        "2 other ranks failed at that time, too: ranks 4-5 (node-c)",
    ),
    (
        of(R.RPC_UNANSWERED, worker="w1", calls="1"),
        "rank 2: 1 RPC of worker 'w1' has no answer; to which worker is not known",
        None,
    ),
    (
        of(R.RPC_UNANSWERED, worker="w1", calls="3"),
        "rank 2: 3 RPCs of worker 'w1' have no answer; to which worker is not known",
        None,
    ),
    (of(R.STANDS_AT), f"{NAME}: its stack shows no line", f"{NAMES}: its stack shows no line"),
    (
        of(R.CAUSED_WAITING, 80, span_s="12.0", along="75.0"),
        "80 % of all waiting in 12 s on record; most of the waiting in 75 % of its parts",
        None,
    ),
    (
        of(R.CAUSED_WAITING, 80, span_s="12.0", along="75.0", slow_start_s="5.0"),
        "80 % of all waiting in 12 s (the 5.0 s before, of far longer steps, are left out); most of the waiting in 75 % of its parts",
        None,
    ),
    (
        of(R.CAUSED_WAITING, 80, span_s="12.0", along="75.0", times="device"),
        "80 % of all waiting in 12 s on record; most of the waiting in 75 % of its parts (by the devices' durations)",
        None,
    ),
    (
        of(R.CAME_LAST, 99, collectives="1200"),
        "last in 99 % of 1,200 collectives of that group",
        None,
    ),
    (of(R.TRANSFERS, 1200, most_bytes="4096"), "over 1,200 transfers of up to 4,096 bytes", None),
    (of(R.STILL_IN_TRANSFER), f"{NAME} still in it", f"{NAMES} still in it"),
    (of(R.EARLIER_WAIT_PASSED, 90, line="a.py:1"), "a wait at a.py:1 lasted 90 s and passed", None),
]


@pytest.mark.parametrize(("facts", "single", "several"), LINES)
def test_a_line_of_evidence(facts: tuple[Fact, Fact], single: str, several: str | None) -> None:
    """A line agrees with its subject. None: the relation is always about a single rank."""
    assert evidence([facts[0]]) == (single,)
    if several is not None:
        assert evidence([facts[1]]) == (several,)


def test_a_quotation_has_a_line_of_evidence_for_each_of_its_own() -> None:
    """A terminal, a page and JSON show lines of evidence, so none of them contains another."""
    fact, _ = of(R.SAID_LAST, text="Traceback:\n  File 'a.py'\nKeyError: 'x'")
    assert evidence([fact]) == (
        "rank 2 wrote last to stderr:",
        "| Traceback:",
        "|   File 'a.py'",
        "| KeyError: 'x'",
    )


def test_every_relation_is_rendered_here_and_explained_to_users() -> None:
    """A relation without an example, here or for logs, or without a row in the docs, is noticed."""
    files = Path(__file__), Path(__file__).with_name("test_log_sentences.py")
    source = "".join(file.read_text(encoding="utf-8") for file in files)
    assert [name for name in R.__members__ if f"R.{name}" not in source] == []
    documented = re.findall(r"^\| `(\w+)` \|", PAGE[PAGE.index("what is true") :], re.MULTILINE)
    assert [relation.value for relation in R if relation.value not in documented] == []


@pytest.mark.parametrize(("facts"), [facts for facts, *_ in (*STATES, *LINES)])
def test_facts_survive_json(facts: tuple[Fact, Fact]) -> None:
    """Readers of a store or of a file get the facts that the judge had."""
    assert facts_from(json.loads(json.dumps([fact_object(fact) for fact in facts]))) == facts


def test_a_finding_survives_json_with_its_facts(tmp_path: Path) -> None:
    """The words that a reader gets are those that its facts render to."""
    (finding,) = diagnose_calls(tmp_path, RANK_2_MISSING, states={}).findings
    (read,) = findings_from([json.loads(json.dumps(finding_object(finding)))])
    assert read.facts == finding.facts
    assert len(read.facts) > 2
    assert summary(read.facts[:2]) == read.summary == finding.summary
    assert evidence(read.facts[2:]) == read.evidence


GOOD = fact_object(of(R.HELD_UP, 60, CALL)[1])
BAD: list[tuple[str, Any]] = [
    ("relation", "blames"),
    ("relation", 7),
    ("subject", {"ranks": [-1], "hosts": [], "pid": None}),
    ("subject", {"ranks": ["2"], "hosts": [], "pid": None}),
    ("subject", {"ranks": 3, "hosts": [], "pid": None}),
    ("subject", {"ranks": [True], "hosts": [], "pid": None}),
    ("subject", {"ranks": [0] * ((1 << 20) + 1), "hosts": [], "pid": None}),
    ("subject", "rank 2"),
    ("others", {"ranks": [1], "hosts": [5], "pid": None}),
    ("others", {"ranks": [1], "hosts": [], "pid": -4}),
    ("call", {**GOOD["call"], "op": "x" * (1 << 15)}),
    ("call", {**GOOD["call"], "peer": -2}),
    ("call", {**GOOD["call"], "seq": 1e3}),
    ("call", {}),
    ("values", ["a"]),
    ("values", {"a": 1}),
    ("number", float("nan")),
    ("number", float("inf")),
    ("number", "60"),
    ("unit", 1),
    ("confidence", "sure"),
]


@pytest.mark.parametrize(("key", "value"), BAD, ids=lambda value: str(value)[:30])
def test_a_hostile_fact_is_left_out(key: str, value: Any) -> None:
    """Anybody can write into a store. One damaged fact does not take the others with it."""
    assert facts_from([{**GOOD, key: value}, GOOD]) == facts_from([GOOD]) != ()


@pytest.mark.parametrize("written", [None, {}, "facts", 3, [3, None, [], "x"]])
def test_facts_that_are_no_list(written: Any) -> None:
    """A finding of an older version has no facts, and counts all the same."""
    assert facts_from(written) == ()
    (finding,) = findings_from([{"kind": "dead", "ranks": [1], "facts": written}])
    assert (finding.kind, finding.ranks, finding.facts) == ("dead", (1,), ())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ranks", [1 << 20]),
        ("ranks", [10**4000]),
        ("victims", [0] * ((1 << 20) + 1)),
        ("seq", 10**4000),
        ("since_s", float("nan")),
        ("summary", "x" * ((1 << 14) + 1)),
        ("evidence", ["x" * ((1 << 14) + 1)]),
        ("hosts", [3]),
        ("op", {"a": "dict"}),
    ],
    ids=lambda value: str(type(value).__name__) if not isinstance(value, str) else value[:9],
)
def test_a_hostile_finding_is_left_out(tmp_path: Path, key: str, value: Any) -> None:
    """What is too large or of another type comes from nobody who means well."""
    sound = finding_object(diagnose_calls(tmp_path, RANK_2_MISSING, states={}).findings[0])
    assert findings_from([sound])
    assert not findings_from([{**sound, key: value}])
