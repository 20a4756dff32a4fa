"""Messages of several lines: tracebacks, torchrun's report, NCCL's stacks, Horovod's stalls.

In a log of several ranks, lines of others stand between them. So each of these takes the lines of
one stream only, one after the other.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rankcall.imports.logs.blame import blame_of, says_own
from rankcall.imports.logs.facts import Blame, IssuedAt, Stalled
from rankcall.imports.logs.prefixes import Line, Writer
from rankcall.ranks import MAX_RANKS
from rankcall.record import op_of_variant

__all__ = [
    "Failure",
    "MissingRanks",
    "Raised",
    "Report",
    "StackOfCollective",
    "Traceback",
    "has_frame",
    "is_part_of_frame",
]

_FRAME = re.compile(r'\s*File "(.{1,400})", line (\d{1,9}), in (.{1,200})')
_BROKEN_FRAME = re.compile(r'\s{0,8}File(?: "|$)')
_IN_FRAME = re.compile(r'  File "(?P<whole>[^"]{1,400}", line \d{1,9}, in \S)?')
_GATHERED = re.compile(r"most recent call last\): \(RANK (\d{1,7})\)")
_DETAILS = 1000  # characters
_REMOTE = re.compile(r"ray\.exceptions\.RayTaskError\(\w{1,80}\): ray::")
_LAST_ERROR = re.compile(r"^Last error: ?\n(.{1,400})", re.MULTILINE)
_CARETS = re.compile(r"[\s^~]+$")
_EXCEPTION = re.compile(r"([A-Za-z_][\w.]{0,200})(?:: (.*))?$")
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_BUILT_IN = re.compile(r"(?:Error|Exception|Interrupt|Exit|Warning|Iteration)$")
# Programs gather the errors of all ranks and raise them on each: "saving failed on rank 2: ...".
_ON_A_RANK = re.compile(
    r"(?:[Ff]ail|[Ee]rror|[Ee]xception|[Rr]aised|[Cc]rash|[Dd]ied|[Aa]bort|[Kk]illed)\w{0,8}"
    r"[\w ]{0,40}? (?:on|in|of|from|at|by) (?:\w{1,20} )?[Rr]ank ?(\d{1,7})\b"
    r"|\b[Rr]ank (\d{1,7}) (?:has |had |was |is )?"
    r"(?:failed|crashed|died|raised|exited|errored|aborted|killed|dead|lost|reported)\b"
)
_MOST_OF_MESSAGE = 400  # characters that are searched for it
_IN_C10D = re.compile(r"/torch/distributed/(?:distributed_c10d|c10d_logger)\.py$")
_LIBRARY = re.compile(r"/(?:torch|rankcall)/|^<|/site-packages/|/dist-packages/|/lib/python")
# Frames of the programs whose failures this package is about. A traceback without any of them may
# be of any Python program: of pip, of a test, of an unrelated server.
_OF_A_JOB = re.compile(
    r"/(?:torch|torch_npu|deepspeed|accelerate|transformers|lightning|pytorch_lightning|vllm|sglang"
    r"|ray|composer|megatron|rankcall)/"
)
_BLOCK = (
    re.compile(r"\s*\[(\d{1,7})\]:\s*$"),
    re.compile(r"\s*time\s*: (\S+)"),
    re.compile(r"\s*host\s*: (\S{1,300})"),
    re.compile(r"\s*rank\s*: (\d{1,7}) \(local_rank: \d+\)"),
    re.compile(r"\s*exitcode\s*: (-?\d{1,10}) \(pid: (\d{1,10})\)"),
    re.compile(r"\s*error_file\s*: "),
    re.compile(r"\s*traceback\s*: (.*)"),
)
_CODE = 5  # lines of a block up to the one with the exit code
_OF_LAUNCHERS = (
    "ChildFailedError",
    "SignalException",
    "ProcessRaisedException",
    "ProcessExitedException",
)
# ``!`` marks ranks for which Horovod ends the job. After six ops, three dots stand for the others.
# A prefix may stand before the line that a log is too short to learn.
_MISSING = re.compile(r"(?:(?:^|[\s>:])(\d{1,7})!?: |^)\[([^\[\]]{1,16000}?)( \.\.\.)?\]$")
_STACK_LINE = re.compile(r"\s*#\d{1,4} (\S{1,200}) from (\S{1,400}):(\d{1,9})")


def has_frame(text: str) -> bool:
    """Whether a line has a frame of a traceback, with the name of its function or a part of it."""
    frame = _IN_FRAME.search(text)
    return frame is not None and frame["whole"] is not None


def is_part_of_frame(text: str) -> bool:
    """Whether a line has the beginning of a frame, without the name of its function."""
    return _IN_FRAME.search(text) is not None and not has_frame(text)


@dataclass
class Raised:
    """An exception that ended a program, or that its log shows.

    Attributes:
        line: The line that names the exception.
        kind: The exception's type.
        site: The nearest frame outside torch, as ``file:line``.
        op: The collective that raised it; empty if it came from elsewhere.
        blame: Whose fault it is, as far as its words and its place tell.
        unhandled: Whether it ended its program.
        led_on: Whether another exception came of it, which stands for both.
        of_a_job: Whether it comes from a program that trains or serves, as far as its frames tell.
        of_rank: The rank whose exception it is, if another one wrote it: torch's checkpoints gather
            the exceptions of a group, and every member writes them. -1: the writer's own.
        of_a_script: Whether its frames begin with those of a script, so that nothing caught it.
        details: What the message says in the lines below the first.
    """

    line: Line
    kind: str
    message: str
    site: str = ""
    op: str = ""
    blame: Blame = "own"
    unhandled: bool = False
    led_on: bool = False
    of_a_job: bool = True
    of_rank: int = -1
    of_a_script: bool = False
    details: str = ""

    @property
    def said(self) -> str:
        """The message; of NCCL's exceptions, what failed last, which the message does not say."""
        last = _LAST_ERROR.search(self.details)
        return last[1].strip() if last else self.message

    @property
    def ended_program(self) -> bool:
        """Whether its program ended by it, whatever program that is: its log ends with it."""
        return self.unhandled and self.of_a_script

    @property
    def follows(self) -> bool:
        """Whether it follows from the end or the absence of another rank, or may do so."""
        return self.blame != "own"

    def is_about_another(self, rank: int) -> bool:
        """Whether it says that it comes from other ranks than the one that raised it."""
        matches = _ON_A_RANK.finditer(self.message[:_MOST_OF_MESSAGE])
        named = {int(match[1] or match[2]) for match in matches}
        return bool(named) and rank not in named

    @property
    def by_launcher(self) -> bool:
        """Whether a launcher raised it because of its workers: it is no rank's exception."""
        return self.kind.endswith(_OF_LAUNCHERS)


