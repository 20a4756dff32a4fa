"""The sentences of all verdicts: one template for each relation of ``facts``.

``summary`` and ``evidence`` render facts; ``evidence_lines`` has the templates of single lines, and
``naming`` the names in all of them. The tense is that of the run: the past once it has ended.
docs/design/verdicts.md lists the sentences with what must be true for each.

A template of ``_STATES`` is what follows the names of ranks that others wait for; one of
``_SUMMARIES`` is the whole beginning of a finding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rankcall.analysis.verdicts.evidence_lines import LINES
from rankcall.analysis.verdicts.facts import CallFact, Fact, Relation
from rankcall.analysis.verdicts.naming import (
    ago,
    call_in,
    name_call,
    name_group,
    name_of,
    name_op,
    name_place,
    name_ranks,
    others_of,
    time_of,
    values_in,
    verbs_for,
    who,
)
from rankcall.analysis.verdicts.wording import (
    begin_sentence,
    count_of,
    duration,
    short_duration,
)

SHOWN = 3  # ranks, waits, sides or hosts that a finding names one by one


def summary(facts: Sequence[Fact], live: bool = True) -> str:
    """Write the sentences that a finding begins with.

    The first fact's template says which facts make one sentence with it; each of the others is a
    sentence of its own.
    """
    if not facts:
        return ""
    why = [fact for fact in facts if fact.relation in _REASONS]
    first_facts = [fact for fact in facts if fact.relation not in _REASONS]
    text = _SUMMARIES[first_facts[0].relation](first_facts, live)
    return f"{text} {reasons(why, live)}" if why else text


def reasons(facts: Sequence[Fact], live: bool = True) -> str:
    """Write why ranks are late, a sentence for each fact."""
    return " ".join(_REASONS[fact.relation](fact, live) for fact in facts)


def evidence(facts: Sequence[Fact], live: bool = True) -> tuple[str, ...]:
    """Write each fact as a line that begins in lower case; a quotation has lines of its own."""
    return tuple(line for fact in facts for line in LINES[fact.relation](fact, live).split("\n"))


def as_seen(text: str, seconds: float) -> str:
    """Write the summary of a finding that the job's own watcher made before the job's end."""
    return f"The job's own watcher saw, {duration(seconds)} before the end: {text}"


def as_still_seen(text: str, seconds: float) -> str:
    """Write the summary of a finding that the job's own watcher made, and that is true until now.

    Its times are those of that moment.
    """
    return f"The job's own watcher saw {duration(seconds)} ago what has lasted since: {text}"


def _ending(text: str, *, plural: str = "") -> Callable[[Fact, bool], str]:
    """Return the template of an end: its words, with the fact's values, and when it was."""

    def write(fact: Fact, live: bool) -> str:
        single = len(who(fact).numbers) == 1
        form = text if single or not plural else plural
        its = "its" if single else "their"
        return f"{form.format(its=its, **dict(fact.values))} {ago(live, time_of(fact))}"

    return write


def _failed_with(fact: Fact, live: bool) -> str:
    error = fact.value("error")
    comma = "," if error[-1:] not in ".!?" else ""
    if fact.value("end") == "closing":
        verbs = verbs_for(len(who(fact).numbers), live)
        return f"failed with {error}{comma} and {verbs.be} closing down"
    return f"failed with {error}{comma} {ago(live, time_of(fact))}"


def _connections_closed(fact: Fact, live: bool) -> str:
    # Present tense: the process is gone, whether the job runs or not.
    verbs = verbs_for(len(who(fact).numbers), live=True)
    unknown = f"no word has come from where {verbs.they} ran"
    if fact.value("why") != "unheard":
        unknown = f"{verbs.they} left no records here"
    return f"{verbs.be} gone: {verbs.its} connections were closed, and {unknown}"


def _left_loop(fact: Fact, live: bool) -> str:
    verbs, end = verbs_for(len(who(fact).numbers), live), fact.value("end")
    if end == "exited":
        return f"left the loop and exited with code 0, {ago(live, time_of(fact))}"
    if end == "ended":
        return f"left the loop and ended {ago(live, time_of(fact))}"
    return f"left the loop: {verbs.they} {verbs.be} closing down"


