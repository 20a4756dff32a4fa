"""A hang is over when its calls have ended, whatever other threads of the same ranks do.

The model is written here: threads run scripts of collectives, and a collective ends when the
threads of all its members have come.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from diagnosing import SECOND, diagnose_calls
from hypothesis import given
from hypothesis import strategies as st
from worlds import Call, write_world

from rankcall.analysis.snapshot import (
    ALIVE,
    CALL,
    COMPLETED,
    FAILED,
    RankState,
    Snapshot,
    failed_for_good,
)
from rankcall.analysis.verdicts import diagnose
from rankcall.analysis.verdicts.finding import Finding
from rankcall.analysis.verdicts.kept import kept_in
from rankcall.analysis.verdicts.over import lasted, quiet_if_over
from rankcall.job.judge import Judge
from rankcall.job.keep import keep_verdict
from rankcall.record import STATUSES
from rankcall.ring.tables import CallSite, Group
from rankcall.run.exits import Exit, note_exit
from rankcall.run.load import load

STARTED = STATUSES.index("started")


@dataclass
class ModelCall:
    """One rank's part in a collective; ``ended`` and ``failed`` are moments, or None."""

    rank: int
    thread: int
    group: int
    seq: int
    issued: int
    ended: int | None = None
    failed: int | None = None

    def is_open(self, moment: int) -> bool:
        """Return whether the rank is in the call at a moment."""
        over = min((at for at in (self.ended, self.failed) if at is not None), default=None)
        return self.issued <= moment and (over is None or over > moment)


@dataclass
class Thread:
    """A thread of a rank: the groups of its calls in order, and its pauses before each of them."""

    rank: int
    number: int
    script: list[int]
    pauses: list[int]
    catches: bool  # it goes on if a call fails
    at: int = 0
    free: int = 0  # the moment at which it can issue its next call
    inside: ModelCall | None = None


