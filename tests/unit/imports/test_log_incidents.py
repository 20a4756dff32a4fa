"""Logs of failed jobs: which rank is named, what is said, and what is advised."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from collected_logs import COLLECTORS, REAL
from generated_logs import Plan, made
from log_cases import HARMLESS, INCIDENTS, judged, raised, torchrun
from nccl_logs import WORDINGS, Call, log_of

from rankcall.analysis.logs import diagnose_logs
from rankcall.analysis.verdicts.facts import Fact, Relation


@pytest.mark.parametrize("name", INCIDENTS)
def test_an_incident(tmp_path: Path, name: str, request: pytest.FixtureRequest) -> None:
    """The rank that the log shows to be at fault is named, and nobody if it shows none."""
    case = INCIDENTS[name]
    if case.open:
        request.applymarker(pytest.mark.xfail(reason=case.open, strict=True))
    path = tmp_path / case.file
    path.write_text("\n".join(case.lines) + "\n")
    finding = diagnose_logs([path]).findings[0]
    assert finding.kind in case.kinds
    assert finding.ranks in case.ranks
    assert any(words in finding.summary + finding.advice for words in case.says)


@pytest.mark.parametrize("name", HARMLESS)
def test_a_log_without_a_failure_of_a_job(tmp_path: Path, name: str) -> None:
    """Programs that train nothing, and jobs that ended well, give no finding."""
    path = tmp_path / "job.log"
    path.write_text("\n".join(HARMLESS[name].lines) + "\n")
    assert judged(path) == ("nothing_found", ())


def test_the_exceptions_of_a_checkpoint_are_gathered_in_a_subgroup(tmp_path: Path) -> None:
    """Ranks 1, 3, 5 and 7 say that rank 1 of their group failed, which may be rank 3: nobody is."""
    lines = INCIDENTS["a-checkpoint-that-rank-3-could-not-write"].lines
    text = "\n".join(lines).replace("(RANK 3)", "(RANK 1)").replace("[3]", "[1]")
    for rank in (3, 2, 1, 0):
        text = text.replace(f"[rank{rank}]", f"[rank{2 * rank + 1}]")
    path = tmp_path / "job.log"
    path.write_text(text)
    assert judged(path) == ("undecided", ())


def test_ranks_that_end_together_by_one_signal(tmp_path: Path) -> None:
    """Four ranks got SIGBUS in one second: torchrun's first is not special; /dev/shm is small."""
    block = (
        "[{rank}]:\n  time      : 2026-04-14_06:35:35\n  host      : node-a\n"
        "  rank      : {rank} (local_rank: {rank})\n  exitcode  : -7 (pid: {pid})\n"
        "  error_file: <N/A>\n  traceback : Signal 7 (SIGBUS) received by PID {pid}\n"
    )
    others = "".join(block.format(rank=rank, pid=3111 + rank) for rank in (1, 2, 3))
    text = (
        (
            f"===\nx.py FAILED\n---\nFailures:\n{others}---\nRoot Cause (first observed failure):\n"
            f"{block.format(rank=0, pid=3111)}=====\n"
        )
        .replace("===\n", "=====\n")
        .replace("---\n", "-----\n")
    )
    path = tmp_path / "job.log"
    path.write_text(text)
    (finding,) = diagnose_logs([path]).findings
    assert (finding.kind, finding.ranks) == ("dead", (0, 1, 2, 3))
    assert "--shm-size" in finding.advice
    assert "first" not in finding.summary.replace("which was first", "")


def summary_of(*ends: tuple[int, int, int]) -> str:
    """Return torchrun's report of ranks with their exit codes and seconds; the last is the root."""
    block = (
        "[{0}]:\n  time      : 2026-04-14_06:35:{2:02d}\n  host      : node-a\n"
        "  rank      : {0} (local_rank: {0})\n  exitcode  : {1} (pid: {3})\n"
        "  error_file: <N/A>\n  traceback : To enable traceback see: ...\n"
    )
    *others, root = [block.format(*end, 3000 + end[0]) for end in ends]
    line = "-" * 20
    return (
        f"x.py FAILED\n{line}\nFailures:\n{''.join(others)}{line}\n"
        f"Root Cause (first observed failure):\n{root}{'=' * 20}\n"
    )


