"""Which reason a verdict names for lateness: facts, and the sentences that are made of them."""

from __future__ import annotations

import numpy as np
import pytest

from rankcall.analysis.snapshot import RankState, Snapshot, no_calls
from rankcall.analysis.spent import LATELY, SINCE, SPENT, Spending
from rankcall.analysis.stragglers import Stragglers
from rankcall.analysis.verdicts.facts import Fact, Ranks, Relation
from rankcall.analysis.verdicts.reasons import (
    advice_for,
    have_only_bad_luck,
    reasons_for_absence,
    reasons_for_lateness,
)
from rankcall.analysis.verdicts.sentences import summary

NAN = float("nan")
CAUSES = {
    "gc": "gc_s",
    "no_cpu": "runnable_s",
    "disk": "disk_wait_s",
    "stopped": "stopped_s",
    "blocked": "blocked_s",
    "gil": "gil_s",
    "data_loader": "data_loader_s",
    "checkpoint": "checkpoint_s",
    "compilation": "compilation_s",
}
OF_THE_CGROUP = {"memory": "memory_stall_s", "io": "io_stall_s"}


def job(window: int, *rows: dict[str, float], ranks: int = 4) -> Snapshot:
    """Return a job of some ranks; each row is what one spent, of 10 s if not said otherwise."""
    spent = np.zeros(len(rows), SPENT)
    for row, given in zip(spent, rows, strict=True):
        for name, value in {"seconds": 10.0, "window": window, **given}.items():
            row[name] = value
    states = [RankState(rank, "node-a", 100 + rank) for rank in range(ranks)]
    return Snapshot(states, no_calls(), spending=Spending((spent,)))


def cause_and_share(facts: list[Fact]) -> tuple[str, float] | None:
    """Return the cause that is named, and its share in %."""
    if not facts:
        return None
    (fact,) = facts
    assert fact.number is not None
    return fact.value("cause"), round(fact.number, 6)


@pytest.mark.parametrize("cause", CAUSES)
def test_each_cause_of_absence(cause: str) -> None:
    """Named from half of the time on, with its share."""
    column = CAUSES[cause]
    enough = job(SINCE, {"rank": 2, column: 5.0})
    assert cause_and_share(reasons_for_absence(enough, [2])) == (cause, 50.0)
    assert reasons_for_absence(job(SINCE, {"rank": 2, column: 4.9}), [2]) == []
    assert reasons_for_absence(job(LATELY, {"rank": 2, column: 5.0}), [2]) == []


@pytest.mark.parametrize("cause", OF_THE_CGROUP)
def test_what_all_tasks_of_the_cgroup_wait_for(cause: str) -> None:
    """It is not the cause of an absence: other ranks have it as well."""
    column = OF_THE_CGROUP[cause]
    assert reasons_for_absence(job(SINCE, {"rank": 2, column: 9.0}), [2]) == []


@pytest.mark.parametrize(
    ("waited_s", "span_s", "expected"),
    [
        (2.0, 5.0, True),  # a fifth of its time, and it is late for two fifths
        (1.9, 5.0, False),
        (9.0, 9.9, True),
        (9.0, 10.0, False),  # the scheduler would have chosen others, too
        (NAN, 5.0, False),
        (None, 5.0, False),
    ],
)
def test_who_is_late_by_chance(waited_s: float | None, span_s: float, expected: bool) -> None:
    """In a short job, a rank that waited for a CPU for half of its lateness is no straggler."""
    found = Stragglers((2,), "", (1.0,), 0.9, 0.4, 1.0, None, 0, span_s, 0.0)
    rows = [] if waited_s is None else [{"rank": 2, "runnable_s": waited_s}]
    rows.append({"rank": 0, "runnable_s": 9.0})
    assert have_only_bad_luck(job(LATELY, *rows), found, []) is expected