@dataclass
class Job:
    """Groups, by their members, and the threads that issue calls in them."""

    groups: list[tuple[int, ...]]
    threads: list[Thread]
    gives_up_after: int  # moments after which a call fails
    calls: list[ModelCall] = field(default_factory=list)

    def run(self, moments: int) -> None:
        """Let the threads run for so many moments."""
        issued: dict[tuple[int, int], int] = {}
        for now in range(1, moments + 1):
            for thread in self.threads:
                if thread.inside or thread.free > now or thread.at >= len(thread.script):
                    continue
                group = thread.script[thread.at]
                seq = issued[thread.rank, group] = issued.get((thread.rank, group), 0) + 1
                thread.inside = ModelCall(thread.rank, thread.number, group, seq, now)
                self.calls.append(thread.inside)
            self._end(now)

    def _end(self, now: int) -> None:
        """End the calls that all members have come to, and those that have lasted too long."""
        for thread in self.threads:
            call = thread.inside
            if call is None:
                continue
            members = self.groups[call.group]
            came = [c for c in self.calls if (c.group, c.seq) == (call.group, call.seq)]
            if {c.rank for c in came} == set(members) and all(c.failed is None for c in came):
                call.ended = now + 1
            elif now - call.issued >= self.gives_up_after:
                call.failed = now + 1
            else:
                continue
            thread.inside, thread.at = None, thread.at + 1
            if call.failed and not thread.catches:
                thread.at = len(thread.script)
            pause = thread.pauses[thread.at % len(thread.pauses)]
            thread.free = now + 2 + pause

    def active(self, rank: int, since: int, until: int) -> bool:
        """Return whether a rank issued or left a call after ``since``, and up to ``until``."""
        times = [
            at
            for call in self.calls
            if call.rank == rank
            for at in (call.issued, call.ended, call.failed)
            if at is not None
        ]
        return any(since < at <= until for at in times)

    def snapshot(self, moment: int, ranks: tuple[int, ...] | None = None) -> Snapshot:
        """Return what rankcall sees of it at a moment, of all ranks or of one node's."""
        world = 1 + max(thread.rank for thread in self.threads)
        seen = [
            call
            for call in self.calls
            if call.issued <= moment and (ranks is None or call.rank in ranks)
        ]
        table = np.zeros(len(seen), CALL)
        for row, call in enumerate(seen):
            over = call.ended if call.ended is not None else call.failed
            is_open = call.is_open(moment)
            table[row]["rank"], table[row]["group"] = call.rank, call.group
            table[row]["thread"] = 100 + call.thread
            table[row]["seq"], table[row]["index"] = call.seq, self.calls.index(call)
            table[row]["age_s"] = moment - call.issued
            table[row]["ended_s"] = np.nan if is_open or over is None else moment - over
            status = STARTED if is_open else FAILED if call.failed else COMPLETED
            table[row]["status"] = status
            table[row]["root"] = table[row]["peer"] = -1
        states = [
            RankState(rank, "node-a", state=ALIVE, started_s=float(moment))
            if ranks is None or rank in ranks
            else RankState(rank, blind=True)
            for rank in range(world)
        ]
        groups = [Group(str(n), 0, "gloo", "", members) for n, members in enumerate(self.groups)]
        labels = [group.label for group in groups]
        return Snapshot(states, table, groups, labels, [CallSite("", 0, "", "")])


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Draw a job of two to four ranks, each with up to three threads, and up to three groups."""
    world = draw(st.integers(2, 4))
    ranks = list(range(world))
    subsets = st.lists(st.sampled_from(ranks), min_size=2, max_size=world, unique=True)
    more = draw(st.lists(subsets, max_size=2))
    groups = [tuple(ranks), *(tuple(sorted(group)) for group in more)]
    threads = []
    for rank in ranks:
        mine = [number for number, members in enumerate(groups) if rank in members]
        threads_of = {group: draw(st.integers(0, 2)) for group in mine}
        for number in sorted(set(threads_of.values())):
            own = [group for group in mine if threads_of[group] == number]
            length = draw(st.integers(0, 12))  # a short one leaves the others waiting
            script = [own[n % len(own)] for n in range(length)]
            pauses = draw(st.lists(st.integers(0, 6), min_size=1, max_size=4))
            threads.append(Thread(rank, number, script, pauses, draw(st.booleans())))
    return Job(groups, threads, draw(st.sampled_from([8, 15, 1000])))


def hang_of(job: Job, moment: int) -> Finding | None:
    """Return a verdict about the call that has lasted longest at a moment, if there is one."""
    waiting = [call for call in job.calls if call.is_open(moment)]
    if not waiting:
        return None
    longest = min(waiting, key=lambda call: call.issued)
    place = longest.group, longest.seq
    came = {
        call.rank for call in job.calls if (call.group, call.seq) == place and call.issued <= moment
    }
    waiters = tuple(sorted(call.rank for call in waiting if (call.group, call.seq) == place))
    absent = tuple(sorted(set(job.groups[longest.group]) - came))
    return Finding(
        "missing", absent, waiters, group=str(longest.group), seq=longest.seq, op="all_reduce"
    )


@given(jobs(), st.integers(1, 40), st.integers(1, 40))
def test_over_means_that_the_calls_have_ended(job: Job, told: int, later: int) -> None:
    """It is over if all calls of that moment have ended, and every rank goes on."""
    moment = told + later
    job.run(moment)
    finding = hang_of(job, told)
    if finding is None:
        return
    caught = [call for call in job.calls if call.is_open(told)]
    all_ended = all(call.ended is not None and call.ended <= moment for call in caught)
    failed = any(call.failed and told < call.failed <= moment for call in job.calls)
    goes_on = all(job.active(state.rank, told, moment) for state in job.snapshot(told).ranks)
    over = quiet_if_over(job.snapshot(moment), [finding], float(later)) is not None
    if over:
        assert goes_on
        assert not any(call.is_open(moment) for call in caught)
    elif goes_on:
        assert failed or not all_ended


@given(jobs(), st.integers(1, 40), st.integers(1, 40), st.data())
def test_a_node_without_the_calls_does_not_say_that_it_is_over(
    job: Job, told: int, later: int, data: st.DataObject
) -> None:
    """A node sees its own ranks only; it never says so while the named call lasts elsewhere."""
    moment = told + later
    job.run(moment)
    finding = hang_of(job, told)
    if finding is None:
        return
    world = len(job.snapshot(told).ranks)
    mine = tuple(data.draw(st.sets(st.integers(0, world - 1), min_size=1)))
    seen = job.snapshot(moment, mine)
    if quiet_if_over(seen, [finding], float(later)) is not None:
        named = [
            call
            for call in job.calls
            if (str(call.group), call.seq) == (finding.group, finding.seq)
        ]
        assert named
        assert any(call.ended is not None for call in named)


@given(jobs(), st.integers(1, 40), st.integers(1, 40))
def test_a_verdict_counts_at_the_end_if_its_ranks_never_got_out(
    job: Job, told: int, later: int
) -> None:
    """That other threads issue calls does not make it untrue; that its calls end does."""
    moment = told + later
    job.run(moment)
    finding = hang_of(job, told)
    if finding is None:
        return
    named = {*finding.ranks, *finding.victims}
    caught = [call for call in job.calls if call.is_open(told) and call.rank in named]
    stuck = [call for call in caught if call.is_open(moment)]
    ended_well = all(call.ended is not None and call.ended <= moment for call in caught)
    verdict = lasted(job.snapshot(moment), finding, float(later))
    if stuck:
        assert verdict
    if ended_well:
        assert not verdict


@given(jobs(), st.integers(20, 80))
def test_a_call_that_failed_for_good(job: Job, moment: int) -> None:
    """It did if neither its thread nor its group went on at that rank, whatever others did."""
    job.gives_up_after = 8
    job.run(moment)
    snapshot = job.snapshot(moment)
    seen = [call for call in job.calls if call.issued <= moment]
    lasting = failed_for_good(snapshot.calls)
    for row, call in enumerate(seen):
        if call.failed is None or call.failed > moment:
            assert not lasting[row]
            continue
        later = [
            other
            for other in seen[row + 1 :]
            if other.rank == call.rank and other.ended is not None and other.ended <= moment
        ]
        went_on = any(c.thread == call.thread or c.group == call.group for c in later)
        assert lasting[row] == (not went_on)


# A saver's group of its own, beside the group in which the main threads train.
TRAIN = Group("0", 0, "gloo", "default_pg", (0, 1, 2))
SAVE = Group("1", 0, "gloo", "checkpoint", (0, 1, 2))
MAIN, SAVER = 10, 11


def _training(seconds: int) -> list[Call]:
    """Return a collective of the main threads in each second."""
    return [
        Call(rank, seq, seq * SECOND, seq * SECOND + 1000, group=TRAIN, line=20, thread=MAIN)
        for seq in range(1, seconds + 1)
        for rank in TRAIN.ranks
    ]


def _saving(status: str = "started") -> list[Call]:
    """Return the savers' collectives: rank 1 does not come to the second one."""
    over = None if status == "started" else 9 * SECOND
    return [
        *(
            Call(rank, 1, 2 * SECOND, 2 * SECOND + 1000, group=SAVE, line=9, thread=SAVER)
            for rank in SAVE.ranks
        ),
        *(
            Call(rank, 2, 3 * SECOND, over, group=SAVE, line=9, thread=SAVER, status=status)
            for rank in (0, 2)
        ),
    ]