def _state(text: str) -> Callable[[Fact, bool], str]:
    """Return the template of a state: its words, with verbs that agree with the ranks."""

    def write(fact: Fact, live: bool) -> str:
        verbs = verbs_for(len(who(fact).numbers), live)
        values = dict(fact.values)
        call = name_call(fact.call) if fact.call else ""
        return text.format(**verbs._asdict(), **values, call=call, duration=duration(time_of(fact)))

    return write


def _not_come(fact: Fact, live: bool) -> str:
    verbs = verbs_for(len(who(fact).numbers), live)
    place = name_place(fact)
    if place:
        return f"{verbs.have} not come: {verbs.they} {verbs.be} {place}{_when_seen(fact)}"
    for_so_long = "" if fact.number is None else f" for {duration(time_of(fact))}"
    return f"{verbs.have} not come: {verbs.they} {verbs.have} issued nothing{for_so_long}"


def _when_seen(fact: Fact) -> str:
    seen_s = fact.value("seen_s")
    return f", {duration(float(seen_s))} before the end" if seen_s else ""


def _goes_on(fact: Fact, live: bool) -> str:
    count = len(who(fact).numbers)
    verbs = verbs_for(count, live)
    go = ("goes" if count == 1 else "go") if live else "went"
    return (
        f"{verbs.have} not come, although {verbs.they} {go} on: the newest call of rank "
        f"{who(fact).numbers[0]} {'is' if live else 'was'} {name_call(call_in(fact))}"
    )


def _not_started(fact: Fact, live: bool) -> str:
    count = len(who(fact).numbers)
    verbs = verbs_for(count, live)
    devices = f"{verbs.its} {'device' if count == 1 else 'devices'}"
    others = len(others_of(fact).numbers)
    more = f"{count_of(others, 'other rank')} {verbs_for(others, live).have}"
    return (
        f"{verbs.have} not started {name_call(call_in(fact))} on {devices}, "
        f"{duration(time_of(fact))} after the issue; {more}"
    )


_STATES: dict[Relation, Callable[[Fact, bool], str]] = {
    Relation.KILLED_BY: _ending("was killed by {signal}", plural="were killed by {signal}"),
    Relation.EXITED_WITH: _ending("exited with code {code},"),
    Relation.FAILED_WITH: _failed_with,
    Relation.ENDED_WITH_LAUNCHER: _ending(
        "was ended with {its} launcher, which {signal} told to stop,",
        plural="were ended with {its} launcher, which {signal} told to stop,",
    ),
    Relation.GONE: _ending("disappeared"),
    Relation.ENDED_BADLY: _ending("ended badly,"),
    Relation.CONNECTIONS_CLOSED: _connections_closed,
    Relation.STOPPED: _state("{be} stopped (SIGSTOP)"),
    Relation.NO_PYTHON_THREAD: _state("{have} run no Python thread for {duration}"),
    Relation.NO_SIGN_OF_LIFE: _state("{have} given no sign of life for {duration}"),
    Relation.HOLDS_GIL: _state("{have} held the GIL for {duration}"),
    Relation.LEFT_LOOP: _left_loop,
    Relation.DOES_NOT_ANSWER: _state("{do} not answer: no word has come from where {they} ran"),
    Relation.LEFT_NO_RECORDS: _state("{have} left no {kind} here"),
    Relation.STOPPED_RECORDING: _state(
        "{have} stopped recording, to end or by rankcall.disable: whether {they} came is not known"
    ),
    Relation.STILL_IN: _state("{have} not come: {they} {be} still in {call}"),
    Relation.NOT_STARTED: _not_started,
    Relation.DUMP_ENDS_BEFORE: _state(
        "{have} not come: the calls that {they} dumped end before that"
    ),
    Relation.NOT_COME: _not_come,
    Relation.GOES_ON: _goes_on,
    Relation.NOT_COME_AS_BEFORE: _state(
        "{have} not come, as before: an earlier wait at the same line passed"
    ),
}


def _of_culprits(facts: Sequence[Fact], live: bool) -> str:
    """Write the state of ranks, and which ranks they hold up."""
    state, *rest = facts
    text = f"{name_of(state)} {_STATES[state.relation](state, live)}."
    return f"{text} {_held_up(rest, live)}" if rest else text


