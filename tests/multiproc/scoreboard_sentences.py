"""Check every sentence of a verdict on a row of the scoreboard against the row's program.

The program of a row says what each rank issues: the calls of a group are numbered from 1 in that
order. Each sentence has to fit one of the patterns below as a whole. Its ranks, calls, lines,
arguments and ends are compared with the program. Only the course of the job decides which call a
rank has not reached and which one went through: that is compared with the records.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import scoreboard_calls
from scenario_sentences import ranks_in
from scoreboard_calls import Call
from scoreboard_case import PARAMETER, Case

from rankcall.analysis.verdicts.finding import Finding
from rankcall.process import host_name

Row = Mapping[str, Any]
Match = re.Match[str]
PROGRAMS = Path(scoreboard_calls.__file__)
ITEM = {"float32": 4, "int32": 4, "float16": 2, "float64": 8}
MESSAGES = ("send", "recv")
NO_CALLS = ("announce", "await", "wait", "threads")
_MOST_RANKS = 4  # of a row
OF_ALL = ("all_gather", "reduce_scatter", "all_to_all")  # their size is that of all parts

_WHO = r"[Rr]anks? (?P<ranks>[\d,-]+) \([^)]*\)"
_OTHERS = r"ranks? (?P<others>[\d,-]+) \([^)]*\)"
_CALL = r"(?P<op>\w+) #(?P<seq>\d+) of group (?P<group>\d+)"
_MESSAGE = (
    r"(?P<end>send|recv) #(?P<number>\d+) (?:to|from) (?:rank (?P<peer>\d+)|any rank) "
    r"\(tag (?P<tag>\d+), group (?P<on>\d+)\)"
)
_AT, _TIME = r" at (?P<line>\S+:\d+)", r"[\d.]+ (?:ms|s)"
_AGO = rf"(?:{_TIME} before the end|at the end)"
_WAITED = rf" (?P<count>\d+) ranks? had waited {_TIME} for (?:it|them) in {_CALL}{_AT}\."
_THROUGH = r"(?P<through> It went through all the same: the (?:results are|received data is) .*\.)?"
_NAMES = {"reduce op": "reduce_op", "size": "size", "dtype": "dtype", "root": "root"}


class Sentences:
    """What one run of a row allows to say. ``rows``: its records, oldest first."""

    def __init__(self, case: Case, pids: Sequence[int], took: float, rows: Sequence[Row]) -> None:
        self._case, self._pids, self._took, self._rows = case, pids, took, rows
        self._groups = {"0": "world", **{str(n): g for n, (g, _) in enumerate(case.groups, 1)}}

    def false(self, finding: Finding) -> Iterator[str]:
        """Yield what is not true in a finding's sentences."""
        for text in (finding.summary, *finding.evidence):
            for problem in self._problems(text, finding):
                yield f"{problem}: {text}"

    def _problems(self, text: str, finding: Finding) -> Iterator[str]:
        for rank, host, pid in re.findall(r"[Rr]ank (\d+) \(([\w.-]+), pid (\d+)\)", text):
            if (host, int(pid)) != (host_name(), self._pids[int(rank)]):
                yield f"rank {rank} is process {self._pids[int(rank)]} on {host_name()}"
        for number, unit in re.findall(r"([\d.]+) (ms|s)\b", text):
            if float(number) * {"ms": 1e-3, "s": 1}[unit] > self._took:
                yield f"the job took {self._took:.1f} s"
        side = re.fullmatch(_SIDE, text)
        if side:
            yield from self._side(side, finding)
            return
        for pattern, check in _KNOWN:
            match = re.fullmatch(pattern, text)
            if match:
                yield from check(self, match)
                return
        yield "no such sentence is known"

    # --- the program of the row ---

    def _calls(self, rank: int, group: str) -> list[Call]:
        """Return the collectives of a rank on a group, in order."""
        steps = [
            call
            for step in self._case.program[rank]
            for call in (step.threads if step.op == "threads" else (step,))
        ]
        name = self._groups[group]
        skipped = (*MESSAGES, *NO_CALLS)
        return [call for call in steps if call.op not in skipped and call.group == name]

    def _call(self, rank: int, match: Match) -> Call | None:
        """Return the collective of a rank that has the number in a sentence; None if none has."""
        calls, number = self._calls(rank, match["group"]), int(match["seq"])
        return calls[number - 1] if 0 < number <= len(calls) else None

    def _members(self, group: str) -> set[int]:
        every = range(self._case.world_size)
        return set(dict(self._case.groups).get(self._groups[group], every))

    def _size(self, call: Call, members: int) -> str:
        parts = members if _op(call) in OF_ALL else 1
        parts -= call.op == "all_gather_short"
        return f"{call.count * parts * ITEM[call.dtype]} bytes"

    def _value(self, call: Call, field: str, group: str) -> str:
        """Return an argument of a call as a sentence has it."""
        if field == "size":
            return self._size(call, len(self._members(group)))
        if field == "root":
            inside = call.root in self._members(group)
            return f"rank {call.root}" if inside else "a rank outside the group"
        return str(getattr(call, field)).lower()

    # --- claims that several sentences make ---

    def _is_issued(self, ranks: str, match: Match, op: str, line: str | None) -> Iterator[str]:
        """Ranks issue this call, from this line."""
        for rank in sorted(ranks_in(ranks)):
            call = self._call(rank, match)
            if call is None or _op(call) != op:
                yield f"rank {rank} issues {_op(call) if call else 'nothing'} there"
        if line is not None:
            yield from _false_line(op, line)

    def _has_message(self, rank: int, match: Match) -> Iterator[str]:
        """A rank has such a message in its program."""
        peer = int(match["peer"]) if match["peer"] else -1
        wanted = (match["end"], peer, int(match["tag"]), self._groups[match["on"]])
        if wanted not in [(c.op, c.peer, c.tag, c.group) for c in self._case.program[rank]]:
            yield f"rank {rank} has no such message"
        yield from _false_line(match["end"], match["line"])

    def _waits(self, match: Match) -> Iterator[str]:
        """So many ranks wait in a call that the culprits do not issue."""
        culprits = ranks_in(match["ranks"])
        waiting = self._members(match["group"]) - culprits
        if len(waiting) != int(match["count"]):
            yield f"{len(waiting)} ranks issue it"
        listed = ",".join(map(str, waiting))
        yield from self._is_issued(listed, match, match["op"], match["line"])
        yield from self._not_reached(culprits, match)

    def _not_reached(self, ranks: set[int], match: Match) -> Iterator[str]:
        """These ranks are members of the group, and their records do not have this call."""
        came = self._came(match)
        if ranks & came or not ranks <= self._members(match["group"]):
            yield f"ranks {sorted(came)} have come there"

    def _came(self, match: Match) -> set[int]:
        key = match["group"], int(match["seq"])
        return {
            row["rank"]
            for row in self._rows
            if (row["group"], row["seq"]) == key and row["op"] not in MESSAGES
        }

    def _went_through(self, ranks: set[int], of_call: Callable[[Row], bool]) -> Iterator[str]:
        rows = [row for row in self._rows if row["rank"] in ranks and of_call(row)]
        if {row["rank"] for row in rows if row["status"] == "completed"} != ranks:
            yield "it did not go through"

    # --- one sentence each ---

    def _desync(self, match: Match) -> Iterator[str]:
        yield from self._is_issued(match["ranks"], match, match["op"], match["line"])
        yield from self._is_issued(match["others"], match, match["op2"], match["line2"])
        sides = {self._call(min(ranks_in(match[name])), match) for name in ("ranks", "others")}
        if len(sides) != 2:
            yield "they issue the same"

    def _mismatch(self, match: Match) -> Iterator[str]:
        fields = [_NAMES[word] for word in re.split(r", | and ", match["fields"])]
        for name, claim in (("ranks", match["a"]), ("others", match["b"])):
            yield from self._is_issued(match[name], match, match["op"], None)
            for rank in sorted(ranks_in(match[name])):
                call = self._call(rank, match)
                values = [self._value(call, field, match["group"]) for field in fields if call]
                if claim != ", ".join(values):
                    yield f"rank {rank} passes {', '.join(values)}"
        if match["through"]:
            key = match["group"], int(match["seq"]), match["op"]
            concerned = ranks_in(match["ranks"]) | ranks_in(match["others"])
            yield from self._went_through(
                concerned, lambda row: (row["group"], row["seq"], row["op"]) == key
            )

    def _messages_differ(self, match: Match) -> Iterator[str]:
        source, target = int(match["source"]), int(match["target"])
        ends = ((source, "send", (target,), match["a"]), (target, "recv", (source, -1), match["b"]))
        for rank, op, peers, claim in ends:
            passed = [call for call in self._case.program[rank] if call.op == op]
            values = [
                call.dtype if claim in ITEM else self._size(call, 1)
                for call in passed
                if call.peer in peers
            ]
            if claim not in values:
                yield f"rank {rank} passes {values}"
        if match["a"] == match["b"]:
            yield "they pass the same"
        if match["through"]:
            yield from self._went_through({source, target}, lambda row: row["op"] in MESSAGES)

    def _exhausted(self, match: Match) -> Iterator[str]:
        yield from self._waits(match)
        for rank in ranks_in(match["ranks"]):
            if self._call(rank, match) is not None:
                yield f"rank {rank} issues it as well"

    def _dead(self, match: Match) -> Iterator[str]:
        yield from self._waits(match)
        for rank in ranks_in(match["ranks"]):
            refused = [c for c in self._case.program[rank] if _is_refused(c)]
            if self._case.kind_of_fault != PARAMETER or not refused:
                yield f"rank {rank} passes no argument that torch refuses"
            # Gloo reads behind its list of peers then, which may also go wrong more quietly.
            if match["signal"] and not any(c.peer >= self._case.world_size for c in refused):
                yield f"rank {rank} passes no peer outside the group"

    def _deadlock(self, match: Match) -> Iterator[str]:
        named = ranks_in(match["ranks"])
        for part in match["waits"].split("; "):
            tags = re.fullmatch(_TAGS, part)
            if tags:
                yield from self._tags(tags)
                continue
            wait = re.fullmatch(_WAIT, part)
            if wait is None:
                yield f"no such wait is known: {part}"
                continue
            yield from self._wait(wait)
            if not (ranks_in(wait["ranks"]) | ranks_in(wait["others"])) & named:
                yield f"who waits is not named: {part}"

    def _wait(self, match: Match) -> Iterator[str]:
        """Ranks are in a call, for others."""
        others = ranks_in(match["others"])
        if match["op"]:
            yield from self._in_call(match)
            yield from self._not_reached(others, match)
            return
        for rank in ranks_in(match["ranks"]):
            yield from self._has_message(rank, match)
            if match["peer"] and others != {int(match["peer"])}:
                yield f"rank {match['peer']} is the other end"

    def _tags(self, match: Match) -> Iterator[str]:
        source, target = int(match["source"]), int(match["target"])
        sent = {c.tag for c in self._case.program[source] if (c.op, c.peer) == ("send", target)}
        taken = {c.tag for c in self._case.program[target] if (c.op, c.peer) == ("recv", source)}
        tag, other_tag = int(match["one"]), int(match["other"])
        if not ((tag in sent and other_tag in taken) or (other_tag in sent and tag in taken)):
            yield f"sent is {sorted(sent)}, and received {sorted(taken)}"

    def _side(self, match: Match, finding: Finding) -> Iterator[str]:
        """Evidence: a side of a desync or a mismatch, with what it passes in the finding's call."""
        claims = set(filter(None, (match["values"] or "").split(", ")))
        for rank in sorted(ranks_in(match["ranks"])):
            if match["op"] in MESSAGES:
                calls = [call for call in self._case.program[rank] if call.op == match["op"]]
            else:
                calls = self._calls(rank, finding.group)[finding.seq - 1 : finding.seq]
            passed = [self._values(call, finding.group) for call in calls]
            if not any(claims | {match["op"]} <= values for values in passed):
                yield f"rank {rank} passes {passed}"
        yield from _false_line(match["op"], match["line"])

    def _values(self, call: Call, group: str) -> set[str]:
        """Return what a sentence may say that a call passes."""
        fields = ("dtype", "reduce_op", "root", "size")
        return {_op(call), *(self._value(call, field, group) for field in fields)}

    def _last(self, match: Match) -> Iterator[str]:
        yield from self._is_issued(match["ranks"], match, match["op"], match["line"])
        rank = int(match["ranks"])
        done = [
            row["seq"]
            for row in self._rows
            if (row["rank"], row["group"]) == (rank, match["group"]) and row["op"] not in MESSAGES
        ]
        if max(done) != int(match["seq"]):
            yield f"it was last in #{max(done)}"

    def _in_call(self, match: Match) -> Iterator[str]:
        """Ranks are in a call: it is theirs, and their records have it."""
        yield from self._is_issued(match["ranks"], match, match["op"], match["line"])
        if not ranks_in(match["ranks"]) <= self._came(match):
            yield f"ranks {sorted(self._came(match))} have come there"

    def _failed(self, match: Match) -> Iterator[str]:
        refused = [c for c in self._case.program[int(match["ranks"])] if _is_refused(c)]
        if match["op"] not in [call.op for call in refused]:
            yield f"it passes what torch refuses in {[call.op for call in refused]}"
        yield from _false_line(match["op"], match["line"])


