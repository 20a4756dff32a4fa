"""The protocol of ``rankcall.store`` keeps its promises in every order of requests.

``agreeing.py`` has the promises. A failure prints the schedule; ``Simulation.replay`` repeats it.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import agreeing
import pytest
from agreeing import Checks, Plan, hosted, mixed, ranks

from rankcall.store import protocol
from rankcall.testing.simulated_store import Violation

BARRIERS, EXCHANGES, READS = ("barrier",) * 2, ("exchange",) * 2, ("get_all",) * 2
TWICE = ("barrier", "clean_up") * 2
STILL: dict[str, Any] = {"expiries": False}
slow = pytest.mark.slow

# By name: the ranks, the processes that should not be there, and the faults.
CASES = {
    "2 ranks, barriers": (ranks(2, retries=1), (), {}),
    "2 ranks, barriers, a lost answer": (ranks(2, retries=1), (), {"lost_answers": 1}),
    "2 ranks, barriers, a death": (ranks(2, retries=1), (), {"deaths": 1}),
    "2 ranks, barriers, one polls": (mixed(2, retries=1), (), {}),
    "2 ranks, barriers, no counting": (ranks(2, retries=1, counts=False), (), {}),
    "2 ranks, barriers, no counting, a lost answer": (
        ranks(2, retries=1, counts=False),
        (),
        {"lost_answers": 1},
    ),
    "3 ranks, a barrier, no counting": (ranks(3, calls=("barrier",), counts=False), (), {}),
    "2 ranks, barriers, no appending": (ranks(2, retries=1, appends=False), (), {}),
    "2 ranks, 3 barriers": (ranks(2, calls=("barrier",) * 3, retries=1), (), {}),
    "2 ranks, 4 reads, in time, a lost answer": (
        ranks(2, calls=("get_all",) * 4, retries=1),
        (),
        {**STILL, "lost_answers": 1},
    ),
    "3 ranks, barriers, in time": (ranks(3), (), STILL),
    "3 ranks, barriers, one polls, in time": (mixed(3), (), STILL),
    "2 ranks, exchanges": (ranks(2, calls=EXCHANGES), (), {}),
    "2 ranks, exchanges, one polls": (mixed(2, calls=EXCHANGES), (), {}),
    "2 ranks, exchanges, in time, a lost answer": (
        ranks(2, calls=EXCHANGES, retries=1),
        (),
        {**STILL, "lost_answers": 1},
    ),
    "2 ranks, exchanges, no appending": (ranks(2, calls=EXCHANGES, appends=False), (), {}),
    "2 ranks, reads": (ranks(2, calls=READS, retries=1), (), {}),
    "2 ranks, reads, no appending": (ranks(2, calls=READS, appends=False), (), {}),
    "2 ranks, reads, a lost answer": (ranks(2, calls=READS, retries=1), (), {"lost_answers": 1}),
    "2 ranks, reads, a death": (ranks(2, calls=READS, retries=1), (), {"deaths": 1}),
    "3 ranks, reads, in time": (ranks(3, calls=READS), (), STILL),
    "2 ranks, clean-ups": (ranks(2, calls=TWICE, retries=1), (), {}),
    "2 ranks, clean-ups, a lost answer": (
        ranks(2, calls=TWICE, retries=1),
        (),
        {"lost_answers": 1},
    ),
    "2 ranks, clean-ups, a death": (ranks(2, calls=TWICE, retries=1), (), {"deaths": 1}),
    "3 ranks, clean-ups, in time": (ranks(3, calls=TWICE), (), STILL),
    **{
        f"{size} ranks, the host ends, {polling or 'none'} poll, {'+'.join(calls)}, {store}": (
            hosted(size, polling, calls=calls, **({} if store == "counts" else {"counts": False})),
            (),
            STILL if size == 3 else {},
        )
        for size, polling in ((2, ()), (2, (0,)), (2, (1,)), (2, (0, 1)), (3, (1,)))
        for calls in (BARRIERS, EXCHANGES, READS)
        for store in ("counts", "appends")
        if size == 2 or calls == BARRIERS
    },
    "2 ranks, the host ends, another one than rank 0": (
        hosted(2, (0, 1), 1, calls=("barrier", "exchange", "get_all")),
        (),
        {},
    ),
    "2 ranks, the host is killed": (hosted(2, (1,), retries=1), (), {"deaths": 1}),
    "a double": (ranks(2), [Plan(1, 2, nonce="d")], {}),
    "a wrong world size": (ranks(2, calls=("barrier",)), [Plan(1, 3, ("barrier",), nonce="w")], {}),
}
SLOW_CASES = {
    "2 ranks, barriers, one polls, a lost answer": (mixed(2, retries=1), (), {"lost_answers": 1}),
    "3 ranks, barriers, in time, a lost answer": (
        ranks(3, retries=1),
        (),
        {**STILL, "lost_answers": 1},
    ),
    "2 ranks, barriers, two lost answers": (ranks(2, retries=2), (), {"lost_answers": 2}),
    "2 ranks, 3 barriers, a lost answer": (
        ranks(2, calls=("barrier",) * 3, retries=1),
        (),
        {"lost_answers": 1},
    ),
    "3 ranks, barriers": (ranks(3), (), {}),
    "3 ranks, barriers, a death": (ranks(3), (), {"deaths": 1}),
    "3 ranks, exchanges, in time": (ranks(3, calls=EXCHANGES), (), STILL),
    "2 ranks, exchanges, a death": (ranks(2, calls=EXCHANGES), (), {"deaths": 1}),
    "2 ranks, exchanges, a lost answer": (
        ranks(2, calls=("exchange",), retries=1),
        (),
        {"lost_answers": 1},
    ),
    "2 ranks, 3 exchanges, in time, a lost answer": (
        ranks(2, calls=("exchange",) * 3, retries=1),
        (),
        {**STILL, "lost_answers": 1},
    ),
    "3 ranks, clean-ups": (ranks(3, calls=TWICE), (), {}),
    "a double of three": (ranks(3, calls=("barrier",)), [Plan(2, 3, ("barrier",), nonce="d")], {}),
    "a wrong world size, twice": (ranks(2), [Plan(1, 3, nonce="w")], {}),
}


def explore(case: tuple[Any, Any, dict[str, Any]]) -> None:
    """Try all schedules of a case."""
    plans, strangers, faults = case
    explored = Checks(plans, strangers).simulation(**faults).explore(3_000_000)
    assert explored.ends > 0


@pytest.mark.parametrize("name", CASES)
def test_every_schedule(name: str) -> None:
    """No order of requests, deadlines and faults breaks a promise."""
    explore(CASES[name])


@slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SLOW_CASES)
def test_every_schedule_of_larger_cases(name: str) -> None:
    """The same for cases of up to some million states."""
    explore(SLOW_CASES[name])


MIXED = ("barrier", "exchange", "barrier", "exchange", "exchange", "clean_up", "barrier")


FAULTY = {"lost_answers": 2, "deaths": 1}


# The kinds of stores: those that count, with one rank that does not wait in ``Arrive``; others.
STORES: dict[str, dict[str, Any]] = {
    "counts": {},
    "appends": {"counts": False},
    "neither": {"appends": False},
}


def search(schedules: int, size: int, store: str, faults: dict[str, int], seed: int) -> None:
    """Try random schedules of more ranks and more calls."""
    plans = mixed(size, calls=MIXED, retries=3, **STORES[store])
    Checks(plans).simulation(**faults).search(schedules, seed)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("faults", [{}, FAULTY], ids=["fine", "faulty"])
def test_random_schedules(store: str, faults: dict[str, int]) -> None:
    """Random schedules break no promise."""
    search(500, 3, store, faults, seed=1)
    search(50, 5, store, faults, seed=1)


@slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("faults", [{}, FAULTY], ids=["fine", "faulty"])
def test_many_random_schedules(seed: int, store: str, faults: dict[str, int]) -> None:
    """The same 240,000 times."""
    search(9_500, 3, store, faults, seed)
    search(500, 5, store, faults, seed)


# Planted bugs: a part of the protocol, its replacement, and a case that finds the bug.
MUTANTS = {
    "waits for a key that another rank has removed": (
        "        return keys.missing((yield Read(log)))\n    return",
        "        yield Wait((keys.log(kind, number - 1),) if number else ())\n"
        "        return keys.missing((yield Read(log)))\n    return",
        "2 ranks, 3 barriers",
    ),
    "lets pass though one rank is missing": (
        "    if not missing:\n        yield from _let_pass(keys, kind, number)\n",
        "    if len(missing) < 2:\n        yield from _let_pass(keys, kind, number)\n",
        "2 ranks, barriers",
    ),
    "does not let pass": (
        "    yield from _let_pass(keys, kind, number)\n    return True\n\n\ndef _read_until_full",
        "    return True\n\n\ndef _read_until_full",
        "2 ranks, barriers, no counting",
    ),
    "that polls does not let pass": (
        "        return False\n    yield from _let_pass(keys, kind, number)\n    return True\n",
        "        return False\n    return True\n",
        "2 ranks, barriers, one polls",
    ),
    "is counted twice": (
        "            yield from _arrive_again(keys, progress, log, rank, asking_line)\n",
        "            key = keys.turnstile(kind, number)\n"
        "            if (yield Arrive([], key, keys.world_size, [])):\n"
        "                return True\n",
        "2 ranks, barriers",
    ),
    "reads a key at which others wait": (
        "    if (yield Until(Read(log), keys.is_full)) is None:",
        "    yield Read(keys.turnstile(kind, number))\n"
        "    if (yield Until(Read(log), keys.is_full)) is None:",
        "3 ranks, barriers, one polls, in time",
    ),
    "is counted before it is in the log": (
        "            yield hand_in(keys, log, rank, asking_line)\n"
        "            has_passed = yield from _count_and_wait(keys, kind, number)\n",
        "            has_passed = yield from _count_and_wait(keys, kind, number)\n"
        "            yield hand_in(keys, log, rank, asking_line)\n",
        "3 ranks, a barrier, no counting",
    ),
    "hands in after it has arrived": (
        "instead=(*data, (log, asking_line))",
        "instead=((log, asking_line), *data)",
        "2 ranks, exchanges, one polls",
    ),
    "believes that a request without an answer took effect": (
        "    if not has_arrived:\n        if progress.frame",
        "    if False:\n        if progress.frame",
        "2 ranks, barriers, a lost answer",
    ),
    "removes the keys of this generation": (
        "    for key in keys.to_remove(kind, number, member.claim.rank):",
        "    for key in keys.to_remove(kind, number + 1, member.claim.rank):",
        "2 ranks, barriers",
    ),
    "removes keys before all have arrived": (
        "    log = keys.log(kind, number)\n    # After an exchange",
        "    log = keys.log(kind, number)\n"
        "    yield from _remove_old_keys(keys, member, kind, number)\n    # After an exchange",
        "2 ranks, barriers",
    ),
    "removes no key": (
        "    for key in keys.to_remove(kind, number, member.claim.rank):",
        "    for key in []:",
        "2 ranks, 3 barriers",
    ),
    "cleans up before all have": (
        "        if count < keys.world_size:\n            return True\n        member",
        "        member",
        "2 ranks, clean-ups",
    ),
    "removes the claims first": (
        "member.removal = keys.ours((yield ListKeys()))",
        "member.removal = keys.ours((yield ListKeys()))[::-1]",
        "2 ranks, clean-ups",
    ),
    "hosts the store and goes at once": (
        "    yield Until(Read(log), lambda held: not is_asked(held), STAY_S)\n",
        "    yield Read(log)\n",
        "2 ranks, the host ends, (0, 1) poll, barrier+barrier, counts",
    ),
    "hosts the store and does not wait for its answers": (
        "        if member.hosts_store and keys.world_size > 1:\n"
        "            yield from _see_others_off(keys.log(BARRIER, progress.generation))\n",
        "",
        "2 ranks, the host ends, none poll, barrier+barrier, appends",
    ),
    "does not say that it asks again and again": (
        "asking_line = member.asking_line if says_when_done else member.line",
        "asking_line = member.line",
        "2 ranks, the host ends, (0, 1) poll, barrier+barrier, counts",
    ),
    "needs the store to tidy up": (
        "        return  # all have arrived",
        "        raise  # all have arrived",
        "2 ranks, the host ends, none poll, barrier+barrier, counts",
    ),
    "forgets keys when an answer is lost": (
        "            yield Delete(key)\n            progress.leftovers = tuple(pair for pair in "
        "progress.leftovers if pair[1] != key)\n",
        "            progress.leftovers = tuple(pair for pair in "
        "progress.leftovers if pair[1] != key)\n            yield Delete(key)\n",
        "2 ranks, 4 reads, in time, a lost answer",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_bugs_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug planted in the protocol breaks a promise, and the schedule that shows it replays."""
    original, planted, case = MUTANTS[name]
    source = Path(protocol.__file__).read_text()
    assert source.count(original) == 1, "the protocol has changed: plant this bug anew"
    mutant: Any = types.ModuleType("mutant")
    monkeypatch.setitem(sys.modules, "mutant", mutant)
    exec(compile(source.replace(original, planted), "mutant", "exec"), vars(mutant))
    monkeypatch.setattr(agreeing, "protocol", mutant)
    plans, strangers, faults = {**CASES, **SLOW_CASES}[case]
    with pytest.raises(Violation) as violation:
        Checks(plans, strangers).simulation(**faults).explore(400_000)
    with pytest.raises(Violation) as again:
        Checks(plans, strangers).simulation(**faults).replay(violation.value.trace)
    assert again.value.reason == violation.value.reason
