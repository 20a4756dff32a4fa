"""Read the logs of one job: rejoin wrapped lines, collect the facts, find out who wrote each.

The result says nothing about causes. ``rankcall.analysis.logs`` judges it.
"""

from __future__ import annotations

import functools
import re
import signal
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rankcall.errors import CorruptRunError
from rankcall.imports.logs.facts import (
    Aborting,
    AttemptEnded,
    BarrierFailed,
    DeviceFault,
    Enqueued,
    Fact,
    Fragment,
    Killed,
    Lagging,
    LauncherExit,
    Member,
    Outside,
    Restarted,
    StoreMet,
    StoreWait,
    Trouble,
    WorkerExit,
    number_in_group,
)
from rankcall.imports.logs.prefixes import Line, Prefixes, Step, Writer
from rankcall.imports.logs.reading import Log, RawLine, logs_of
from rankcall.imports.logs.sources import facts_of, markers, repeated
from rankcall.imports.logs.tracebacks import (
    Failure,
    MissingRanks,
    Raised,
    Report,
    StackOfCollective,
    Traceback,
)
from rankcall.imports.logs.wrapping import Wrapping, wrapping_of
from rankcall.printable import clean
from rankcall.problems import Problem, ProblemKind
from rankcall.ranks import MAX_RANKS

__all__ = ["LogFacts", "read_logs"]

_MOST_RANKS = 1 << 22  # in all messages that list ranks
_TRACEBACK = "Traceback (most recent call last)"
# For the messages of all logs together, beside the search for their lines. A line of 16 KiB that
# was made to be slow takes up to 0.4 s, so the lines that are kept could take half an hour.
_MOST_SECONDS = 60.0
_MOST_NEWEST = 1 << 15  # lines of all logs together that only tell what is enqueued next
_SAMPLE = 200  # excerpts from which prefixes and wrapping are learnt
_LAST = 5  # lines after the exception that ended a program
_NEAR = 5  # lines between "failed to start" and its traceback
_SHOWN = 170  # characters of a quoted line
# Python's multiprocessing writes it before the traceback that ends a child.
_CHILD = re.compile(r"Process [\w:.-]{1,80}:$")
# CANN writes what failed in the line below, which has no rank.
_INNER_ERROR = "9999: Inner Error!"
_QUIET = (Restarted, Member, Enqueued, Killed)  # say nothing of a failure
_CANCELLED = re.compile(r"STEP \S{1,60} ON \S{1,200} CANCELLED AT \S{1,40}$")  # for no reason
# Words of a command that starts several ranks on a node, and of what such programs write first.
_LAUNCHERS = (
    *("torchrun", "torch.distributed.run", "torch.distributed.launch", "torch/distributed/elastic"),
    *("accelerate launch", "deepspeed.launcher", "environment variable for each process"),
)
_NAMED_RANK = re.compile(r"rank[_\-.]?(\d{1,7})(?!\d)", re.IGNORECASE)
# composer writes what a rank wrote after that rank has ended, between two such lines.
_SECTION = re.compile(r"-{5,} ?(Begin|End) global rank (\d{1,7}) (?:STDERR|STDOUT) ?-{5,}")
_TENSOR_RANK = re.compile(r"TP(\d{1,7})(?:_EP\d{1,7})?$")


