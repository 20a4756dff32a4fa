"""The lines of evidence of all findings: one template for each relation that can stand in one."""

from __future__ import annotations

from collections.abc import Callable

from rankcall.analysis.verdicts.facts import Fact, Relation
from rankcall.analysis.verdicts.naming import (
    ago,
    call_in,
    name_call,
    name_op,
    name_place,
    name_ranks,
    others_of,
    time_of,
    values_in,
    verbs_for,
    who,
)
from rankcall.analysis.verdicts.wording import count_of, duration, ordinal


def _rank_alone(fact: Fact) -> str:
    """Name a single rank without its process, which the summary has named."""
    return f"rank {who(fact).numbers[0]}"


def _last_left(fact: Fact, live: bool) -> str:
    when = "" if fact.number is None else f" {ago(live, fact.number)}"
    return f"{_rank_alone(fact)}: last in {name_call(call_in(fact))}, which it left{when}"


def _last_is_in(fact: Fact, live: bool) -> str:
    return f"{_rank_alone(fact)}: in {name_call(call_in(fact))} for {duration(time_of(fact))}"


def _last_issued(fact: Fact, live: bool) -> str:
    when = ago(live, time_of(fact))
    return f"{_rank_alone(fact)}: issued {name_call(call_in(fact))} {when}, end unknown"


def _last_failed(fact: Fact, live: bool) -> str:
    return f"{_rank_alone(fact)}: {name_call(call_in(fact))} failed {ago(live, time_of(fact))}"


def _waits_in(fact: Fact, live: bool) -> str:
    return f"{name_ranks(who(fact))}: in {name_call(call_in(fact))} for {duration(time_of(fact))}"


def _waits_in_turn(fact: Fact, live: bool) -> str:
    verb = "waits" if len(who(fact).numbers) == 1 else "wait"
    return f"{name_ranks(who(fact))}: {verb} for those in turn"


def _waits_for(fact: Fact, live: bool) -> str:
    return (
        f"{name_ranks(who(fact))} in {name_call(call_in(fact))}, for {name_ranks(others_of(fact))}"
    )


def _messages_so_far(fact: Fact, live: bool) -> str:
    count, way = int(time_of(fact)), fact.value("way")
    between = "to" if way == "sent" else "from"
    waits = "is awaited" if way == "sent" else "waits to be received"
    messages = count_of(count, "message") if count else "no message"
    return (
        f"{_rank_alone(fact)} {verbs_for(1, live).have} {way} {messages} {between} rank "
        f"{others_of(fact).numbers[0]} (tag {fact.value('tag')}, group {fact.value('group')}); the "
        f"{ordinal(count + 1)} {waits}"
    )


def _tags_differ(fact: Fact, live: bool) -> str:
    lower, higher = fact.value("tags").split()
    return (
        f"tag {lower} and tag {higher} do not match, from rank {who(fact).numbers[0]} to rank "
        f"{others_of(fact).numbers[0]}"
    )


def _side(fact: Fact, live: bool) -> str:
    call = call_in(fact)
    values = f", {values_in(fact)}" if fact.values else ""
    place = f" at {call.line}" if call.line else ""
    return f"{name_ranks(who(fact))}: {name_op(call)}{place}{values}"


def _other_line(fact: Fact, live: bool) -> str:
    call = call_in(fact)
    return (
        f"{name_ranks(who(fact))}: before, {call.op} #{call.seq} came from {call.line}, and from "
        f"{fact.value('line')} on {name_ranks(others_of(fact))}: it may be a call too many, or one "
        "in place of another"
    )


def _two_threads(fact: Fact, live: bool) -> str:
    whose = "its" if len(who(fact).numbers) == 1 else "their"
    have = verbs_for(2, live).have
    return (
        f"{name_ranks(who(fact))}: two of {whose} threads {have} calls in group "
        f"{fact.value('group')} at once, and nothing keeps those in the order of the other members"
    )


def _in_join(fact: Fact, live: bool) -> str:
    count = len(who(fact).numbers)
    verbs = verbs_for(count, live=True)
    answer = "answers" if count == 1 else "answer"
    return (
        f"{name_ranks(who(fact))}: that call is one of {verbs.its} Join's own; without inputs, "
        f"{verbs.they} {answer} the calls of the joinables, and no others"
    )


def _not_known(fact: Fact, live: bool) -> str:
    unheard = fact.value("why") == "unheard"
    why = "no answer from there" if unheard else "no records of it here"
    return f"nothing is known of {name_ranks(who(fact))}: {why}"


def _ended_without_records(fact: Fact, live: bool) -> str:
    single = len(who(fact).numbers) == 1
    name = _rank_alone(fact) if single else name_ranks(who(fact))
    verbs = verbs_for(len(who(fact).numbers), live=False)
    return (
        f"{name}: left no records, so {verbs.they} ended before {verbs.they} had made a process "
        f"group, or {verbs.be} not recorded"
    )


def _had_no_group(fact: Fact, live: bool) -> str:
    verbs = verbs_for(len(who(fact).numbers), live)
    return f"{name_ranks(who(fact))}: {verbs.have} not made {verbs.its} process group"


def _overwritten(fact: Fact, live: bool) -> str:
    count = int(time_of(fact))
    verb = "was" if count == 1 else "were"
    return (
        f"{count_of(count, 'record')} of {_rank_alone(fact)} {verb} overwritten, and "
        "none of this group is left: it may have been there"
    )