@pytest.mark.parametrize(
    ("of_rank_2", "of_rank_0", "expected"),
    [
        # Of a healthy job of two ranks, at a load of 14 on two cores: rank 2 needed a CPU for
        # longer, and got it sooner than rank 0.
        ((1.4, 1.7), (0.2, 0.4), True),
        ((1.4, 3.0), (0.2, 0.4), False),  # rank 0 got one sooner
        ((1.4, 1.7), (0.01, 0.1), False),  # rank 0 hardly needed one
        ((1.4, 1.7), (NAN, NAN), False),
        ((NAN, 1.7), (0.2, 0.4), False),
    ],
)
def test_a_machine_that_is_short_of_cpus(
    of_rank_2: tuple[float, float], of_rank_0: tuple[float, float], expected: bool
) -> None:
    """Who waits for a CPU no longer than others when it needs one was not kept back by others."""
    found = Stragglers((2,), "", (1.0,), 0.9, 0.5, 1.0, None, 0, 3.2, 0.0)
    late = job(
        LATELY,
        {"rank": 2, "seconds": 3.2, "running_s": of_rank_2[0], "runnable_s": of_rank_2[1]},
        {"rank": 0, "seconds": 3.2, "running_s": of_rank_0[0], "runnable_s": of_rank_0[1]},
    )
    reason = Fact(Relation.LATE_BECAUSE, values=(("cause", "no_cpu"),))
    assert have_only_bad_luck(late, found, [reason]) is expected
    other = Fact(Relation.LATE_BECAUSE, values=(("cause", "gc"),))
    assert not have_only_bad_luck(late, found, [other])


@pytest.mark.parametrize("cause", CAUSES | OF_THE_CGROUP)
def test_each_cause_of_lateness(cause: str) -> None:
    """Named if it explains at least half of the lateness, and only what others do not spend."""
    column = (CAUSES | OF_THE_CGROUP)[cause]
    others = [{"rank": rank, "seconds": 8.0, column: 1.0} for rank in (0, 1, 3)]
    late = job(LATELY, {"rank": 2, "seconds": 8.0, column: 3.0}, *others)  # 25 % more of its time
    assert cause_and_share(reasons_for_lateness(late, [2], 0.5)) == (cause, 50.0)
    assert cause_and_share(reasons_for_lateness(late, [2], 0.1)) == (cause, 100.0)
    assert reasons_for_lateness(late, [2], 0.51) == []
    alike = job(LATELY, *({"rank": rank, column: 9.0} for rank in range(4)))
    assert reasons_for_lateness(alike, [2], 0.4) == []


def test_throttled_or_no_cpu() -> None:
    """Without a CPU because of the quota, if the cgroup was throttled for most of that time."""
    throttled = job(SINCE, {"rank": 2, "runnable_s": 6.0, "throttled_s": 3.0})
    assert cause_and_share(reasons_for_absence(throttled, [2])) == ("throttled", 60.0)
    crowded = job(SINCE, {"rank": 2, "runnable_s": 6.0, "throttled_s": 2.9})
    assert cause_and_share(reasons_for_absence(crowded, [2])) == ("no_cpu", 60.0)
    unlimited = job(SINCE, {"rank": 2, "runnable_s": 6.0, "throttled_s": NAN})
    assert cause_and_share(reasons_for_absence(unlimited, [2])) == ("no_cpu", 60.0)


def test_what_is_not_known_is_no_cause() -> None:
    """No row, too short a time, NaN, a rank of several without one."""
    assert reasons_for_absence(job(SINCE), [2]) == []
    assert reasons_for_absence(job(SINCE, {"rank": 2, "seconds": 0.9, "gc_s": 0.9}), [2]) == []
    nothing = dict.fromkeys(set(CAUSES.values()), NAN)
    assert reasons_for_absence(job(SINCE, {"rank": 2, **nothing}), [2]) == []
    assert reasons_for_lateness(job(LATELY, {"rank": 2, **nothing}), [2], 0.4) == []
    one = job(SINCE, {"rank": 2, "gc_s": 9.0})
    assert reasons_for_absence(one, [1, 2]) == []
    assert reasons_for_lateness(one, [2], 0.0) == []


@pytest.mark.parametrize("cause", sorted(CAUSES.keys() - {"gc", "stopped"}))
def test_some_looks_say_too_little(cause: str) -> None:
    """What is seen twice a second needs three seconds; so does a wait, which that may contain."""
    short = {"rank": 2, "seconds": 2.9, CAUSES[cause]: 2.9}
    assert reasons_for_absence(job(SINCE, short), [2]) == []
    assert reasons_for_lateness(job(LATELY, short), [2], 0.5) == []


