"""The sentences of verdicts from logs: one template for each relation that only logs can state.

A log tells of the past, so there is one tense. Its evidence is quoted and has no templates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rankcall.analysis.verdicts.facts import CallFact, Fact, Relation
from rankcall.analysis.verdicts.naming import (
    call_in,
    name_group,
    name_of,
    name_ranks,
    others_of,
    time_of,
    who,
)
from rankcall.analysis.verdicts.wording import begin_sentence, count_of, duration
from rankcall.imports.logs.blame import OWN_SIGNALS, signal_of

_SIDES = 4  # that a sentence names; more would be a table


def _is_one(fact: Fact) -> bool:
    return len(who(fact).numbers) == 1


def _at(line: str) -> str:
    return f" at {line}" if line else ""


def _ended_by_signal(fact: Fact) -> str:
    when, why, be = fact.value("time"), fact.value("why"), "was" if _is_one(fact) else "were"
    because = f", because {why}" if why else ""
    text = f"{name_of(fact)} {be} ended by {fact.value('signal')}"
    if not when:
        return f"{text}{because}, says the launcher."
    # The reason has a sentence of its own: "because memory ran out at 15:43" would give it a time.
    reason = f" The reason: {why}." if why else ""
    return f"{text}{_among_others(fact, when)}{reason}"


def _among_others(fact: Fact, when: str) -> str:
    """Return when ranks ended by a signal, and whether others failed in that second."""
    if fact.others is not None:
        others = f"in the second in which {name_ranks(fact.others)} failed, too, {when}"
        return f" {others}. The log does not show which was first."
    if _is_one(fact):
        return f" at {when}, before any other rank failed on its node."
    return f" in the same second, {when}. The log does not show which was first."


def _own_error(fact: Fact) -> str:
    its = "its" if _is_one(fact) else "their"
    return f"{name_of(fact)} failed with {its} own error: {fact.value('error')}"


def _own_exception(fact: Fact) -> str:
    its = "its" if _is_one(fact) else "their"
    where = _at(fact.value("line"))
    return f"{name_of(fact)} failed with {its} own exception{where}: {fact.value('error')}"


def _called(facts: Sequence[Fact]) -> str:
    return begin_sentence("; ".join(_side_called(fact) for fact in facts[:_SIDES])) + "."


def _side_called(fact: Fact) -> str:
    call, shape, seq = call_in(fact), fact.value("shape"), fact.value("seq")
    parts = (
        call.op or "another op",
        f"of {'shape ' if shape.startswith('[') else ''}{shape}" if shape else "",
        fact.value("dtype"),
        f"as #{seq}" if seq else "",
    )
    what = " ".join(part for part in parts if part)
    return f"{name_ranks(who(fact))} called {what}{_at(call.line)}"


def _enqueued(facts: Sequence[Fact]) -> str:
    sides = [
        f"{_enqueuers(fact)} {call_in(fact).op} ({fact.value('arguments')})"
        for fact in facts[:_SIDES]
    ]
    return (
        f"NCCL wrote different calls with opCount {facts[0].value('number')} of a communicator of "
        f"{facts[0].value('size')} ranks: {'; '.join(sides)}."
    )


def _last_enqueued(facts: Sequence[Fact]) -> str:
    """Write how far each rank had come; of many sides, those that were least far and the farthest.

    It is no more than what NCCL wrote: whoever reads this must not take it for the last call.
    """
    shown = facts if len(facts) <= _SIDES else (*facts[: _SIDES - 1], facts[-1])
    sides = [
        f"{_enqueuers(fact)} {call_in(fact).op} with opCount {fact.value('number')}"
        for fact in shown
    ]
    return (
        f"On a communicator of {facts[0].value('size')} ranks, the last calls that NCCL wrote are "
        f"{'; '.join(sides)}. The last lines of a process that was ended may be lost."
    )


def _enqueuers(fact: Fact) -> str:
    """Name the ranks or processes that enqueued a call."""
    if fact.ranks is not None:
        return name_ranks(fact.ranks)
    pids, host = fact.value("pids").split(), fact.value("host")
    several = f"es {', '.join(pids[:_SIDES])}{' and others' if len(pids) > _SIDES else ''}"
    return f"process{several if len(pids) > 1 else f' {pids[0]}'}{f' on {host}' if host else ''}"


def _models_differ(fact: Fact) -> str:
    return (
        f"The ranks wrap different models: {name_ranks(who(fact))} has {fact.value('has')}, and "
        f"{name_ranks(others_of(fact))} has not."
    )


def _not_at_barrier(fact: Fact) -> str:
    return (
        f"{name_of(fact)} did not come to a monitored barrier{_at(fact.value('line'))} within "
        f"{duration(time_of(fact))}; TORCH_DISTRIBUTED_DEBUG=DETAIL makes one before each "
        "collective."
    )


def _not_at_setup(fact: Fact) -> str:
    joined, size = (int(fact.value(name)) for name in ("joined", "world_size"))
    return (
        f"{name_of(fact)} did not come while a process group was made: {joined:,} of "
        f"{count_of(size, 'rank')} did."
    )


def _not_submitted(facts: Sequence[Fact]) -> str:
    sides = []
    for fact in facts[:_SIDES]:
        more = " and other ops" if fact.value("more") else ""
        sides.append(f"{name_ranks(who(fact))} had not submitted {fact.value('ops')}{more}")
    before = f"more than {duration(time_of(facts[0]))} before"
    return begin_sentence(f"{'; '.join(sides)}. Other ranks had, {before}, says Horovod.")


def _reported_missing(fact: Fact) -> str:
    return (
        f"{name_of(fact)} had not come to the collective that the others timed out in, says "
        "TORCH_NCCL_DESYNC_DEBUG."
    )


def _behind(fact: Fact) -> str:
    call, last = call_in(fact), int(time_of(fact))
    issued = f"the last one issued there was #{last}" if last > 0 else "none had been issued there"
    return (
        f"{name_of(fact)} had not come to {call.op or 'the collective'} #{call.seq} of group "
        f"{name_group(call.group, call.description)}, which {name_ranks(others_of(fact))} timed "
        f"out in: {issued}."
    )


def _may_be_behind(fact: Fact) -> str:
    call = call_in(fact)
    return (
        f"{name_of(fact)} had not come to #{call.seq} of group {call.group}, but may have waited "
        "in another group."
    )


def _timed_out_in(facts: Sequence[Fact]) -> str:
    call = call_in(facts[0])
    group = f"group {name_group(call.group, call.description)}" if call.group else "one group"
    return (
        f"The ranks timed out in different calls, all of which are #{call.seq} of {group}: "
        f"{'; '.join(_side_timed_out(fact) for fact in facts[:_SIDES])}."
    )


def _side_timed_out(fact: Fact) -> str:
    sizes = [f"{int(size):,}" for size in fact.value("sizes").split()]
    of = f" of {' and '.join(sizes)} elements" if sizes else ""
    return f"{name_ranks(who(fact))} in {call_in(fact).op}{of}"


def _not_said(facts: Sequence[Fact]) -> str:
    """Write that no rank can be named, and what is known all the same, without a conclusion."""
    known = [_KNOWN[fact.relation](fact) for fact in facts[1:] if fact.relation in _KNOWN]
    last = [fact for fact in facts if fact.relation is Relation.LAST_ENQUEUED]
    known += [_last_enqueued(last)] if last else []
    return " ".join(["The log does not say which rank is at fault.", *known])


def _ended_from_outside(fact: Fact) -> str:
    did = "kept the job from starting" if fact.value("at_start") else "ended the job"
    return f"Something outside the ranks {did}: {fact.value('what')}."


def _interrupted_at(fact: Fact) -> str:
    call, were = call_in(fact), "was" if len(who(fact).numbers) == 1 else "were"
    return (
        f"{name_of(fact)} {were} interrupted{f' in {call.op}' if call.op else ''}{_at(call.line)}."
    )


def _process(fact: Fact) -> str:
    """Name a process whose rank is not known."""
    pid, host, worker = fact.value("pid"), fact.value("host"), fact.value("worker")
    process = f"Process {pid}" if pid else f"Worker {worker}" if worker else "A process"
    return f"{process}{f' on {host}' if host else ''}"


def _process_failed(fact: Fact) -> str:
    return f"{_process(fact)} failed with {fact.value('error')}."


def _timed_out(fact: Fact) -> str:
    """Write who timed out, and in which call, as far as the log tells."""
    call, in_group = call_in(fact) if fact.call is not None else None, fact.value("in_group")
    if fact.ranks is not None:
        waiter = name_of(fact)
    else:
        waiter = f"Rank {in_group} of its group" if in_group else _process(fact)
    if call is None:
        return f"{waiter} timed out, and waited for others."
    group = f" of group {name_group(call.group, call.description)}" if call.group else ""
    op = f"{call.op or 'a collective'}{f' #{call.seq}' if call.seq else ''}{group}{_at(call.line)}"
    return f"{waiter} timed out in {op}, and waited for others."


def _said(fact: Fact) -> str:
    """Quote the line that tells most, if nothing else is known."""
    speaker = name_of(fact) if fact.ranks is not None else _process(fact)
    call = call_in(fact) if fact.call is not None else CallFact("")
    inside = f" in {call.op}" if call.op else ""
    return f"{speaker} wrote{inside}{_at(call.line)}: {fact.value('text')}"


def _waited_for(fact: Fact) -> str:
    waiter = name_of(fact) if fact.ranks is not None else _process(fact)
    return f"{waiter} waited for {fact.value('peer')}, which did not answer."


def _kernel_reports(fact: Fact) -> str:
    host = fact.value("host")
    return f"The kernel{f' of {host}' if host else ''} reports: {fact.value('error')}."


def _link_errors(fact: Fact) -> str:
    how_many = f"{int(time_of(fact)):,} of {int(fact.value('all')):,} link errors"
    if fact.value("end") == "host":
        return f"{fact.value('host')} reports {how_many}."
    return f"{how_many} are about the connection to {fact.value('host')}."


def _spawned_ended(fact: Fact) -> str:
    signal = fact.value("signal")
    how = f"ended by {signal}" if signal else "failed"
    number = fact.value("process")
    return f"Process {number} of those that torch.multiprocessing started {how}."


def _worker_ended(fact: Fact) -> str:
    rank, host, pid = fact.value("local_rank"), fact.value("host"), fact.value("pid")
    worker = f"Local rank {rank}" if rank else f"Worker process {pid}" if pid else "A worker"
    name = OWN_SIGNALS.get(signal_of(int(fact.value("code"))), "")
    code = f"{fact.value('code')}{f' ({name})' if name else ''}"
    return f"{worker}{f' on {host}' if host else ''} ended with code {code}."


def _failed_first(fact: Fact) -> str:
    ranks = who(fact)
    if len(ranks.numbers) == 1:
        return (
            f"The first failure that torchrun saw is that of {name_ranks(ranks)}, and that can be "
            "a rank that waited for another one."
        )
    return (
        f"The first failures that torchrun saw are those of {name_ranks(ranks)}, and those can be "
        "ranks that waited for another one."
    )


def _no_failure_seen(fact: Fact) -> str:
    count = count_of(int(time_of(fact)), "line")
    return f"No line that rankcall knows reports a failure; it read {count}."


_KNOWN: dict[Relation, Callable[[Fact], str]] = {
    Relation.ENDED_FROM_OUTSIDE: _ended_from_outside,
    Relation.INTERRUPTED_AT: _interrupted_at,
    Relation.PROCESS_FAILED: _process_failed,
    Relation.PROCESS_RAISED: lambda fact: f"{_process(fact)} raised {fact.value('error')}.",
    Relation.PROCESS_GONE: lambda fact: f"{_process(fact)} is gone, says {fact.value('by')}.",
    Relation.WAITED_FOR: _waited_for,
    Relation.KERNEL_REPORTS: _kernel_reports,
    Relation.LINK_ERRORS: _link_errors,
    Relation.SPAWNED_ENDED: _spawned_ended,
    Relation.WORKER_ENDED: _worker_ended,
    Relation.TIMED_OUT: _timed_out,
    Relation.SAID: _said,
    Relation.MAY_BE_BEHIND: _may_be_behind,
    Relation.FAILED_FIRST: _failed_first,
}
_ALONE: dict[Relation, Callable[[Fact], str]] = {
    Relation.ENDED_BY_SIGNAL: _ended_by_signal,
    Relation.OWN_ERROR: _own_error,
    Relation.OWN_EXCEPTION: _own_exception,
    Relation.MODELS_DIFFER: _models_differ,
    Relation.NOT_AT_BARRIER: _not_at_barrier,
    Relation.NOT_AT_SETUP: _not_at_setup,
    Relation.REPORTED_MISSING: _reported_missing,
    Relation.BEHIND: _behind,
    Relation.NO_FAILURE_SEEN: _no_failure_seen,
}
_TOGETHER: dict[Relation, Callable[[Sequence[Fact]], str]] = {
    Relation.CALLED: _called,
    Relation.TIMED_OUT_IN: _timed_out_in,
    Relation.ENQUEUED: _enqueued,
    Relation.NOT_SUBMITTED: _not_submitted,
    Relation.RANK_NOT_SAID: _not_said,
}


def summary_from_log(facts: Sequence[Fact]) -> str:
    """Write the sentences that a finding from a log begins with; it has at least one fact."""
    relation = facts[0].relation
    return _TOGETHER[relation](facts) if relation in _TOGETHER else _ALONE[relation](facts[0])
