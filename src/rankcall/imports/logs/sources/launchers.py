"""Messages of what starts the ranks: torchrun, torch.multiprocessing, DeepSpeed, Slurm, mpirun."""

from __future__ import annotations

import re

from rankcall.imports.logs.blame import OWN_SIGNALS, signal_of
from rankcall.imports.logs.facts import (
    Aborting,
    AttemptEnded,
    Fact,
    Fatal,
    Killed,
    LauncherExit,
    Member,
    Outside,
    Restarted,
    SpawnedExit,
    WorkerExit,
)
from rankcall.imports.logs.prefixes import Line
from rankcall.imports.logs.sources.message import (
    Message,
    Source,
    aborting,
    any_of,
    failed,
    not_started,
    outside,
    ranks_in,
    waited,
)
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
_DEATH_SIGNAL = re.compile(r"Received ([\w.]{1,20}) death signal, shutting down workers")


# The last line of a failure in torchrun's report; the others may be missing.
_RECEIVED = re.compile(r"Signal (\d{1,2}) \(SIG[A-Z0-9]{2,10}\) received by PID (\d{1,10})")


def _received(line: Line, match: re.Match[str]) -> Fact:
    return WorkerExit(line, -1, int(match[2]), -int(match[1]))


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


# The command before these words is that of the last worker that was started, whichever has failed:
# so its local rank says nothing.
_DEEPSPEED_EXIT = re.compile(r" exits with return code = (-?\d{1,10})")


def _deepspeed_exit(line: Line, match: re.Match[str]) -> Fact:
    return WorkerExit(line, -1, -1, int(match[1]))


_COMMAND_EXIT = re.compile(r"died with <Signals\.(SIG[A-Z0-9]{2,10}): (\d{1,2})>")


def _command_exit(line: Line, match: re.Match[str]) -> Fact:
    return WorkerExit(line, -1, -1, -int(match[2]))


_LIGHTNING_EXIT = re.compile(
    r"\[rank: (\d{1,7})\] Child process with PID (\d{1,10}) terminated with code (-?\d{1,5})"
)
# A script's own shell writes the line and the pid; others only the words, in a line of their own.
_SHELL_EXIT = re.compile(
    r"(?:^ *|(?:it/s|s/it)\] ?|: line \d{1,9}: +(\d{1,10}) |^\[\d{1,4}\][+-]? {1,9}(?:\d{1,10} )?)"
    r"(Killed|Segmentation fault|Bus error|Aborted|Illegal instruction|Floating point exception)"
    r"(?: {0,20}\(core dumped\))?(?: {2,}.*)?$",
)
_CODE = re.compile(
    r"(?:(?:terminated|completed|finished|failed) with (?:exit )?|exited with exit )code "
    r"(13[2-9])\b|\] Error (13[2-9])$"
)
_NO_LAUNCHER = re.compile(
    r"^(?:[\w.@-]{1,120}: )?\S{1,200}: (?:(?:line )?\d{1,6}: )?"
    r"((?:torchrun|srun|mpirun|mpiexec|horovodrun|deepspeed|accelerate|pdsh|vllm|ray)"
    r": (?:command )?not found)(?:$| \[repeated)"
)
# torchrun passes no such argument; the old launcher of torch 2 writes it with a dash.
_LOCAL_RANK = re.compile(r"error: unrecognized arguments: .{0,400}?--local[-_]rank=\d{1,5}")
_COMPOSE_EXIT = re.compile(r"(?:^|: )[\w.-]{1,120} exited with code (1[3-5]\d)$")


def _lightning_exit(line: Line, match: re.Match[str]) -> Fact:
    return WorkerExit(line, int(match[1]), int(match[2]), int(match[3]))


def _shell_exit(line: Line, match: re.Match[str]) -> Fact:
    return WorkerExit(line, -1, int(match[1] or -1), -_SIGNALS[match[2]])


def _code(line: Line, match: re.Match[str]) -> Fact | None:
    if "srun: error:" in line.text:  # it says which task that was
        return None
    return WorkerExit(line, -1, -1, int(match[1] or match[2]))


def _compose_exit(line: Line, match: re.Match[str]) -> Fact:
    return WorkerExit(line, -1, -1, int(match[1]))


