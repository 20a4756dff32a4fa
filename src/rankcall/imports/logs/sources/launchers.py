"""Messages of what starts the ranks: torchrun, torch.multiprocessing, DeepSpeed, Slurm, mpirun."""

from __future__ import annotations

import re

from rankcall.imports.logs.blame import OWN_SIGNALS, signal_of
from rankcall.imports.logs.facts import (
    AttemptEnded,
    Fact,
    Killed,
    LauncherExit,
    Outside,
    Restarted,
    SpawnedExit,
    WorkerExit,
)
from rankcall.imports.logs.prefixes import Line
from rankcall.imports.logs.sources.message import Message, Source, any_of, outside, ranks_in
from rankcall.ranks import MAX_RANKS

__all__ = ["SOURCES"]

_SUMMARY = 2000  # lines of messages that have several
_ATTEMPT = re.compile(
    r"(?:^|(\d{1,9}) \S{0,120}\.py:\d+\] ?|:)failed \(exitcode: (-?\d{1,10})\) "
    r"local_rank: (\d{1,7})(?: \(pid: (\d{1,10})\))?"
)
_CLOSING = re.compile(
    r"(?:Sending process (\d{1,9}) closing signal|Closing process (\d{1,9}) via signal) SIG"
    r"|Unable to shutdown process (\d{1,9}) via|Killing subprocess (\d{1,10})"
)
_DEATH_SIGNAL = re.compile(r"Received (\w{1,20}) death signal, shutting down workers")


def _attempt_ended(line: Line, match: re.Match[str]) -> Fact:
    return AttemptEnded(line, match[1] or "", int(match[3]), int(match[4] or -1), int(match[2]))


def _restarted(line: Line, match: re.Match[str]) -> Fact:
    return Restarted(line)


def _killed(line: Line, match: re.Match[str]) -> Fact:
    return Killed(line, int(match[match.lastindex or 1]))


_SPAWNED = re.compile(
    r"process (\d{1,7}) terminated with (?:signal SIG(\w{1,10})|exit code (\d{1,5}))"
    r"|-- Process (\d{1,7}) terminated with the following error"
)


def _spawned_exit(line: Line, match: re.Match[str]) -> Fact:
    numbers = {name.removeprefix("SIG"): number for number, name in OWN_SIGNALS.items()}
    return SpawnedExit(line, int(match[1] or match[4]), numbers.get(match[2] or "", -1))


# The command stands before these words. It is looked at afterwards: a pattern for both would try
# every beginning with every end.
_DEEPSPEED_EXIT = re.compile(r" exits with return code = (-?\d{1,10})")
_COMMAND = 4000  # characters of it
_LOCAL_RANK = re.compile(r"--local[_-]rank[= ](\d{1,7})")


def _deepspeed_exit(line: Line, match: re.Match[str]) -> Fact:
    command = line.text[max(0, match.start() - _COMMAND) : match.start()].replace("', '", " ")
    local_rank = _LOCAL_RANK.search(command)
    return WorkerExit(line, int(local_rank[1]) if local_rank else -1, -1, int(match[1]))


_MPI_EXIT = re.compile(r"process rank (\d{1,7}) .{0,300}?exited on signal (\d{1,2})")
_SRUN_EXIT = re.compile(
    r"srun: error: \S{1,200}: tasks? ([\d,\-]{1,400}): "
    r"(Killed|Segmentation fault|Bus error|Aborted|Terminated|Out Of Memory"
    r"|Exited with exit code \d{1,3})"
)
_SIGNALS = {
    "Killed": 9,
    "Out Of Memory": 9,
    "Segmentation fault": 11,
    "Bus error": 7,
    "Aborted": 6,
    "Terminated": 15,
}


def _mpi_exit(line: Line, match: re.Match[str]) -> Fact:
    return LauncherExit(line, (int(match[1]),), int(match[2]), is_first=True)


def _srun_exit(line: Line, match: re.Match[str]) -> Fact | None:
    tasks = ranks_in(match[1])
    if not tasks:
        return None
    # srun says "Out Of Memory" only of the task that the kernel's OOM killer ended.
    is_own = match[2] == "Out Of Memory"
    return LauncherExit(line, tasks, _SIGNALS.get(match[2], 0), is_first=is_own)


_SLURM_END = re.compile(
    r"(?:slurmstepd|srun|slurmd)\S*: (?:error: )?\*{0,3} ?"
    r"((?:STEP|JOB|step|job) \S{1,60} ON \S{1,200} CANCELLED AT \S{1,40}(?: DUE TO [A-Z ]{1,60})?"
    r"|.{0,80}DUE TO (?:TIME LIMIT|PREEMPTION|NODE FAIL\w*))"
)
_NODE_FAILED = re.compile(r"srun: error: (Node failure on [\w,\[\]-]{1,400})")
_SSH_FAILED = re.compile(r"pdsh@\S{1,200}: ([\w.-]{1,253}): (ssh exited with exit code 255)")


def _ssh_failed(line: Line, match: re.Match[str]) -> Fact:
    return Outside(line, f"pdsh lost {match[1]}: {match[2]}")


_COMPOSER_EXIT = re.compile(
    r"Global rank (\d{1,7}) \(PID (\d{1,10})\) exited with code (-?\d{1,5})"
)


def _composer_exit(line: Line, match: re.Match[str]) -> Fact | None:
    code, rank = int(match[3]), int(match[1])
    if not code or rank >= MAX_RANKS:
        return None
    return LauncherExit(line, (rank,), signal_of(code), is_first=False)


_SLURM_OOM = re.compile(
    r"slurmstepd\S*: error: (?:Detected (\d{1,7}) oom[-_]kill event|.{0,80}oom-kill)"
)


