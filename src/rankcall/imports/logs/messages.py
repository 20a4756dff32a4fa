"""The messages of torch and its launchers that say why a job failed, as facts."""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

from rankcall.imports.logs.lines import Line
from rankcall.ranks import MAX_RANKS
from rankcall.record import op_of_variant

_LARGEST = 1 << 62
_MOST_RANKS = 1 << 13  # of one message; a line is too short for many more


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
    """A rank's watchdog ended a collective. ``sizes`` are the elements in and out, if known."""

    line: Line
    seq: int  # 0: the version does not print it
    op: str
    sizes: tuple[int, ...]
    seconds: float


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
    """A rank says that another rank called something else. Ranks are those within the group."""

    line: Line
    rank: int
    own: Fingerprint
    other: int
    others: Fingerprint


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


class Lagging(NamedTuple):
    """Ranks of a group that TORCH_NCCL_DESYNC_DEBUG holds responsible for a time-out."""

    line: Line
    ranks: tuple[int, ...]
    joined: bool  # they have come to the collective and not left it


class LauncherExit(NamedTuple):
    """A launcher says how a process ended. ``task`` is mpirun's rank or srun's task."""

    line: Line
    tasks: tuple[int, ...]
    signal: int
    is_first: bool  # the launcher tells only of the process that ended first


class Killed(NamedTuple):
    """torchrun ended a worker because another one had failed."""

    line: Line
    pid: int


class AttemptEnded(NamedTuple):
    """A worker has failed, and torchrun ends the others; it may start all of them again."""

    line: Line
    agent: str  # which of torchrun's processes says so


class Restarted(NamedTuple):
    """torchrun starts all workers again: the lines before this one are of another attempt."""

    line: Line


class Trouble(NamedTuple):
    """A rank's connection to another rank broke, or a wait timed out. It does not say which."""

    line: Line


Fact = (
    Timeout
    | Progress
    | Mismatch
    | BarrierFailed
    | BarrierReached
    | StoreBarrier
    | Lagging
    | LauncherExit
    | Killed
    | AttemptEnded
    | Restarted
    | Trouble
)