def _held_up(facts: Sequence[Fact], live: bool) -> str:
    """Write which ranks cannot go on: only some of them may be in the call that waits longest."""
    first = facts[0]
    there = len(who(first).numbers)
    verbs = verbs_for(there, live)
    them = verbs_for(len(others_of(first).numbers), live).them
    waited = (
        f"{verbs.have} waited {duration(time_of(first))} for {them} in {name_call(call_in(first))}"
    )
    if len(facts) == 1:
        return f"{count_of(there, 'rank')} {waited}."
    elsewhere = len(who(facts[1]).numbers)
    others = "in another call" if elsewhere == 1 else "in other calls"
    return (
        f"{count_of(there + elsewhere, 'rank')} {'cannot' if live else 'could not'} go on: "
        f"{there:,} {waited}, and {elsewhere:,} {verbs_for(elsewhere, live).be} {others}."
    )


def _ended_together(facts: Sequence[Fact], live: bool) -> str:
    end = "ended" if len(who(facts[0]).numbers) == 1 else "ended together"
    if facts[0].value("copied"):
        end = f"{end}, or still ran when these records were copied"
    if facts[0].value("early"):
        its = verbs_for(len(who(facts[0]).numbers), live).its
        end = f"{end}, before {its} process group was made; nobody noted how."
        if facts[0].others is None:
            return f"{name_of(facts[0])} {end}"
        absent = begin_sentence(name_ranks(others_of(facts[0])))
        return f"{absent} left no records. {name_of(facts[0])} {end}"
    return f"{name_of(facts[0])} {end}; nobody noted how, and none had waited for long."


def _ended_first(facts: Sequence[Fact], live: bool) -> str:
    fact = facts[0]
    verbs = verbs_for(len(who(fact).numbers), live)
    theirs = verbs_for(len(others_of(fact).numbers), live)
    return (
        f"{name_of(fact)} ended, and {name_ranks(others_of(fact))} failed "
        f"{duration(time_of(fact))} later with {fact.value('error').rstrip('.!?')}: "
        f"{theirs.they} lost {theirs.its} connections to {verbs.them}, or to the store that "
        f"{verbs.they} hosted."
    )


def _waits_for_work(facts: Sequence[Fact], live: bool) -> str:
    fact = facts[0]
    verbs = verbs_for(len(who(fact).numbers), live)
    others = len(fact.others.numbers) if fact.others else 0
    waiting = f", and {count_of(others, 'rank')} with {verbs.them}" if others else ""
    return (
        f"{name_of(fact)} {verbs.have} waited for work ({fact.value('what')}) for "
        f"{duration(time_of(fact))}{waiting}."
    )


def _op_with_line(call: CallFact) -> str:
    return name_op(call) + (f" ({call.line})" if call.line else "")


def _desync(facts: Sequence[Fact], live: bool) -> str:
    """Write what two sides issued, and how the first is out of step from there on."""
    first, last, *causes = facts
    mine, theirs = call_in(first), call_in(last)
    text = (
        f"{name_of(first)} issued {_op_with_line(mine)} as #{mine.seq} of group "
        f"{name_group(mine.group, mine.description)}, against {_op_with_line(theirs)} of "
        f"{name_ranks(who(last))}."
    )
    for fact in causes:
        write = _looped_again if fact.relation is Relation.LOOPED_AGAIN else _shifted
        text = f"{text} {write(fact)}"
    return text


def _looped_again(fact: Fact) -> str:
    turns, call = int(time_of(fact)), call_in(fact)
    times = {1: "once more", 2: "twice more"}.get(turns, f"{turns:,} times more")
    return (
        f"{name_of(fact)} ran the loop with {_op_with_line(call)} {times}, and then came to what "
        f"{name_ranks(others_of(fact))} had issued in its place: likely the inputs are uneven."
    )


def _shifted(fact: Fact) -> str:
    verbs = verbs_for(len(who(fact).numbers), live=True)
    number = int(time_of(fact))
    calls = count_of(abs(number), "call")
    same = (
        f"In {fact.value('shown_by')} calls since #{fact.value('since')}, {verbs.its} calls were "
        "those of the others"
    )
    if fact.value("both_ways"):
        return (
            f"{same} {calls} away: {verbs.they} likely skipped {calls} or issued {calls} too many."
        )
    if number > 0:
        return f"{same} {calls} later: {verbs.they} likely skipped {calls} before."
    return f"{same} {calls} earlier: {verbs.they} likely issued {calls} too many before."


