"""The text in a ring's header that says what an RPC agent waits for and runs."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from rankcall.ring.layout import HEADER
from rankcall.ring.rpc_state import MOST, RpcRun, RpcState, RpcWait, decode

ROOM = HEADER.fields["rpc"][0].itemsize - 1  # type: ignore[index]
STATE = RpcState(
    "worker0",
    2,
    15,
    7,
    (RpcWait("worker1", "m.f", "a.py:1", "", 3), RpcWait("worker2", "g", "a.py:2", "m.h", 5)),
    (RpcRun("m.h", "a.py:2", True, 4),),
)


def test_a_state_survives_its_text() -> None:
    """Readers get what the process saw."""
    assert decode(STATE.encode(ROOM)) == STATE
    assert decode("") is None


def test_a_long_state_loses_its_newest_calls_and_the_beginnings_of_names() -> None:
    """What is left fits into the header, and the oldest wait and run are among it."""
    path = f"/{'folder/' * 40}train.py:12"
    waits = tuple(RpcWait(f"{'w' * 80}{n}", "f" * 99, path, "g" * 99, n) for n in range(9))
    runs = tuple(RpcRun("h" * 99, path, False, n) for n in range(9))
    text = replace(STATE, waits=waits, runs=runs).encode(ROOM)
    assert len(text) <= ROOM
    state = decode(text)
    assert state is not None
    assert state.waits[0].since_ns == state.runs[0].since_ns == 0
    assert len(state.waits) <= MOST
    assert state.waits[0].line.endswith("train.py:12")
    assert state.waits[0].to.endswith("w0")


@pytest.mark.parametrize(
    "text",
    [
        "null",
        "[]",
        "{}",
        "[" * 10_000,
        '["w",1,1,1,[],[],0]',
        '["w",-1,1,1,[],[]]',
        '["w",1e999,1,1,[],[]]',
        '["w",true,1,1,[],[]]',
        f'["w",{"9" * 5000},1,1,[],[]]',
        '["w",1,1,1,[["a","b","c","d"]],[]]',
        '["w",1,1,1,[["a","b","c",4,5]],[]]',
        '["w",1,1,1,7,[]]',
        '[["w"],1,1,1,[],[]]',
        STATE.encode()[:-3],
    ],
)
def test_a_damaged_text_says_nothing(text: str) -> None:
    """Any user may have written the header."""
    assert decode(text) is None


def test_random_damage() -> None:
    """A text that is read while it is written gives a state or nothing, and no exception."""
    choose, text = random.Random(1), STATE.encode()
    for _ in range(2000):
        at, length = choose.randrange(len(text)), choose.randrange(9)
        noise = "".join(choose.choice('"[]{},0-9ae\\u') for _ in range(length))
        state = decode(text[:at] + noise + text[at + choose.randrange(9) :])
        assert state is None or json.loads(state.encode())