def _slurm_oom(line: Line, match: re.Match[str]) -> Fact:
    return Outside(line, "Slurm's cgroup ran out of memory, and the kernel killed a process in it")


SOURCES: tuple[Source, ...] = (
    Source(
        "torchrun",
        "`[default3]:` counts the ranks of a node, so it is not used as a rank",
        (
            Message(
                "the report of all failures",
                ("Failures:", "Root Cause (first observed"),
                None,
                None,
                "Root Cause (first observed failure):",
                "torch 1.9 to 2.15",
                _SUMMARY,
            ),
            Message(
                "a worker has failed, and the attempt ends",
                ("failed (exitcode: ",),
                _ATTEMPT,
                _attempt_ended,
                "E1122 18:59:08.232000 6005 torch/distributed/elastic/multiprocessing/api.py:1002] "
                "failed (exitcode: 1) local_rank: 2 (pid: 6011) of binary: /venv/bin/python",
                "torch 1.9 to 2.15",
            ),
            Message(
                "workers are started again",
                ("will restart worker group",),
                any_of("will restart worker group"),
                _restarted,
                "[default] Worker group FAILED. 3/3 attempts left; will restart worker group",
                "torch 1.9 to 2.15",
            ),
            Message(
                "torchrun ends a worker because another one had failed",
                (" signal SIG", "Unable to shutdown process"),
                _CLOSING,
                _killed,
                "W0330 12:13:49.389000 12432 torch/distributed/elastic/multiprocessing/api.py:900] "
                "Sending process 12453 closing signal SIGTERM",
                "torch 1.9 to 2.15",
            ),
            Message(
                "torchrun itself was told to end",
                ("death signal",),
                _DEATH_SIGNAL,
                outside,
                "W0330 12:13:49.388000 12432 torch/distributed/elastic/agent/server/api.py:723] "
                "Received 15 death signal, shutting down workers",
                "torch 1.10 to 2.15",
            ),
        ),
    ),
    Source(
        "torch.multiprocessing",
        "none; the number of a process is its index among those that were spawned",
        (
            Message(
                "how a spawned process ended",
                ("terminated with signal", "terminated with exit code"),
                _SPAWNED,
                _spawned_exit,
                "torch.multiprocessing.spawn.ProcessExitedException: process 2 terminated with "
                "signal SIGKILL",
                "torch 1.5 to 2.15",
            ),
            Message(
                "the error of a spawned process follows",
                ("terminated with the following error",),
                _SPAWNED,
                _spawned_exit,
                "-- Process 2 terminated with the following error:",
                "torch 1.0 to 2.15",
            ),
        ),
    ),
    Source(
        "DeepSpeed's launcher, pdsh",
        "pdsh's `host:`; the launcher's own lines have no rank",
        (
            Message(
                "how a worker ended",
                ("exits with return code",),
                _DEEPSPEED_EXIT,
                _deepspeed_exit,
                "[2026-08-08 10:31:12,620] [ERROR] [launch.py:325:sigkill_handler] "
                "['/srv/venv/bin/python', '-u', 'train.py', '--local_rank=7'] exits with return "
                "code = -6",
                "DeepSpeed 0.8 and newer",
            ),
            Message(
                "the launcher ends the others",
                ("Killing subprocess",),
                _CLOSING,
                _killed,
                "[2026-08-08 10:31:12,455] [INFO] [launch.py:319:sigkill_handler] Killing "
                "subprocess 70213",
                "DeepSpeed 0.6 and newer",
            ),
            Message(
                "a node cannot be reached",
                ("ssh exited with exit code 255",),
                _SSH_FAILED,
                _ssh_failed,
                "pdsh@node-a: node-b: ssh exited with exit code 255",
                "pdsh 2",
            ),
        ),
    ),
    Source(
        "composer",
        "`rank3[pid][thread]:`; the launcher's own lines name the rank in the job",
        (
            Message(
                "how a worker ended",
                (") exited with code",),
                _COMPOSER_EXIT,
                _composer_exit,
                "Global rank 3 (PID 4711) exited with code -11",
                "composer 0.5 and newer",
            ),
        ),
    ),
    Source(
        "Slurm, mpirun",
        "`12:` of `srun --label` and `[1,3]<stderr>:` are tasks, which may be launchers",
        (
            Message(
                "mpirun: the process that ended first",
                ("exited on signal",),
                _MPI_EXIT,
                _mpi_exit,
                "mpirun noticed that process rank 3 with PID 0 on node a exited on signal 9 "
                "(Killed).",
                "Open MPI 2 and newer",
            ),
            Message(
                "srun: how tasks ended",
                ("srun: error:",),
                _SRUN_EXIT,
                _srun_exit,
                "srun: error: node-3: task 7: Segmentation fault",
                "Slurm 17 and newer",
            ),
            Message(
                "Slurm ended the job: time limit, pre-emption, a person",
                ("CANCELLED AT", "DUE TO "),
                _SLURM_END,
                outside,
                "slurmstepd: error: *** STEP 812.0 ON node-3 CANCELLED AT 2026-03-14T09:02:36 DUE "
                "TO TIME LIMIT ***",
                "Slurm 17 and newer",
            ),
            Message(
                "Slurm lost a node",
                ("Node failure on",),
                _NODE_FAILED,
                outside,
                "srun: error: Node failure on node-3",
                "Slurm 17 and newer",
            ),
            Message(
                "memory of the job's cgroup ran out",
                ("oom_kill event", "oom-kill event", "oom-kill"),
                _SLURM_OOM,
                _slurm_oom,
                "slurmstepd: error: Detected 1 oom_kill event in StepId=812.0. Some of the step "
                "tasks have been OOM Killed.",
                "Slurm 20 and newer",
            ),
        ),
    ),
)