_MPI_EXIT = re.compile(r"process rank (\d{1,7}) .{0,300}?exited on(?: signal (\d{1,2})|$)")
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
    "Illegal instruction": 4,
    "Floating point exception": 8,
}


# Open MPI has the number or the name of the job before the rank, and horovodrun the rank alone.
_MPI_FIRST = re.compile(
    r"Process name: (?:\[(?:\[\d{1,9},\d{1,9}\]|[\w.-]{1,253}@\d{1,9}),(\d{1,7})\]|(\d{1,7})$)"
)
_DAEMON = re.compile(r"Remote daemon: \[\S{1,260}\] on node ([\w.-]{1,253})")
_HOROVOD_EXIT = re.compile(r"^Process (\d{1,7}) exit with status code (-?\d{1,5})\.")
_MPI_ABORT = re.compile(r"MPI_ABORT was invoked on rank (\d{1,7})")
_MPI_FAILED = (
    *("exited with non-zero status", "BAD TERMINATION OF ONE"),
    *("application called MPI_Abort", "Fatal error in "),
)
_NO_DAEMONS = re.compile(
    r"ORTE was unable to reliably start one or more daemons"
    r"|An? (?:ORTE|PRTE) daemon has unexpectedly failed after launch"
    r"|There are not enough slots available in the system to satisfy the \d{1,7}"
    r"|mpirun was unable to launch the specified application"
    r"|Launching horovodrun task function was not successful"
)
# Intel MPI writes how each process ended in two lines, also of those that it has killed itself.
_INTEL_RANK = re.compile(r"RANK (\d{1,7}) PID (\d{1,10}) RUNNING AT ([\w.-]{1,253})")
_INTEL_SIGNAL = re.compile(r"KILLED BY SIGNAL: (\d{1,2}) \(")
_CRASHED = re.compile(
    r"\[([\w.-]{1,253}):0*(\d{1,10})(?: ?:\d{1,10}:\d{1,10})?\] (?:Signal: |Caught signal )"
    r"(?:(\d{1,2}) \()?([A-Z][\w ]{3,40}?)(?:: .{0,120}\)| \((\d{1,2})\))"
)


def _mpi_first(line: Line, match: re.Match[str]) -> Fact:
    return LauncherExit(line, (int(match[match.lastindex or 1]),), 0, is_first=True)


def _daemon(line: Line, match: re.Match[str]) -> Fact:
    return Outside(line, f"mpirun lost the node {match[1]}")


def _horovod_exit(line: Line, match: re.Match[str]) -> Fact:
    signal = signal_of(int(match[2]))
    return LauncherExit(line, (int(match[1]),), signal, is_first=False, in_order=True)


def _crashed(line: Line, match: re.Match[str]) -> Fact:
    what = f"{match[4]} (signal {match[3] or match[5]})"
    is_own = int(match[3] or match[5]) in OWN_SIGNALS
    return Fatal(line, what, "own" if is_own else "victim", match[1], int(match[2]))


def _intel_rank(line: Line, match: re.Match[str]) -> Fact | None:
    rank = int(match[1])
    return Member(line, match[3], int(match[2]), rank, 0) if rank < MAX_RANKS else None


def _intel_signal(line: Line, match: re.Match[str]) -> Fact:
    return LauncherExit(line, (), int(match[1]), is_first=False)


def _mpi_exit(line: Line, match: re.Match[str]) -> Fact:
    return LauncherExit(line, (int(match[1]),), int(match[2] or 0), is_first=True)


def _srun_exit(line: Line, match: re.Match[str]) -> Fact | None:
    tasks = ranks_in(match[1])
    if not tasks:
        return None
    # srun says "Out Of Memory" only of the task that the kernel's OOM killer ended.
    is_own = match[2] == "Out Of Memory"
    why = "memory ran out" if is_own else ""
    return LauncherExit(line, tasks, _SIGNALS.get(match[2], 0), is_own, why)


_SLURM_END = re.compile(
    r"(?:slurmstepd|srun|slurmd)\S*: (?:error: )?\*{0,3} ?"
    r"((?:STEP|JOB|step|job) \S{1,60} ON \S{1,200} CANCELLED AT \S{1,40}(?: DUE TO [A-Z ]{1,60})?"
    r"|.{0,80}DUE TO (?:TIME LIMIT|PREEMPTION|NODE FAIL\w*))"
)


