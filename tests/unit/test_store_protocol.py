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
from agreeing import Checks, Plan, ranks

from rankcall.store import _protocol
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
    "2 ranks, barriers, two words": (ranks(2, retries=1, ranks_per_word=1), (), {}),
    "2 ranks, 3 barriers": (ranks(2, calls=("barrier",) * 3, retries=1), (), {}),
    "3 ranks, barriers, in time": (ranks(3), (), STILL),
    "3 ranks, barriers, in time, a lost answer": (
        ranks(3, retries=1),
        (),
        {**STILL, "lost_answers": 1},
    ),
    "3 ranks, barriers, in time, two words": (ranks(3, ranks_per_word=2), (), STILL),
    "2 ranks, exchanges": (ranks(2, calls=EXCHANGES), (), {}),
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
    "a double": (ranks(2), [Plan(1, 2, nonce="d")], {}),
    "a wrong world size": (ranks(2, calls=("barrier",)), [Plan(1, 3, ("barrier",), nonce="w")], {}),
}
SLOW_CASES = {
    "2 ranks, barriers, two lost answers": (ranks(2, retries=2), (), {"lost_answers": 2}),
    "2 ranks, barriers, two words, a lost answer": (
        ranks(2, retries=1, ranks_per_word=1),
        (),
        {"lost_answers": 1},
    ),
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


def search(schedules: int, size: int, appends: bool, faults: dict[str, int], seed: int) -> None:
    """Try random schedules of more ranks, more calls and several words."""
    plans = ranks(size, calls=MIXED, retries=3, appends=appends, ranks_per_word=2)
    Checks(plans).simulation(**faults).search(schedules, seed)


@pytest.mark.parametrize("appends", [True, False])
@pytest.mark.parametrize("faults", [{}, FAULTY], ids=["fine", "faulty"])
def test_random_schedules(appends: bool, faults: dict[str, int]) -> None:
    """Random schedules break no promise."""
    search(500, 3, appends, faults, seed=1)
    search(50, 5, appends, faults, seed=1)


@slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("appends", [True, False])
@pytest.mark.parametrize("faults", [{}, FAULTY], ids=["fine", "faulty"])
def test_many_random_schedules(seed: int, appends: bool, faults: dict[str, int]) -> None:
    """The same 200,000 times."""
    search(9_500, 3, appends, faults, seed)
    search(500, 5, appends, faults, seed)


# Planted bugs: a part of the protocol, its replacement, and a case that finds the bug.
MUTANTS = {
    "waits for a key that another rank has removed": (
        "words = yield ReadMany(keys.words(kind, self._number))",
        "words = []\n"
        "        for key in keys.words(kind, self._number):\n"
        "            words.append((yield WaitRead(key)))",
        "2 ranks, barriers, two words",
    ),
    "lets pass though one rank is missing": (
        "if not missing:\n            yield from self._let_pass()",
        "if len(missing) < 2:\n            yield from self._let_pass()",
        "2 ranks, barriers",
    ),
    "removes the data of the last generation": (
        "self._keys.release(EXCHANGE, self._number - 2)",
        "self._keys.release(EXCHANGE, self._number - 1)",
        "2 ranks, 3 exchanges, in time, a lost answer",
    ),
    "removes the counters of this generation": (
        "yield Delete(self._keys.word(self._kind, self._number - 1, self._word))",
        "yield Delete(self._keys.word(self._kind, self._number, self._word))",
        "3 ranks, barriers, in time, two words",
    ),
    "counts a word too many": (
        "keys.word_count == 1 or keys.word_count == (",
        "keys.word_count == 1 or keys.word_count - 1 == (",
        "2 ranks, barriers, two words",
    ),
    "does not let pass": (
        "            if is_complete:\n                yield from self._complete()\n",
        "",
        "3 ranks, barriers, in time",
    ),
    "believes that a request without an answer took effect": (
        "if not arrivals(value, self._rank, keys.ranks_per_word):",
        "if False:",
        "2 ranks, barriers, a lost answer",
    ),
    "arrives before it hands in": (
        "        if progress.frame is not None:\n"
        "            yield from hand_in(self._keys, self._data, self._rank, progress.frame)\n"
        "        progress.additions += 1\n"
        "        value: int = yield Add(word, self._arrival)\n",
        "        progress.additions += 1\n"
        "        value: int = yield Add(word, self._arrival)\n"
        "        if progress.frame is not None:\n"
        "            yield from hand_in(self._keys, self._data, self._rank, progress.frame)\n",
        "2 ranks, exchanges",
    ),
    "overwrites the data of all": (
        'yield CompareSet(self.release, b"", _ELSEWHERE)',
        "yield Set(self.release, _ELSEWHERE)",
        "2 ranks, exchanges",
    ),
    "cleans up before all have": (
        "        if not is_full(value, number, keys.world_size, keys.ranks_per_word):\n"
        "            return True\n",
        "",
        "2 ranks, clean-ups",
    ),
    "removes the claims first": (
        "member.removal = keys.ours((yield ListKeys()))",
        "member.removal = keys.ours((yield ListKeys()))[::-1]",
        "2 ranks, clean-ups",
    ),
    "forgets keys when an answer is lost": (
        "        if progress.leftovers:\n"
        "            yield from remove_leftovers(self._keys, progress)\n",
        "",
        "2 ranks, 3 exchanges, in time, a lost answer",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_bugs_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug planted in the protocol breaks a promise, and the schedule that shows it replays."""
    original, planted, case = MUTANTS[name]
    source = Path(_protocol.__file__).read_text()
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
