"""Check every sentence of a verdict against what was planted, and against the records.

``false_claims`` reads sentences as a person would: it finds the claims in them (which process,
which call, which line, how many ranks, which fault) and looks each one up: processes in the list of
those that were started, faults in the plan, lines in the source of the program, calls among the
records of the ranks, filtered in the simplest way. A sentence that it cannot read is a claim, too.
"""

from __future__ import annotations

import inspect
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import scenario_programs
from scenarios import Scenario

from rankcall.process import host_name
from rankcall.testing.injection import Fault

Row = Mapping[str, Any]
PROGRAMS = Path(scenario_programs.__file__)
_RANKS = r"[Rr]anks? (?P<ranks>[\d,-]+)"
_PROCESS = re.compile(r"[Rr]ank (?P<rank>\d+) \((?P<host>[\w.-]+), pid (?P<pid>\d+)\)")
_CALL = (
    r"(?P<op>\w+) #(?P<seq>\d+)"
    r"(?: (?:to|from) (?:rank (?P<peer>\d+)|any rank) \(tag (?P<tag>\d+), group (?P<p2p>[^\s()]+)\)"
    r"| of group (?P<group>[^\s()]+)(?: \((?P<about>\w+)\))?)"
    r"(?: at (?P<line>\S+:\d+))?"
)
_WAITED = re.compile(
    r"(?P<count>[\d,]+)(?: ranks?)? (?:has|have|had) waited (?P<s>[\d.]+) s for (?:it|them) in "
    rf"{_CALL}"
)
_HELD_UP = re.compile(
    r"(?P<all>[\d,]+) ranks (?:cannot|could not) go on: (?P<there>[\d,]+) .*, "
    r"and (?P<others>[\d,]+) (?:is|are|was|were) in (?:another call|other calls)\.$"
)
_WHO = rf"{_RANKS} \([^)]*\) "
_AGO = r"(?:[\d.]+ s (?:ago|before the end)|at the end)"
_THEN = r"(?:\. .*(?:waited|go on: ).*)?\.$"
# What a summary of each kind may say, as a whole.
_SUMMARIES = {
    "missing": (
        rf"{_WHO}(?:has|have|had) (?:not come: (?:it|they) (?:is|are|was|were) "
        r"(?:in user code|in \w+ at \S+:\d+|at \S+:\d+ in \S+)"
        r"|(?P<off>stopped recording), to end or by rankcall\.disable: "
        rf"whether (?:it|they) came is not known){_THEN}"
    ),
    "stopped": (
        rf"{_WHO}(?:(?:is|are) (?P<sig>stopped \(SIGSTOP\))"
        rf"|(?:has|have|had) (?P<gil>run no Python thread) for [\d.]+ s){_THEN}"
    ),
    "dead": (
        rf"{_WHO}(?:(?:was|were) killed by (?P<signal>\w+)|exited with code (?P<code>\d+),"
        rf"|failed with (?P<error>.*),) {_AGO}{_THEN}"
    ),
    "exhausted": (
        rf"{_WHO}left the loop(?: and (?:exited with code (?P<code>0),|ended) {_AGO}"
        rf"|: (?:it|they) (?:is|are|was|were) closing down){_THEN}"
    ),
    "desync": (
        rf"{_WHO}issued (?P<op>\w+) \((?P<line>\S+)\) as #(?P<seq>\d+) of group "
        r"(?P<group>\S+), against (?P<op2>\w+) \((?P<line2>\S+)\) of ranks? "
        r"(?P<others>[\d,-]+) \([^)]*\)\.$"
    ),
    "mismatch": (
        rf"{_WHO}and ranks? (?P<others>[\d,-]+) \([^)]*\) differ in (?P<fields>[\w ,]+) in "
        r"(?P<op>\w+) #(?P<seq>\d+) of group (?P<group>[^\s:]+): (?P<a>.+) against (?P<b>[^.]+)\.$"
    ),
    "deadlock": rf"{_WHO}wait for each other: .*\.$",
    "straggler": (
        rf"{_WHO}(?:makes|make) the others wait: waiting for (?:it|them) costs each of them "
        r"(?P<cost>\d+) % of its time, on average\. (?:It comes|They come) late to \w+ of group "
        r"\S+ at \S+:\d+, by (?P<late>[\d.]+) (?P<unit>ms|s) at the median\.$"
    ),
    "slow_link": (
        r"Slow: messages from rank (?P<source>\d+) \([^)]*\) to rank (?P<target>\d+) \([^)]*\) "
        r"take (?P<took>\d+) ms once both ends have come, [\d.]+ times the [\d.]+ ms of \d+ others "
        r"like it\.$"
    ),
}
_FIELD_OF_CHANGE = {"shape": "size", "dtype": "dtype", "root": "root", "tag": "tag"}