class Traceback:
    """One traceback. ``raised`` is its exception, once the line that names it has come."""

    def __init__(self, line: Line, chained: Traceback | None, *, ends_program: bool) -> None:
        # torch's own hook writes the rank before each line of it.
        self._unhandled = line.writer.by_torch or ends_program
        self._follows = chained is not None and (chained.raised is None or chained.raised.follows)
        self.cause = chained.raised if chained is not None else None
        self._frames: list[tuple[str, str, str]] = []
        self._in_frames = self._source_follows = True
        self._source = ""  # of the last frame
        self._broken = ""  # a frame that is wrapped: then the message may be cut off, too
        self.raised: Raised | None = None
        self.chains = False  # it says that another exception came of it
        gathered = _GATHERED.search(line.text)
        self._of_rank = int(gathered[1]) if gathered else -1

    def take(self, line: Line) -> Raised | None:
        """Take the next line of the same stream; return the exception if the line names it."""
        text = line.text
        if not self._in_frames:
            self.chains = self.chains or text.startswith(_CHAINED)
            raised = self.raised
            if raised is not None and not self.chains and len(raised.details) < _DETAILS:
                raised.details += f"\n{text[:_DETAILS]}"
            if raised is not None and not self.chains and raised.blame == "own":
                # The message goes on in this line: ``Last error:`` of NCCL, for example.
                own = blame_of(f"{raised.message} {text}", raised.kind)
                raised.blame = own if own != "own" else raised.blame
            return None
        frame = _FRAME.match(text)
        if frame:
            self._frames.append((frame[1], frame[2], frame[3].strip()))
            self._source_follows, self._source = True, ""
            return None
        if _BROKEN_FRAME.match(text) and not _OF_A_JOB.search(self._broken):
            self._broken = text
        match = _EXCEPTION.match(text)
        # A program that wraps at spaces drops those at the beginning of a frame's source line.
        is_source = self._source_follows and match is None
        if self._source_follows:
            self._source = text.strip()
        self._source_follows = False
        if not text or text[0].isspace() or is_source or _CARETS.match(text):
            return None
        if _REMOTE.match(text):
            # Ray writes the traceback of its worker below, and after it the exception itself.
            self._frames.clear()
            return None
        self._in_frames = False
        if match is None or not self._frames:
            return None
        self.raised = self._exception(line, match[1], match[2] or "")
        return self.raised

    def _exception(self, line: Line, kind: str, message: str) -> Raised:
        frames = reversed(self._frames)
        site = next((f"{file}:{at}" for file, at, _ in frames if not _LIBRARY.search(file)), "")
        inside = [name for file, _, name in self._frames if _IN_C10D.search(file)]
        last = self._frames[-1][0]
        blame = blame_of(message, kind)
        unknown_type = not (_BUILT_IN.search(kind) or "." in kind)
        # Python code of torch that raises has found something on this rank. What C++ raises there
        # is about others.
        is_check = self._source.startswith("raise ")
        in_torch = kind.endswith("RuntimeError") and "/torch/distributed/" in last and not is_check
        is_cut = bool(self._broken) and not says_own(message, kind)
        if blame == "own" and (self._follows or unknown_type or in_torch or is_cut):
            blame = "victim"
        op = next((name for name in reversed(inside) if name != "wrapper"), "")
        known_op = op if op_of_variant(op.replace("all_", "all")) != "unknown" else ""
        files = [self._broken, *(file for file, _, _ in self._frames)]
        of_a_job = any(map(_OF_A_JOB.search, files))
        return Raised(
            line,
            kind,
            message,
            site,
            known_op,
            blame,
            self._unhandled,
            of_a_job=of_a_job,
            of_rank=self._of_rank,
            of_a_script=self._frames[0][2] == "<module>",
        )