def test_a_saver_that_waits_while_the_job_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The watcher names rank 1, and does not say that the hang is over while the savers wait."""
    early, late = (
        diagnose_calls(
            tmp_path / str(seconds),
            sorted([*_training(seconds), *_saving()], key=lambda call: call.at),
            states={},
            seconds=seconds,
            hang_after=10,
        )
        for seconds in (20, 40)
    )
    (finding,) = early.findings
    assert (finding.kind, finding.ranks) == ("missing", (1,))
    assert "although it goes on: the newest call of rank 1 is all_reduce #20" in finding.summary
    judge = Judge(tmp_path / "run", 10.0)
    monkeypatch.setattr(judge, "_snapshot", lambda headers: early.snapshot)
    now_ns = [10**12]
    monkeypatch.setattr("rankcall.job.judge.time.monotonic_ns", lambda: now_ns[0])
    no_rings: Any = {}
    assert judge.look(no_rings, now_ns[0] - 17 * SECOND, False)
    now_ns[0] += 20 * SECOND
    monkeypatch.setattr(judge, "_snapshot", lambda headers: late.snapshot)
    judge.look_back(no_rings)
    assert "is over" not in capsys.readouterr().err
    assert kept_in(tmp_path / "run")[0].over_s is None
    ended = [*_training(41), *_saving()[:3], *_saving_ended(38)]
    over = diagnose_calls(tmp_path / "over", ended, states={}, seconds=42, hang_after=10)
    now_ns[0] += 2 * SECOND
    monkeypatch.setattr(judge, "_snapshot", lambda headers: over.snapshot)
    judge.look_back(no_rings)
    assert capsys.readouterr().err.count("the hang is over") == 1
    assert kept_in(tmp_path / "run")[0].over_s is not None


def _saving_ended(at: int) -> list[Call]:
    """Return the savers' second collective, to which rank 1 has come at last."""
    came = {0: 3 * SECOND, 1: at * SECOND, 2: 3 * SECOND}
    return [
        Call(rank, 2, issued, at * SECOND + 1000, group=SAVE, line=9, thread=SAVER)
        for rank, issued in came.items()
    ]