def ranks_in(text: str) -> set[int]:
    """Return the ranks of a list such as ``0,2-4``."""
    spans = (part.partition("-") for part in text.split(","))
    return {rank for low, _, high in spans for rank in range(int(low), int(high or low) + 1)}


class Claims:
    """Checks the sentences about one scenario. ``rows``: all records, oldest first, or none."""

    def __init__(
        self, scenario: Scenario, pids: Sequence[int], took: float, rows: Sequence[Row]
    ) -> None:
        self._scenario = scenario
        self._pids = pids
        self._took = took
        self._rows = rows

    def false(self, finding: Mapping[str, Any]) -> Iterator[str]:
        """Yield what is not true in a finding's sentences."""
        sentences = [finding["summary"], *finding["evidence"]]
        for text in sentences:
            for problem in self._false_in(text):
                yield f"{problem}: {text}"
        for problem in self._false_in_summary(finding["kind"], finding["summary"]):
            yield f"{problem}: {finding['summary']}"

    def _false_in(self, text: str) -> Iterator[str]:
        for match in _PROCESS.finditer(text):
            rank = int(match["rank"])
            if int(match["pid"]) != self._pids[rank]:
                yield f"rank {rank} is process {self._pids[rank]}"
            if match["host"] != self._host(rank):
                yield f"rank {rank} is on {self._host(rank)}"
        for line in re.findall(r"\S+\.py:\d+", text):
            yield from self._false_line(line.lstrip("("))
        for match in _WAITED.finditer(text):
            if float(match["s"]) > self._took:
                yield f"the job took {self._took:.1f} s"
            there = self._in_call(match)
            if self._rows and len(there) != int(match["count"].replace(",", "")):
                yield f"in that call are ranks {sorted(there)}"
        for match in re.finditer(rf"{_RANKS} \([^)]*\):? (?:in|waits? in) {_CALL}", text):
            lost = ranks_in(match["ranks"]) - self._in_call(match)
            if self._rows and lost:
                yield f"ranks {sorted(lost)} are not in that call"
        held_up = _HELD_UP.search(text)
        if held_up:
            total, there, others = (int(count.replace(",", "")) for count in held_up.groups())
            if total != there + others or total > self._scenario.world_size:
                yield "the ranks do not add up"

    def _false_line(self, line: str) -> Iterator[str]:
        """A line is one of the scenario's program, or of what that calls there."""
        file, _, number = line.rpartition(":")
        if Path(file) != PROGRAMS:
            yield f"{line} is no line of {PROGRAMS.name}"
            return
        called = inspect.getsource(self._scenario.program)
        for name, function in inspect.getmembers(scenario_programs, inspect.isfunction):
            source, first = inspect.getsourcelines(function)
            if first <= int(number) < first + len(source):
                if function is not self._scenario.program and f"{name}(" not in called:
                    yield f"line {number} is in {name}"
                return
        yield f"line {number} is in no function"

    def _in_call(self, match: re.Match[str]) -> set[int]:
        """Return the ranks whose records show them in the call that a sentence names."""
        group = match["group"] or match["p2p"]
        wanted: dict[str, Any] = {"op": match["op"], "seq": int(match["seq"]), "group": group}
        if match["peer"] is not None:
            wanted.update(peer=int(match["peer"]), tag=int(match["tag"]))
        return {
            row["rank"]
            for row in self._rows
            if all(row[name] == value for name, value in wanted.items())
            and row["status"] != "completed"
        }

    def _host(self, rank: int) -> str:
        scenario = self._scenario
        if scenario.nodes > 1:
            return f"node-{rank // (scenario.world_size // scenario.nodes)}"
        return "node-b" if scenario.ahead and rank >= scenario.world_size // 2 else host_name()

    # --- one kind of verdict ---

    def _false_in_summary(self, kind: str, text: str) -> Iterator[str]:
        match = re.match(_SUMMARIES[kind], text)
        if match is None:
            yield "no such sentence is known"
            return
        ranks = ranks_in(match["ranks"]) if "ranks" in match.re.groupindex else set()
        planted = [fault for fault in self._scenario.plan.faults if fault.rank in ranks]
        yield from getattr(self, f"_{kind}")(match, planted)
        for waited in _WAITED.finditer(text):
            yield from self._not_the_call(ranks, planted, waited)

    def _not_the_call(
        self, ranks: set[int], planted: Sequence[Fault], waited: re.Match[str]
    ) -> Iterator[str]:
        """The call that others wait in is one that the culprits were kept from."""
        group, seq = waited["group"] or waited["p2p"], int(waited["seq"])
        for fault in planted:
            one_counter = fault.kind != "exhaust" and fault.group is None and not waited["p2p"]
            if one_counter and fault.seq > seq:
                yield f"the fault strikes at #{fault.seq}"
            if fault.group not in (None, waited["about"]) and not self._belong(ranks, group):
                yield f"the fault strikes in {fault.group}"
            if fault.at not in (None, waited["op"], "send") or (fault.at == "send") != bool(
                waited["p2p"]
            ):
                yield f"the fault strikes at {fault.at}"
        if waited["p2p"] is None:
            came = {row["rank"] for row in self._rows if (row["group"], row["seq"]) == (group, seq)}
            if came & ranks and not any(fault.kind in ("signal", "fail") for fault in planted):
                yield f"ranks {sorted(came & ranks)} have come"

    def _belong(self, ranks: set[int], group: str) -> bool:
        """Tell whether ranks have issued calls of a group: then they are kept from its next."""
        return ranks <= {row["rank"] for row in self._rows if row["group"] == group}

    def _missing(self, match: re.Match[str], planted: Sequence[Fault]) -> Iterator[str]:
        # The process of a rank that has run out may take long to end, on a busy machine.
        kinds = {"exhaust", "exit"} if match["off"] else {"delay"}
        if {fault.kind for fault in planted} - kinds:
            yield "no rank was made to end" if match["off"] else "no rank was made to hang"

    def _stopped(self, match: re.Match[str], planted: Sequence[Fault]) -> Iterator[str]:
        kinds = {fault.kind for fault in planted}
        if kinds != {"signal" if match["sig"] else "hold_gil"}:
            yield f"planted is {kinds}"

    def _dead(self, match: re.Match[str], planted: Sequence[Fault]) -> Iterator[str]:
        for fault in planted:
            number = fault.number if fault.kind == "signal" else 0
            if match["signal"] and signal.Signals[match["signal"]] != number:
                yield f"signal {number} was planted"
            code = {"fail": 1, "exit": fault.number}.get(fault.kind)
            if match["code"] and int(match["code"]) != code:
                yield f"exit code {code} was planted"

    def _exhausted(self, match: re.Match[str], planted: Sequence[Fault]) -> Iterator[str]:
        if {fault.kind for fault in planted} - {"exhaust", "exit"}:
            yield "its data did not run out"

    def _desync(self, match: re.Match[str], planted: Sequence[Fault]) -> Iterator[str]:
        mine = match["ranks"], match["op"], match["line"]
        for ranks, op, line in (mine, (match["others"], match["op2"], match["line2"])):
            issued = {
                row["rank"]
                for row in self._rows
                if (row["op"], row["call_site"]) == (op, line)
                and (row["group"], row["seq"]) == (match["group"], int(match["seq"]))
            }
            if self._rows and issued != ranks_in(ranks):
                yield f"{op} was issued by ranks {sorted(issued)}"

    def _mismatch(self, match: re.Match[str], planted: Sequence[Fault]) -> Iterator[str]:
        named = set(re.split(r", | and ", match["fields"]))
        for fault in planted:
            if fault.kind == "change" and _FIELD_OF_CHANGE[fault.text] not in named:
                yield f"its {fault.text} was changed"
            if fault.kind == "change" and (
                fault.at != match["op"] or fault.seq > int(match["seq"])
            ):
                yield f"{fault.at} #{fault.seq} was changed"
        if ranks_in(match["ranks"]) & ranks_in(match["others"]):
            yield "ranks are on both sides"

    def _deadlock(self, match: re.Match[str], planted: Sequence[Fault]) -> Iterator[str]:
        named = re.findall(r"for ranks? ([\d,-]+)", match.string)
        if {rank for ranks in named for rank in ranks_in(ranks)} - ranks_in(match["ranks"]):
            yield "a rank that is waited for is not named"

    def _straggler(self, match: re.Match[str], planted: Sequence[Fault]) -> Iterator[str]:
        late = float(match["late"]) * (1 if match["unit"] == "s" else 1e-3)
        for fault in planted:
            if late < 0.5 * fault.seconds or late > 3 * fault.seconds:
                yield f"it was delayed by {fault.seconds} s"
        if not 0 < int(match["cost"]) <= 100:
            yield "a share"

    def _slow_link(self, match: re.Match[str], planted: Sequence[Fault]) -> Iterator[str]:
        ends = int(match["source"]), int(match["target"])
        (fault,) = (fault for fault in self._scenario.plan.faults if fault.kind == "slow_link")
        if ends != (fault.number, fault.rank) or int(match["took"]) < 900 * fault.seconds:
            yield f"rank {fault.number} to rank {fault.rank} takes {fault.seconds} s"