@dataclass
class Failure:
    """One worker in torchrun's report."""

    line: Line
    rank: int
    host: str
    time: str
    code: int
    pid: int
    first: bool  # it is the failure that torchrun saw first on its node
    raised: Raised | None = None  # if the program recorded its exception for torchrun


class Report:
    """torchrun's report of the workers that failed: blocks of seven lines with fixed names."""

    def __init__(self, failures: list[Failure]) -> None:
        self._failures = failures
        self._writer: Writer | None = None
        self._first = False
        self._line = Line(Writer(0), 0, "")  # the one with the exit code
        self._block: list[tuple[str, ...]] = []
        self._failure: Failure | None = None

    def take(self, line: Line) -> bool:
        """Take a line; return whether it belongs to a report."""
        text = line.text
        if text.startswith(("Failures:", "Root Cause (first observed failure)")):
            self._writer, self._first = line.writer, text.startswith("Root")
            self._block, self._failure = [], None
            return True
        if self._writer is None or line.writer != self._writer:
            return False
        if text.startswith(("=====", "-----")):
            self._writer = self._writer if text[0] == "-" else None
            self._block, self._failure = [], None
            return True
        head = _BLOCK[0].match(text)
        if head:
            self._block, self._failure = [head.groups()], None
            return True
        if self._failure is not None:
            self._message(line)
            return True
        if not self._block:
            return True
        match = _BLOCK[len(self._block)].match(text)
        self._block = [*self._block, match.groups()] if match else []
        if len(self._block) == _CODE:
            self._line = line
        if len(self._block) == len(_BLOCK):
            self._add()
        return True

    def _add(self) -> None:
        _, (time,), (host,), (rank,), (code, pid), _, _ = self._block
        self._block = []
        if int(rank) >= MAX_RANKS:
            return
        self._failure = Failure(self._line, int(rank), host, time, int(code), int(pid), self._first)
        self._failures.append(self._failure)

    def _message(self, line: Line) -> None:
        """Take a line of the exception that the worker recorded; the last one names it."""
        text = line.text[2:] if line.text.startswith("  ") else line.text
        match = _EXCEPTION.match(text)
        failure = self._failure
        if failure is None or match is None or not _BUILT_IN.search(match[1]):
            return
        message = match[2] or ""
        blame = blame_of(message, match[1])
        if failure.raised is not None and failure.raised.follows:  # a chain of exceptions
            blame = failure.raised.blame
        failure.raised = Raised(line, match[1], message, blame=blame, unhandled=True)


class StackOfCollective:
    """NCCL's stack trace of a collective that failed: the user's line is in it.

    torch writes the stack as one message, so that other ranks' lines seldom stand in between.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    def take(self, line: Line) -> IssuedAt | None:
        """Take the next line; return the user's line once it has come."""
        match = _STACK_LINE.match(line.text)
        if match is None or _LIBRARY.search(match[2]):
            return None
        return IssuedAt(line._replace(writer=self._writer), f"{match[2]}:{match[3]}")


class MissingRanks:
    """Horovod's list of the ranks that have not submitted an op: ``3: [allreduce.a]`` for each."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self.is_over = False

    def take(self, line: Line) -> Stalled | None:
        """Take the next line; return what it says of a rank, if it belongs to the list."""
        task = line.writer.task
        # Without another prefix before it, the rank looks like the number of a task of srun.
        as_task = f"{self._writer.stream} {task}:".strip()
        is_own = line.writer.stream == self._writer.stream
        if not is_own and line.writer.stream != as_task:
            return None
        match = _MISSING.search(line.text)
        rank = -1
        if match is not None:
            rank = int(match[1] or -1) if is_own else task
        if match is None or not 0 <= rank < MAX_RANKS:
            self.is_over = is_own
            return None
        return Stalled(line, (rank,), tuple(match[2].split(", ")), more=match[3] is not None)