def _slurm_end(line: Line, match: re.Match[str]) -> Fact:
    return Aborting(line) if "TASK FAILURE" in match[1] else outside(line, match)


_LIMIT = re.compile(
    r"TERM_(?:MEMLIMIT|RUNLIMIT|OWNER|PREEMPT|ADMIN)\b.{0,120}|PBS: job killed: .{0,120}"
    r"|^job preempted \(.{1,80}\)"
)
_SUBMITIT = re.compile(
    r"Caught signal SIG\w{2,10} on \S{1,253}: this job is (?:preempted|timed-out)"
)
_NOT_LAUNCHED = re.compile(
    r"srun: (?:error: (?:(?:Task|Application) launch .{0,60}failed|task [\d,-]{1,200} launch failed"
    r"|Unable to (?:create step|allocate resources|confirm allocation))|Force Terminated job)"
)
_NO_CONTAINER = re.compile(
    r"slurmstepd\S{0,260}: error: ((?:pyxis: (?:container start failed|couldn't start container"
    r"|failed to import docker image)|spank: required plugin \S{1,200} failed).{0,200})"
)
_NO_PROGRAM = re.compile(r"slurmstepd: error: execve\(\): .{1,300}")
_EXIT_STRING = re.compile(r"TERMINATED WITH THE EXIT STRING: .{1,60} \(signal (\d{1,2})\)")


def _exit_string(line: Line, match: re.Match[str]) -> Fact:
    return WorkerExit(line, -1, -1, -int(match[1]))


_NODE_FAILED = re.compile(r"srun: error: (Node failure on [\w,\[\]-]{1,400})")
_SSH_FAILED = re.compile(r"pdsh@\S{1,200}: ([\w.-]{1,253}): (ssh exited with exit code 255)")
_SSH_CLOSED = re.compile(r"^(Connection to ([\w.-]{1,253}) closed by remote host)")


def _ssh_failed(line: Line, match: re.Match[str]) -> Fact:
    return Outside(line, f"pdsh lost {match[1]}: {match[2]}")


def _ssh_closed(line: Line, match: re.Match[str]) -> Fact:
    return Outside(line, match[1])


_COMPOSER_EXIT = re.compile(
    r"Global rank (\d{1,7}) \(PID \d{1,10}\) exited with code (-?\d{1,5})"
    r"|composer\.cli\.launcher:Rank (\d{1,7}) crashed with exit code (-?\d{1,5})"
)


def _composer_exit(line: Line, match: re.Match[str]) -> Fact | None:
    code, rank = int(match[2] or match[4]), int(match[1] or match[3])
    if not code or rank >= MAX_RANKS:
        return None
    return LauncherExit(line, (rank,), signal_of(code), is_first=False)