_WAIT = rf"{_WHO} in (?:{_CALL}|{_MESSAGE}){_AT}, for {_OTHERS}"
_TAGS = (
    r"tag (?P<one>-?\d+) and tag (?P<other>-?\d+) do not match, "
    r"from rank (?P<source>\d+) to rank (?P<target>\d+)"
)
_SIDE = rf"{_WHO}: (?P<op>\w+){_AT}(?:, (?P<values>.*))?"
_KNOWN: tuple[tuple[str, Callable[[Sentences, Match], Iterator[str]]], ...] = (
    (
        rf"{_WHO} issued (?P<op>\w+) \((?P<line>\S+)\) as #(?P<seq>\d+) of group (?P<group>\d+), "
        rf"against (?P<op2>\w+) \((?P<line2>\S+)\) of {_OTHERS}\.",
        Sentences._desync,
    ),
    (
        rf"{_WHO} and {_OTHERS} differ in (?P<fields>[\w ,]+) in {_CALL}: (?P<a>[^.]+) against "
        rf"(?P<b>[^.]+)\.{_THROUGH}",
        Sentences._mismatch,
    ),
    (
        r"Rank (?P<source>\d+) sends (?P<a>[\w ]+) and rank (?P<target>\d+) receives "
        rf"(?P<b>[\w ]+), in message #\d+ of group \d+\.{_THROUGH}",
        Sentences._messages_differ,
    ),
    (
        rf"{_WHO} left the loop and exited with code 0, {_AGO}\.{_WAITED}",
        Sentences._exhausted,
    ),
    (
        rf"{_WHO} (?:exited with code 1,|was killed by (?P<signal>SIGSEGV)) {_AGO}\.{_WAITED}",
        Sentences._dead,
    ),
    (rf"{_WHO} wait for each other: (?P<waits>.*)\.", Sentences._deadlock),
    (_WAIT, Sentences._wait),
    (
        rf"rank (?P<ranks>\d+): last in {_CALL}{_AT}, which it left {_AGO}",
        Sentences._last,
    ),
    (rf"{_WHO}: in {_CALL}{_AT} for {_TIME}", Sentences._in_call),
    (
        rf"rank (?P<ranks>\d+): (?:in )?(?P<op>\w+) #\d+ of group \d+{_AT} "
        rf"(?:failed {_AGO}|for {_TIME})",
        Sentences._failed,
    ),
)


def _op(call: Call) -> str:
    """Return the op of a step's call, as the records name it."""
    for ending in ("_async", "_written", "_read", "_short"):
        if call.op.endswith(ending):
            return call.op.removesuffix(ending)
    return call.op


def _is_refused(call: Call) -> bool:
    """Tell whether torch refuses a message: for its tag, or for a peer that no group has."""
    return call.op in MESSAGES and (call.tag < 0 or call.peer >= _MOST_RANKS)


def _false_line(op: str, line: str) -> Iterator[str]:
    """A line is one of a function that issues the op."""
    file, _, number = line.rpartition(":")
    for name, function in inspect.getmembers(scoreboard_calls, inspect.isfunction):
        source, first = inspect.getsourcelines(function)
        if Path(file) == PROGRAMS and first <= int(number) < first + len(source):
            if _op(Call(name.removeprefix("_"))) != op:
                yield f"line {number} is in {name}"
            return
    yield f"{line} is no line of {PROGRAMS.name}"