def test_nobody_is_first_within_the_resolution_of_a_clock(tmp_path: Path) -> None:
    """torchrun writes whole seconds: of two failures in one second, none is called the first."""
    path = tmp_path / "job.log"
    path.write_text(summary_of((1, 1, 3), (5, -9, 3)))
    (finding,) = diagnose_logs([path]).findings
    assert (finding.kind, finding.ranks) == ("dead", (5,))
    assert "before any other" not in finding.summary
    assert "The log does not show which was first" in finding.summary
    path.write_text(summary_of((1, 1, 4), (5, -9, 3)))
    (finding,) = diagnose_logs([path]).findings
    assert "before any other rank failed on its node" in finding.summary


def test_no_advice_that_was_followed(tmp_path: Path) -> None:
    """A setting that the log shows is not asked for again."""
    path = tmp_path / "job.log"
    bus = summary_of((0, -7, 3))
    path.write_text(bus)
    assert "--shm-size" in diagnose_logs([path]).findings[0].advice
    path.write_text(f"+ docker run --shm-size=64g --gpus all train\n{bus}")
    assert "--shm-size" not in diagnose_logs([path]).findings[0].advice
    lines = log_of(WORDINGS[-1], {0: Call(51), 1: Call(51)})
    path.write_text("\n".join(lines))
    assert "TORCH_FR_BUFFER_SIZE=2000" in diagnose_logs([path]).findings[0].advice
    path.write_text("\n".join(["export TORCH_FR_BUFFER_SIZE=20000", *lines]))
    advice = diagnose_logs([path]).findings[0].advice
    assert "TORCH_FR_BUFFER_SIZE=2000" not in advice
    assert "give the folder of its dumps" in advice
    path.write_text("\n".join(["TORCH_DISTRIBUTED_DEBUG=DETAIL torchrun x.py", *lines]))
    assert "DETAIL" not in diagnose_logs([path]).findings[0].advice


KERNEL_OOM = (
    "Mar 14 09:02:36 node-a kernel: Out of memory: Killed process {} (python) total-vm:91234kB"
)


@pytest.mark.parametrize(
    ("lines", "summary", "asked", "advised"),
    [
        (
            ["srun: error: node-2: task 5: Out Of Memory"],
            "Rank 5 was ended by SIGKILL, because memory ran out, says the launcher.",
            "oom-kill",
            "use less",
        ),
        (
            ["srun: error: node-2: task 5: Segmentation fault"],
            "Rank 5 was ended by SIGSEGV, says the launcher.",
            "oom-kill",
            "core dump",
        ),
        (
            [*torchrun(3, -9), KERNEL_OOM.format(5003)],
            "The reason: memory ran out.",
            "dmesg",
            "use less",
        ),
        (
            [*torchrun(3, -9), KERNEL_OOM.format(77)],
            "Rank 3 (node-0) was ended",
            "dmesg",
            "use less",
        ),
        ([*torchrun(3, -9)], "Rank 3 (node-0) was ended by SIGKILL at", "use less", "dmesg"),
        (
            [
                "[rank4]: RuntimeError: x",
                *raised("RuntimeError: CUDA error: unspecified launch failure", "[rank4]: "),
                "node-a kernel: NVRM: Xid (PCI:0000:1b:00): 31, pid=77, MMU Fault",
            ],
            "unspecified launch failure",
            "look for Xid",
            "drain",
        ),
    ],
)
def test_no_advice_that_the_log_answers(
    tmp_path: Path, lines: list[str], summary: str, asked: str, advised: str
) -> None:
    """Where the log has what an advice would look for, the advice is about that."""
    path = tmp_path / "job.log"
    path.write_text("\n".join(lines) + "\n")
    (finding,) = diagnose_logs([path]).findings
    assert summary in finding.summary
    assert asked not in finding.advice
    assert advised in finding.advice


def test_a_device_fault_is_the_cause_of_later_time_outs(tmp_path: Path) -> None:
    """Rank 9's device fails; ten minutes later the others time out: they are its victims."""
    fault = (
        "[rank9]:[E808 10:31:07.406255799 ProcessGroupNCCL.cpp:1895] [PG ID 1 PG GUID 1 Rank 9] "
        "Process group watchdog thread terminated with exception: CUDA error: an illegal memory "
        "access was encountered"
    )
    path = tmp_path / "job.log"
    path.write_text("\n".join([fault, *log_of(WORDINGS[-1], {0: Call(51), 1: Call(51)})]))
    (finding,) = diagnose_logs([path]).findings
    assert (finding.kind, finding.ranks, finding.victims) == ("dead", (9,), (0, 1))