_WORK = re.compile(
    r"Watchdog caught collective operation timeout: Work\w+\((.{0,2000}?)\) ran for (\d{1,15}) mill"
)
_FIELD = re.compile(r"(SeqNum|OpType|NumelIn|NumelOut)=(\w{1,40})")
_GROUP = re.compile(
    r"\[PG (?:ID )?(\d{1,9})(?: PG GUID ([^\s()\]]{1,200}))? ?(?:\(([^()]{0,200})\))? ?"
    r"Rank (\d{1,7})\]"
)
_NUMBER = r"(-?\d{1,18})"
_STATE = re.compile(
    rf"[Ll]ast enqueued (?:NCCL )?work: {_NUMBER}(?:, last started [^:,]*: {_NUMBER})?"
    rf", last completed (?:NCCL )?work: {_NUMBER}"
)
_FAILED = re.compile(
    rf"(?:watchdog at work|watchdog at work sequence id|Timeout at NCCL work): {_NUMBER}"
)
_FINGERPRINT = r"(?:CollectiveFingerPrint\()?(.{0,6000}?)"
_MISMATCH = re.compile(
    rf"Detected mismatch between collectives on ranks\. Rank (\d{{1,7}}) is running collective: "
    rf"{_FINGERPRINT}, ?but Rank (\d{{1,7}}) is running collective: {_FINGERPRINT}"
    r"(?:Collectives differ|$)"
)
_BARRIER_FAILED = re.compile(
    r"\[Rank (\d{1,7})\]: Ranks? ((?:\d{1,7}, ?)*\d{1,7}) failed to pass monitoredBarrier in "
    r"(\d{1,12}) ms"
)
_BARRIER_REACHED = re.compile(r"Rank (\d{1,7}) successfully reached monitoredBarrier")
_STORE_BARRIER = re.compile(
    r"store based barrier on rank:? (\d{1,7}).{0,80}?key: ?(\S{1,200}).{0,40}?"
    r"world_size=(\d{1,7}), (?:num_workers_joined|worker_count)=(\d{1,7})"
)
_NEVER_JOINED = re.compile(r"ranks \[([\d, ]{1,8000})\] are the lagging ranks")
_LAGGING = re.compile(
    r"\[([\d, ]{1,8000})\] (finished|joined but didn't finish) collective #(\d{1,18})"
)
_MPI_EXIT = re.compile(r"process rank (\d{1,7}) .{0,300}?exited on signal (\d{1,2})")
_SRUN_EXIT = re.compile(
    r"srun: error: \S{1,200}: tasks? ([\d,\-]{1,400}): "
    r"(Killed|Segmentation fault|Bus error|Aborted|Terminated|Exited with exit code \d{1,3})"
)
_ENDED = re.compile(
    r"(\d{1,9} \S{0,80}\.py:\d+\]|) ?failed \(exitcode: -?\d{1,10}\) local_rank: \d"
)
_CLOSING = re.compile(
    r"(?:Sending process (\d{1,9}) closing signal|Closing process (\d{1,9}) via signal) SIG"
    r"|Unable to shutdown process (\d{1,9}) via"
)
_SIGNALS = {
    "Killed": 9,
    "Segmentation fault": 11,
    "Bus error": 7,
    "Aborted": 6,
    "Terminated": 15,
}
TROUBLE = re.compile(
    r"[Cc]onnection (?:closed by|reset by|refused)|[Tt]imed out|[Tt]imeout|Broken pipe|Socket|NCCL"
    r"|[Gg]loo|c10d|[Mm]onitored ?[Bb]arrier|remote process|pair closure|SignalException"
    r"|Detected mismatch|expects same model|appears not to match|killed by signal|got signal"
    r"|process ?group|TCPStore|rendezvous|communicator"
)


def facts_of(line: Line) -> list[Fact]:
    """Return the facts in a line; an empty list if it has none of the messages above."""
    text = line.text
    facts: list[Fact] = []
    for words, read in _READERS:
        if words in text:
            fact = read(line)
            if fact is not None:
                facts.append(fact)
    return facts


def _timeout(line: Line) -> Fact | None:
    match = _WORK.search(line.text)
    if match is None:
        return None
    fields = dict(_FIELD.findall(match[1]))
    sizes = [fields[name] for name in ("NumelIn", "NumelOut") if name in fields]
    return Timeout(
        line,
        number(fields.get("SeqNum", "")),
        op_name(fields.get("OpType", "")),
        tuple(map(number, sizes)),
        number(match[2]) / 1e3,
    )


def _progress(line: Line) -> Fact | None:
    state = _STATE.search(line.text)
    group = _GROUP.search(line.text)
    if state is None or group is None:
        return None
    failed = _FAILED.search(line.text)
    name = GroupName(group[2] or group[1], group[3] or "", int(group[4]))
    return Progress(
        line,
        name,
        int(failed[1]) if failed else -1,
        int(state[1]),
        int(state[state.lastindex or 3]),
    )


def _mismatch(line: Line) -> Fact | None:
    match = _MISMATCH.search(line.text)
    if match is None:
        return None
    own, other = _fingerprint(match[2]), _fingerprint(match[4])
    return Mismatch(line, int(match[1]), own, int(match[3]), other)


def _fingerprint(text: str) -> Fingerprint:
    seq = re.search(r"SequenceNumber=(\d{1,18})", text)
    op = re.search(r"OpType=(\w{1,40})", text) or re.match(r"\s*([A-Z_]{1,40})\b", text)
    shape = re.search(r"TensorShape=\[([\d, ]{0,4000})\]", text)
    dtype = re.search(r"TensorDtypes=(\w{1,40})", text)
    return Fingerprint(
        int(seq[1]) if seq else -1,
        op_name(op[1]) if op else "",
        f"[{shape[1]}]" if shape else "",
        dtype[1] if dtype else "",
    )


