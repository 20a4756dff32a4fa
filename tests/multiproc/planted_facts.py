"""What every check of facts shares: who and what a fact names, and that its words are its own.

A finding states facts, and its sentences are rendered from them. A subclass says what was planted,
and has a method for each relation that its faults can lead to. A relation without a method, and a
fact that names a wrong process, a call that nobody issued or a time that has not passed, is false.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from rankcall.analysis.verdicts.facts import CallFact, Fact, Ranks
from rankcall.analysis.verdicts.finding import Finding
from rankcall.analysis.verdicts.sentences import as_seen, evidence, summary

Row = Mapping[str, Any]
Write = Callable[[Sequence[Fact], bool], str]


def subject(fact: Fact) -> set[int]:
    """Return the ranks that a fact is about."""
    return set(fact.ranks.numbers) if fact.ranks else set()


def others(fact: Fact) -> set[int]:
    """Return the other ranks that a fact names."""
    return set(fact.others.numbers) if fact.others else set()


def call_of(fact: Fact) -> CallFact:
    """Return the call that a fact is about."""
    assert fact.call is not None, fact
    return fact.call


class PlantedFacts:
    """Checks the facts of findings. ``rows``: all records, oldest first; empty: not known here.

    ``took``: how long the job took, in s.
    """

    programs: ModuleType  # whose lines the facts name

    def __init__(self, pids: Sequence[int], took: float, rows: Sequence[Row]) -> None:
        self._pids, self._took, self._rows = pids, took, rows

    def false(self, finding: Finding) -> Iterator[str]:
        """Yield what is not true in a finding."""
        if not finding.facts:
            yield f"no facts: {finding.summary}"
        for fact in finding.facts:
            for problem in self._problems(fact, finding):
                yield f"{problem}: {fact}"
        yield from false_words(finding)

    def _problems(self, fact: Fact, finding: Finding) -> Iterator[str]:
        for ranks in (fact.ranks, fact.others):
            if ranks is not None:
                yield from self._false_names(ranks)
        if fact.unit == "s" and not 0 <= (fact.number or 0.0) <= self._took:
            yield f"the job took {self._took:.1f} s"
        for line in filter(None, (fact.call.line if fact.call else "", fact.value("line"))):
            yield from self._false_line(line, fact)
        check = getattr(self, f"_{fact.relation.value}", None)
        if check is None:
            yield "nothing was planted that leads to such a fact"
        else:
            yield from check(fact, finding)

    def _false_names(self, ranks: Ranks) -> Iterator[str]:
        hosts = tuple(dict.fromkeys(map(self._host, ranks.numbers)))
        if ranks.hosts != hosts:
            yield f"ranks {ranks.numbers} are on {hosts}"
        pid = self._pids[ranks.numbers[0]] if len(ranks.numbers) == 1 else 0
        if ranks.pid != pid:
            yield f"ranks {ranks.numbers} are process {pid}"
        if len(set(ranks.numbers)) != len(ranks.numbers):
            yield "a rank is named twice"

    def _host(self, rank: int) -> str:
        raise NotImplementedError

    def _false_line(self, line: str, fact: Fact) -> Iterator[str]:
        """A line is one of a function of the programs."""
        name = self._function_at(line)
        if name is None:
            yield f"{line} is no line of a function of {self.programs.__name__}"

    def _function_at(self, line: str) -> str | None:
        """Return the name of the program's function that has a line."""
        file, _, number = line.rpartition(":")
        if file != self.programs.__file__:
            return None
        for name, function in inspect.getmembers(self.programs, inspect.isfunction):
            if Path(inspect.getsourcefile(function) or "") == Path(file):
                source, first = inspect.getsourcelines(function)
                if first <= int(number) < first + len(source):
                    return name
        return None

    # --- what the records show ---

    def _rows_of(self, call: CallFact) -> dict[int, Row]:
        """Return the records of a call, by rank."""
        wanted: dict[str, Any] = {"op": call.op, "seq": call.seq, "group": call.group}
        if call.peer is not None:
            wanted.update(peer=call.peer, tag=call.tag)
        return {
            row["rank"]: row
            for row in self._rows
            if all(row[name] == value for name, value in wanted.items())
        }

    def _in_call(self, call: CallFact) -> set[int]:
        """Return the ranks that have not left a call."""
        return {rank for rank, row in self._rows_of(call).items() if row["status"] != "completed"}

    def _messages_so_far(self, fact: Fact, finding: Finding) -> Iterator[str]:
        """A rank has issued so many sends to another one, or receives from it, on one channel."""
        assert fact.ranks is not None
        assert fact.others is not None
        op = {"sent": "send", "received": "recv"}[fact.value("way")]
        end = fact.ranks.numbers[0], fact.others.numbers[0], op
        channel = fact.value("tag"), fact.value("group")
        issued = [
            row
            for row in self._rows
            if (row["rank"], row["peer"], row["op"]) == end
            and (str(row["tag"]), row["group"]) == channel
        ]
        if self._rows and len(issued) != fact.number:
            yield f"on record are {len(issued)}"

    def _other_line(self, fact: Fact, finding: Finding) -> Iterator[str]:
        """Ranks issued a call from one line, and other ranks from another one."""
        for ranks, line in (
            (subject(fact), call_of(fact).line),
            (others(fact), fact.value("line")),
        ):
            issued = {
                row["call_site"]
                for rank, row in self._rows_of(call_of(fact)).items()
                if rank in ranks
            }
            if self._rows and issued != {line}:
                yield f"it came from {sorted(issued)} on ranks {sorted(ranks)}"

    def _newest(self, rank: int) -> Row:
        """Return a rank's newest record."""
        return [row for row in self._rows if row["rank"] == rank][-1]


def false_words(finding: Finding) -> Iterator[str]:
    """Yield the summary and the lines of evidence that no fact of the finding renders to."""
    facts = finding.facts
    said = [
        _rendered(summary, facts[:count], live)
        for count in range(1, len(facts) + 1)
        for live in (True, False)
    ]
    seen = as_seen("", 0.0).partition(",")[0]  # what the watcher saw before the end
    ends = tuple(text for text in said if text)
    if finding.summary not in said and not (
        finding.summary.startswith(seen) and finding.summary.endswith(ends)
    ):
        yield f"no fact says: {finding.summary}"
    lines = {_rendered(_line, [fact], live) for fact in facts for live in (True, False)}
    for line in finding.evidence:
        if line not in lines:
            yield f"no fact says: {line}"


def _line(facts: Sequence[Fact], live: bool) -> str:
    return "".join(evidence(facts, live))


def _rendered(
    write: Callable[[Sequence[Fact], bool], str], facts: Sequence[Fact], live: bool
) -> str:
    """Return what facts render to; empty if no summary, or no line, is made of them."""
    try:
        return write(facts, live)
    except (KeyError, ValueError, AssertionError):
        return ""