def test_a_pid_is_tied_to_a_rank_by_nccl(tmp_path: Path) -> None:
    """Init START says which rank a process is; its warning, without a rank, then names it."""
    lines = [
        f"node-c:{4000 + rank}:{5000 + rank} [{rank}] NCCL INFO comm 0x55a5 rank {rank} nranks 4 "
        f"cudaDev {rank} nvmlDev {rank} busId 1000 commId 0x4d5e - Init START"
        for rank in range(4)
    ]
    own = "node-c:4002:5102 [2] include/alloc.h:178 NCCL WARN Cuda failure 2 'out of memory'"
    victim = (
        "node-c:4000:5100 [0] misc/socket.cc:49 NCCL WARN socketProgress: Connection closed by "
        "remote peer node-c<51159>"
    )
    path = tmp_path / "job.log"
    path.write_text("\n".join([*lines, own, victim]))
    (finding,) = diagnose_logs([path]).findings
    assert (finding.kind, finding.ranks, finding.victims) == ("dead", (2,), (0,))
    path.write_text("\n".join([own, victim]))
    (finding,) = diagnose_logs([path]).findings
    assert (finding.kind, finding.ranks) == ("undecided", ())
    assert "Process 4002 on node-c failed with Cuda failure 2 'out of memory'" in finding.summary


def test_hccl_ties_a_pid_to_a_rank(tmp_path: Path) -> None:
    """Only one line has the rank; the error of the same process, which has no prefix, names it."""
    lines = [
        "[ERROR] 2026-03-14-18:07:20 (PID:4711, Device:1, RankID:9) ERR01100 OPS call failed",
        "EJ0002: [PID: 4711] 2026-03-14-12:45:31.202.787 The network port is down.",
        "EI0002: [PID: 4700] 2026-03-14-13:15:31.713.335 The wait execution of the Notify register "
        "times out. Reason: The Notify register has not received the Notify record from remote "
        "rank: [1]. base information: [streamID:[109], taskID[38]]",
    ]
    path = tmp_path / "job.log"
    path.write_text("\n".join(lines))
    (finding,) = diagnose_logs([path]).findings
    assert (finding.kind, finding.ranks) == ("dead", (9,))
    assert "cable" in finding.advice
    path.write_text(lines[2])
    (finding,) = diagnose_logs([path]).findings
    assert (finding.kind, finding.ranks) == ("undecided", ())
    assert "Process 4700 waited for rank 1 of its group, which did not answer." in finding.summary


def test_the_table_of_links_of_hccl(tmp_path: Path) -> None:
    """Both ends of a link that was not made are named by address, and no rank of the job is."""
    head = (
        "[ERROR] HCCL(669593,python3):2026-03-14-18:13:19.031.74{} [hccl_socket_manager.cc:64{}] "
    )
    rows = [
        "[673943]   _________________________LINK_ERROR_INFO___________________________",
        "[673943]   |  comm error, device[0]",
        "[673943]   |  dest_ip(user_rank)  |   dest_port   |  src_ip(user_rank)   |   src_port   |"
        "   MyRole   |   Status   |    TlsStatus   |",
        "[673943]   |  192.7.3.198(1)   |  16666  |   192.7.2.199(0)   |  0  |  server  |"
        " time out |   DISABLE  |",
    ]
    path = tmp_path / "job.log"
    path.write_text("\n".join(head.format(n, n) + row for n, row in enumerate(rows)))
    (finding,) = diagnose_logs([path]).findings
    assert (finding.kind, finding.ranks) == ("undecided", ())
    assert "192.7.2.199 (rank 0 of its group) and 192.7.3.198 (rank 1 of its" in finding.advice


def test_which_node_the_links_are_bad_of(tmp_path: Path) -> None:
    """Of 43 broken connections, node-b reports 41, and 41 others cannot reach it."""
    text = "{}:{}:5102 [2] misc/socket.cc:49 NCCL WARN Connection closed by remote peer {}<{}>"
    bad = [text.format("node-b", 4000 + n, f"node-{n % 5}x", 50000 + n) for n in range(41)]
    others = [text.format("node-a", 1, "node-c", 1), text.format("node-c", 1, "node-a", 1)]
    path = tmp_path / "job.log"
    path.write_text("\n".join([*bad, *others]))
    (finding,) = diagnose_logs([path]).findings
    assert (finding.kind, finding.ranks) == ("undecided", ())
    assert "node-b reports 41 of 43 link errors." in finding.summary
    path.write_text("\n".join(text.format(f"node-{n}", 1, "node-b-ib", n) for n in range(9)))
    (finding,) = diagnose_logs([path]).findings
    assert "link errors" not in finding.summary  # nothing to compare with: all name one peer
    lines = [text.format(f"node-{n}", 1, "node-b-ib", n) for n in range(9)]
    path.write_text("\n".join([*lines, text.format("node-1", 1, "node-2", 1)]))
    (finding,) = diagnose_logs([path]).findings
    assert "9 of 10 link errors are about the connection to node-b-ib." in finding.summary