def _mismatch(facts: Sequence[Fact], live: bool) -> str:
    first, last, *through = facts
    call = call_in(last)
    fields = " and ".join(name.replace("_", " ") for name, _ in first.values)
    return (
        f"{name_of(first)} and {name_ranks(who(last))} differ in {fields} in "
        f"{call.op} #{call.seq} of group {name_group(call.group, call.description)}: "
        f"{values_in(first)} against {values_in(last)}.{_through(through, 'the results are wrong')}"
    )


def _message(facts: Sequence[Fact], live: bool) -> str:
    send, recv, *through = facts
    call = call_in(send)
    wrong = "the received data is wrong or incomplete"
    return (
        f"Rank {who(send).numbers[0]} sends {values_in(send)} and rank {who(recv).numbers[0]} "
        f"receives {values_in(recv)}, in message #{call.seq} of group "
        f"{name_group(call.group, call.description)}.{_through(through, wrong)}"
    )


def _splits(facts: Sequence[Fact], live: bool) -> str:
    fact, *through = facts
    call = call_in(fact)
    sent, received = (int(fact.value(name)) for name in ("sent", "received"))
    single = len(who(fact).numbers) == 1
    verb, expect, its = ("sends", "expects", "its") if single else ("send", "expect", "their")
    return (
        f"{name_of(fact)} {verb} {sent:,} bytes in all in {call.op} #{call.seq} of group "
        f"{name_group(call.group, call.description)}, and {expect} to receive {received:,}: {its} "
        f"split sizes do not add up.{_through(through, 'the results are wrong')}"
    )


def _through(facts: Sequence[Fact], wrong: str) -> str:
    return f" It went through all the same: {wrong}." if facts else ""


def _deadlock(facts: Sequence[Fact], live: bool) -> str:
    circle, *steps = facts
    parts = [LINES[step.relation](step, live) for step in steps[:SHOWN]]
    return f"{name_of(circle)} wait for each other: {'; '.join(parts)}."


def _rpc_waits(facts: Sequence[Fact], live: bool) -> str:
    return " ".join(f"{begin_sentence(line)}." for line in evidence(facts, live))


def _rpc_circle(facts: Sequence[Fact], live: bool) -> str:
    circle, *steps = facts
    parts = "; ".join(evidence(steps[:SHOWN], live))
    wait = "wait" if live else "waited"
    return f"RPCs of {name_ranks(who(circle))} {wait} for each other: {parts}."


def _who_waits(fact: Fact, where: str) -> str:
    verb = "waits" if len(who(fact).numbers) == 1 else "wait"
    line = fact.value("line")
    return f"{name_of(fact)} {verb} {where}{f' at {line}' if line else ''}"


def _waits_in_function(facts: Sequence[Fact], live: bool) -> str:
    fact = facts[0]
    text, longest = _who_waits(fact, f"in {fact.value('functions')}"), duration(time_of(fact))
    if fact.relation is Relation.ALL_WAIT_IN_FUNCTION:
        return f"{text}: all ranks are there, and nothing has happened for {longest}."
    nothing = f"No rank has issued anything for {longest}"
    if fact.others is None:
        return f"{text}. {nothing}; the stacks of the others are not known."
    have = verbs_for(len(fact.others.numbers), live=True).have
    return f"{text} for {name_ranks(fact.others)}, which {have} not come. {nothing}."


def _waits_in_store(facts: Sequence[Fact], live: bool) -> str:
    fact = facts[0]
    text, longest = _who_waits(fact, "for a key of the job's store"), duration(time_of(fact))
    if fact.relation is Relation.ALL_WAIT_IN_STORE:
        return (
            f"{text}: no rank is left that could write it, and nothing has happened for {longest}."
        )
    nothing = f"No rank has issued anything for {longest}"
    if fact.others is None:
        return f"{text}. {nothing}."
    does = "does" if len(fact.others.numbers) == 1 else "do"
    return f"{text}, and {name_ranks(fact.others)} {does} nothing. {nothing}."


def _no_group_yet(facts: Sequence[Fact], live: bool) -> str:
    fact = facts[0]
    verbs = verbs_for(len(who(fact).numbers), live=True)
    return (
        f"{name_of(fact)} {verbs.have} not made {verbs.its} process group; the other ranks have. "
        f"No rank has issued anything for {duration(time_of(fact))}."
    )