@dataclass
class LogFacts:
    """All that the logs of a job say about its failure."""

    logs: list[Log]
    facts: list[Fact] = field(default_factory=list)
    raised: list[Raised] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    size: int = 0  # ranks in all messages that list some
    # The ranks that torch put before lines, and the task of srun or mpirun, by log and stream.
    ranks: dict[tuple[int, str], set[int]] = field(default_factory=lambda: defaultdict(set))
    tasks: dict[tuple[int, str], int] = field(default_factory=dict)

    def rank_of(self, writer: Writer) -> int:
        """Return the rank of the process that wrote a line, or -1 if the log does not tell.

        torch's own prefix decides. Without it, the pid that a framework wrote does, if another line
        ties it to a rank; then a launcher's prefix or a file's name, unless lines with both say
        otherwise: torchrun's prefix has a rank within a node, and a task of srun may be a launcher
        of several ranks.
        """
        if writer.rank >= 0:
            return writer.rank
        known = self.rank_of_process(writer.host, writer.pid)
        if known >= 0:
            return known
        if writer.worker:
            return self._rank_of_worker(writer.worker)
        if writer.stream:
            ranks = self.ranks.get((writer.file, writer.stream), set())
            if writer.alone and (writer.task < 0 or ranks):
                return next(iter(ranks)) if len(ranks) == 1 else -1
            # The lines of a pod, a node or a task may be of several ranks, of which only one has
            # put its rank before a line.
            is_rank = writer.task >= 0 and self._has_other_tasks and self.tasks_are_ranks
            return writer.task if is_rank else -1
        named = self._named_rank(writer.file)
        return named if self.ranks.get((writer.file, ""), set()) <= {named} else -1

    def rank_of_process(self, host: str, pid: int) -> int:
        """Return the rank of a process, if a line ties its pid to one; else -1.

        The same pid can be on several hosts. So it counts only if the host is the same, or if no
        other process of that pid is known.
        """
        if pid < 0:
            return -1
        ranks = self._pids.get(pid, {})
        if host in ranks:
            return ranks[host]
        return next(iter(ranks.values())) if len(ranks) == 1 else -1

    @functools.cached_property
    def _pids(self) -> dict[int, dict[str, int]]:
        """The rank of each process that a line ties to one: by pid and host."""
        members = [fact for fact in self.facts if isinstance(fact, Member) and fact.pid >= 0]
        # A process has a rank in each communicator; that in the largest one is its rank in the job,
        # if that communicator has a member of each rank at most once.
        size = max((member.size for member in members), default=0)
        ranks: dict[int, dict[str, int]] = defaultdict(dict)
        for member in members:
            if member.size in (0, size):
                ranks[member.pid].setdefault(member.host, member.rank)
        for failure in self.failures:
            ranks[failure.pid].setdefault(failure.host, failure.rank)
        return dict(ranks)

    def _rank_of_worker(self, worker: str) -> int:
        """Return the rank of a worker of vLLM or SGLang named ``TP12``: it is its rank in the job.

        A worker of a job with data or pipeline parallelism has that in its name, too, for example
        ``PP1_TP3``, and then the number is only its rank in a group. Experts are divided among the
        same processes, so ``TP3_EP3`` has the rank of ``TP3``.
        """
        match = _TENSOR_RANK.match(worker)
        sizes = {fact.size for fact in self.facts if isinstance(fact, Member) and fact.pid < 0}
        if match is None:
            return -1
        return int(match[1]) if int(match[1]) < max(sizes, default=MAX_RANKS) else -1

    def _named_rank(self, file: int) -> int:
        """Return the rank in the name of a log, or -1."""
        numbers = _NAMED_RANK.findall(self.logs[file].path.name)
        return int(numbers[-1]) if numbers and int(numbers[-1]) < MAX_RANKS else -1

    @functools.cached_property
    def tasks_are_ranks(self) -> bool:
        """Whether srun's or mpirun's numbers are ranks, as far as the log tells.

        They are those of launchers, one on each node, if the log names a launcher or what it does
        with its workers, or if a rank with a larger number than its task has written a line.
        """
        by_launcher = (AttemptEnded, Killed, Restarted)
        if self.failures or any(isinstance(fact, by_launcher) for fact in self.facts):
            return False
        if any(word in line.text for log in self.logs for line in log.head for word in _LAUNCHERS):
            return False
        if any(0 <= fact.line.writer.task < number_in_group(fact) for fact in self.facts):
            return False
        return all({task} >= self.ranks.get(key, set()) for key, task in self.tasks.items())

    @functools.cached_property
    def _has_other_tasks(self) -> bool:
        """Whether a task with another number than 0 wrote a line of interest, or an early one.

        If not, and srun or mpirun itself tells of none, it started one program, as far as the logs
        show. A job has several ranks, so that program started them.
        """
        exits = [fact for fact in self.facts if isinstance(fact, LauncherExit)]
        of_launcher = [fact for fact in exits if fact.line.writer.task < 0]  # it labels no own line
        if any(self.tasks.values()) or any(any(fact.tasks) for fact in of_launcher):
            return True
        for file in {file for file, _ in self.tasks}:
            texts = [line.text for line in self.logs[file].head]
            prefixes = Prefixes(file, texts)
            if any(line.writer.task > 0 for text in texts for line in prefixes.read(0, text)):
                return True
        return False

    def quote(self, line: Line) -> str:
        """Return a line as evidence: its log, its number, and its text, shortened."""
        text = " ".join(line.text.split())
        text = text if len(text) <= _SHOWN else text[:_SHOWN].rstrip() + "…"
        rank = f"[rank{line.writer.rank}] " if line.writer.rank >= 0 else ""
        return f"{self.logs[line.writer.file].name}:{line.number}: {rank}{text}"


