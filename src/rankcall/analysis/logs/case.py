"""One failed job as its logs show it: its facts, who wrote them, and findings that quote them."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from rankcall.analysis.logs.advice import advice_for, answer_to, settings_in
from rankcall.analysis.verdicts.facts import Fact, Ranks
from rankcall.analysis.verdicts.finding import Finding
from rankcall.analysis.verdicts.log_sentences import summary_from_log
from rankcall.analysis.verdicts.wording import count_of
from rankcall.imports.logs.facts import (
    DeviceFault,
    Fatal,
    IssuedAt,
    Killed,
    Outside,
    Progress,
    Timeout,
    Trouble,
)
from rankcall.imports.logs.job import LogFacts
from rankcall.imports.logs.prefixes import Line
from rankcall.problems import Problem, ProblemKind
from rankcall.ranks import format_ranks

SAME = (
    "All members of a group must issue the same calls with the same sizes, in the same order: "
    "compare what the ranks do before this call."
)
UNDECIDED, NOTHING = "undecided", "nothing_found"
_SHOWN = 6  # lines of evidence

_T = TypeVar("_T", bound=Any)


@dataclass
class Numbering:
    """Whether the ranks in messages about one kind of thing are those of the whole job.

    The members of a group are in ascending order. So if a rank has the same number in the group as
    in the job, all ranks below it have, too.
    """

    proven: int = -1  # up to this rank, numbers in the group are those of the job
    wrong: bool = False  # a rank has another number in the group

    def note(self, in_job: int, in_group: int) -> None:
        """Take both numbers of one process; the first is -1 if it is not known."""
        if in_job >= 0:
            self.wrong = self.wrong or in_job != in_group
            self.proven = max(self.proven, in_group)

    def confidence(self, ranks: Iterable[int]) -> str:
        """Return how sure it is that numbers from such messages are ranks of the job."""
        return "likely" if max(ranks, default=0) <= self.proven else "possible"


class Case:
    """One failed job: the facts of its logs, and the parts that all findings share."""

    def __init__(self, facts: LogFacts) -> None:
        self.all = facts
        self.timeouts = self.facts(Timeout)
        self.progress = self.facts(Progress)
        killed = {fact.pid for fact in self.facts(Killed)}
        self.failures = [failure for failure in facts.failures if failure.pid not in killed]
        # A launcher's exception stands in the stream of its workers, and says nothing of its own.
        self.raised = [
            exception
            for exception in facts.raised
            if not exception.led_on and not exception.by_launcher
        ]
        self.waited = {self.rank(fact.line) for fact in self.timeouts}

    def facts(self, kind: type[_T]) -> list[_T]:
        """Return the facts of one kind, in the order of the logs."""
        return [fact for fact in self.all.facts if isinstance(fact, kind)]

    def lines(self, *kinds: type[Any]) -> list[Line]:
        """Return the lines that facts of some kinds rest on."""
        return [fact.line for kind in kinds for fact in self.facts(kind)]

    def rank(self, line: Line) -> int:
        """Return the rank that wrote a line, or -1 if it is not known."""
        return self.all.rank_of(line.writer)

    def rank_of_fact(self, fact: Any) -> int:
        """Return the rank of the process that a fact is about, which may not have written it."""
        if isinstance(fact, Fatal) and fact.rank >= 0:
            return fact.rank
        pid, writer = getattr(fact, "pid", -1), fact.line.writer
        known = self.all.rank_of_process(getattr(fact, "host", ""), pid)
        if known >= 0 or getattr(fact, "by_kernel", False):
            return known
        if pid < 0:
            return self.rank(fact.line)
        # The process is not known. Its line may stand in a stream of several processes, or in that
        # of the process that started it, which has another pid.
        is_of_one = (writer.alone or not writer.stream) and writer.pid in (-1, pid)
        return self.rank(fact.line) if writer.rank >= 0 or is_of_one else -1

    def seen(self) -> set[int]:
        """Return all ranks that the log mentions as ranks of the job."""
        seen = {rank for ranks in self.all.ranks.values() for rank in ranks}
        return seen | {failure.rank for failure in self.all.failures}

    def problem(self, text: str) -> None:
        """Add a limit of the evidence."""
        problem = Problem(ProblemKind.LIMITED, text)
        if problem not in self.all.problems:
            self.all.problems.append(problem)

    def has_said(self, *words: str) -> bool:
        """Whether a setting is in the first lines of a log, for example in the job's command."""
        return any(
            word in line.text for log in self.all.logs for line in log.head for word in words
        )

    def advice(self, what: str, hosts: Sequence[str]) -> str:
        """Return the next step for a cause, unless the log shows that it was taken; else empty."""
        text = advice_for(what, hosts)
        answer = answer_to(text, self._causes)
        if answer:
            text = advice_for(answer, hosts)
        return "" if self.has_said(*settings_in(text)) else text

    @functools.cached_property
    def _causes(self) -> list[str]:
        """What the log says in plain words of devices, processes and the job."""
        devices = [fact.what for fact in self.facts(DeviceFault)]
        processes = [fact.what for fact in self.facts(Fatal)]
        return devices + processes + [fact.what for fact in self.facts(Outside)]

    def first(self) -> set[int]:
        """Return the ranks that torchrun saw fail first."""
        return {failure.rank for failure in self.failures if failure.first}

    def victims(self, dead: set[int]) -> tuple[int, ...]:
        """Return the other ranks that wrote about a broken connection or a time-out."""
        ranks = {self.rank_of_fact(fact) for fact in self.facts(Trouble)} | self.waited
        ranks |= {self.rank(exception.line) for exception in self.raised if exception.follows}
        return tuple(sorted(ranks - dead - {-1}))

    def trouble(self) -> list[Line]:
        """Return two lines that show what the victims saw."""
        return self.lines(Timeout, Trouble)[:2]

    def longest(self) -> float:
        """Return for how long a call lasted before it timed out, s; 0 if that is not known."""
        return max((timeout.seconds for timeout in self.timeouts), default=0.0)

    def site(self, ranks: Iterable[int]) -> str:
        """Return the line at which most of some ranks were; empty if it is not known.

        NCCL's stack of a collective has the line that issued it, an exception the one that raised.
        """
        wanted = set(ranks)
        issued = Counter(
            fact.site for fact in self.facts(IssuedAt) if self.rank(fact.line) in wanted
        )
        raised = Counter(
            exception.site
            for exception in self.raised
            if exception.site and self.rank(exception.line) in wanted
        )
        sites = (issued or raised).most_common(1)
        return sites[0][0] if sites else ""

    def finding(
        self,
        kind: str,
        ranks: tuple[int, ...],
        victims: tuple[int, ...],
        said: Sequence[Fact],
        lines: Iterable[Line],
        advice: str,
        confidence: str,
        *,
        hosts: tuple[str, ...] = (),
        group: str = "",
        seq: int = 0,
        op: str = "",
        since: float = 0.0,
    ) -> Finding:
        """Return a finding that states some facts, and quotes the lines that they rest on."""
        quoted = list({(line.writer.file, line.number): line for line in lines}.values())
        shown = [self.all.quote(line) for line in quoted[:_SHOWN]]
        if len(quoted) > _SHOWN:
            shown.append(f"and {count_of(len(quoted) - _SHOWN, 'more line')} of this kind")
        return Finding(
            kind,
            tuple(sorted(ranks)),
            victims,
            hosts,
            group,
            seq,
            op,
            self.site(victims),
            min(since, 1e9),
            confidence,
            summary_from_log(said),
            tuple(shown),
            advice,
            is_fault=kind != NOTHING,
            facts=tuple(said),
        )


def minority(sides: Sequence[set[int]]) -> tuple[int, ...]:
    """Return the ranks outside the largest side, if that has more than half of all ranks."""
    largest = max(sides, key=len)
    everybody = {rank for side in sides for rank in side}
    if 2 * len(largest) <= len(everybody):
        return ()
    return tuple(sorted(everybody - largest))


def subject(ranks: Iterable[int], hosts: Sequence[str] = ()) -> Ranks:
    """Return ranks as the subject of a fact."""
    return Ranks(tuple(sorted(set(ranks))), tuple(hosts))


def ranks_text(ranks: Iterable[int]) -> str:
    """Write ranks in a sentence: ``rank 2``, ``ranks 0-3,7``."""
    distinct_ranks = sorted(set(ranks))
    return f"rank{'' if len(distinct_ranks) == 1 else 's'} {format_ranks(distinct_ranks)}"
