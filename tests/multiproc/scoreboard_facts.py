"""Check every fact of a verdict on a row of the scoreboard against the row's program.

The program of a row says what each rank issues: the calls of a group are numbered from 1 in that
order. So the ranks, calls, lines and arguments of a fact are compared with the program. Only the
course of the job decides which call a rank has not reached and which one went through: that is
compared with the records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import scoreboard_calls
from planted_facts import PlantedFacts, Row, call_of, others, subject
from scoreboard_calls import Call
from scoreboard_case import PARAMETER, Case

from rankcall.analysis.verdicts.facts import CallFact, Fact
from rankcall.analysis.verdicts.finding import Finding
from rankcall.process import host_name

ITEM = {"float32": 4, "int32": 4, "float16": 2, "float64": 8}
MESSAGES = ("send", "recv")
NO_CALLS = ("announce", "await", "wait", "threads")
OF_ALL = ("all_gather", "reduce_scatter", "all_to_all")  # their size is that of all parts
_MOST_RANKS = 4  # of a row


class ScoreboardFacts(PlantedFacts):
    """Checks the facts of the findings about one row."""

    programs = scoreboard_calls

    def __init__(self, case: Case, pids: Sequence[int], took: float, rows: Sequence[Row]) -> None:
        super().__init__(pids, took, rows)
        self._case = case
        self._groups = {"0": "world", **{str(n): g for n, (g, _) in enumerate(case.groups, 1)}}

    def _host(self, rank: int) -> str:
        return host_name()

    def _false_line(self, line: str, fact: Fact) -> Iterator[str]:
        """A line is one of a function that issues the op."""
        name = self._function_at(line)
        if name is None or _op(Call(name.removeprefix("_"))) != call_of(fact).op:
            yield f"{line} is in {name}"

    # --- the program of the row ---

    def _calls(self, rank: int, group: str) -> list[Call]:
        """Return the collectives of a rank on a group, in order."""
        steps = [
            call
            for step in self._case.program[rank]
            for call in (step.threads if step.op == "threads" else (step,))
        ]
        skipped = (*MESSAGES, *NO_CALLS)
        return [call for call in steps if call.op not in skipped and call.group == group]

    def _call(self, rank: int, named: CallFact) -> Call | None:
        """Return the collective of a rank that has the number of a fact; None if none has."""
        calls = self._calls(rank, self._groups[named.group])
        return calls[named.seq - 1] if 0 < named.seq <= len(calls) else None

    def _members(self, group: str) -> set[int]:
        every = range(self._case.world_size)
        return set(dict(self._case.groups).get(self._groups[group], every))

    def _size(self, call: Call, members: int) -> str:
        parts = members if _op(call) in OF_ALL else 1
        parts -= call.op == "all_gather_short"
        return f"{call.count * parts * ITEM[call.dtype]} bytes"

    def _value(self, call: Call, field: str, members: set[int]) -> str:
        """Return an argument of a call as a fact has it."""
        if field == "size":
            return self._size(call, 1 if call.op in MESSAGES else len(members))
        if field == "op":
            return _op(call)
        if field == "root":
            return f"rank {call.root}" if call.root in members else "a rank outside the group"
        return str(getattr(call, field)).lower()

    # --- what several relations claim ---

    def _is_issued(self, ranks: set[int], named: CallFact) -> Iterator[str]:
        """Ranks issue this call."""
        for rank in sorted(ranks):
            call = self._call(rank, named)
            if call is None or _op(call) != named.op:
                yield f"rank {rank} issues {_op(call) if call else 'nothing'} there"

    def _has_message(self, rank: int, named: CallFact) -> Iterator[str]:
        """A rank has such a message in its program."""
        wanted = named.op, named.peer, named.tag, self._groups[named.group]
        if wanted not in [(c.op, c.peer, c.tag, c.group) for c in self._case.program[rank]]:
            yield f"rank {rank} has no such message"

    def _came(self, named: CallFact) -> set[int]:
        return {
            row["rank"]
            for row in self._rows
            if (row["group"], row["seq"]) == (named.group, named.seq) and row["op"] not in MESSAGES
        }

    def _not_reached(self, ranks: set[int], named: CallFact) -> Iterator[str]:
        """These ranks are members of the group, and their records do not have this call."""
        came = self._came(named)
        if ranks & came or not ranks <= self._members(named.group):
            yield f"ranks {sorted(came)} have come there"

    def _passes(self, fact: Fact, ranks: set[int], calls_of: CallsOf) -> Iterator[str]:
        """Each of the ranks has a call that passes the fact's values."""
        named = call_of(fact)
        members = self._members(named.group)
        for rank in sorted(ranks):
            passed = [
                {field: self._value(call, field, members) for field, _ in fact.values}
                for call in calls_of(rank)
                if _op(call) == named.op
            ]
            if dict(fact.values) not in passed:
                yield f"rank {rank} passes {passed}"

    # --- one relation each ---

    def _issued(self, fact: Fact, finding: Finding) -> Iterator[str]:
        yield from self._is_issued(subject(fact), call_of(fact))
        sides = {self._call(rank, call_of(fact)) for rank in (*finding.ranks, *finding.victims)}
        if len(sides) < 2:
            yield "all issue the same"

    def _passed(self, fact: Fact, finding: Finding) -> Iterator[str]:
        """A side of a desync or a mismatch, with what it passes in the finding's call."""
        named = call_of(fact)
        for other in finding.facts:
            if other.relation is fact.relation and other is not fact and fact.values:
                fields = [name for name, _ in other.values]
                if fields != [name for name, _ in fact.values] or other.values == fact.values:
                    yield f"another side passes {other.values}"
        if named.op in MESSAGES:
            yield from self._passes(fact, subject(fact), self._case.program.__getitem__)
            return

        def in_finding(rank: int) -> list[Call]:
            calls = self._calls(rank, self._groups[finding.group])
            return calls[finding.seq - 1 : finding.seq]

        yield from self._passes(fact, subject(fact), in_finding)

    def _sends(self, fact: Fact, finding: Finding) -> Iterator[str]:
        yield from self._message(fact, finding, other="recv")

    def _receives(self, fact: Fact, finding: Finding) -> Iterator[str]:
        yield from self._message(fact, finding, other="send")

    def _message(self, fact: Fact, finding: Finding, other: str) -> Iterator[str]:
        """A rank passes these values to a message, and the rank at its other end others."""
        ends = [
            f for f in finding.facts if f.relation.value in ("sends", "receives") and f is not fact
        ]
        if [end.values for end in ends] == [fact.values]:
            yield "both ends pass the same"
        peers = {rank for end in ends for rank in subject(end)} | {-1}

        def with_peer(rank: int) -> list[Call]:
            return [call for call in self._case.program[rank] if call.peer in peers]

        if call_of(fact).op == other:
            yield f"that is a {other}"
        yield from self._passes(fact, subject(fact), with_peer)

    def _two_threads(self, fact: Fact, finding: Finding) -> Iterator[str]:
        """The program has two threads issue calls of the group on each of these ranks."""
        group = self._groups[fact.value("group")]
        for rank in subject(fact):
            threads = [call for step in self._case.program[rank] for call in step.threads]
            if len([call for call in threads if call.group == group]) < 2:
                yield f"rank {rank} has no two threads in it"

    def _went_through(self, fact: Fact, finding: Finding) -> Iterator[str]:
        named, concerned = call_of(fact), {*finding.ranks, *finding.victims}
        rows = [row for row in self._rows if row["rank"] in concerned]
        if named.op in MESSAGES:
            rows = [row for row in rows if row["op"] in MESSAGES]
        else:
            key = named.group, named.seq, named.op
            rows = [row for row in rows if (row["group"], row["seq"], row["op"]) == key]
        if {row["rank"] for row in rows if row["status"] == "completed"} != concerned:
            yield "it did not go through"

    def _left_loop(self, fact: Fact, finding: Finding) -> Iterator[str]:
        if fact.value("end") != "exited":
            yield "it exited with code 0"

    def _exited_with(self, fact: Fact, finding: Finding) -> Iterator[str]:
        yield from self._refused(fact)
        if fact.value("code") != "1":
            yield "Python exits with 1"

    def _killed_by(self, fact: Fact, finding: Finding) -> Iterator[str]:
        yield from self._refused(fact)
        # Gloo reads behind its list of peers then, which may also go wrong more quietly.
        outside = self._case.world_size
        for rank in subject(fact):
            if not any(c.peer >= outside for c in self._case.program[rank] if _is_refused(c)):
                yield f"rank {rank} passes no peer outside the group"
        if fact.value("signal") != "SIGSEGV":
            yield "Gloo reads behind a list"

    def _failed_with(self, fact: Fact, finding: Finding) -> Iterator[str]:
        yield from self._refused(fact)

    def _refused(self, fact: Fact) -> Iterator[str]:
        for rank in subject(fact):
            refused = any(_is_refused(call) for call in self._case.program[rank])
            if self._case.kind_of_fault != PARAMETER or not refused:
                yield f"rank {rank} passes no argument that torch refuses"

    def _held_up(self, fact: Fact, finding: Finding) -> Iterator[str]:
        """All other members wait in a call that the culprits do not issue."""
        named, culprits = call_of(fact), others(fact)
        waiting = self._members(named.group) - culprits
        if subject(fact) != waiting or culprits != set(finding.ranks):
            yield f"ranks {sorted(waiting)} issue it"
        yield from self._is_issued(waiting, named)
        yield from self._not_reached(culprits, named)
        for rank in culprits if finding.kind == "exhausted" else ():
            if self._call(rank, named) is not None:
                yield f"rank {rank} issues it as well"

    def _waits_in(self, fact: Fact, finding: Finding) -> Iterator[str]:
        """Ranks are in a call: it is theirs, and their records have it."""
        named = call_of(fact)
        if named.peer is not None:
            for rank in subject(fact):
                yield from self._has_message(rank, named)
            return
        yield from self._is_issued(subject(fact), named)
        if not subject(fact) <= self._came(named):
            yield f"ranks {sorted(self._came(named))} have come there"

    def _wait_for_each_other(self, fact: Fact, finding: Finding) -> Iterator[str]:
        planted = [set(ranks) for kind, ranks in self._case.causes if kind == "deadlock"]
        if subject(fact) not in planted:
            yield f"planted is a circle of {planted}"

    def _waits_for(self, fact: Fact, finding: Finding) -> Iterator[str]:
        """Ranks of the circle are in a call, for others."""
        named, awaited = call_of(fact), others(fact)
        yield from self._waits_in(fact, finding)
        if named.peer is None:
            yield from self._not_reached(awaited, named)
        elif named.peer >= 0 and awaited != {named.peer}:
            yield f"rank {named.peer} is the other end"
        if not (subject(fact) | awaited) & set(finding.ranks):
            yield "a rank that waits is not named"

    def _tags_differ(self, fact: Fact, finding: Finding) -> Iterator[str]:
        (source,), (target,) = subject(fact), others(fact)
        sent = {c.tag for c in self._case.program[source] if (c.op, c.peer) == ("send", target)}
        taken = {c.tag for c in self._case.program[target] if (c.op, c.peer) == ("recv", source)}
        tag, other_tag = map(int, fact.value("tags").split())
        if not ((tag in sent and other_tag in taken) or (other_tag in sent and tag in taken)):
            yield f"sent is {sorted(sent)}, and received {sorted(taken)}"

    def _last_left(self, fact: Fact, finding: Finding) -> Iterator[str]:
        named, (rank,) = call_of(fact), subject(fact)
        yield from self._is_issued({rank}, named)
        done = [
            row["seq"]
            for row in self._rows
            if (row["rank"], row["group"]) == (rank, named.group) and row["op"] not in MESSAGES
        ]
        if max(done) != named.seq:
            yield f"it was last in #{max(done)}"

    def _last_is_in(self, fact: Fact, finding: Finding) -> Iterator[str]:
        yield from self._in_refused(fact)

    def _last_failed(self, fact: Fact, finding: Finding) -> Iterator[str]:
        yield from self._in_refused(fact)

    def _in_refused(self, fact: Fact) -> Iterator[str]:
        """The call that a rank ended in passes what torch refuses."""
        (rank,) = subject(fact)
        refused = [call.op for call in self._case.program[rank] if _is_refused(call)]
        if call_of(fact).op not in refused:
            yield f"it passes what torch refuses in {refused}"


CallsOf = Callable[[int], Sequence[Call]]


def _op(call: Call) -> str:
    """Return the op of a step's call, as the records name it."""
    for ending in ("_async", "_written", "_read", "_short"):
        if call.op.endswith(ending):
            return call.op.removesuffix(ending)
    return call.op


def _is_refused(call: Call) -> bool:
    """Tell whether torch refuses a message: for its tag, or for a peer that no group has."""
    return call.op in MESSAGES and (call.tag < 0 or call.peer >= _MOST_RANKS)