def test_several_ranks_have_the_least_share() -> None:
    """A cause is named only if it holds for each of them."""
    both = job(SINCE, {"rank": 1, "gc_s": 9.0}, {"rank": 2, "gc_s": 6.0})
    assert cause_and_share(reasons_for_absence(both, [1, 2])) == ("gc", 60.0)
    other = job(SINCE, {"rank": 1, "gc_s": 9.0}, {"rank": 2, "runnable_s": 6.0})
    assert reasons_for_absence(other, [1, 2]) == []


def test_the_more_specific_cause_is_named() -> None:
    """A collection without a CPU takes longer: the collection is the cause."""
    both = job(SINCE, {"rank": 2, "gc_s": 6.0, "runnable_s": 6.0})
    assert cause_and_share(reasons_for_absence(both, [2])) == ("gc", 60.0)


def test_a_disk_on_a_busy_machine() -> None:
    """The wait for a CPU after the wait for a disk belongs to the disk, in proportion to its sleep.

    Of 10 s, the thread ran for 1 s and was queued for 3 s, always after it had slept. It slept for
    6 s, of which 4 s for the disk: two thirds, so 2 of the 3 s come after that.
    """
    spent = {"running_s": 1.0, "runnable_s": 3.0, "woken_s": 3.0, "disk_wait_s": 4.0}
    facts = reasons_for_absence(job(SINCE, {"rank": 2, **spent}), [2])
    assert cause_and_share(facts) == ("disk", 60.0)
    said = summary([Fact(Relation.STOPPED, Ranks((2,))), *facts])
    assert said.endswith(
        "it spent 6.0 s of 10 s waiting for a disk, 2.0 s of it for a CPU after that."
    )
    preempted = {**spent, "running_s": 1.0, "runnable_s": 5.0, "woken_s": 0.0}
    facts = reasons_for_absence(job(SINCE, {"rank": 2, **preempted}), [2])
    assert cause_and_share(facts) == ("no_cpu", 50.0)
    unknown = {**spent, "runnable_s": 5.0, "woken_s": NAN}
    facts = reasons_for_absence(job(SINCE, {"rank": 2, **unknown}), [2])
    assert cause_and_share(facts) == ("no_cpu", 50.0)


@pytest.mark.parametrize("cause", ["checkpoint", "data_loader", "compilation", "gc"])
@pytest.mark.parametrize("wait", ["disk", "blocked", "no_cpu"])
def test_what_a_rank_was_doing_contains_its_waits(cause: str, wait: str) -> None:
    """The cause is the checkpoint, and the sentence says what it waited for meanwhile."""
    spent = {CAUSES[cause]: 7.0, CAUSES[wait]: 6.0}
    facts = reasons_for_absence(job(SINCE, {"rank": 2, **spent}), [2])
    assert cause_and_share(facts) == (cause, 70.0)
    assert facts[0].value("also") == wait
    said = summary([Fact(Relation.STOPPED, Ranks((2,))), *facts])
    assert "Of these 10 s, it spent 6.0 s " in said
    little = {CAUSES[cause]: 7.0, CAUSES[wait]: 4.0}
    facts = reasons_for_absence(job(SINCE, {"rank": 2, **little}), [2])
    assert facts[0].value("also") == ""


def test_the_sentences() -> None:
    """They follow what else the finding says, with numbers that the facts state."""
    snapshot = job(SINCE, {"rank": 2, "gc_s": 6.0, "full_gc_s": 5.0})
    reasons = reasons_for_absence(snapshot, [2])
    facts = [Fact(Relation.STOPPED, Ranks((2,))), *reasons]
    assert summary(facts).endswith(
        "Since its last call, it spent 6.0 s of 10 s collecting garbage (mostly full collections)."
    )
    assert "gc.freeze()" in advice_for(reasons)
    late = job(LATELY, {"rank": 2, "runnable_s": 3.0}, {"rank": 1})
    reasons = reasons_for_lateness(late, [2], 0.4)
    facts = [Fact(Relation.MAKES_WAIT, Ranks((2,)), number=40.0), *reasons]
    assert summary(facts).endswith(
        "It spent 3.0 s of 10 s ready to run, without a CPU: that explains 75 % of its lateness."
    )
    assert "node-a" in advice_for(reasons)
    assert "taskset -p 102" in advice_for(reasons)
    assert advice_for([]) == ""