@pytest.mark.parametrize(
    ("line", "words", "advice"),
    [
        ("kernel: mlx5_core 0000:5e:00.0 ens1f0np0: Link down", "ens1f0np0: Link down", "cable"),
        ("kernel: mce: [Hardware Error]: CPU 12: Machine Check Exception: 5", "CPU 12", "drain"),
        ("kernel: amdgpu 0000:c5:00.0: amdgpu: GPU reset begin!. Source:  3", "reset", "drain"),
    ],
)
def test_what_the_kernel_reports(tmp_path: Path, line: str, words: str, advice: str) -> None:
    """A report of a device that may be nobody's names the node, and no rank of the file's name."""
    path = tmp_path / "rank3.log"
    path.write_text(f"Mar 14 09:02:36 node-a {line}\n")
    (finding,) = diagnose_logs([path]).findings
    assert (finding.kind, finding.ranks) == ("undecided", ())
    assert "The kernel of node-a reports" in finding.summary
    assert words in finding.summary
    assert advice in finding.advice


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("Global rank 3 (PID 4711) exited with code -11", ("dead", (3,))),
        ("Global rank 3 (PID 4711) exited with code -9", ("undecided", ())),  # composer kills, too
        ("Global rank 3 (PID 4711) exited with code 1", ("undecided", ())),
    ],
)
def test_what_composer_says_of_a_worker(
    tmp_path: Path, line: str, expected: tuple[str, tuple[int, ...]]
) -> None:
    """composer names the rank in the job; a signal that no failure sends is the rank's own."""
    path = tmp_path / "job.log"
    path.write_text(line + "\n")
    assert judged(path) == expected


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        (
            "W0330 12:13:49.388000 1 torch/distributed/elastic/agent/server/api.py:723] Received "
            "15 death signal, shutting down workers",
            "scheduler",
        ),
        (
            "slurmstepd: error: *** STEP 812.0 ON node-3 CANCELLED AT 2026-03-14T09:02:36 DUE TO "
            "TIME LIMIT ***",
            "ask for more time",
        ),
        ("The node was low on resource: memory. Threshold quantity: 100Mi.", "use less"),
    ],
)
def test_something_outside_the_job(tmp_path: Path, line: str, advice: str) -> None:
    """No rank is blamed for a scheduler's or a person's decision; the answer says who it was."""
    path = tmp_path / "job.log"
    path.write_text(line + "\n")
    (finding,) = diagnose_logs([path]).findings
    assert (finding.kind, finding.ranks) == ("undecided", ())
    assert "outside" in finding.summary
    assert advice in finding.advice


STEP = "slurmstepd: error: *** STEP 812.0 ON node-1 CANCELLED AT 2026-03-14T09:02:36"
CANCELLED = f"{STEP} ***"
EXITED = "srun: error: node-1: task 3: Exited with exit code 1"


@pytest.mark.parametrize(
    ("lines", "from_outside"),
    [
        ([CANCELLED, "srun: error: node-1: tasks 0-7: Terminated"], True),
        (["srun: error: node-1: tasks 0-7: Terminated", CANCELLED], True),
        ([EXITED, "srun: Terminating StepId=812.0", CANCELLED], False),
        ([EXITED, f"{STEP} DUE TO TIME LIMIT ***"], True),
        ([f"{STEP} DUE TO TASK FAILURE ***"], False),
    ],
)
def test_a_step_that_srun_ends_itself(tmp_path: Path, lines: list[str], from_outside: bool) -> None:
    """If a task has failed, srun ends the others, and slurmstepd calls the step cancelled."""
    path = tmp_path / "job.log"
    path.write_text("\n".join(lines) + "\n")
    (finding,) = diagnose_logs([path]).findings
    assert finding.kind == "undecided"
    assert ("outside the ranks" in finding.summary) == from_outside


