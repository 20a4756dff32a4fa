# ruff: noqa: E501
# An expected sentence stays on one line, so that it can be searched for as a user reads it.
"""Each relation that only logs state has one template, which is right for one rank and for many."""

from __future__ import annotations

import json

import pytest

from rankcall.analysis.verdicts.decoding import facts_from
from rankcall.analysis.verdicts.encoding import fact_object
from rankcall.analysis.verdicts.facts import CallFact, Fact, Ranks, Relation
from rankcall.analysis.verdicts.log_sentences import summary_from_log

R = Relation
ONE, MANY = Ranks((2,), ("node-a",)), Ranks((1, 2, 3))
OTHER, OTHERS = Ranks((0,)), Ranks((4, 5))
CALL = CallFact("all_reduce", 51, "0", "mesh_dp")


def of(relation: Relation, ranks: Ranks | None = None, **values: str) -> Fact:
    """Return a fact with some values."""
    return Fact(relation, ranks, values=tuple(values.items()))


NOT_SAID = "The log does not say which rank is at fault."
SENTENCES: list[tuple[list[Fact], str]] = [
    (
        [of(R.ENDED_BY_SIGNAL, ONE, signal="SIGKILL", time="2025-05-21 15:43:03")],
        "Rank 2 (node-a) was ended by SIGKILL at 2025-05-21 15:43:03, before any other rank failed on its node.",
    ),
    (
        [of(R.ENDED_BY_SIGNAL, MANY, signal="SIGKILL", time="15:43:03")],
        "Ranks 1-3 were ended by SIGKILL in the same second, 15:43:03. The log does not show which was first.",
    ),
    (
        [of(R.ENDED_BY_SIGNAL, ONE, signal="SIGSEGV")],
        "Rank 2 (node-a) was ended by SIGSEGV, says the launcher.",
    ),
    (
        [of(R.ENDED_BY_SIGNAL, ONE, signal="SIGKILL", why="memory ran out")],
        "Rank 2 (node-a) was ended by SIGKILL, because memory ran out, says the launcher.",
    ),
    (
        [of(R.ENDED_BY_SIGNAL, ONE, signal="SIGKILL", time="15:43:03", why="memory ran out")],
        "Rank 2 (node-a) was ended by SIGKILL at 15:43:03, before any other rank failed on its node. The reason: memory ran out.",
    ),
    (
        [of(R.ENDED_BY_SIGNAL, MANY, signal="SIGSEGV")],
        "Ranks 1-3 were ended by SIGSEGV, says the launcher.",
    ),
    (
        [of(R.OWN_ERROR, ONE, error="Xid 79 {x}")],
        "Rank 2 (node-a) failed with its own error: Xid 79 {x}",
    ),
    ([of(R.OWN_ERROR, MANY, error="Xid 79")], "Ranks 1-3 failed with their own error: Xid 79"),
    (
        [of(R.OWN_EXCEPTION, ONE, error="KeyError: 'x'", line="train.py:9")],
        "Rank 2 (node-a) failed with its own exception at train.py:9: KeyError: 'x'",
    ),
    (
        [of(R.OWN_EXCEPTION, MANY, error="KeyError")],
        "Ranks 1-3 failed with their own exception: KeyError",
    ),
    (
        [
            Fact(R.CALLED, OTHER, CallFact("barrier", line="a.py:1"), values=(("seq", "0"),)),
            Fact(R.CALLED, MANY, CallFact(""), values=(("shape", "[4]"), ("dtype", "float"))),
        ],
        "Rank 0 called barrier as #0 at a.py:1; ranks 1-3 called another op of shape [4] float.",
    ),
    (
        [Fact(R.MODELS_DIFFER, ONE, others=OTHER, values=(("has", "12 parameters"),))],
        "The ranks wrap different models: rank 2 (node-a) has 12 parameters, and rank 0 has not.",
    ),
    (
        [Fact(R.NOT_AT_BARRIER, MANY, values=(("line", "a.py:1"),), number=30)],
        "Ranks 1-3 did not come to a monitored barrier at a.py:1 within 30 s; TORCH_DISTRIBUTED_DEBUG=DETAIL makes one before each collective.",
    ),
    (
        [of(R.NOT_AT_SETUP, OTHER, joined="1023", world_size="1024")],
        "Rank 0 did not come while a process group was made: 1,023 of 1,024 ranks did.",
    ),
    (
        [Fact(R.REPORTED_MISSING, OTHER)],
        "Rank 0 had not come to the collective that the others timed out in, says TORCH_NCCL_DESYNC_DEBUG.",
    ),
    (
        [
            Fact(
                R.ENDED_BY_SIGNAL,
                ONE,
                others=OTHERS,
                values=(("signal", "SIGKILL"), ("time", "2026-03-14 09:02:36")),
            )
        ],
        "Rank 2 (node-a) was ended by SIGKILL in the second in which ranks 4-5 failed, too, 2026-03-14 09:02:36. The log does not show which was first.",
    ),
    (
        [Fact(R.BEHIND, ONE, CALL, OTHERS, number=50)],
        "Rank 2 (node-a) had not come to all_reduce #51 of group 0 (mesh_dp), which ranks 4-5 timed out in: the last one issued there was #50.",
    ),
    (
        [Fact(R.BEHIND, MANY, CallFact("", 1, "0"), OTHER, number=0)],
        "Ranks 1-3 had not come to the collective #1 of group 0, which rank 0 timed out in: none had been issued there.",
    ),
    (
        [
            Fact(R.TIMED_OUT_IN, OTHER, CallFact("broadcast", 9, "0"), values=(("sizes", "1024"),)),
            Fact(R.TIMED_OUT_IN, MANY, CallFact("all_gather", 9, "0"), values=(("sizes", "4 8"),)),
        ],
        "The ranks timed out in different calls, all of which are #9 of group 0: rank 0 in broadcast of 1,024 elements; ranks 1-3 in all_gather of 4 and 8 elements.",
    ),
    (
        [
            of(R.RANK_NOT_SAID),
            of(R.ENDED_FROM_OUTSIDE, what="CANCELLED AT 15:43"),
            of(R.ENDED_FROM_OUTSIDE, what="srun: not found", at_start="yes"),
            Fact(R.INTERRUPTED_AT, ONE, CallFact("", line="train.py:7")),
            Fact(R.INTERRUPTED_AT, MANY, CallFact("all_reduce", line="train.py:9")),
            of(R.PROCESS_FAILED, error="out of memory", pid="77", host="node-a"),
            of(R.SPAWNED_ENDED, process="1", signal="SIGKILL"),
            of(R.WORKER_ENDED, local_rank="3", host="node-a", code="1"),
            Fact(R.TIMED_OUT, OTHERS),
            Fact(R.MAY_BE_BEHIND, OTHER, CallFact("", 51, "0")),
            Fact(R.FAILED_FIRST, ONE),
        ],
        f"{NOT_SAID} Something outside the ranks ended the job: CANCELLED AT 15:43. "
        "Something outside the ranks kept the job from starting: srun: not found. "
        "Rank 2 (node-a) was interrupted at train.py:7. "
        "Ranks 1-3 were interrupted in all_reduce at train.py:9. "
        "Process 77 on node-a failed with out of memory. "
        "Process 1 of those that torch.multiprocessing started ended by SIGKILL. "
        "Local rank 3 on node-a ended with code 1. "
        "Ranks 4-5 timed out, and waited for others. "
        "Rank 0 had not come to #51 of group 0, but may have waited in another group. "
        "The first failure that torchrun saw is that of rank 2 (node-a), and that can be a rank that waited for another one.",
    ),
    (
        [of(R.RANK_NOT_SAID), Fact(R.FAILED_FIRST, MANY)],
        f"{NOT_SAID} The first failures that torchrun saw are those of ranks 1-3, and those can be ranks that waited for another one.",
    ),
    (
        [
            of(R.RANK_NOT_SAID),
            of(R.WORKER_ENDED, code="-11"),
            of(R.PROCESS_RAISED, error="ValueError: x", pid="9"),
            of(R.PROCESS_GONE, by="Ray", pid="77", host="10.0.0.4"),
            Fact(R.WAITED_FOR, OTHER, values=(("peer", "rank 3 of its group"),)),
            of(R.WAITED_FOR, peer="rank 3 of its group", pid="5"),
        ],
        f"{NOT_SAID} A worker ended with code -11 (SIGSEGV). Process 9 raised ValueError: x. "
        "Process 77 on 10.0.0.4 is gone, says Ray. "
        "Rank 0 waited for rank 3 of its group, which did not answer. "
        "Process 5 waited for rank 3 of its group, which did not answer.",
    ),
    (
        [
            of(R.RANK_NOT_SAID),
            of(R.PROCESS_FAILED, error="out of memory"),
            of(R.KERNEL_REPORTS, error="Xid 79", host="node-a"),
            of(R.KERNEL_REPORTS, error="Xid 79"),
            Fact(
                R.LINK_ERRORS,
                number=41,
                values=(("host", "node-b"), ("end", "host"), ("all", "43")),
            ),
            Fact(
                R.LINK_ERRORS,
                number=41,
                values=(("host", "node-c"), ("end", "peer"), ("all", "43")),
            ),
            of(R.SPAWNED_ENDED, process="1"),
            of(R.WORKER_ENDED, code="1"),
        ],
        f"{NOT_SAID} A process failed with out of memory. "
        "The kernel of node-a reports: Xid 79. The kernel reports: Xid 79. "
        "node-b reports 41 of 43 link errors. "
        "41 of 43 link errors are about the connection to node-c. "
        "Process 1 of those that torch.multiprocessing started failed. "
        "A worker ended with code 1.",
    ),
    (
        [
            Fact(
                R.ENQUEUED,
                ONE,
                CallFact("all_gather", 652),
                values=(("number", "28c"), ("arguments", "count 5 datatype 0"), ("size", "4")),
            ),
            Fact(
                R.ENQUEUED,
                None,
                CallFact("all_reduce", 652),
                values=(
                    ("number", "28c"),
                    ("arguments", "count 9 datatype 7"),
                    ("size", "4"),
                    ("pids", "11 12 13 14 15"),
                    ("host", "node-b"),
                ),
            ),
        ],
        "NCCL wrote different calls with opCount 28c of a communicator of 4 ranks: rank 2 (node-a) "
        "all_gather (count 5 datatype 0); processes 11, 12, 13, 14 and others on node-b all_reduce "
        "(count 9 datatype 7).",
    ),
    (
        [
            of(R.RANK_NOT_SAID),
            *(
                Fact(
                    R.LAST_ENQUEUED,
                    None,
                    CallFact("all_reduce", number),
                    values=(("number", f"{number:x}"), ("size", "8"), ("pids", f"{number}")),
                )
                for number in range(10, 16)
            ),
        ],
        f"{NOT_SAID} On a communicator of 8 ranks, the last calls that NCCL wrote are process 10 "
        "all_reduce with opCount a; process 11 all_reduce with opCount b; process 12 all_reduce "
        "with opCount c; process 15 all_reduce with opCount f. The last lines of a process that "
        "was ended may be lost.",
    ),
    (
        [
            Fact(R.NOT_SUBMITTED, OTHER, values=(("ops", "a, b"), ("more", "yes")), number=60),
            Fact(R.NOT_SUBMITTED, OTHERS, values=(("ops", "c"),), number=60),
        ],
        "Rank 0 had not submitted a, b and other ops; ranks 4-5 had not submitted c. Other ranks "
        "had, more than 60 s before, says Horovod.",
    ),
    (
        [Fact(R.NO_FAILURE_SEEN, number=1000)],
        "No line that rankcall knows reports a failure; it read 1,000 lines.",
    ),
]
CASES = [
    pytest.param(*case, id=f"{n}-{case[0][-1].relation.value}") for n, case in enumerate(SENTENCES)
]


@pytest.mark.parametrize(("facts", "sentence"), CASES)
def test_a_sentence_from_a_log(facts: list[Fact], sentence: str) -> None:
    """A sentence agrees with its subject, and leaves out what the log does not have."""
    assert summary_from_log(facts) == sentence


@pytest.mark.parametrize(("facts", "sentence"), CASES)
def test_facts_from_logs_survive_json(facts: list[Fact], sentence: str) -> None:
    """Programs that read the JSON get the facts that the judge had."""
    read = facts_from(json.loads(json.dumps([fact_object(fact) for fact in facts])))
    assert (list(read), summary_from_log(read)) == (facts, sentence)