def _barrier_failed(line: Line) -> Fact | None:
    match = _BARRIER_FAILED.search(line.text)
    if match is None:
        return None
    missing = ranks_in(match[2])
    return BarrierFailed(line, int(match[1]), missing, int(match[3]) / 1e3) if missing else None


def _barrier_reached(line: Line) -> Fact | None:
    match = _BARRIER_REACHED.search(line.text)
    return BarrierReached(line, int(match[1])) if match else None


def _store_barrier(line: Line) -> Fact | None:
    match = _STORE_BARRIER.search(line.text)
    if match is None:
        return None
    return StoreBarrier(line, int(match[1]), match[2].rstrip(","), int(match[3]), int(match[4]))


def _lagging(line: Line) -> Fact | None:
    match = _NEVER_JOINED.search(line.text)
    if match is not None:
        return Lagging(line, ranks_in(match[1]), False)
    match = _LAGGING.search(line.text)
    if match is None or (match[2] == "finished" and "didn't join" not in line.text):
        return None
    return Lagging(line, ranks_in(match[1]), match[2] != "finished")


def _launcher_exit(line: Line) -> Fact | None:
    match = _MPI_EXIT.search(line.text)
    if match is not None:
        return LauncherExit(line, (int(match[1]),), int(match[2]), True)
    match = _SRUN_EXIT.search(line.text)
    if match is None:
        return None
    tasks = ranks_in(match[1])
    return LauncherExit(line, tasks, _SIGNALS.get(match[2], 0), False) if tasks else None


def _killed(line: Line) -> Fact | None:
    match = _CLOSING.search(line.text)
    return Killed(line, int(match[match.lastindex or 1])) if match else None


def _attempt_ended(line: Line) -> Fact | None:
    match = _ENDED.search(line.text)
    return AttemptEnded(line, match[1].partition(" ")[0]) if match else None


def _restarted(line: Line) -> Fact | None:
    return Restarted(line)


def _trouble(line: Line) -> Fact | None:
    return Trouble(line)


_READERS = (
    ("Watchdog caught", _timeout),
    ("ast enqueued", _progress),
    ("Detected mismatch", _mismatch),
    ("failed to pass monitoredBarrier", _barrier_failed),
    ("reached monitoredBarrier", _barrier_reached),
    ("store based barrier", _store_barrier),
    ("are the lagging ranks", _lagging),
    (" collective #", _lagging),
    ("exited on signal", _launcher_exit),
    ("srun: error:", _launcher_exit),
    (" signal SIG", _killed),
    ("Unable to shutdown process", _killed),
    ("failed (exitcode: ", _attempt_ended),
    ("will restart worker group", _restarted),
    ("onnection closed by peer", _trouble),
    ("onnection reset by peer", _trouble),
    ("Timed out waiting", _trouble),
)


def number(text: str) -> int:
    """Return a whole number that is not negative; 0 for everything else."""
    return min(int(text), _LARGEST) if text.isascii() and text.isdigit() and len(text) < 19 else 0


@functools.lru_cache(maxsize=256)
def op_name(op_type: str) -> str:
    """Return our name of an op that torch writes as ``ALLREDUCE`` or ``_ALLGATHER_BASE``."""
    if not op_type:
        return ""
    known = op_of_variant(op_type.lower())
    return known if known != "unknown" else op_type.lower()


def ranks_in(text: str) -> tuple[int, ...]:
    """Return the ranks in ``4, 5`` or ``0-3,7``; nothing if they cannot be real."""
    ranks: set[int] = set()
    for part in text.replace(" ", "").split(","):
        first, _, last = part.partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            return ()
        begin, end = int(first), int(last or first)
        if not begin <= end < MAX_RANKS or end - begin + len(ranks) > _MOST_RANKS:
            return ()
        ranks.update(range(begin, end + 1))
    return tuple(sorted(ranks))
