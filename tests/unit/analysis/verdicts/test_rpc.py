"""The verdict ``rpc``, on the states of agents that a test writes."""

from __future__ import annotations

from dataclasses import replace

from rankcall.analysis.node_snapshot import decode as decode_node
from rankcall.analysis.node_snapshot import encode as encode_node
from rankcall.analysis.node_snapshot import merge, node_snapshot_of
from rankcall.analysis.snapshot import ALIVE, RankState, Snapshot, no_calls
from rankcall.analysis.verdicts import find
from rankcall.analysis.verdicts.facts import Relation
from rankcall.analysis.verdicts.finding import Finding
from rankcall.ring.rpc_state import RpcRun, RpcState, RpcWait

AFTER_S, LONG = 60.0, 90 * 10**9


def wait(to: str, function: str, during: str = "", age_ns: int = LONG) -> RpcWait:
    """Return a wait, at a line that its function names."""
    return RpcWait(to, function, f"{during or 'main'}.py:1", during, age_ns)


def run(function: str, waits: bool = False) -> RpcRun:
    """Return a function that runs."""
    return RpcRun(function, f"{function}.py:7", waits, LONG)


def judge(*workers: tuple[list[RpcWait], list[RpcRun]], idle: int = 8) -> list[Finding]:
    """Return the findings about these workers; the state travels from one node to another."""
    states = [
        RpcState(f"worker{rank}", len(waits), idle, LONG, tuple(waits), tuple(runs))
        for rank, (waits, runs) in enumerate(workers)
    ]
    ranks = [
        RankState(rank, "vm", 100 + rank, state=ALIVE, started_s=1000.0, rpc=state.encode())
        for rank, state in enumerate(states)
    ]
    snapshot = Snapshot(ranks, no_calls())
    return find(merge([decode_node(encode_node(node_snapshot_of(snapshot)))]), AFTER_S)


def relations(finding: Finding) -> list[tuple[Relation, tuple[int, ...]]]:
    """Return the facts of a finding, with the ranks that they are about."""
    return [(fact.relation, fact.ranks.numbers) for fact in finding.facts if fact.ranks]


def test_the_end_of_a_chain_is_named() -> None:
    """0 waits for 1, which waits for 2, which runs: 2 is named, and the others are victims."""
    (finding,) = judge(
        ([wait("worker1", "f")], []),
        ([wait("worker2", "g", "f")], [run("f", True)]),
        ([], [run("g")]),
    )
    assert (finding.kind, finding.ranks, finding.victims) == ("rpc", (2,), (0, 1))
    assert finding.since_s == 90
    assert relations(finding) == [
        (Relation.RPC_WAITS, (1,)),
        (Relation.RPC_RUNS, (2,)),
        (Relation.RPC_WAITS, (0,)),
    ]
    assert "Rank 2 has been in g for 90 s, at g.py:7." in finding.summary


def test_a_worker_that_does_not_run_the_function() -> None:
    """It has free threads, and none of them runs what it was asked for."""
    (finding,) = judge(([wait("worker1", "f")], []), ([], []))
    assert finding.ranks == (1,)
    assert finding.summary.endswith("No thread of rank 1 runs f.")


def test_a_worker_without_a_free_thread() -> None:
    """The request waits for a thread; the function that runs there is what keeps it."""
    (finding,) = judge(([wait("worker1", "f")], []), ([], [run("other")]), idle=0)
    assert finding.ranks == (1,)
    assert "Rank 1 has been in other for 90 s" in finding.summary


def test_a_chain_whose_end_is_not_known() -> None:
    """The function waits for an answer, and not for long yet: nothing is said of what it does."""
    (finding,) = judge(
        ([wait("worker1", "f")], []), ([wait("worker0", "g", "f", 10**9)], [run("f", True)])
    )
    assert finding.ranks == (1,)
    assert relations(finding) == [(Relation.RPC_WAITS, (0,))]


def test_a_worker_without_records() -> None:
    """Its name is all that is known, so no rank is named."""
    (finding,) = judge(([wait("elsewhere", "f")], []), ([], []))
    assert finding.ranks == ()
    assert "for worker 'elsewhere' to answer f, called at main.py:1" in finding.summary


def test_a_circle_through_waits_and_full_workers() -> None:
    """Both workers' only threads wait for an answer that the other one has no thread for."""
    (finding,) = judge(
        ([wait("worker1", "g"), wait("worker1", "k", "h")], [run("h", True)]),
        ([wait("worker0", "h", "g")], [run("g", True)]),
        idle=0,
    )
    assert finding.ranks == (0, 1)
    assert relations(finding)[0] == (Relation.RPC_CIRCLE, (0, 1))
    assert len(finding.facts) == 3, "the first wait is not part of the circle"


def test_a_function_that_calls_itself_elsewhere_is_no_circle_while_it_runs() -> None:
    """One thread of worker 0 computes: all others wait for that one in the end."""
    (finding,) = judge(
        ([wait("worker1", "fib"), wait("worker1", "fib", "fib")], [run("fib"), run("fib", True)]),
        ([wait("worker0", "fib", "fib")], [run("fib", True)]),
    )
    assert finding.ranks == (0,)
    assert (Relation.RPC_CIRCLE, (0, 1)) not in relations(finding)


def test_short_waits_and_activity_are_no_hang() -> None:
    """A wait that is young, or workers that do something new, are a job that goes on."""
    assert judge(([wait("worker1", "f", age_ns=10**9)], []), ([], [run("f")])) == []
    for waits in ((), (wait("worker1", "train"),)):
        busy = RpcState("worker0", 1, 8, 10**9, waits)  # did something else a second ago
        ranks = [
            RankState(0, "vm", 1, state=ALIVE, started_s=1000.0, rpc=busy.encode()),
            RankState(1, "vm", 2, state=ALIVE, started_s=1000.0),
        ]
        assert find(Snapshot(ranks, no_calls()), AFTER_S) == []
        silent = replace(busy, active_ns=400 * 10**9, waits=())
        ranks[0] = replace(ranks[0], rpc=silent.encode())
        (finding,) = find(Snapshot(ranks, no_calls()), AFTER_S)
        assert finding.kind == "no_progress"
