"""A job in which nothing moves is never healthy: waits without a record, and stopped processes."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from diagnosing import SECOND, THREE_ENDED, WORLD, causes, diagnose_calls, unfinished
from worlds import MS, START, together, write_world

from rankcall.analysis.pace import pace
from rankcall.analysis.snapshot import within_world
from rankcall.analysis.verdicts import diagnose, find, judge, with_stacks
from rankcall.analysis.verdicts.diagnosis import Diagnosis
from rankcall.report import diagnosis_text as report
from rankcall.report import top
from rankcall.ring.layout import offset_of
from rankcall.ring.tables import Group
from rankcall.run.frames import LOADER, CodePlace, code_place
from rankcall.run.load import load

PACKAGES = "/opt/venv/lib/python3.12/site-packages"
TORCH = f"{PACKAGES}/torch"


def dumped(*frames: tuple[str, int, str]) -> str:
    """Return a stack as faulthandler writes it, the newest frame first."""
    lines = [f'  File "{file}", line {line} in {name}' for file, line, name in frames]
    return "\n".join(["Current thread 0x00007f (most recent call first):", *lines])


IN_NEW_GROUP = dumped(
    (f"{TORCH}/distributed/distributed_c10d.py", 2000, "_new_process_group_helper"),
    (f"{TORCH}/distributed/distributed_c10d.py", 5100, "_new_group_with_tag"),
    (f"{TORCH}/distributed/c10d_logger.py", 83, "wrapper"),
    (f"{TORCH}/distributed/distributed_c10d.py", 5000, "new_group"),
    ("/home/ada/train.py", 12, "main"),
    ("/home/ada/train.py", 40, "<module>"),
)
IN_INIT = IN_NEW_GROUP.replace("new_group", "init_process_group")
AT_SLEEP = dumped(("/home/ada/train.py", 9, "main"), ("/home/ada/train.py", 40, "<module>"))


@pytest.mark.parametrize(
    ("stack", "place"),
    [
        (IN_NEW_GROUP, CodePlace("/home/ada/train.py:12", "main", "new_group")),
        (AT_SLEEP, CodePlace("/home/ada/train.py:9", "main", "")),
        (
            dumped(
                ("/usr/lib/python3.12/queue.py", 171, "get"),
                (f"{TORCH}/utils/data/dataloader.py", 1200, "_try_get_data"),
                (f"{PACKAGES}/lightning/loops/fetchers.py", 60, "__next__"),
                ("/home/ada/fit.py", 3, "<module>"),
            ),
            CodePlace("/home/ada/fit.py:3", "<module>", LOADER),
        ),
        (
            'Thread 71 (idle): "MainThread"\n    wait (threading.py:359)\n'
            "    init_process_group (torch/distributed/distributed_c10d.py:1800)\n"
            "    <module> (train.py:5)",
            CodePlace("train.py:5", "<module>", "init_process_group"),
        ),
        ("", CodePlace()),
        ("nothing that is a stack", CodePlace()),
    ],
)
def test_a_stack_names_the_users_line(stack: str, place: CodePlace) -> None:
    """The user's own frame is named, not those of torch, Python or a framework."""
    assert code_place(stack) == place


def without_calls(folder: Path, ranks: tuple[int, ...], seconds: int, after: float) -> Diagnosis:
    """Diagnose a live job of two whose processes have recorded nothing for ``seconds``."""
    run = write_world(folder / "run", [], ranks=ranks, world_size=2, closed=lambda rank: False)
    return diagnose(
        load(run), after, state_of=lambda header: "alive", now_ns=lambda: START + seconds * SECOND
    )


def test_nobody_has_a_process_group(tmp_path: Path) -> None:
    """Two ranks without a group or a call are a finding, once start-up takes too long."""
    diagnosis = without_calls(tmp_path, (0, 1), 30, 5.0)
    assert causes(diagnosis) == [("no_progress", ())]
    assert diagnosis.findings[0].confidence == "possible"
    assert "None of 2 ranks has made a process group" in diagnosis.findings[0].summary
    early = without_calls(tmp_path / "early", (0, 1), 15, 5.0)
    assert causes(early) == []
    for text in (report.diagnosis_text(early), top.render(early)):
        assert "no rank has issued anything for 15 s" in text
        assert "go on" not in text


