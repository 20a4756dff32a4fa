"""The lines of a log that can tell why a job failed: from the words of a line to a fact.

docs/log-messages.md says in which versions each wording was seen. Ranks in a message are often
those within a process group, so each fact keeps the source of its line: ``log_facts`` finds out
which process wrote it, and the analysis decides which ranks can be believed.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import io
import re
import stat
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple, cast

import zstandard

from rankcall.errors import CorruptRun
from rankcall.process import clean
from rankcall.record import MAX_RANKS, op_of_variant

# The lines of a log that can tell why a job failed, and which rank wrote each of them.
#
# A log can have gigabytes, and few of its lines are about a failure. So this module reads a log in
# blocks, and parses only lines with one of ``_MARKERS``. If a message has several lines, it also
# parses the lines after that. It never holds more than two blocks in memory.


__all__ = ["STDIN", "Line", "Log", "Source", "logs_of"]

STDIN = Path("-")
_BLOCK = 1 << 22
_MOST_BYTES = 1 << 36  # of one log; a small compressed file can hold any number
_MOST_LINES = 150_000  # of one log that are parsed; 1,024 ranks write about 10,000
_MOST_LINE = 1 << 14  # bytes of a line; the longest message lists the shapes of a collective
_TRACEBACK, _SUMMARY, _REPORT = 300, 2000, 40  # lines of messages that have several

# A line of interest contains one of these; so many of the lines after it belong to the message.
# Each is searched for separately: that takes about 0.3 s for 1 GB, a regular expression 16 s.
_MARKERS = (
    (b"Watchdog caught", 0),  # NCCL's watchdog
    (b"ast enqueued", 0),  # the state of a group, in all versions
    (b"lagging", _REPORT),  # TORCH_NCCL_DESYNC_DEBUG
    (b"Detected mismatch between", 0),  # TORCH_DISTRIBUTED_DEBUG=DETAIL
    (b"monitoredBarrier", 0),
    (b"store based barrier", 0),
    (b"onnection closed by peer", 0),  # Gloo
    (b"onnection reset by peer", 0),
    (b"Timed out waiting", 0),
    (b"Traceback (most recent call last)", _TRACEBACK),
    (b"Failures:", _SUMMARY),  # torchrun's report
    (b"Root Cause (first observed", _SUMMARY),
    (b" signal SIG", 0),  # a worker that torchrun ends
    (b"Unable to shutdown process", 0),
    (b"failed (exitcode: ", 0),
    (b"will restart worker group", 0),
    (b"exited on signal", 0),  # mpirun
    (b"srun: error:", 0),
)

_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# torch writes ``[rank3]:`` before its messages; some versions garble the bracket.
_RANK = re.compile(r"\[rank(\d{1,7})\[?\]:\s?")
_MPI = re.compile(r"\[(?:\d+,)?(\d{1,7})\]<std(?:err|out)>:\s?")
_TORCHRUN = re.compile(r"\[([A-Za-z_][A-Za-z_\-]*\d+)\]:\s?")
_SRUN = re.compile(r"\s*(\d{1,7}):(?: |$)")
_NAMED_RANK = re.compile(r"rank[_\-.]?(\d{1,7})(?!\d)", re.IGNORECASE)
_FAR = 200  # characters before ``[rank3]:``: a time, a pod, the name of an actor


class Source(NamedTuple):
    """The writer of a line, as far as its prefix and its file tell.

    Attributes:
        file: The index of the log.
        stream: The launcher's prefix; empty without one.
        rank: The rank that torch put before the line, or -1.
        task: The number that srun or mpirun put before it, or -1.
    """

    file: int
    stream: str
    rank: int = -1
    task: int = -1


class Line(NamedTuple):
    """A line of interest, without its prefixes and colours."""

    source: Source
    number: int  # in its log, from 1
    text: str


class Log:
    """One log: a file, which may be compressed, or stdin."""

    def __init__(self, path: Path, index: int = 0) -> None:
        self.path, self.index = path, index
        self.count = 0  # lines read so far
        self.cut = False  # it has more than this module looks at
        self.looked_at = 0

    @property
    def name(self) -> str:
        """The name by which messages call it."""
        return "stdin" if self.path == STDIN else clean(self.path.name)

    @property
    def named_rank(self) -> int:
        """The rank in the file's name, or -1."""
        numbers = _NAMED_RANK.findall(self.path.name)
        return int(numbers[-1]) if numbers and int(numbers[-1]) < MAX_RANKS else -1

    def lines(self) -> Iterator[Line]:
        """Yield the lines of interest.

        Raises:
            CorruptRun: The log cannot be read, or is no text.
        """
        try:
            with _opened(self.path) as file:
                for number, raw in self._of_interest(file):
                    self.looked_at += 1
                    if self.looked_at > _MOST_LINES:
                        self.cut = True
                        return
                    yield _line(raw, number, self.index)
        except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise CorruptRun(f"{clean(str(self.path))}: cannot be read: {clean(why)}") from error

    def _of_interest(self, file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
        """Yield lines with their numbers; ``left`` counts the lines that a message still has."""
        left, size = 0, 0
        for block in _blocks(file):
            size += len(block)
            if size > _MOST_BYTES:
                self.cut = True
                return
            at = 0
            for start, follow in _hits(block):
                while left and at < start:
                    end = _end(block, at)
                    self.count += 1
                    left -= 1
                    yield self.count, block[at : min(end, at + _MOST_LINE)]
                    at = end
                if start < at:  # a second marker in a line, or a line of a message
                    left = max(left, follow)
                    continue
                self.count += block.count(b"\n", at, start) + 1
                at = _end(block, start)
                left = max(left, follow)
                yield self.count, block[start : min(at, start + _MOST_LINE)]
            while left and at < len(block):
                end = _end(block, at)
                self.count += 1
                left -= 1
                yield self.count, block[at : min(end, at + _MOST_LINE)]
                at = end
            self.count += block.count(b"\n", at)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a log; the first bytes tell whether it is compressed."""
    if path == STDIN:
        yield sys.stdin.buffer
        return
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
        raise CorruptRun(f"{clean(str(path))}: not a file")
    with path.open("rb") as file:
        head = file.peek(4)[:4] if isinstance(file, io.BufferedReader) else b""
        if head[:2] == b"\x1f\x8b":
            with gzip.open(file) as unpacked:
                yield cast(IO[bytes], unpacked)
        elif head == b"\x28\xb5\x2f\xfd":
            with zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True) as inner:
                yield cast(IO[bytes], inner)
        else:
            yield file


def _blocks(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the bytes of a log in blocks that end with a line; a line longer than a block is cut.

    A carriage return alone begins a line again, as progress bars do. It is left in the line.
    """
    rest = b""
    while block := file.read(_BLOCK):
        cut = block.rfind(b"\n") + 1
        if not cut and len(rest) < _BLOCK:
            rest += block
            continue
        yield rest + block[:cut] if cut else rest
        rest = block[cut:]
    if rest:
        yield rest


def _hits(block: bytes) -> list[tuple[int, int]]:
    """Return where lines with a marker begin, in order, and how many lines belong to each."""
    hits = []
    for marker, follow in _MARKERS:
        at = block.find(marker)
        while at >= 0:
            hits.append((block.rfind(b"\n", 0, at) + 1, follow))
            at = block.find(marker, _end(block, at))
            if len(hits) > _MOST_LINES:
                break
    return sorted(hits)


def _end(block: bytes, at: int) -> int:
    """Return where the line after the one at ``at`` begins."""
    return (block.find(b"\n", at) + 1) or len(block)


def _line(raw: bytes, number: int, file: int) -> Line:
    text = raw.decode("utf-8", "replace").rstrip("\r\n")
    # A progress bar and a message can share a line.
    text = text.rpartition("\r")[2] if "\r" in text else text
    text = _COLOUR.sub("", text) if "\x1b" in text else text
    stream, task = "", -1
    for pattern in (_MPI, _TORCHRUN, _SRUN):
        match = pattern.match(text)
        if match and not _RANK.match(text):
            stream = match[0].strip()
            task = int(match[1]) if match[1].isdigit() else -1
            text = text[match.end() :]
            break
    rank = -1
    match = _RANK.search(text[:_FAR])
    if match:
        rank, text = int(match[1]), text[match.end() :]
    source = Source(file, stream, rank if rank < MAX_RANKS else -1, task)
    return Line(source, number, text)


def logs_of(paths: Sequence[Path]) -> list[Log]:
    """Return the logs of some files; a folder stands for the files in it."""
    files: dict[Path, None] = {}
    for path in paths:
        if path != STDIN and path.is_dir():
            files.update((file, None) for file in sorted(path.rglob("*")) if file.is_file())
        else:
            files[path] = None
    return [Log(path, index) for index, path in enumerate(files)]


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
