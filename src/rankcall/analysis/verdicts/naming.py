"""How sentences name ranks, groups, calls, places and times, and verbs that agree with ranks."""

from __future__ import annotations

from typing import NamedTuple

from rankcall.analysis.verdicts.facts import CallFact, Fact, Ranks
from rankcall.analysis.verdicts.wording import begin_sentence, duration, numbered
from rankcall.ranks import format_ranks
from rankcall.run.frames import LOADER

_LONGEST = 40  # characters of a list of ranks; a longer list is written as a count


class Verbs(NamedTuple):
    """The verbs and the pronouns that agree with some ranks, in the tense of the run."""

    be: str
    have: str
    do: str
    they: str
    them: str
    its: str


def name_ranks(ranks: Ranks) -> str:
    """Name ranks: ``rank 2 (node-a, pid 4711)``, ``ranks 8-15 (node-b)``."""
    count = len(ranks.numbers)
    if count == 1:
        pid = [f"pid {ranks.pid}"] if ranks.pid else []
        inside = ", ".join([*ranks.hosts, *pid])
        return f"rank {ranks.numbers[0]}{f' ({inside})' if inside else ''}"
    inside = ", ".join(ranks.hosts) if len(ranks.hosts) <= 3 else f"on {len(ranks.hosts):,} hosts"
    text = format_ranks(ranks.numbers)
    name = f"{count:,} ranks" if len(text) > _LONGEST else f"ranks {text}"
    return f"{name}{f' ({inside})' if inside else ''}"


def name_group(label: str, description: str) -> str:
    """Name a group: ``3``, or ``3 (mesh_dp)`` if its maker described it."""
    return f"{label} ({description})" if description else label


def name_call(call: CallFact, *, line: bool = True) -> str:
    """Name a call: ``all_reduce #51 of group 0 at train.py:13``, or one end of a message."""
    group = name_group(call.group, call.description)
    if call.peer is not None:
        whom = f"rank {call.peer}" if call.peer >= 0 else "any rank"
        way = "to" if call.op == "send" else "from"
        text = f"{numbered(call.op, call.seq)} {way} {whom} (tag {call.tag}, group {group})"
    else:
        text = f"{numbered(name_op(call), call.seq)} of group {group}"
    return f"{text} at {call.line}" if line and call.line else text


def name_op(call: CallFact) -> str:
    """Name an op, and the function that issues it if that says more: ``Join's all_reduce``."""
    return f"{call.function}'s {call.op}" if call.function else call.op


def name_place(fact: Fact) -> str:
    """Write the place at which a rank's code stands: ``in new_group at train.py:12``."""
    line, function, inside = (fact.value(name) for name in ("line", "function", "inside"))
    where = f"at {line}" if line else ""
    if inside == LOADER:
        return f"waiting for its data loader {where}".rstrip()
    if inside:
        return f"in {inside} {where}".rstrip()
    return f"{where} in {function}" if where and function else where


def ago(live: bool, seconds: float) -> str:
    """Write a time in the past: ``12 s ago``, or for a dead run ``12 s before the end``."""
    if live:
        return f"{duration(seconds)} ago"
    return f"{duration(seconds)} before the end" if seconds >= 0.05 else "at the end"


def verbs_for(count: int, live: bool) -> Verbs:
    """Return the verbs for so many ranks: past tense after the run has ended."""
    single = count == 1
    be = ("is" if single else "are") if live else ("was" if single else "were")
    have = ("has" if single else "have") if live else "had"
    if single:
        return Verbs(be, have, "does", "it", "it", "its")
    return Verbs(be, have, "do", "they", "them", "their")


def who(fact: Fact) -> Ranks:
    """Return the ranks that a fact is about."""
    assert fact.ranks is not None, f"{fact.relation.value} needs a subject"
    return fact.ranks


def others_of(fact: Fact) -> Ranks:
    """Return the other ranks that a fact names."""
    assert fact.others is not None, f"{fact.relation.value} needs other ranks"
    return fact.others


def call_in(fact: Fact) -> CallFact:
    """Return the call that a fact is about."""
    assert fact.call is not None, f"{fact.relation.value} needs a call"
    return fact.call


def name_of(fact: Fact) -> str:
    """Name the ranks that a fact is about, at the beginning of a sentence."""
    return begin_sentence(name_ranks(who(fact)))


def time_of(fact: Fact) -> float:
    """Return the time that a fact states, in s; 0 if it states none."""
    return fact.number or 0.0


def values_in(fact: Fact) -> str:
    """Write the values of a fact, without their names."""
    return ", ".join(value for _, value in fact.values)