def test_one_rank_is_late_to_init_process_group(tmp_path: Path) -> None:
    """With stacks, the rank that has not arrived is named, with the line of each rank."""
    diagnosis = without_calls(tmp_path, (0, 1), 30, 5.0)
    again = with_stacks(load(tmp_path / "run"), diagnosis, {0: IN_INIT, 1: AT_SLEEP})
    assert causes(again) == [("no_progress", (1,))]
    (finding,) = again.findings
    assert (finding.victims, finding.confidence) == ((0,), "certain")
    assert finding.call_site == "/home/ada/train.py:12"
    assert "waits in init_process_group at /home/ada/train.py:12 for rank 1" in finding.summary
    assert any("at /home/ada/train.py:9 in main" in line for line in finding.evidence)
    both = with_stacks(load(tmp_path / "run"), diagnosis, {0: IN_INIT, 1: IN_INIT})
    assert causes(both) == [("no_progress", ())]
    assert "all ranks are there" in both.findings[0].summary
    half = with_stacks(load(tmp_path / "run"), diagnosis, {0: IN_INIT})
    assert causes(half) == [("no_progress", ())]
    assert "the stacks of the others are not known" in half.findings[0].summary


def test_a_process_that_never_came(tmp_path: Path) -> None:
    """A rank without a ring is the one that has not arrived."""
    diagnosis = without_calls(tmp_path, (0,), 30, 5.0)
    assert causes(diagnosis) == [("no_progress", (1,))]
    assert "these processes were started" in diagnosis.findings[0].advice


def silent(folder: Path, seconds: int, **options: object) -> Diagnosis:
    """Diagnose a job of four that ends its third call and then does nothing."""
    return diagnose_calls(folder, THREE_ENDED, seconds=seconds, states={}, hang_after=10, **options)  # type: ignore[arg-type]


def test_all_ranks_fall_silent(tmp_path: Path) -> None:
    """It is a finding if no rank issues a call for the threshold, even though no rank waits."""
    assert causes(silent(tmp_path / "soon", 9)) == []
    diagnosis = silent(tmp_path, 11)
    assert causes(diagnosis) == [("no_progress", ())]
    assert diagnosis.findings[0].confidence == "possible"
    assert "rankcall.expect" in diagnosis.findings[0].advice


AT_STORE = AT_SLEEP.replace("line 9", "line 5")
IN_LOCK = dumped(
    ("/usr/lib/python3.12/threading.py", 355, "wait"), ("/home/ada/train.py", 9, "main")
)
IN_CHILD = dumped(
    ("/usr/lib/python3.12/subprocess.py", 1200, "communicate"), ("/home/ada/train.py", 9, "main")
)


