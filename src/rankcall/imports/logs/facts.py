"""What a message in a log says, as facts: ``sources`` makes them, ``analysis.logs`` judges them.

Ranks in a message are often those within a process group. So each fact keeps its line: ``job``
finds out which process wrote it, and the analysis decides which ranks can be believed.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from rankcall.imports.logs.prefixes import Line

Blame = Literal["own", "victim", "outside"]


class GroupName(NamedTuple):
    """A process group as NCCL's messages name it, and the speaker's rank in it."""

    name: str
    description: str
    rank: int

    @property
    def is_world(self) -> bool:
        """Whether it is the group that init_process_group made."""
        return self.description == "default_pg" or (self.name == "0" and not self.description)


class Timeout(NamedTuple):
    """A rank's watchdog ended a collective. ``sizes`` are the elements in and out, if known.

    ``in_group`` is the rank's number in the group, or -1.
    """

    line: Line
    seq: int  # 0: the version does not print it
    op: str
    sizes: tuple[int, ...]
    seconds: float
    in_group: int = -1


class Progress(NamedTuple):
    """How far a rank had come in a group: the numbers of its last collectives there.

    ``failed`` is the number of the collective that timed out, or -1 if the rank wrote this because
    another one timed out.
    """

    line: Line
    group: GroupName
    failed: int
    enqueued: int
    completed: int


class Fingerprint(NamedTuple):
    """The call of a rank, as TORCH_DISTRIBUTED_DEBUG=DETAIL describes it."""

    seq: int  # -1: not known
    op: str
    shape: str
    dtype: str


class Mismatch(NamedTuple):
    """Two ranks called something else. Ranks are those within the group.

    ``by_rank``: ``rank`` wrote it. If not, the ranks had gathered their calls, and each wrote it.
    """

    line: Line
    rank: int
    own: Fingerprint
    other: int
    others: Fingerprint
    by_rank: bool = True


class ModelsDiffer(NamedTuple):
    """DDP found that two ranks wrap different models. Ranks are those within its group.

    ``writer`` is the one of the two that wrote it.
    """

    line: Line
    rank: int
    other: int
    what: str
    writer: int


class SpawnedExit(NamedTuple):
    """torch.multiprocessing says how one of its processes ended. ``signal`` -1: not by one."""

    line: Line
    process: int  # in the order of their start
    signal: int


class BarrierFailed(NamedTuple):
    """Rank 0 of a group says which ranks have not come to a monitored barrier."""

    line: Line
    rank: int
    missing: tuple[int, ...]
    seconds: float


class BarrierReached(NamedTuple):
    """Another rank of the group says that it has come to that barrier."""

    line: Line
    rank: int


class StoreBarrier(NamedTuple):
    """A rank waited for the others in the store, while a process group was made."""

    line: Line
    rank: int
    key: str
    world_size: int
    joined: int


class StoreWait(NamedTuple):
    """A rank still waits for others in the store. Healthy jobs write it, too, while they start."""

    line: Line
    key: str


class StoreMet(NamedTuple):
    """All ranks have come to that barrier of the store."""

    line: Line
    key: str


class Stall(NamedTuple):
    """Horovod says that some ranks have waited so long for others; ``Stalled`` facts follow."""

    line: Line
    seconds: float


class Stalled(NamedTuple):
    """Ranks that have not submitted some ops, which others have. ``more``: the ops are not all."""

    line: Line
    ranks: tuple[int, ...]
    ops: tuple[str, ...]
    more: bool = False


class Lagging(NamedTuple):
    """Ranks of a group that TORCH_NCCL_DESYNC_DEBUG holds responsible for a time-out."""

    line: Line
    ranks: tuple[int, ...]
    joined: bool  # they have come to the collective and not left it


class LauncherExit(NamedTuple):
    """A launcher says how processes ended. ``tasks`` are mpirun's ranks or srun's tasks."""

    line: Line
    tasks: tuple[int, ...]
    signal: int
    is_first: bool  # the launcher says that this process ended first, or tells of no other one
    why: str = ""  # if the launcher says it
    in_order: bool = False  # the launcher tells of each process as it ends


class WorkerExit(NamedTuple):
    """A launcher of one node says how a worker ended. -1: the message does not have it."""

    line: Line
    local_rank: int
    pid: int
    code: int


class Killed(NamedTuple):
    """A launcher ended a worker because another one had failed."""

    line: Line
    pid: int


class AttemptEnded(NamedTuple):
    """A worker has failed, and torchrun ends the others; it may start all of them again."""

    line: Line
    agent: str  # which of torchrun's processes says so
    local_rank: int
    pid: int
    code: int


class Restarted(NamedTuple):
    """torchrun starts all workers again: the lines before this one are of another attempt."""

    line: Line


class Member(NamedTuple):
    """A process says which rank it is in a communicator of so many ranks; 0: in the job.

    ``pointer`` stands for the communicator in the process, and ``name`` in all its members.
    """

    line: Line
    host: str
    pid: int  # -1: the line's prefix tells the process
    rank: int
    size: int
    pointer: str = ""
    name: str = ""


class Enqueued(NamedTuple):
    """A process says what it enqueues next on a communicator of so many ranks.

    ``number`` counts the calls there; those that are made as one have the same. ``rank`` is the
    process's rank in the communicator, or -1. ``arguments`` must be the same on all ranks.
    """

    line: Line
    host: str
    pid: int
    device: int
    pointer: str
    size: int
    number: int
    op: str
    arguments: str
    rank: int = -1


class Trouble(NamedTuple):
    """A rank's connection to another rank broke, or a wait timed out. It does not say which.

    ``host`` and ``pid`` are those of the process that wrote it, if the message has them, and
    ``peer`` is the other end of the connection, or the process that it waited for.
    """

    line: Line
    host: str = ""
    pid: int = -1
    peer: str = ""
    has_waited: bool = False  # for the peer: the connection had been made


class Gone(NamedTuple):
    """A framework says that one of its processes is gone, and not why."""

    line: Line
    by: str
    host: str = ""
    pid: int = -1


class DeviceFault(NamedTuple):
    """A process says that its own device failed or ran out of memory. ``what`` quotes it.

    ``by_kernel``: The kernel of the host says so, of a device that may be nobody's.
    ``in_group``: The number of the rank in a process group, or -1.
    """

    line: Line
    what: str
    host: str = ""
    pid: int = -1
    by_kernel: bool = False
    in_group: int = -1


class Fatal(NamedTuple):
    """A process says that it ends, and why: by its own fault, another's, or from outside.

    ``rank`` is its rank in the job, if the message has it.
    """

    line: Line
    what: str
    blame: Blame
    host: str = ""
    pid: int = -1
    rank: int = -1


class Outside(NamedTuple):
    """Something that is no rank of the job ended it, or kept it from starting: ``at_start``."""

    line: Line
    what: str
    pid: int = -1
    at_start: bool = False


class Aborting(NamedTuple):
    """A process aborts after an error that another line explains."""

    line: Line


class Fragment(NamedTuple):
    """A part of a message about a failure. The rest is lost, so it says nothing but that."""

    line: Line


class IssuedAt(NamedTuple):
    """The line of user code that issued a collective which failed; NCCL's stack trace has it."""

    line: Line
    site: str


Fact = (
    Timeout
    | Progress
    | Mismatch
    | ModelsDiffer
    | SpawnedExit
    | BarrierFailed
    | BarrierReached
    | StoreBarrier
    | StoreWait
    | StoreMet
    | Stall
    | Stalled
    | Lagging
    | LauncherExit
    | WorkerExit
    | Killed
    | AttemptEnded
    | Restarted
    | Member
    | Enqueued
    | Trouble
    | Gone
    | DeviceFault
    | Fatal
    | Outside
    | Aborting
    | IssuedAt
    | Fragment
)


def number_in_group(fact: Fact) -> int:
    """Return the number in some process group of the rank that wrote a line; -1: not told.

    It is at most the rank in the job: the members of a group are in ascending order.
    """
    match fact:
        case Timeout() | DeviceFault():
            return fact.in_group
        case Progress():
            return fact.group.rank
        case BarrierFailed() | BarrierReached() | StoreBarrier():
            return fact.rank
        case Mismatch() if fact.by_rank:
            return fact.rank
    return -1
