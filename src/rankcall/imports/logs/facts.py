"""The facts in the logs of a job that failed, and the rank that wrote each of them.

Two messages have several lines, and in a log of several ranks other lines stand between them: the
traceback of an exception, and torchrun's report of the workers that failed. Both are put together
here, separately for each source.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rankcall.errors import CorruptRunError
from rankcall.imports.logs.lines import Line, Log, Source, logs_of
from rankcall.imports.logs.messages import (
    TROUBLE,
    AttemptEnded,
    BarrierFailed,
    Fact,
    Lagging,
    LauncherExit,
    Restarted,
    facts_of,
)
from rankcall.ranks import MAX_RANKS
from rankcall.record import op_of_variant

__all__ = ["Failure", "LogFacts", "Raised", "read_logs"]

_FRAME = re.compile(r'\s*File "(.{1,400})", line (\d{1,9}), in (.{1,200})')
_EXCEPTION = re.compile(r"([A-Za-z_][\w.]{0,200})(?:: (.*))?$")
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_BUILT_IN = re.compile(r"(?:Error|Exception|Interrupt|Exit|Warning|Iteration)$")
# Exceptions that follow from the end of another process; their message does not matter.
_FOLLOWS = re.compile(
    r"(?:^|\.)(?:Dist\w*Error|Connection\w*Error|BrokenPipeError|EOFError|TimeoutError"
    r"|KeyboardInterrupt|SystemExit|SignalException|ChildFailedError|Rendezvous\w*)$"
)
_IN_TORCH = re.compile(r"/(?:torch|rankcall)/|^<")
_IN_C10D = re.compile(r"/torch/distributed/(?:distributed_c10d|c10d_logger)\.py$")
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
_MOST_RANKS = 1 << 22  # in all messages that list ranks


@dataclass
class Raised:
    """An exception that ended a program, or that its log shows.

    Attributes:
        line: The line that names the exception.
        kind: The exception's type.
        site: The nearest frame outside torch, as ``file:line``.
        op: The collective that raised it; empty if it came from elsewhere.
        follows: Whether it follows from the end or the absence of another rank, or may do so.
        unhandled: Whether torch's own hook wrote it, so that it ended the program.
        led_on: Whether another exception came of it, which stands for both.
    """

    line: Line
    kind: str
    message: str
    site: str = ""
    op: str = ""
    follows: bool = False
    unhandled: bool = False
    led_on: bool = False


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


@dataclass
class LogFacts:
    """All that the logs of a job say about its failure."""

    logs: list[Log]
    facts: list[Fact] = field(default_factory=list)
    raised: list[Raised] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    size: int = 0  # ranks in all messages that list some
    # The ranks that torch put before lines, by log and launcher's prefix.
    ranks: dict[tuple[int, str], set[int]] = field(default_factory=lambda: defaultdict(set))

    def rank_of(self, source: Source) -> int:
        """Return the rank of the process that wrote a line, or -1 if the log does not tell.

        torch's own prefix decides. Without it, a launcher's prefix or a file's name does, unless
        lines with both say otherwise: torchrun's prefix has a rank within a node, and a task of
        srun may be a launcher of several ranks.
        """
        if source.rank >= 0:
            return source.rank
        if source.stream:
            known = self.ranks.get((source.file, source.stream), set())
            if source.task < 0 or known:
                return next(iter(known)) if len(known) == 1 else -1
            return source.task if self.tasks_are_ranks else -1
        named = self.logs[source.file].named_rank
        return named if self.ranks.get((source.file, ""), set()) <= {named} else -1

    @functools.cached_property
    def tasks_are_ranks(self) -> bool:
        """Whether srun's or mpirun's numbers are ranks, as far as the log tells."""
        if self.failures:
            return False  # the tasks are torchrun's, one on each node
        return all(
            {int(number) for number in re.findall(r"\d+", stream)[-1:]} >= ranks
            for (_, stream), ranks in self.ranks.items()
            if stream and not stream.startswith("[d")
        )

    def quote(self, line: Line) -> str:
        """Return a line as evidence: its log, its number, and its text, shortened."""
        text = " ".join(line.text.split())
        text = text if len(text) <= _SHOWN else text[:_SHOWN].rstrip() + "…"
        rank = f"[rank{line.source.rank}] " if line.source.rank >= 0 else ""
        return f"{self.logs[line.source.file].name}:{line.number}: {rank}{text}"


_SHOWN = 170


def read_logs(paths: Sequence[Path]) -> LogFacts:
    """Read the logs of one job, and return what they say; a folder stands for the files in it.

    Raises:
        CorruptRunError: No log can be read.
    """
    logs = logs_of(paths)
    log_facts = LogFacts(logs)
    unreadable = 0
    for log in logs:
        reader = _Reader(log_facts, log)
        try:
            for line in log.lines():
                reader.read(line)
                if log_facts.size > _MOST_RANKS:
                    log.cut = True
                    break
        except CorruptRunError as error:
            log_facts.problems.append(str(error))
            unreadable += 1
        reader.end()
        if log.cut:
            log_facts.problems.append(
                f"{log.name}: not read beyond line {log.count:,}: too many lines about failures"
            )
    if unreadable == len(logs):
        raise CorruptRunError(
            log_facts.problems[0] if log_facts.problems else "there is no log to read"
        )
    return log_facts


class _Reader:
    """Reads the lines of one log, in order."""

    def __init__(self, log_facts: LogFacts, log: Log) -> None:
        self._found, self._log = log_facts, log
        self._tracebacks: dict[Source, _Traceback] = {}
        self._report = _Report(log_facts)
        self._ended: dict[str, int] = {}  # by agent: the line at which its last attempt ended

    def read(self, line: Line) -> None:
        """Take one line."""
        source, log_facts = line.source, self._found
        if source.rank >= 0:
            log_facts.ranks[source.file, source.stream].add(source.rank)
        for fact in facts_of(line):
            if isinstance(fact, Restarted):
                self._forget(line.number)
            if isinstance(fact, AttemptEnded):
                # If an agent says so twice, it started all workers again in between.
                self._forget(self._ended.get(fact.agent, 0))
                self._ended[fact.agent] = line.number
            log_facts.facts.append(fact)
            if isinstance(fact, (BarrierFailed, Lagging, LauncherExit)):
                log_facts.size += len(fact[2] if isinstance(fact, BarrierFailed) else fact[1])
        if self._report.take(line):
            return
        before = self._tracebacks.get(source)
        if line.text.startswith("Traceback (most recent call last)"):
            chained = before if before is not None and before.chains else None
            self._tracebacks[source] = _Traceback(line, chained)
            return
        raised = before.take(line) if before is not None else None
        if before is not None and raised is not None:
            if before.cause is not None:
                before.cause.led_on = True
            log_facts.raised.append(raised)

    def end(self) -> None:
        """Note which exception is at the end of a log of one rank: it ended its program."""
        for raised in self._found.raised:
            source = raised.line.source
            alone = not source.stream and source.rank < 0
            if source.file == self._log.index and alone:
                raised.unhandled = raised.line.number > self._log.count - _LAST

    def _forget(self, until: int) -> None:
        """Drop what an earlier attempt wrote into this log, up to a line."""
        log_facts, file = self._found, self._log.index

        def is_newer(line: Line) -> bool:
            return line.source.file != file or line.number > until

        if until:
            log_facts.facts = [fact for fact in log_facts.facts if is_newer(fact.line)]
            log_facts.raised = [raised for raised in log_facts.raised if is_newer(raised.line)]


_LAST = 5  # lines after the exception that ended a program


class _Traceback:
    """One traceback. Its lines arrive one after the other."""

    def __init__(self, line: Line, chained: _Traceback | None) -> None:
        # torch's own hook writes the rank before each line of it.
        self._unhandled = line.source.rank >= 0
        self._follows = chained is not None and (chained.raised is None or chained.raised.follows)
        self.cause = chained.raised if chained is not None else None
        self._frames: list[tuple[str, str, str]] = []
        self._in_frames = True
        self.raised: Raised | None = None
        self.chains = False  # it says that another exception came of it

    def take(self, line: Line) -> Raised | None:
        """Take the next line of the same source; return the exception if the line names it."""
        text = line.text
        if not self._in_frames:
            self.chains = self.chains or text.startswith(_CHAINED)
            if self.raised is not None and not self.chains and TROUBLE.search(text):
                self.raised.follows = True  # the message goes on in this line
            return None
        if not text or text[0].isspace():
            frame = _FRAME.match(text)
            if frame:
                self._frames.append((frame[1], frame[2], frame[3].strip()))
            return None
        self._in_frames = False
        match = _EXCEPTION.match(text)
        if match is None or not self._frames:
            return None
        self.raised = self._exception(line, match[1], match[2] or "")
        return self.raised

    def _exception(self, line: Line, kind: str, message: str) -> Raised:
        site = next(
            (f"{file}:{at}" for file, at, _ in reversed(self._frames) if not _is_torch(file)), ""
        )
        inside = [name for file, _, name in self._frames if _IN_C10D.search(file)]
        last = self._frames[-1][0]
        follows = (
            self._follows
            or not (_BUILT_IN.search(kind) or "." in kind)
            or bool(_FOLLOWS.search(kind) or TROUBLE.search(message))
            or (kind.endswith("RuntimeError") and "/torch/distributed/" in last)
        )
        op = next((name for name in reversed(inside) if name != "wrapper"), "")
        known_op = op if op_of_variant(op.replace("all_", "all")) != "unknown" else ""
        return Raised(line, kind, message, site, known_op, follows, self._unhandled)


def _is_torch(file: str) -> bool:
    return bool(_IN_TORCH.search(file)) or "/site-packages/" in file or "/lib/python" in file


class _Report:
    """torchrun's report of the workers that failed: blocks of seven lines with fixed names."""

    def __init__(self, log_facts: LogFacts) -> None:
        self._found = log_facts
        self._source: Source | None = None
        self._first = False
        self._line = Line(Source(0, ""), 0, "")  # the one with the exit code
        self._block: list[tuple[str, ...]] = []
        self._failure: Failure | None = None

    def take(self, line: Line) -> bool:
        """Take a line; return whether it belongs to a report."""
        text = line.text
        if text.startswith(("Failures:", "Root Cause (first observed failure)")):
            self._source, self._first = line.source, text.startswith("Root")
            self._block, self._failure = [], None
            return True
        if self._source is None or line.source != self._source:
            return False
        if text.startswith(("=====", "-----")):
            self._source = self._source if text[0] == "-" else None
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
        self._found.failures.append(self._failure)

    def _message(self, line: Line) -> None:
        """Take a line of the exception that the worker recorded; the last one names it."""
        text = line.text[2:] if line.text.startswith("  ") else line.text
        match = _EXCEPTION.match(text)
        failure = self._failure
        if failure is None or match is None or not _BUILT_IN.search(match[1]):
            return
        message = match[2] or ""
        follows = bool(_FOLLOWS.search(match[1]) or TROUBLE.search(message))
        if failure.raised is not None:
            follows = follows or failure.raised.follows  # a chain of exceptions
        failure.raised = Raised(line, match[1], message, follows=follows, unhandled=True)
