"""Check every fact of a scenario's verdict against the planted faults, and the records."""

from __future__ import annotations

import inspect
import signal
from collections.abc import Iterator, Sequence
from itertools import takewhile

import scenario_programs
from planted_facts import PlantedFacts, Row, call_of, others, subject
from scenarios import Scenario

from rankcall.analysis.verdicts.facts import CallFact, Fact, Relation
from rankcall.analysis.verdicts.finding import Finding
from rankcall.process import host_name
from rankcall.testing.injection import Fault

# How the records name what ``FaultPlan.change`` changes.
_FIELDS = {"shape": "size", "dtype": "dtype", "root": "root", "tag": "tag"}
_ENDS = ("signal", "fail")  # faults by which a process ends inside a call that it has come to


class ScenarioFacts(PlantedFacts):
    """Checks the facts of the findings about one scenario."""

    programs = scenario_programs

    def __init__(
        self, scenario: Scenario, pids: Sequence[int], took: float, rows: Sequence[Row]
    ) -> None:
        super().__init__(pids, took, rows)
        self._scenario = scenario

    def _host(self, rank: int) -> str:
        scenario = self._scenario
        if scenario.nodes > 1:
            return f"node-{rank // (scenario.world_size // scenario.nodes)}"
        return "node-b" if scenario.ahead and rank >= scenario.world_size // 2 else host_name()

    def _false_line(self, line: str, fact: Fact) -> Iterator[str]:
        """A line is one of the scenario's program, or of what that calls there."""
        yield from super()._false_line(line, fact)
        name, program = self._function_at(line), self._scenario.program
        if name not in (None, program.__name__) and f"{name}(" not in inspect.getsource(program):
            yield f"{line} is in {name}"

    # --- what was planted ---

    def _faults(self, fact: Fact) -> list[Fault]:
        """Return the faults of the ranks that a fact is about."""
        ranks = subject(fact)
        return [fault for fault in self._scenario.plan.faults if fault.rank in ranks]

    def _planted(self, fact: Fact, *kinds: str) -> Iterator[str]:
        """Each rank that a fact is about has a fault of one of these kinds."""
        faults = self._faults(fact)
        if {fault.kind for fault in faults} - set(kinds):
            yield f"planted is {[fault.kind for fault in faults]}"
        if self._scenario.plan.faults and subject(fact) != {f.rank for f in faults}:
            yield f"planted is {self._scenario.plan.faults}"

    def _killed_by(self, fact: Fact, finding: Finding) -> Iterator[str]:
        yield from self._planted(fact, "signal")
        for fault in self._faults(fact):
            if signal.Signals[fact.value("signal")] != fault.number:
                yield f"signal {fault.number} was planted"

    def _exited_with(self, fact: Fact, finding: Finding) -> Iterator[str]:
        yield from self._planted(fact, "exit", "fail")
        for fault in self._faults(fact):
            code = 1 if fault.kind == "fail" else fault.number
            if fact.value("code") != str(code):
                yield f"exit code {code} was planted"

    def _failed_with(self, fact: Fact, finding: Finding) -> Iterator[str]:
        yield from self._planted(fact, "fail")
        if not fact.value("error").startswith("InjectedFault"):
            yield "InjectedFault was raised"

    def _said_last(self, fact: Fact, finding: Finding) -> Iterator[str]:
        yield from self._planted(fact, "fail", "exit", "signal")
        raised = any(fault.kind == "fail" for fault in self._faults(fact))
        if raised and "InjectedFault" not in fact.value("text"):
            yield "InjectedFault was raised"

    def _failed_later(self, fact: Fact, finding: Finding) -> Iterator[str]:
        yield from self._planted(fact, "fail", "exit", "signal")
        if subject(fact) & others(fact):
            yield "it failed first"

    def _stopped(self, fact: Fact, finding: Finding) -> Iterator[str]:
        yield from self._planted(fact, "signal")
        if {fault.number for fault in self._faults(fact)} != {signal.SIGSTOP}:
            yield "no SIGSTOP was planted"

    def _no_python_thread(self, fact: Fact, finding: Finding) -> Iterator[str]:
        yield from self._planted(fact, "hold_gil")

    def _left_loop(self, fact: Fact, finding: Finding) -> Iterator[str]:
        yield from self._planted(fact, "exhaust", "exit")
        if any(fault.kind == "exit" and fault.number for fault in self._faults(fact)):
            yield "another exit code was planted"

    def _stopped_recording(self, fact: Fact, finding: Finding) -> Iterator[str]:
        # The process of a rank that has run out may take long to end, on a busy machine.
        yield from self._planted(fact, "exhaust", "exit")

    def _not_come(self, fact: Fact, finding: Finding) -> Iterator[str]:
        yield from self._planted(fact, "delay")

    def _goes_on(self, fact: Fact, finding: Finding) -> Iterator[str]:
        yield from self._planted(fact, "delay")

    # --- ranks that wait ---

    def _held_up(self, fact: Fact, finding: Finding) -> Iterator[str]:
        there, culprits = subject(fact), others(fact)
        if culprits != set(finding.ranks):
            yield f"the finding is about ranks {finding.ranks}"
        if self._rows and there != self._in_call(call_of(fact)) - culprits:
            yield f"in that call are ranks {sorted(self._in_call(call_of(fact)))}"
        yield from self._not_the_call(call_of(fact), culprits)

    def _not_the_call(self, call: CallFact, culprits: set[int]) -> Iterator[str]:
        """The call that others wait in is one that the culprits were kept from."""
        is_message = call.peer is not None
        faults = [fault for fault in self._scenario.plan.faults if fault.rank in culprits]
        for fault in faults:
            counted = fault.kind != "exhaust" and fault.group is None and not is_message
            if counted and fault.seq > call.seq:
                yield f"the fault strikes at #{fault.seq}"
            if fault.group not in (None, call.description) and not self._belong(culprits, call):
                yield f"the fault strikes in {fault.group}"
            if fault.at not in (None, call.op, "send") or (fault.at == "send") != is_message:
                yield f"the fault strikes at {fault.at}"
        if not is_message and not any(fault.kind in _ENDS for fault in faults):
            came = culprits & set(self._rows_of(call))
            if came:
                yield f"ranks {sorted(came)} have come"

    def _belong(self, ranks: set[int], call: CallFact) -> bool:
        """Tell whether ranks have issued calls of a group: then they are kept from its next."""
        return ranks <= {row["rank"] for row in self._rows if row["group"] == call.group}

    def _held_up_elsewhere(self, fact: Fact, finding: Finding) -> Iterator[str]:
        elsewhere = subject(fact)
        there = {
            rank
            for other in finding.facts
            if other.relation is Relation.HELD_UP
            for rank in subject(other)
        }
        if elsewhere & (there | set(finding.ranks)) or not elsewhere <= set(finding.victims):
            yield f"held up are {finding.victims}, and {sorted(there)} of them there"
        waiting = {row["rank"] for row in self._rows if row["status"] != "completed"}
        if self._rows and not elsewhere <= waiting:
            yield f"in a call are ranks {sorted(waiting)}"

    def _waits_in(self, fact: Fact, finding: Finding) -> Iterator[str]:
        lost = subject(fact) - self._in_call(call_of(fact))
        if self._rows and lost:
            yield f"ranks {sorted(lost)} are not in that call"

    def _waits_in_turn(self, fact: Fact, finding: Finding) -> Iterator[str]:
        if not subject(fact) <= set(finding.victims):
            yield f"held up are {finding.victims}"

    def _last_left(self, fact: Fact, finding: Finding) -> Iterator[str]:
        yield from self._last(fact, "completed")

    def _last_is_in(self, fact: Fact, finding: Finding) -> Iterator[str]:
        # The call fails once others end; a process that is killed leaves it open. Of several that
        # DDP has in flight, it is the oldest.
        yield from self._last(fact, "scheduled", "started", "failed")

    def _last_failed(self, fact: Fact, finding: Finding) -> Iterator[str]:
        yield from self._last(fact, "failed")

    def _last(self, fact: Fact, *statuses: str) -> Iterator[str]:
        """The record that a rank stands with is of that call, and has one of these states.

        It is the newest, or the oldest of those in flight.
        """
        if not self._rows:
            return
        rank, call = min(subject(fact)), call_of(fact)
        last = self._newest(rank)
        if "started" in statuses:
            mine = [row for row in self._rows if row["rank"] == rank]
            in_flight = takewhile(lambda row: row["status"] != "completed", reversed(mine))
            last = [last, *in_flight][-1]
        if (last["op"], last["seq"], last["group"]) != (call.op, call.seq, call.group):
            yield f"its last call is {last['op']} #{last['seq']} of {last['group']}"
        if last["status"] not in statuses:
            yield f"that call is {last['status']}"

    def _issued_nothing(self, fact: Fact, finding: Finding) -> Iterator[str]:
        if any(row["rank"] in subject(fact) for row in self._rows):
            yield "it has issued calls"

    def _seen_at(self, fact: Fact, finding: Finding) -> Iterator[str]:
        yield from ()  # its line was checked

    # --- members that do not issue the same ---

    def _issued(self, fact: Fact, finding: Finding) -> Iterator[str]:
        yield from self._side(fact, finding)

    def _passed(self, fact: Fact, finding: Finding) -> Iterator[str]:
        yield from self._side(fact, finding)
        changed = {
            _FIELDS[fault.text] for fault in self._scenario.plan.faults if fault.kind == "change"
        }
        fields = {name for name, _ in fact.values}
        if finding.kind == "mismatch" and changed and fields and not changed & fields:
            yield f"changed was {changed}"

    def _side(self, fact: Fact, finding: Finding) -> Iterator[str]:
        """Exactly these ranks issued this op from this line, under the number."""
        call, fields = call_of(fact), dict(fact.values)
        seq = call.seq if fact.relation is Relation.ISSUED else finding.seq
        members = {*finding.ranks, *finding.victims}
        issued = {
            row["rank"]
            for row in self._rows
            if (row["op"], row["call_site"]) == (call.op, call.line)
            and (row["group"], row["seq"]) == (call.group, seq)
            and ("dtype" not in fields or row["dtype"] == fields["dtype"])
            and ("root" not in fields or f"rank {row['root']}" == fields["root"])
            and ("size" not in fields or fields["size"] in _sizes(row))
        }
        if self._rows and issued & members != subject(fact):
            yield f"that was issued by ranks {sorted(issued)}"
        for fault in self._scenario.plan.faults:
            if fault.rank in subject(fact) and fault.seq > seq:
                yield f"the fault strikes at #{fault.seq}"

    def _shifted(self, fact: Fact, finding: Finding) -> Iterator[str]:
        yield from self._planted(fact, "skip")
        if fact.number != 1:
            yield "one call was skipped"

    # --- circles ---

    def _wait_for_each_other(self, fact: Fact, finding: Finding) -> Iterator[str]:
        planted = [ranks for kind, ranks in self._scenario.causes if kind == "deadlock"]
        if tuple(sorted(subject(fact))) not in planted:
            yield f"planted is a circle of {planted}"

    def _waits_for(self, fact: Fact, finding: Finding) -> Iterator[str]:
        yield from self._waits_in(fact, finding)
        awaited = others(fact)
        if not awaited <= set(finding.ranks):
            yield f"the circle is {finding.ranks}"
        if call_of(fact).peer is None and awaited & set(self._rows_of(call_of(fact))):
            yield f"there are ranks {sorted(self._rows_of(call_of(fact)))}"
        if call_of(fact).peer not in (None, -1) and awaited != {call_of(fact).peer}:
            yield f"rank {call_of(fact).peer} is the other end"

    def _tags_differ(self, fact: Fact, finding: Finding) -> Iterator[str]:
        yield from self._planted(fact, "change")
        if {fault.text for fault in self._faults(fact)} != {"tag"}:
            yield "no tag was changed"
        ends = min(subject(fact)), min(others(fact))
        tags = {
            str(row["tag"])
            for row in self._rows
            if row["op"] in ("send", "recv")
            and row["status"] != "completed"
            and ends in ((row["rank"], row["peer"]), (row["peer"], row["rank"]))
        }
        if self._rows and tags != set(fact.value("tags").split()):
            yield f"the tags in flight are {tags}"

    # --- jobs that go on ---

    def _makes_wait(self, fact: Fact, finding: Finding) -> Iterator[str]:
        yield from self._planted(fact, "delay")
        if not 0 < (fact.number or 0) <= 100:
            yield "a share"

    def _comes_late(self, fact: Fact, finding: Finding) -> Iterator[str]:
        yield from self._planted(fact, "delay")
        for fault in self._faults(fact):
            if not 0.5 * fault.seconds <= (fact.number or 0.0) <= 3 * fault.seconds:
                yield f"it was delayed by {fault.seconds} s"

    def _late_because(self, fact: Fact, finding: Finding) -> Iterator[str]:
        # No scenario plants a cause. Other programs on this machine may take the CPU for real.
        if fact.value("cause") not in ("no_cpu", "throttled", "disk", "memory", "io"):
            yield "no rank has garbage"

    _absent_because = _late_because

    def _caused_waiting(self, fact: Fact, finding: Finding) -> Iterator[str]:
        if not 0 < (fact.number or 0) <= 100 or not 0 < float(fact.value("along")) <= 100:
            yield "a share"
        if float(fact.value("span_s")) > self._took:
            yield f"the job took {self._took:.1f} s"

    def _came_last(self, fact: Fact, finding: Finding) -> Iterator[str]:
        seqs = {row["seq"] for row in self._rows if row["group"] == finding.group}
        if not 0 < (fact.number or 0) <= 100 or int(fact.value("collectives")) > len(seqs):
            yield f"there are {len(seqs)} collectives"

    def _slow_transfer(self, fact: Fact, finding: Finding) -> Iterator[str]:
        (fault,) = (fault for fault in self._scenario.plan.faults if fault.kind == "slow_link")
        ends = subject(fact), others(fact)
        if ends != ({fault.number}, {fault.rank}) or (fact.number or 0) < 0.9 * fault.seconds:
            yield f"rank {fault.number} to rank {fault.rank} takes {fault.seconds} s"
        if fact.value("op") != "send" or float(fact.value("usual_s")) >= fault.seconds:
            yield "only one link is slow"

    def _transfers(self, fact: Fact, finding: Finding) -> Iterator[str]:
        sent = [row for row in self._rows if row["op"] == "send"]
        if not 0 < (fact.number or 0) <= len(sent):
            yield f"there are {len(sent)} messages"


def _sizes(row: Row) -> set[str]:
    """Return the sizes of a call: the op decides in which of them its members must agree."""
    columns = "message_bytes", "in_bytes", "out_bytes"
    return {f"{row[name]:,} bytes" for name in columns if row[name] is not None}
