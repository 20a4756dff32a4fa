"""One straggler rule: the report and the diagnosis of a run name the same ranks, or none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from worlds import MS, Call, group_of, together, write_world

from rankcall.analysis.snapshot import CALL, RankState, Snapshot
from rankcall.analysis.summary import summarise
from rankcall.analysis.verdicts import diagnose, find_slow
from rankcall.analysis.verdicts.finding import Finding
from rankcall.record import OPS, STATUSES
from rankcall.report.headline import headline
from rankcall.ring.tables import CallSite, Group
from rankcall.run.load import load
from rankcall.testing.model import Op, Pace
from rankcall.testing.synthetic import synthetic_run

WORLD = group_of(4)
SECOND = 1000 * MS


def named(run: Path) -> tuple[int, ...]:
    """Return the stragglers that the report and the diagnosis name; they must agree."""
    summary = summarise(load(run))
    findings = [finding for finding in diagnose(load(run)).findings if finding.kind == "straggler"]
    ranks = findings[0].ranks if findings else ()
    assert (summary.late.ranks if summary.late else ()) == ranks
    first = headline(summary)
    assert first.alarm == bool(ranks)
    assert first.ranks == ranks
    return ranks


def in_steps(lengths: list[int], late: dict[int, int], per_step: int = 1) -> list[Call]:
    """Return steps of so many ms, each with collectives that one rank comes late to, in ms."""
    calls, start, seq = [], 0, 0
    for step, length in enumerate(lengths):
        start += length * MS
        for _ in range(per_step):
            seq += 1
            arrivals = [start + late.get(rank, 0) * MS for rank in range(4)]
            end = max(arrivals) + MS
            calls += together(seq, arrivals, end, WORLD, step=step)
            start = end
    return calls


def test_a_few_long_steps(tmp_path: Path) -> None:
    """A rank that holds the others up two seconds in each of six steps is a straggler."""
    run = write_world(tmp_path / "run", in_steps([1000] * 6, {2: 2000}))
    assert named(run) == (2,)


def test_several_collectives_in_a_step(tmp_path: Path) -> None:
    """Late to one of five collectives of each step is late in each step."""
    calls = []
    for step in range(20):
        start = 100 * step * MS
        for n in range(5):
            at = start + 10 * n * MS
            arrivals = [at, at + (30 * MS if n == 0 else 0), at, at]
            calls += together(5 * step + n + 1, arrivals, max(arrivals) + MS, WORLD, step=step)
            start += 30 * MS if n == 0 else 0
    assert named(write_world(tmp_path / "run", calls)) == (1,)


def finding(run: Path) -> Finding:
    """Return the straggler that the diagnosis finds."""
    (straggler,) = [
        finding for finding in diagnose(load(run)).findings if finding.kind == "straggler"
    ]
    return straggler


def test_late_by_how_much(tmp_path: Path) -> None:
    """The lateness is that to the call that is named, not to all calls of the group.

    DeepSpeed, for example, issues three collectives a step from one line of its own, and a rank
    that is late to the first of them is last in the others by chance.
    """
    calls = []
    for step in range(20):
        start = 100 * step * MS
        late, chance = start + 40 * MS, start + 50 * MS
        calls += together(2 * step + 1, [start, late, start, start], late + MS, WORLD, bytes=64)
        ends = chance + 3 * MS
        calls += together(2 * step + 2, [chance, chance + 2 * MS, chance, chance], ends, WORLD)
    straggler = finding(write_world(tmp_path / "run", calls))
    assert straggler.ranks == (1,)
    assert "by 40 ms at the median" in straggler.summary


def test_the_time_that_the_share_is_about(tmp_path: Path) -> None:
    """The part of all waiting is that of the time without the slow start, and says so."""
    first = together(1, [0, 0, 0, 5 * SECOND], 5 * SECOND + MS, WORLD, step=0)
    base = 5100
    rest = [
        call
        for step in range(1, 40)
        for call in together(
            step + 1,
            [(base + 100 * step + (40 if rank == 2 else 0)) * MS for rank in range(4)],
            (base + 100 * step + 41) * MS,
            WORLD,
            step=step,
        )
    ]
    text = finding(write_world(tmp_path / "run", first + rest)).evidence[0]
    assert text.startswith(
        "100 % of all waiting in 3.8 s (the 5.2 s before, of far longer steps"
    ), text


def test_a_slow_first_step_is_left_out(tmp_path: Path) -> None:
    """A rank that compiles for long in the first step alone is no straggler, nor hides one."""
    first = together(1, [0, 0, 60 * SECOND, 0], 60 * SECOND + MS, WORLD, step=0)
    base = 61 * SECOND // MS
    rest = [
        Call(
            **{
                **vars(call),
                "seq": call.seq + 1,
                "step": call.step + 1,
                "at": call.at + base * MS,
                "end": (call.end or 0) + base * MS,
            }
        )
        for call in in_steps([10] * 60, {3: 20})
    ]
    run = write_world(tmp_path / "run", first + rest)
    assert named(run) == (3,)
    assert "in which steps took far longer, is left out" in headline(summarise(load(run))).detail
    even = [Call(**{**vars(c), "at": c.at - (20 * MS if c.rank == 3 else 0)}) for c in rest]
    assert named(write_world(tmp_path / "even", first + even)) == ()


def test_uneven_steps(tmp_path: Path) -> None:
    """Steps of very different lengths do not make a rank a straggler, or hide one."""
    lengths = [10, 200, 15, 400, 10, 90, 300, 20] * 4
    assert named(write_world(tmp_path / "even", in_steps(lengths, {}))) == ()
    assert named(write_world(tmp_path / "late", in_steps(lengths, {0: 60}))) == (0,)


@pytest.mark.parametrize("straggler", [None, 5])
def test_a_rank_late_by_another_is_not_named(tmp_path: Path, straggler: int | None) -> None:
    """The tensor-parallel peers of a late rank come late to all others: it alone is named."""
    groups = {"tp": [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]}
    program = (Op("all_gather", 4096, "tp", line=1), Op("all_reduce", 4096, line=2))
    synthetic_run(
        tmp_path / "run",
        16,
        200,
        groups=groups,
        program=program,
        straggler=straggler,
        straggler_ms=5.0,
        pace=Pace(compute_ms=1.0),
    )
    assert named(tmp_path / "run") == (() if straggler is None else (straggler,))


def pipeline(stages: int, microbatches: int, slow: int | None = None) -> list[Call]:
    """Return GPipe steps: each stage computes each microbatch forward, then backward."""
    group, calls = group_of(stages), []
    seqs: dict[tuple[int, int], int] = {}

    def passed(source: int, target: int, ready: int, wanted: int, step: int) -> int:
        seq = seqs[source, target] = seqs.get((source, target), 0) + 1
        end = max(ready, wanted) + MS // 10
        calls.append(Call(source, seq, ready, end, "send", group=group, peer=target, step=step))
        calls.append(Call(target, seq, wanted, end, "recv", group=group, peer=source, step=step))
        return end

    free = [0] * stages
    for step in range(12):
        for order in (range(stages), range(stages - 1, -1, -1)):
            path = list(order)
            for _ in range(microbatches):
                ready = 0
                for at, stage in enumerate(path):
                    if at:
                        ready = passed(path[at - 1], stage, ready, free[stage], step)
                    length = 10 * MS * (4 if stage == slow else 1)
                    free[stage] = ready = max(free[stage], ready) + length
    return sorted(calls, key=lambda call: call.at)


def test_the_bubbles_of_a_pipeline_are_nobodys(tmp_path: Path) -> None:
    """The stages of a balanced pipeline wait for each other; a slow stage is named."""
    assert named(write_world(tmp_path / "even", pipeline(4, 4))) == ()
    assert named(write_world(tmp_path / "slow", pipeline(4, 8, slow=2))) == (2,)


def test_local_training_between_rare_meetings(tmp_path: Path) -> None:
    """As in DiLoCo: one meeting in many optimizer steps, to which one rank comes late."""
    calls = []
    for turn in range(10):
        start = 500 * turn * MS
        arrivals = [start, start, start + 400 * MS, start]
        calls += together(turn + 1, arrivals, start + 401 * MS, WORLD, step=50 * turn)
    assert named(write_world(tmp_path / "run", calls)) == (2,)


def test_disjoint_groups(tmp_path: Path) -> None:
    """A rank that only its own group waits for is named if that costs the job enough."""
    halves = [Group("1", 0, "gloo", "", (0, 1)), Group("2", 0, "gloo", "", (2, 3))]
    calls = []
    for seq in range(1, 41):
        start = 50 * seq * MS
        calls += together(seq, [start, start + 40 * MS], start + 41 * MS, halves[0], step=seq)
        calls += together(seq, [start, start], start + MS, halves[1], step=seq)
    assert named(write_world(tmp_path / "run", calls)) == (1,)


def test_one_long_wait_at_the_start_of_a_loop_without_steps(tmp_path: Path) -> None:
    """The line of the loop is named, and all figures are about the time of the loop.

    Rank 1 reads a list for 1.5 s before its first collective, and is 12 ms late to each of the
    loop's 100. Both lines reduce as many bytes in the same group.
    """
    pair = group_of(2)
    calls = together(1, [0, 1500 * MS], 1501 * MS, pair, line=13)
    for seq in range(2, 102):
        at = 1501 * MS + (seq - 2) * 13 * MS
        calls += together(seq, [at, at + 12 * MS], at + 13 * MS, pair, line=17)
    straggler = finding(write_world(tmp_path / "run", calls))
    assert (straggler.ranks, straggler.call_site) == ((1,), "train.py:17")
    assert "costs each of them 92 % of its time" in straggler.summary
    assert "by 12 ms at the median" in straggler.summary
    span, last = straggler.evidence
    assert span.startswith("100 % of all waiting in 1.2 s (the 1.6 s before"), span
    assert last == "last in 100 % of 95 collectives of that group"


def test_a_line_that_is_late_in_most_parts(tmp_path: Path) -> None:
    """Two long waits at one line cost more than all short ones at another: that one is named."""
    calls = []
    for step in range(40):
        start = 100 * step * MS + (1500 * MS if step > 10 else 0) + (1500 * MS if step > 30 else 0)
        pause = 1500 * MS if step in (10, 30) else 0
        calls += together(
            2 * step + 1,
            [start, start + pause] + [start] * 2,
            start + pause + MS,
            WORLD,
            step=step,
            line=3,
        )
        at = start + pause + 2 * MS
        calls += together(
            2 * step + 2, [at, at + 60 * MS, at, at], at + 61 * MS, WORLD, step=step, line=5
        )
    straggler = finding(write_world(tmp_path / "run", calls))
    assert (straggler.ranks, straggler.call_site) == ((1,), "train.py:5")
    assert "by 60 ms at the median" in straggler.summary


# How long each rank computed before each of 1,000 all_reduces, in us: two to four ranks that did
# the same work, on two cores that some 20 processes shared (2026-11-25, load average 22 before and
# 13 after). The limits of the rule were chosen on the recordings that these are taken from.
NOISE = np.load(Path(__file__).with_name("noise.npz"))


def noisy_job(rng: np.random.Generator, steps: int, late_ms: float = 0.0) -> Snapshot:
    """Return a job of so many steps with measured noise; rank 1 may be late to each of them."""
    noise = NOISE[str(rng.choice(NOISE.files))]
    begin = int(rng.integers(noise.shape[1] - steps))
    computes = noise[:, begin : begin + steps] / 1e6
    step_s = float(rng.choice([0.0, 0.002, 0.01, 0.05]))  # that all ranks compute besides
    ranks, now, rows = len(noise), 0.0, []
    for step in range(steps):
        came = now + computes[:, step] + step_s * rng.uniform(1.0, 1.1)
        came[1] += late_ms / 1e3
        now = float(came.max()) + 0.0003
        rows += [(rank, step, came[rank], now) for rank in range(ranks)]
    has_steps = bool(rng.integers(2))
    calls = np.zeros(len(rows), CALL)
    columns = (np.array(column) for column in zip(*rows, strict=True))
    calls["rank"], calls["index"], issued, ended = columns
    calls["seq"], calls["site"] = calls["index"] + 1, 1
    calls["step"] = calls["index"] if has_steps else 0
    calls["age_s"], calls["ended_s"] = now - issued, now - ended
    calls["status"], calls["op"] = STATUSES.index("completed"), OPS.index("all_reduce")
    calls["message_bytes"] = calls["in_bytes"] = calls["out_bytes"] = 8000
    calls["root"] = calls["peer"] = -1
    calls["took_s"] = np.nan
    states = [RankState(rank, "node-a", exit=0, closed=True) for rank in range(ranks)]
    sites = [CallSite("", 0, "", ""), CallSite("train.py", 9, "step", "all_reduce")]
    group = group_of(ranks)
    return Snapshot(states, calls, [group], [group.label], sites)


def test_500_healthy_short_jobs() -> None:
    """None of them has a straggler or a slow link, with the noise of a busy machine."""
    rng = np.random.default_rng(35)
    named = [find_slow(noisy_job(rng, int(rng.integers(8, 61)))) for _ in range(500)]
    assert [findings for findings in named if findings] == []


def test_a_straggler_in_the_same_noise() -> None:
    """A rank that is 50 ms late to each of 40 steps is named, beside the same noise."""
    rng = np.random.default_rng(36)
    for _ in range(100):
        found = find_slow(noisy_job(rng, 40, late_ms=50.0))
        assert [(finding.kind, finding.ranks) for finding in found] == [("straggler", (1,))]