def _none_started(facts: Sequence[Fact], live: bool) -> str:
    count = count_of(len(who(facts[0]).numbers), "rank")
    return (
        f"None of {count} has made a process group or issued a collective for "
        f"{duration(time_of(facts[0]))}."
    )


def _none_issues(facts: Sequence[Fact], live: bool) -> str:
    fact, seconds = facts[0], duration(time_of(facts[0]))
    if fact.others is None:
        return f"No rank has issued a collective or a message, and none is in one, for {seconds}."
    return (
        f"No rank has issued a collective or a message for {seconds}. Whether the last one has "
        f"ended is not known of {name_ranks(fact.others)}."
    )


def _straggler(facts: Sequence[Fact], live: bool) -> str:
    first, *late = facts
    single = len(who(first).numbers) == 1
    step = first.value("since_step")
    since = f", since step {int(step):,}" if step else ""
    text = (
        f"{name_of(first)} {'makes' if single else 'make'} the others wait{since}: waiting for "
        f"{'it' if single else 'them'} costs each of them {first.number:.0f} % of its time, on "
        "average."
    )
    if not late:
        return text
    call = call_in(late[0])
    return (
        f"{text} {'It comes' if single else 'They come'} late to {call.op} of group {call.group}"
        f"{f' at {call.line}' if call.line else ''}, by {short_duration(time_of(late[0]))} at the "
        "median."
    )


def _slow_transfer(facts: Sequence[Fact], live: bool) -> str:
    fact = facts[0]
    seconds, usual = time_of(fact), float(fact.value("usual_s"))
    if fact.others is not None:
        what = f"messages from {name_ranks(who(fact))} to {name_ranks(fact.others)}"
    else:
        what = f"{fact.value('op')} between {name_ranks(who(fact))}"
    return (
        f"Slow: {what} take {short_duration(seconds)} once both ends have come, "
        f"{seconds / usual:.1f} times the {short_duration(usual)} of {fact.value('compared')} "
        "others like it."
    )


def _stuck_transfer(facts: Sequence[Fact], live: bool) -> str:
    fact = facts[0]
    members = len(who(fact).numbers)
    arrived = "The only rank has" if members == 1 else f"All {members:,} ranks have"
    return (
        f"{arrived} come to {name_call(call_in(fact))}, "
        f"and {count_of(len(others_of(fact).numbers), 'rank')} did not get out for "
        f"{duration(time_of(fact))}: the transfer itself is stuck."
    )


def _started_nowhere(facts: Sequence[Fact], live: bool) -> str:
    fact, verbs = facts[0], verbs_for(1, live)
    return (
        f"{_all_have_issued(fact, live)}, {duration(time_of(fact))} ago, and no device "
        f"{verbs.have} started it: what was issued before it does not end."
    )


def _start_unknown(facts: Sequence[Fact], live: bool) -> str:
    fact = facts[0]
    verb = "does" if live else "did"
    return (
        f"{_all_have_issued(fact, live)}, and it {verb} not end on "
        f"{count_of(len(others_of(fact).numbers), 'rank')} for {duration(time_of(fact))}. Whether "
        "each device has started it is not known."
    )


def _all_have_issued(fact: Fact, live: bool) -> str:
    members = len(who(fact).numbers)
    verbs = verbs_for(members, live)
    ranks = "The only rank" if members == 1 else f"All {members:,} ranks"
    return f"{ranks} {verbs.have} issued {name_call(call_in(fact))}"


def _alone_in(facts: Sequence[Fact], live: bool) -> str:
    fact = facts[0]
    be, have = verbs_for(1, live).be, verbs_for(1, live).have
    return (
        f"{name_of(fact)} {be} alone in {name_call(call_in(fact))} for {duration(time_of(fact))}: "
        f"none of the {len(others_of(fact).numbers):,} other members {have} come, and none of them "
        f"{'waits' if live else 'waited'} in another call."
    )


def _left_behind(facts: Sequence[Fact], live: bool) -> str:
    fact = facts[0]
    others = len(others_of(fact).numbers)
    them = "the other member" if others == 1 else f"the {others:,} other members"
    have = ("has" if others == 1 else "have") if live else "had"
    return (
        f"{name_of(fact)} {verbs_for(len(who(fact).numbers), live).have} been in "
        f"{name_call(call_in(fact))} for {duration(time_of(fact))}, although {them} {have} left it."
    )