def read_logs(paths: Sequence[Path]) -> LogFacts:
    """Read the logs of one job, and return what they say; a folder stands for the files in it.

    Raises:
        CorruptRunError: No log can be read.
    """
    logs = logs_of(paths)
    log_facts = LogFacts(logs)
    unreadable, left_s = 0, _MOST_SECONDS
    for log in logs:
        reader = _Reader(log_facts, log)
        try:
            for line in _lines_of(log, max(1, _MOST_NEWEST // len(logs))):
                began = time.perf_counter()
                reader.read(line)
                left_s -= time.perf_counter() - began
                if log_facts.size > _MOST_RANKS or left_s < 0:
                    log.cut = True
                    break
        except CorruptRunError as error:
            log_facts.problems.append(Problem(ProblemKind.UNREADABLE, str(error)))
            unreadable += 1
        reader.end()
        if log.left_out:
            many = f"{log.left_out:,} lines about failures in its middle are left out"
            log_facts.problems.append(Problem(ProblemKind.LIMITED, f"{log.name}: {many}"))
        if log.damage:
            text = f"{log.name}: its end cannot be read: {clean(log.damage)}"
            log_facts.problems.append(Problem(ProblemKind.UNREADABLE, text))
        if log.cut:
            text = f"{log.name}: not read beyond line {log.count:,}: too many lines about failures"
            log_facts.problems.append(Problem(ProblemKind.LIMITED, text))
    _settle_gathered(log_facts)
    if unreadable == len(logs):
        raise CorruptRunError(
            log_facts.problems[0].text if log_facts.problems else "there is no log to read"
        )
    return log_facts


def _settle_gathered(log_facts: LogFacts) -> None:
    """Of the exceptions that members of a group gathered, leave each to the rank that raised it.

    The members say its rank in their group. That is the rank in the job if all ranks below it are
    members, too; otherwise it is nobody's.
    """
    gathered = [raised for raised in log_facts.raised if raised.of_rank >= 0]
    writers = {log_facts.rank_of(raised.line.writer) for raised in gathered}
    for raised in gathered:
        rank = log_facts.rank_of(raised.line.writer)
        if rank != raised.of_rank or not set(range(raised.of_rank)) <= writers:
            raised.blame = "victim"
    for raised in log_facts.raised if gathered else ():
        if raised.kind.endswith("CheckpointException"):
            raised.led_on = True  # it only announces them


def _lines_of(log: Log, most_newest: int) -> Iterator[Line]:
    """Yield the lines of interest of a log, without prefixes, wrapped ones rejoined.

    All excerpts are read first, because the prefixes and the width of a terminal show only in many
    lines. ``reading`` bounds what they take. A terminal wraps what a collector has put a prefix
    before; a program or its launcher wraps before a collector does so. Both are undone, the
    outermost first.
    """
    runs = list(log.excerpts(markers(), repeated(), most_newest))
    sample = [log.head] if log.is_short else [log.head, *runs[:_SAMPLE]]
    prefixes = Prefixes(log.index, _texts(sample))
    # A marker may be broken, and an exception may have a name that is not searched for. Of a short
    # log, all lines are there, so that none is missed.
    runs = [log.head] if log.is_short else runs
    wrapping = wrapping_of(runs if log.is_short else [log.head, *runs], prefixes)
    if wrapping is not None:
        runs = [[*wrapping.undone(run)] for run in runs]
        sample = [[*wrapping.undone(run)] for run in sample]
        # The rests of lines lacked the prefix that all lines have.
        prefixes = Prefixes(log.index, _texts(sample))
    runs = _with_newest(runs, log.newest)
    steps = prefixes.collector(_texts(sample))
    if steps or any("\x1b" in text for text in _texts(sample)):
        streams = list(_by_stream(sample, prefixes, steps))
        # A collector's record of a record begins with other words than the one that it is in.
        beneath = Prefixes(log.index, _texts(streams))
        inner = wrapping_of(streams, beneath)
        if inner is not None:
            yield from _undone_by_stream(inner, runs, prefixes, steps)
            return
    for run in runs:
        for raw in run:
            yield from prefixes.read(raw.number, raw.text)


def _texts(runs: Iterable[Sequence[RawLine]]) -> list[str]:
    return [line.text for run in runs for line in run]


def _with_newest(runs: list[list[RawLine]], newest: Sequence[RawLine]) -> list[list[RawLine]]:
    """Return runs of lines and the newest lines of messages that come again and again, in order."""
    there = {line.number for run in runs for line in run} if newest else set()
    others = [[line] for line in newest if line.number not in there]
    return sorted([*runs, *others], key=lambda run: run[0]) if others else runs


def _by_stream(
    runs: Iterable[Sequence[RawLine]], prefixes: Prefixes, steps: Sequence[Step]
) -> Iterator[list[RawLine]]:
    """Yield the lines of each stream of some runs, without what a collector put before them."""
    for run in runs:
        streams: dict[str, list[RawLine]] = defaultdict(list)
        for line in run:
            collected = prefixes.collected(line.text, steps)
            streams[collected.writer.stream].append(line._replace(text=collected.text))
        yield from streams.values()


def _undone_by_stream(
    wrapping: Wrapping, runs: Iterable[Sequence[RawLine]], prefixes: Prefixes, steps: Sequence[Step]
) -> Iterator[Line]:
    """Yield the lines of runs that were wrapped before a collector put a prefix before each part.

    The lines of several streams may alternate, so each is put together by itself.
    """
    for run in runs:
        before = {line.number: prefixes.collected(line.text, steps) for line in run}
        lines = [
            line for lines in _by_stream([run], prefixes, steps) for line in wrapping.undone(lines)
        ]
        for raw in sorted(lines):
            yield from prefixes.read(raw.number, raw.text, before[raw.number])


def _is_outer(writer: Writer, inner: Writer) -> bool:
    """Whether a line has a collector's prefixes, at most, of those that another line has."""
    return f"{inner.stream} ".startswith(f"{writer.stream} ".lstrip())


class _Reader:
    """Reads the lines of one log, in order."""

    def __init__(self, log_facts: LogFacts, log: Log) -> None:
        self._found, self._log = log_facts, log
        self._tracebacks: dict[Writer, Traceback] = {}
        self._stack: StackOfCollective | None = None
        self._missing: MissingRanks | None = None
        self._aborting: dict[Writer, int] = {}  # the line at which a process said that it ends
        self._announced: dict[Writer, Member] = {}  # the process that the next lines are about
        self._open: Writer | None = None  # whose traceback goes on without a prefix
        self._report = Report(log_facts.failures)
        self._earlier: tuple[list[Fact], list[Raised]] = [], []  # of the attempt before
        self._ended: dict[str, int] = {}  # by agent: the line at which its last attempt ended
        self._has_ended = False  # a process of a launcher that tells of each as it ends
        self._has_failed = False  # a task of srun, by itself
        self._met: dict[str, int] = {}  # the line at which all had come to a barrier of the store
        self._section = -1  # the rank whose output composer repeats
        self._explained: Line | None = None  # the line before, if CANN explains it below

    def read(self, line: Line) -> None:
        """Take one line."""
        if self._is_of_list(line):
            return
        section = _SECTION.search(line.text)
        if section:
            self._end_section(line.number)
            rank = int(section[2])
            self._section = rank if section[1] == "Begin" and rank < MAX_RANKS else -1
        elif self._section >= 0 and line.writer.rank < 0:
            line = line._replace(writer=line.writer._replace(rank=self._section))
        explained = self._explained
        if explained and line.number - explained.number <= _NEAR and line.writer.rank < 0:
            line = line._replace(writer=explained.writer)
        self._explained = line if line.text.endswith(_INNER_ERROR) else None
        if _CHILD.match(line.text):
            self._aborting[line.writer] = line.number
        writer, log_facts = line.writer, self._found
        key = writer.file, writer.stream
        if writer.rank >= 0:
            log_facts.ranks[key].add(writer.rank)
        if writer.task >= 0:
            log_facts.tasks[key] = writer.task
        facts = facts_of(line)
        for fact in facts:
            self._take(fact, line)
        # What a process enqueues may be written in the middle of a traceback, and is none of it.
        if any(isinstance(fact, Enqueued) for fact in facts) or self._report.take(line):
            return
        self._read_stack(line)
        self._read_traceback(line)

    def _is_of_list(self, line: Line) -> bool:
        """Take a line if it belongs to Horovod's list of ranks."""
        if line.text.endswith("Missing ranks:"):
            self._missing = MissingRanks(line.writer)
            return False
        if self._missing is None:
            return False
        stalled = self._missing.take(line)
        if stalled is not None:
            self._found.facts.append(stalled)
            self._found.size += len(stalled.ops)
        elif self._missing.is_over:
            self._missing = None
        return stalled is not None

    def _end_section(self, number: int) -> None:
        """Note which exception is at the end of what one rank wrote: it ended its program."""
        for raised in self._found.raised:
            writer = raised.line.writer
            if writer.file == self._log.index and writer.rank == self._section >= 0:
                raised.unhandled = raised.unhandled or raised.line.number >= number - _LAST

    def _read_stack(self, line: Line) -> None:
        """Take a line of NCCL's stack of a collective; only its first one has the rank."""
        if "Stack trace of the failed collective" in line.text:
            self._stack = StackOfCollective(line.writer)
        elif self._stack is not None:
            issued = self._stack.take(line)
            if issued is not None:
                self._found.facts.append(issued)
                self._stack = None

    def _take(self, fact: Fact, line: Line) -> None:
        log_facts = self._found
        if isinstance(fact, Restarted):
            self._forget(line.number)
        if isinstance(fact, StoreMet):
            self._met[fact.key] = line.number
            return
        if isinstance(fact, AttemptEnded):
            # If an agent says so twice, it started all workers again in between.
            self._forget(self._ended.get(fact.agent, 0))
            self._ended[fact.agent] = line.number
        fact = self._with_process(fact, line)
        if isinstance(fact, LauncherExit) and fact.signal not in (signal.SIGKILL, signal.SIGTERM):
            self._has_failed = True
        if isinstance(fact, Outside) and self._has_failed and _CANCELLED.search(fact.what):
            fact = Aborting(line)  # srun ends the others, and slurmstepd does not say so
        if isinstance(fact, LauncherExit) and fact.in_order:
            fact, self._has_ended = fact._replace(is_first=not self._has_ended), True
        if isinstance(fact, Aborting):
            self._aborting[line.writer] = line.number
        log_facts.facts.append(fact)
        if isinstance(fact, (BarrierFailed, Lagging, LauncherExit)):
            log_facts.size += len(fact[2] if isinstance(fact, BarrierFailed) else fact[1])

    def _with_process(self, fact: Fact, line: Line) -> Fact:
        """Return a fact with the process that is named in the lines above it.

        torch_npu writes a pid before the error of CANN, and Intel MPI a rank before its end.
        """
        if isinstance(fact, Member) and not fact.size:
            self._announced[line.writer] = fact
        member = self._announced.get(line.writer)
        is_near = member is not None and line.number - member.line.number <= _NEAR
        if isinstance(fact, LauncherExit) and not fact.tasks:
            if member is None or not is_near:
                return WorkerExit(line, -1, -1, -fact.signal)
            return fact._replace(tasks=(member.rank,))
        if isinstance(fact, (DeviceFault, Trouble)) and fact.pid < 0 and line.writer.rank < 0:
            return fact._replace(pid=member.pid) if member is not None and is_near else fact
        return fact

    def _read_traceback(self, line: Line) -> None:
        writer = line.writer
        # Some programs write only the first line of a message with their prefix.
        if writer.rank < 0 and self._open is not None and _is_outer(writer, self._open):
            writer = self._open
        before = self._tracebacks.get(writer)
        begins = line.text.startswith(_TRACEBACK) or line.text.rstrip().endswith(f"{_TRACEBACK}:")
        if begins:
            self._open = writer if not line.text.startswith(_TRACEBACK) else None
            chained = before if before is not None and before.chains else None
            ends = line.number - self._aborting.get(writer, -_NEAR - 1) <= _NEAR
            self._tracebacks[writer] = Traceback(line, chained, ends_program=ends)
            if writer.by_torch:  # the line that names the exception may be cut off
                self._found.facts.append(Fragment(line))
            return
        if before is None and line.text.startswith("ray.exceptions."):  # its frames were cut off
            before = self._tracebacks[writer] = Traceback(line, None, ends_program=False)
            before.take(line._replace(text='  File "/ray/worker.py", line 0, in get'))
        raised = before.take(line._replace(writer=writer)) if before is not None else None
        if before is not None and raised is not None:
            if before.cause is not None:
                before.cause.led_on = True
            self._found.raised.append(raised)
            self._open = None

    def end(self) -> None:
        """Note which exception is at the end of a log of one rank: it ended its program."""
        for raised in self._found.raised:
            writer = raised.line.writer
            alone = not writer.stream and writer.rank < 0
            if writer.file == self._log.index and alone:
                is_last = raised.line.number > self._log.count - _LAST
                raised.unhandled = raised.unhandled or is_last
        self._found.facts = [fact for fact in self._found.facts if not self._is_over(fact)]
        self._keep_earlier()

    def _is_over(self, fact: Fact) -> bool:
        """Whether a rank wrote that it waits in the store, and all others came after that."""
        if not isinstance(fact, StoreWait) or fact.line.writer.file != self._log.index:
            return False
        return fact.line.number < self._met.get(fact.key, 0)

    def _keep_earlier(self) -> None:
        """If the last attempt reports nothing, go back to what ended the one before it."""
        log_facts, file = self._found, self._log.index
        lines = [fact.line for fact in log_facts.facts if not isinstance(fact, _QUIET)]
        lines += [raised.line for raised in log_facts.raised]
        facts, raised = self._earlier
        if any(line.writer.file == file for line in lines) or not (facts or raised):
            return
        log_facts.facts = facts + log_facts.facts
        log_facts.raised = raised + log_facts.raised
        text = (
            f"{self._log.name}: the workers were started again, and no line after that reports a "
            "failure: this is about the attempt before"
        )
        log_facts.problems.append(Problem(ProblemKind.LIMITED, text))

    def _forget(self, until: int) -> None:
        """Drop what an earlier attempt wrote into this log, up to a line."""
        log_facts, file = self._found, self._log.index

        def is_newer(line: Line) -> bool:
            return line.writer.file != file or line.number > until

        if until:
            self._earlier = (
                [fact for fact in log_facts.facts if not is_newer(fact.line)],
                [raised for raised in log_facts.raised if not is_newer(raised.line)],
            )
            log_facts.facts = [fact for fact in log_facts.facts if is_newer(fact.line)]
            log_facts.raised = [raised for raised in log_facts.raised if is_newer(raised.line)]