@pytest.mark.parametrize(
    ("in_store", "of_rank_3", "confidence"),
    [
        ((0, 1, 2), {"idle_s": 11.0, "stack": AT_SLEEP}, "certain"),
        ((0, 1, 2), {"idle_s": 11.0, "stack": IN_LOCK}, "certain"),
        ((0, 1, 2), {"idle_s": None, "stack": AT_SLEEP}, "likely"),  # it computes
        ((0, 1, 2), {"idle_s": 2.0, "stack": AT_SLEEP}, "likely"),  # it did until then
        ((0, 1, 2), {"idle_s": 11.0, "stack": IN_CHILD}, "likely"),  # a program of its own may
        ((0, 1, 2), {"idle_s": 11.0, "stack": AT_SLEEP, "gil_s": 8.0}, "likely"),  # an old look
        ((0, 1, 2), {"idle_s": 11.0}, "possible"),  # its line is not known
        ((0, 1), {"idle_s": 11.0, "stack": AT_SLEEP}, "likely"),  # rank 2 computes
        ((0, 1, 2, 3), {}, "certain"),
        ((), {"idle_s": 11.0, "stack": AT_SLEEP}, "possible"),
    ],
)
def test_a_wait_for_the_store(
    in_store: tuple[int, ...], of_rank_3: dict[str, object], confidence: str, tmp_path: Path
) -> None:
    """It is certain that the job hangs only if no rank is seen to do anything."""
    snapshot = silent(tmp_path, 11).snapshot
    for rank in in_store:
        snapshot.ranks[rank] = replace(snapshot.ranks[rank], in_store_s=9.0, stack=AT_STORE)
    snapshot.ranks[3] = replace(snapshot.ranks[3], **of_rank_3)  # type: ignore[arg-type]
    (finding,) = find(snapshot, 10)
    assert (finding.kind, finding.confidence) == ("no_progress", confidence)
    if in_store:
        assert "for a key of the job's store at /home/ada/train.py:5" in finding.summary
        assert ("rank 3" in finding.summary) == (confidence == "certain" and 3 not in in_store)
    stands_still = bool(in_store) and 3 not in in_store and "stack" in of_rank_3
    assert finding.ranks == ((3,) if stands_still else ())


def test_silence_that_has_a_reason(tmp_path: Path) -> None:
    """A declared phase, local steps and a rank that has left or stopped recording are no hang."""
    assert causes(silent(tmp_path / "left", 55, left={1})) == []
    assert causes(silent(tmp_path / "closed", 55, closed={2})) == []
    run = tmp_path / "declared"
    write_world(run, THREE_ENDED, closed=lambda rank: False)
    ring = next((run / "rings").glob("*.ring"))
    for field, value in (("expect_until_ns", START + 500 * SECOND), ("step", 900)):
        before = ring.read_bytes()
        with ring.open("r+b") as file:
            file.seek(offset_of(field))
            file.write(value.to_bytes(8, "little"))
        diagnosis = diagnose(
            load(run), 10, state_of=lambda header: "alive", now_ns=lambda: START + 55 * SECOND
        )
        assert causes(diagnosis) == [], field
        ring.write_bytes(before)


def test_a_stopped_process_is_never_healthy(tmp_path: Path) -> None:
    """A process that a signal stopped is named, even if no rank waits for it yet."""
    diagnosis = diagnose_calls(tmp_path, THREE_ENDED, seconds=2, states={1: "stopped"})
    assert causes(diagnosis) == [("stopped", (1,))]
    assert diagnosis.findings[0].victims == ()
    assert diagnosis.findings[0].confidence == "certain"


def test_a_missing_rank_is_shown_where_it_stands(tmp_path: Path) -> None:
    """A stack shows whether a missing rank waits for its data loader, makes a group or computes."""
    calls = [
        *THREE_ENDED,
        *(replace(c, end=None) for c in together(4, [5 * MS] * 4, 6 * MS, WORLD)[:3]),
    ]
    diagnosis = diagnose_calls(tmp_path, calls, states={})
    run = load(tmp_path / "run")
    assert causes(diagnosis) == [("missing", (3,))]
    loader = dumped((f"{TORCH}/utils/data/dataloader.py", 7, "next"), ("/home/ada/fit.py", 3, "f"))
    for stack, words, advice in (
        (loader, "waiting for its data loader at /home/ada/fit.py:3", "data loader"),
        (IN_NEW_GROUP, "in new_group at /home/ada/train.py:12", "must call new_group"),
        (AT_SLEEP, "at /home/ada/train.py:9 in main", "py-spy"),
        ("", "has not come: it has issued nothing for 70 s", "py-spy"),
    ):
        (finding,) = with_stacks(
            run, replace(diagnosis, snapshot=diagnosis.snapshot), {3: stack}
        ).findings
        assert words in finding.summary
        assert advice in finding.advice