# What a rank did: "it spent 3.1 s ...".
_SPENT_ON = {
    "gc": "collecting garbage",
    "throttled": "throttled by the CPU quota of {its} cgroup",
    "no_cpu": "ready to run, without a CPU",
    "stopped": "stopped, as by a signal",
    "disk": "waiting for a disk",
    "blocked": "waiting in the kernel (state D, mostly a disk or a network file system)",
    "gil": "while a thread that ran no Python code held the GIL",
    "data_loader": "in {its} data loader",
    "checkpoint": "saving or loading a checkpoint",
    "compilation": "compiling",
    "memory": "while tasks of {its} cgroup waited for memory",
    "io": "while tasks of {its} cgroup waited for I/O",
    "phase": "in {its} phase {name!r}",
}


def _spent_on(fact: Fact) -> str:
    its = verbs_for(len(who(fact).numbers), live=True).its
    text = _SPENT_ON[fact.value("cause")].format(its=its, name=fact.value("name"))
    if fact.value("without_cpu_s"):
        text += f", {_seconds_in(fact, 'without_cpu_s')} of it for a CPU after that"
    return f"{text} (mostly full collections)" if fact.value("full") else text


def _seconds_in(fact: Fact, name: str) -> str:
    return duration(float(fact.value(name)))


def _also_spent(fact: Fact) -> str:
    """Write the sentence about the wait that a cause contains; empty without one."""
    if not fact.value("also"):
        return ""
    they = verbs_for(len(who(fact).numbers), live=True).they
    of_s, also_s = _seconds_in(fact, "of_s"), _seconds_in(fact, "also_s")
    return f" Of these {of_s}, {they} spent {also_s} {_SPENT_ON[fact.value('also')]}."


def _absent_because(fact: Fact, live: bool) -> str:
    verbs = verbs_for(len(who(fact).numbers), live)
    spent = f"{_seconds_in(fact, 'seconds')} of {_seconds_in(fact, 'of_s')} {_spent_on(fact)}"
    return f"Since {verbs.its} last call, {verbs.they} spent {spent}.{_also_spent(fact)}"


def _late_because(fact: Fact, live: bool) -> str:
    verbs = verbs_for(len(who(fact).numbers), live)
    spent = f"{_seconds_in(fact, 'seconds')} of {_seconds_in(fact, 'of_s')} {_spent_on(fact)}"
    return (
        f"{begin_sentence(verbs.they)} spent {spent}: that explains {fact.number:.0f} % of "
        f"{verbs.its} lateness.{_also_spent(fact)}"
    )


_REASONS = {
    Relation.ABSENT_BECAUSE: _absent_because,
    Relation.LATE_BECAUSE: _late_because,
}

_SUMMARIES: dict[Relation, Callable[[Sequence[Fact], bool], str]] = {
    **dict.fromkeys(_STATES, _of_culprits),
    Relation.ENDED_TOGETHER: _ended_together,
    Relation.ENDED_FIRST: _ended_first,
    Relation.WAITS_FOR_WORK: _waits_for_work,
    Relation.ISSUED: _desync,
    Relation.PASSED: _mismatch,
    Relation.SENDS: _message,
    Relation.UNEQUAL_SPLITS: _splits,
    Relation.WAIT_FOR_EACH_OTHER: _deadlock,
    Relation.RPC_WAITS: _rpc_waits,
    Relation.RPC_CIRCLE: _rpc_circle,
    Relation.WAITS_IN_FUNCTION: _waits_in_function,
    Relation.ALL_WAIT_IN_FUNCTION: _waits_in_function,
    Relation.WAITS_IN_STORE: _waits_in_store,
    Relation.ALL_WAIT_IN_STORE: _waits_in_store,
    Relation.NO_GROUP_YET: _no_group_yet,
    Relation.NONE_STARTED: _none_started,
    Relation.NONE_ISSUES: _none_issues,
    Relation.MAKES_WAIT: _straggler,
    Relation.SLOW_TRANSFER: _slow_transfer,
    Relation.STUCK_TRANSFER: _stuck_transfer,
    Relation.STARTED_NOWHERE: _started_nowhere,
    Relation.START_UNKNOWN: _start_unknown,
    Relation.LEFT_BEHIND: _left_behind,
    Relation.ALONE_IN: _alone_in,
}