def _seen_at(fact: Fact, live: bool) -> str:
    return (
        f"{_rank_alone(fact)}: {name_place(fact)} when the job's own watcher looked, "
        f"{duration(time_of(fact))} before the end"
    )


def _caused_waiting(fact: Fact, live: bool) -> str:
    start = float(fact.value("slow_start_s") or 0.0)
    is_newest = fact.value("of") == "newest"
    left_out = "" if is_newest else " on record"
    if start:
        left_out = f" (the {duration(start)} before, of far longer steps, are left out)"
    source = " (by the devices' durations)" if fact.value("times") == "device" else ""
    return (
        f"{fact.number:.0f} % of all waiting in {'the last ' if is_newest else ''}"
        f"{duration(float(fact.value('span_s')))}{left_out}; "
        f"most of the waiting in {float(fact.value('along')):.0f} % of its parts{source}"
    )


def _came_last(fact: Fact, live: bool) -> str:
    count = int(fact.value("collectives"))
    return f"last in {fact.number:.0f} % of {count:,} collectives of that group"


def _transfers(fact: Fact, live: bool) -> str:
    return f"over {fact.number:,.0f} transfers of up to {int(fact.value('most_bytes')):,} bytes"


def _earlier_wait(fact: Fact, live: bool) -> str:
    return f"a wait at {fact.value('line')} lasted {duration(time_of(fact))} and passed"


def _said_last(fact: Fact, live: bool) -> str:
    lines = fact.value("text").split("\n")
    return "\n".join(
        [f"{_rank_alone(fact)} wrote last to stderr:", *(f"| {line}" for line in lines)]
    )


def _failed_later(fact: Fact, live: bool) -> str:
    ranks = len(others_of(fact).numbers)
    when = "at that time, too" if fact.value("at_once") else "after that"
    return f"{count_of(ranks, 'other rank')} failed {when}: {name_ranks(others_of(fact))}"


def _rpc_waits(fact: Fact, live: bool) -> str:
    to = f", {name_ranks(fact.others)}," if fact.others is not None else ""
    line = f", called at {fact.value('line')}" if fact.value("line") else ""
    verb = verbs_for(1, live).have
    return (
        f"{name_ranks(who(fact))} {verb} waited {duration(time_of(fact))} for worker "
        f"{fact.value('worker')!r}{to} to answer {fact.value('function')}{line}"
    )


def _rpc_runs(fact: Fact, live: bool) -> str:
    line = f", at {fact.value('line')}" if fact.value("line") else ""
    verb = verbs_for(1, live).have
    text = f"{_rank_alone(fact)} {verb} been in {fact.value('function')}"
    return f"{text} for {duration(time_of(fact))}{line}"


def _rpc_not_run(fact: Fact, live: bool) -> str:
    verb = "runs" if live else "ran"
    return f"no thread of {_rank_alone(fact)} {verb} {fact.value('function')}"


def _rpc_unanswered(fact: Fact, live: bool) -> str:
    calls = count_of(int(fact.value("calls")), "RPC")
    have = "has" if fact.value("calls") == "1" else "have"
    return (
        f"{_rank_alone(fact)}: {calls} of worker {fact.value('worker')!r} {have} no answer; to "
        "which worker is not known"
    )


LINES: dict[Relation, Callable[[Fact, bool], str]] = {
    Relation.LAST_LEFT: _last_left,
    Relation.LAST_IS_IN: _last_is_in,
    Relation.LAST_ISSUED: _last_issued,
    Relation.LAST_FAILED: _last_failed,
    Relation.ISSUED_NOTHING: lambda fact, live: f"{_rank_alone(fact)}: it has issued nothing",
    Relation.WAITS_IN: _waits_in,
    Relation.WAITS_IN_TURN: _waits_in_turn,
    Relation.WAITS_FOR: _waits_for,
    Relation.MESSAGES_SO_FAR: _messages_so_far,
    Relation.TAGS_DIFFER: _tags_differ,
    Relation.PASSED: _side,
    Relation.SENDS: _side,
    Relation.RECEIVES: _side,
    Relation.ISSUED: _side,
    Relation.IN_JOIN: _in_join,
    Relation.OTHER_LINE: _other_line,
    Relation.TWO_THREADS: _two_threads,
    Relation.ENDED_WITHOUT_RECORDS: _ended_without_records,
    Relation.HAD_NO_GROUP: _had_no_group,
    Relation.NOT_KNOWN: _not_known,
    Relation.OVERWRITTEN: _overwritten,
    Relation.SEEN_AT: _seen_at,
    Relation.STANDS_AT: lambda fact, live: (
        f"{name_ranks(who(fact))}: {name_place(fact) or 'its stack shows no line'}"
    ),
    Relation.CAUSED_WAITING: _caused_waiting,
    Relation.CAME_LAST: _came_last,
    Relation.TRANSFERS: _transfers,
    Relation.STILL_IN_TRANSFER: lambda fact, live: f"{name_ranks(who(fact))} still in it",
    Relation.EARLIER_WAIT_PASSED: _earlier_wait,
    Relation.SAID_LAST: _said_last,
    Relation.FAILED_LATER: _failed_later,
    Relation.RPC_WAITS: _rpc_waits,
    Relation.RPC_RUNS: _rpc_runs,
    Relation.RPC_NOT_RUN: _rpc_not_run,
    Relation.RPC_UNANSWERED: _rpc_unanswered,
}