@pytest.mark.parametrize("status", ["started", "failed"])
def test_a_saver_that_waited_until_the_end(tmp_path: Path, status: str) -> None:
    """After the end, the watcher's verdict still counts, although all ranks ended well."""
    beats = dict.fromkeys(range(3), (40 * SECOND, 40 * SECOND))
    run = write_world(
        tmp_path / "run",
        [*_training(40), *_saving(status)],
        closed=lambda rank: False,
        beats=beats,
    )
    for rank in range(3):
        note_exit(run, Exit(rank, 0, "node-a", 1000 + rank, 0, 10**18 + 41 * SECOND))
    judge = Judge(run, 4.0)
    seen = diagnose_calls(
        tmp_path / "seen", [*_training(8), *_saving()], states={}, seconds=8, hang_after=4
    )
    verdict = judge._judge(seen.snapshot)
    assert [(finding.kind, finding.ranks) for finding in verdict.findings] == [("missing", (1,))]
    _keep(run, verdict, 8)
    diagnosis = diagnose(
        load(run), 10, state_of=lambda header: "gone", now_ns=lambda: 10**9 + 60 * SECOND
    )
    assert ("missing", (1,)) in [(finding.kind, finding.ranks) for finding in diagnosis.findings]
    assert diagnosis.kind == "missing"


def _keep(run: Path, verdict: Any, seconds: int) -> None:
    """Keep a verdict that the watcher gave so many seconds after the start."""
    origin = replace(
        verdict.origin,
        boot_id=load(run).heads[0].header.boot_id,
        mono_ns=10**9 + seconds * SECOND,
    )
    assert keep_verdict(run, replace(verdict, origin=origin), {}, lambda kept: True)


def test_two_threads_of_a_rank_in_one_group(tmp_path: Path) -> None:
    """It is said of the rank with calls of both at once, and not if one thread has issued them."""
    ended = [
        Call(rank, 1, SECOND, SECOND + 1000, group=TRAIN, line=20, thread=MAIN)
        for rank in TRAIN.ranks
    ]
    for thread in (MAIN, SAVER):
        calls = [
            *ended,
            Call(0, 2, 2 * SECOND, None, group=TRAIN, line=20, thread=MAIN),
            Call(1, 2, 2 * SECOND, None, group=TRAIN, line=20, thread=MAIN),
            Call(1, 3, 2 * SECOND, None, group=TRAIN, line=9, thread=thread),
        ]
        (finding,) = diagnose_calls(
            tmp_path / str(thread), calls, states={}, seconds=40, hang_after=10, ranks=[0, 1, 2]
        ).findings
        said = [line for line in finding.evidence if "two of its threads" in line]
        assert [line.startswith("rank 1 ") for line in said] == ([True] if thread == SAVER else [])