UNRELATED = {
    "nginx": "2026/03/14 09:02:36 [error] 31#31: *7 recv() failed (104: Connection reset by peer) "
    "while reading response header from upstream",
    "pip": "WARNING: Retrying after connection broken by 'ReadTimeoutError': Timed out waiting",
    "pytest": 'Traceback (most recent call last):\n  File "/src/test_x.py", line 3, in test\n'
    "    assert 1 == 2\nAssertionError\n=== 1 failed, 3 passed in 0.12s ===",
    "training": "step 10 loss 0.31\n[W710 02:01:11.1 socket.cpp:767] [c10d] The client socket has "
    "failed to connect to [node-a]:29500 (errno: 97 - Address family not supported).",
    "shell": "bash: line 1: 4711 Broken pipe   yes | head",
}


@pytest.mark.parametrize("name", UNRELATED)
def test_an_unrelated_log_says_nothing(tmp_path: Path, name: str) -> None:
    """A log that is not of a job of ranks, or of one that went well, has no finding."""
    path = tmp_path / "x.log"
    path.write_text(UNRELATED[name] + "\n")
    (finding,) = diagnose_logs([path]).findings
    assert (finding.kind, finding.is_fault) == ("nothing_found", False)
    assert "No line that rankcall knows reports a failure" in finding.summary


OF_THE_CULPRIT = (
    *(Relation.BEHIND, Relation.MAY_BE_BEHIND, Relation.ENDED_BY_SIGNAL),
    *(Relation.OWN_ERROR, Relation.OWN_EXCEPTION),
)


def is_true(plan: Plan, fact: Fact) -> bool:
    """Return whether a fact that a verdict states is one of those that were planted."""
    ranks = set(fact.ranks.numbers) if fact.ranks else set()
    waiting = set(plan.others)
    if fact.relation is Relation.TIMED_OUT_IN and fact.call:
        waiting = {plan.culprit} if fact.call.op == "broadcast" else waiting
    elif plan.fault == "desync" or fact.relation is Relation.SAID:  # it quotes any rank
        waiting.add(plan.culprit)
    right = {plan.culprit} if fact.relation in OF_THE_CULPRIT else waiting
    of_others = set(fact.others.numbers) if fact.others else set()
    return (
        ranks <= right and of_others <= waiting and (fact.call is None or fact.call.seq == plan.seq)
    )


@pytest.mark.parametrize("seed", range(200))
def test_generated_logs(tmp_path: Path, seed: int) -> None:
    """The verdict on a whole log is the plan's; on a truncated one, nobody else is blamed.

    Each fact that a sentence states is one of those that were planted.
    """
    names = sorted(COLLECTORS)
    plan = made(seed, COLLECTORS[names[seed % len(names)]])
    path = tmp_path / "job.log"
    path.write_text("\n".join(plan.lines) + "\n")
    finding = diagnose_logs([path]).findings[0]
    assert (finding.kind, finding.ranks) == (plan.kind, (plan.culprit,)), plan.fault
    assert plan.what in finding.summary
    assert all(is_true(plan, fact) for fact in finding.facts), finding.facts
    chance = random.Random(seed)
    for _ in range(3):
        end = chance.randint(plan.shown + 1, len(plan.lines))
        path.write_text("\n".join(plan.lines[:end]) + "\n")
        finding = diagnose_logs([path]).findings[0]
        kind, ranks = finding.kind, finding.ranks
        assert kind != "nothing_found"
        assert set(ranks) <= {plan.culprit} or (kind == "desync" and plan.culprit in ranks)
        assert all(is_true(plan, fact) for fact in finding.facts), finding.facts


def test_models_that_differ(tmp_path: Path) -> None:
    """DDP compares with rank 0: if all others report, it is rank 0 that differs."""
    text = (
        "[rank{0}]: RuntimeError: [{0}]: params[0] in this process with sizes [11, 10] appears not "
        "to match sizes of the same param in process 0."
    )
    path = tmp_path / "job.log"
    path.write_text("\n".join(text.format(rank) for rank in (1, 2, 3)))
    assert judged(path) == ("mismatch", (0,))
    path.write_text("\n".join([text.format(2), *(f"[rank{rank}]: waits" for rank in (0, 1, 3))]))
    assert judged(path)[0] == "mismatch"
    assert 2 in judged(path)[1]