def test_a_missing_rank_that_fell_silent_later(tmp_path: Path) -> None:
    """It goes on while it has issued calls in the newer half of the wait, and no longer."""
    pair = Group("1", 0, "gloo", "pair", (2, 3))
    calls = [*THREE_ENDED, *unfinished(WORLD, 4, (0, 1), 5 * MS)]
    for number in range(1, 31):
        calls += together(number, [number * SECOND] * 2, number * SECOND + MS, pair)
    for seconds, words in ((50, "although they go on"), (70, "issued nothing for 40 s")):
        diagnosis = diagnose_calls(
            tmp_path / str(seconds), calls, states={}, seconds=seconds, hang_after=20
        )
        assert causes(diagnosis) == [("missing", (2, 3))]
        assert words in diagnosis.findings[0].summary


def test_a_missing_rank_that_began_during_the_wait(tmp_path: Path) -> None:
    """A rank that began to record while the others waited has issued no call that could be named.

    The diagnosis raised ValueError.
    """
    pair = Group("1", 0, "gloo", "pair", (2, 3))
    calls = [*unfinished(WORLD, 1, (0, 1, 2), 5 * MS), *together(1, [MS] * 2, 2 * MS, pair)]
    snapshot = diagnose_calls(tmp_path, calls, states={}, seconds=70, hang_after=20).snapshot
    ranks = [replace(state, started_s=5.0) for state in snapshot.ranks]
    others = snapshot.calls[snapshot.calls["rank"] != 3]
    (finding,) = find(replace(snapshot, ranks=ranks, calls=others), 20)
    assert (finding.kind, finding.ranks) == ("missing", (3,))
    assert "has issued nothing for 5.0 s" in finding.summary


@pytest.mark.parametrize("beyond", ["member", "peer", "root"])
def test_ranks_that_the_job_does_not_have(tmp_path: Path, beyond: str) -> None:
    """A group, a peer or a root beyond the world is left out and said; it raised IndexError."""
    calls = [*THREE_ENDED, *unfinished(WORLD, 4, (0, 1, 2), 5 * MS)]
    snapshot = diagnose_calls(tmp_path, calls, states={}, seconds=70, hang_after=20).snapshot
    groups, wrong = list(snapshot.groups), snapshot.calls.copy()
    if beyond == "member":
        groups = [replace(group, ranks=(*group.ranks, 1000, 1 << 19)) for group in groups]
    else:
        wrong[beyond][-1] = 1000
    sound = within_world(replace(snapshot, groups=groups, calls=wrong))
    assert [finding.kind for finding in find(sound, 20)] == ["missing"]
    assert "not among the job's 4" in str(sound.problems[-1])
    assert within_world(snapshot) is snapshot


def test_the_pace_is_that_of_the_last_seconds(tmp_path: Path) -> None:
    """The rate of a job that issued 1,000 calls/s an hour ago and one a second now is one."""
    calls = [c for n in range(1, 501) for c in together(n, [n * MS] * 4, n * MS + 1, WORLD)]
    late = 3600 * SECOND
    for n in range(501, 521):
        calls += together(n, [late + n * SECOND] * 4, late + n * SECOND + MS, WORLD)
    diagnosis = diagnose_calls(tmp_path, calls, seconds=3600 + 521, states={})
    assert pace(diagnosis.snapshot).calls_per_s == pytest.approx(1.0, rel=0.15)
    stale = judge(load(tmp_path / "run"), replace(diagnosis.snapshot, calls=aged(diagnosis)), 60)
    assert pace(stale.snapshot).calls_per_s == 0.0


def aged(found: Diagnosis) -> np.ndarray:
    """Return the calls as they are 30 s later."""
    calls = found.snapshot.calls.copy()
    for name in ("age_s", "ended_s"):
        calls[name] += 30
    return calls


def test_this_process_has_a_stack() -> None:
    """A stack that faulthandler wrote is read, and the newest user frame is this test's."""
    import faulthandler
    import tempfile

    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=False)
        file.seek(0)
        place = code_place(file.read())
    assert place.line.startswith(os.path.abspath(__file__))
    assert place.function == "test_this_process_has_a_stack"