_SLURM_OOM = re.compile(
    r"slurmstepd\S*: error: (?:Detected (\d{1,7}) oom[-_]kill event|.{0,80}oom-kill"
    r"|Exceeded (?:job|step) memory limit)"
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
                "a signal ended a worker: the last line of a failure in the report",
                (") received by PID",),
                _RECEIVED,
                _received,
                "  traceback : Signal 6 (SIGABRT) received by PID 2195196",
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
            Message(
                "torchrun waited in vain for that of another node, at the end",
                ("Error waiting on exit barrier",),
                any_of("Error waiting on exit barrier"),
                waited,
                "ERROR:torch.distributed.elastic.agent.server.api:Error waiting on exit barrier. "
                "Elapsed: 315.7792458534241 seconds",
                "pytorch/pytorch#69520",
            ),
            Message(
                "the script does not take the argument that an old launcher passes",
                ("unrecognized arguments: ",),
                _LOCAL_RANK,
                failed,
                "train.py: error: unrecognized arguments: --local-rank=3",
                "torch.distributed.launch of torch 2.0 and newer",
            ),
            Message(
                "ColossalAI: torchrun failed on a node",
                ("failed to run torchrun",),
                any_of("failed to run torchrun"),
                failed,
                "Error: failed to run torchrun --nproc_per_node=4 --nnodes=1 --node_rank=0 "
                "--rdzv_backend=c10d --rdzv_endpoint=127.0.0.1:29500 train.py on 127.0.0.1",
                "hpcaitech/ColossalAI#2441",
            ),
        ),
    ),
    Source(
        "torch.multiprocessing",
        "none; the number of a process is its index among those that were spawned",
        (
            Message(
                "how a spawned process ended, or that its error follows",
                ("terminated with ",),
                _SPAWNED,
                _spawned_exit,
                "torch.multiprocessing.spawn.ProcessExitedException: process 2 terminated with "
                "signal SIGKILL",
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
            Message(
                "a node ended the connection over which its ranks were started",
                ("closed by remote host",),
                _SSH_CLOSED,
                _ssh_closed,
                "Connection to node-b closed by remote host.",
                "OpenSSH 7 and newer",
            ),
        ),
    ),
    Source(
        "Lightning, shells, Docker Compose",
        "none; Lightning's `[rank: 3]` counts the ranks of a node",
        (
            Message(
                "Lightning: a process ended, and the others are ended",
                ("terminated with code",),
                _LIGHTNING_EXIT,
                _lightning_exit,
                "[rank: 3] Child process with PID 4711 terminated with code 1. Forcefully "
                "terminating all other processes to avoid zombies 🧟",
                "Lightning 2.1 and newer",
            ),
            Message(
                "a launcher in Python: a signal ended its command",
                ("died with <Signals.",),
                _COMMAND_EXIT,
                _command_exit,
                "subprocess.CalledProcessError: Command '['/venv/bin/python', '-u', 'train.py', "
                "'--local_rank=7']' died with <Signals.SIGSEGV: 11>.",
                "torch 1.0 to 1.8, accelerate",
            ),
            Message(
                "a shell: a signal ended a command",
                ("Killed", "Segmentation fault", "Bus error", "(core dumped)", "Aborted"),
                _SHELL_EXIT,
                _shell_exit,
                "run.sh: line 14:  4711 Killed                  python train.py",
                "bash 4 and newer, dash",
            ),
            Message(
                "a shell: there is no such launcher",
                ("not found",),
                _NO_LAUNCHER,
                not_started,
                "train.sh: 1: srun: not found",
                "bash, dash; zhiyuanyou/SAFECount#16",
            ),
            Message(
                "make, kubectl, CI: a signal ended a command",
                ("code 13", "] Error 13"),
                _CODE,
                _code,
                "command terminated with exit code 137",
                "GNU make 4, Kubernetes 1.20 and newer, GitHub Actions",
            ),
            Message(
                "Compose: a signal ended a container",
                (" exited with code ",),
                _COMPOSE_EXIT,
                _compose_exit,
                "trainer-2 exited with code 137",
                "Docker Compose 2",
            ),
        ),
    ),
    Source(
        "composer",
        "`rank3[pid][thread]:`; the launcher's own lines name the rank in the job",
        (
            Message(
                "how a worker ended",
                (") exited with code", " crashed with exit code "),
                _COMPOSER_EXIT,
                _composer_exit,
                "Global rank 3 (PID 4711) exited with code -11",
                "composer 0.5 and newer",
            ),
            Message(
                "what a worker wrote; its lines follow",
                ("Begin global rank ", "End global rank "),
                None,
                None,
                "----------Begin global rank 3 STDERR----------",
                "composer 0.5 and newer",
                _SUMMARY,
            ),
        ),
    ),
    Source(
        "Slurm, mpirun",
        "`12:` of `srun --label` and `[1,3]<stderr>:` are tasks, which may be launchers",
        (
            Message(
                "mpirun: the process that ended first",
                ("noticed that process rank",),
                _MPI_EXIT,
                _mpi_exit,
                "mpirun noticed that process rank 3 with PID 0 on node a exited on signal 9 "
                "(Killed).",
                "Open MPI 2 and newer",
            ),
            Message(
                "mpirun, horovodrun: the process that ended first",
                ("Process name: ",),
                _MPI_FIRST,
                _mpi_first,
                "  Process name: [[12167,1],10]",
                "Open MPI 1.8 and newer, Horovod 0.18 and newer",
            ),
            Message(
                "mpirun: a node is lost",
                ("Remote daemon: [",),
                _DAEMON,
                _daemon,
                "  Remote daemon: [prterun-node-1-19188@0,1] on node node-2",
                "Open MPI 4 and 5",
            ),
            Message(
                "mpirun, horovodrun: processes could not be started",
                (
                    *(" was unable to", "unexpectedly failed", "not enough slots"),
                    "Launching horovodrun task",
                ),
                _NO_DAEMONS,
                not_started,
                "ORTE was unable to reliably start one or more daemons.",
                "Open MPI 1.8 and newer, horovod/horovod#504",
            ),
            Message(
                "Intel MPI: the process of which the next line tells",
                (" RUNNING AT ",),
                _INTEL_RANK,
                _intel_rank,
                "=   RANK 3 PID 7003 RUNNING AT node-2",
                "bsc-performance-tools/extrae#101",
            ),
            Message(
                "Intel MPI: how it ended; most were killed because another one had failed",
                ("KILLED BY SIGNAL: ",),
                _INTEL_SIGNAL,
                _intel_signal,
                "=   KILLED BY SIGNAL: 11 (Segmentation fault)",
                "bsc-performance-tools/extrae#101",
            ),
            Message(
                "horovodrun: how a process ended; it writes each as it ends",
                (" exit with status code ",),
                _HOROVOD_EXIT,
                _horovod_exit,
                "Process 0 exit with status code 137.",
                "Horovod 0.19 and newer",
            ),
            Message(
                "mpirun: a process called MPI_Abort",
                ("MPI_ABORT was invoked",),
                _MPI_ABORT,
                _mpi_first,
                "MPI_ABORT was invoked on rank 3 in communicator MPI_COMM_WORLD",
                "Open MPI 1.8 and newer",
            ),
            Message(
                "mpirun: a process failed",
                ("non-zero status", *_MPI_FAILED[1:]),
                any_of(*_MPI_FAILED),
                failed,
                "=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES",
                "Open MPI 1.8 and newer; Intel MPI, MPICH",
            ),
            Message(
                "MPICH: which signal ended a process",
                ("WITH THE EXIT STRING: ",),
                _EXIT_STRING,
                _exit_string,
                "YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)",
                "openai/jukebox#155",
            ),
            Message(
                "Open MPI or UCX: a signal ended the process",
                ("] Signal: ", "] Caught signal "),
                _CRASHED,
                _crashed,
                "[node-1:4711 :0:4711] Caught signal 11 (Segmentation fault: address not mapped to "
                "object at address (nil))",
                "UCX 1.8, Open MPI 1.8 and newer",
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
                _slurm_end,
                "slurmstepd: error: *** STEP 812.0 ON node-3 CANCELLED AT 2026-03-14T09:02:36 DUE "
                "TO TIME LIMIT ***",
                "Slurm 17 and newer",
            ),
            Message(
                "LSF or PBS ended the job",
                ("TERM_", "PBS: job killed", "preempted"),
                _LIMIT,
                outside,
                "=>> PBS: job killed: walltime 86435 exceeded limit 86400",
                "LSF 10, PBS 19 and newer; cBio/cbio-cluster#188",
            ),
            Message(
                "submitit: Slurm ends the job",
                ("preempted",),
                _SUBMITIT,
                outside,
                "submitit WARNING (2022-08-12 02:06:11,453) - Caught signal SIGUSR2 on node-4: "
                "this job is preempted.",
                "facebookincubator/submitit#1708",
            ),
            Message(
                "srun could not start tasks, or ended all of them",
                ("srun: error:", "srun: Force Terminated"),
                _NOT_LAUNCHED,
                aborting,
                "srun: error: Task launch for 36.0 failed on node node-3: Job credential expired",
                "Slurm 17 and newer",
            ),
            Message(
                "Slurm could not start the program of a task",
                ("slurmstepd",),
                _NO_PROGRAM,
                not_started,
                "slurmstepd: error: execve(): torchrun: No such file or directory",
                "CSCfi/pytorch-ddp-examples#1",
            ),
            Message(
                "Slurm could not start the container of a task",
                ("slurmstepd",),
                _NO_CONTAINER,
                not_started,
                "slurmstepd: error: pyxis: container start failed with error code: 1",
                "NVIDIA/pyxis#122",
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
                ("oom_kill event", "oom-kill", "slurmstepd"),
                _SLURM_OOM,
                _slurm_oom,
                "slurmstepd: error: Detected 1 oom_kill event in StepId=812.0. Some of the step "
                "tasks have been OOM Killed.",
                "Slurm 20 and newer",
            ),
        ),
    ),
)