def test_a_traceback_whose_lines_have_no_prefix(tmp_path: Path) -> None:
    """SGLang writes its prefix before the first line of a message only."""
    lines = [
        "[2026-03-14 09:02:18] server_args=ServerArgs(model_path='m', tp_size=8, mem=0.9)",
        "[2026-03-14 09:02:36 TP3] Scheduler hit an exception: Traceback (most recent call last):",
        '  File "/sgl/python/sglang/srt/managers/scheduler.py", line 2748, in run_scheduler',
        "    scheduler.event_loop()",
        '  File "/sgl/python/sglang/srt/model_runner.py", line 12, in forward',
        "    return self.model(batch)",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "",
        "[2026-03-14 09:02:36] Received sigquit from a child process.",
    ]
    path = tmp_path / "job.log"
    path.write_text("\n".join(lines))
    finding = diagnose_logs([path]).findings[0]
    assert (finding.kind, finding.ranks) == ("dead", (3,))
    assert "no memory left" in finding.advice


def test_a_spawned_process(tmp_path: Path) -> None:
    """The index of a spawned process may not be its rank: it is told, and no rank is named."""
    path = tmp_path / "job.log"
    path.write_text(
        "torch.multiprocessing.spawn.ProcessExitedException: process 2 terminated with signal "
        "SIGKILL\n"
    )
    finding = diagnose_logs([path]).findings[0]
    assert (finding.kind, finding.ranks) == ("undecided", ())
    assert (
        "Process 2 of those that torch.multiprocessing started ended by SIGKILL" in finding.summary
    )


def test_what_torch_wrote_on_simulated_devices() -> None:
    """Two watchdogs tell the op, its number and the line that issued it; nobody is blamed."""
    (finding,) = diagnose_logs([REAL / "nccl-2.14-missing.log"]).findings
    assert (finding.op, finding.seq, finding.call_site) == ("all_reduce", 6, "/job/job.py:9")
    assert finding.victims == (0, 2)
    assert finding.since_s == pytest.approx(8.0, abs=0.5)


OLD_FAULT = (
    "[E ProcessGroupNCCL.cpp:916] [Rank {0}] NCCL watchdog thread terminated with exception: CUDA "
    "error: an illegal memory access was encountered"
)

OLD_TIMEOUT = (
    "[E ProcessGroupNCCL.cpp:474] [Rank {0}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum={1}, OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1800123 milliseconds "
    "before timing out."
)


@pytest.mark.parametrize(
    ("why", "lines", "expected"),
    [
        (
            "the others wait in one call",
            [OLD_FAULT.format(2), *(OLD_TIMEOUT.format(rank, 7) for rank in (0, 1, 3))],
            ("dead", (2,)),
        ),
        (
            "the exception is repeated when the process ends",
            [OLD_FAULT.format(2), f"  what():  {OLD_FAULT.format(2).partition('] ')[2]}"],
            ("dead", (2,)),
        ),
        (
            "torchrun reports the rank",
            [OLD_FAULT.format(2), *torchrun(2, -6, [(0, -15)])],
            ("dead", (2,)),
        ),
        (
            "one process may have both numbers",
            [OLD_FAULT.format(2), OLD_FAULT.format(6)],
            ("undecided", ()),
        ),
        (
            "time-outs in two groups",
            [OLD_FAULT.format(2), OLD_TIMEOUT.format(0, 7), OLD_TIMEOUT.format(1, 9)],
            ("undecided", ()),
        ),
        (
            "two processes have one number",
            [OLD_FAULT.format(2), OLD_TIMEOUT.format(0, 7), OLD_TIMEOUT.format(0, 7)],
            ("undecided", ()),
        ),
        (
            "a rank has another number",
            [OLD_FAULT.format(1), "[rank5]:" + OLD_TIMEOUT.format(2, 7)],
            ("undecided", ()),
        ),
        (
            "it has waited before",
            [OLD_TIMEOUT.format(2, 7), OLD_FAULT.format(2)],
            ("undecided", ()),
        ),
        (
            "the job has groups of several kinds",
            ["+ train.py --tensor-model-parallel-size 4", OLD_FAULT.format(2)],
            ("undecided", ()),
        ),
        (
            "torchrun reports other ranks",
            [OLD_FAULT.format(2), *torchrun(6, -6, [(0, -15)])],
            ("undecided", ()),
        ),
    ],
)
def test_a_number_in_a_group_is_a_rank_if_there_is_one_group(
    tmp_path: Path, why: str, lines: list[str], expected: tuple[str, tuple[int, ...]]
) -> None:
    """torch before 2.3 wrote no rank in the job before its messages."""
    path = tmp_path / "job.log"
    path.write_text("\n".join(lines) + "\n")
    assert judged(path) == expected, why
