"""The wire's parser against frames that are cut, grown, flipped and made up."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

HEADER = struct.Struct("<4sB3xQQQqQQiiII")
SLOT = struct.Struct("<IIQQ")
PACKED, FRAME, ARENA = 0, 1, 2


@pytest.fixture(scope="module", autouse=True)
def parse():
    """Return the native parser; the frames of a message in, what it holds out."""
    pytest.importorskip("zmq")
    from rankcall.rpc.native import agent_module

    return agent_module().parse


def build(
    payload: bytes, pickle: bytes, buffers: list[tuple[int, bytes]], kind: int = 1, call: int = 7
) -> list[bytes]:
    """Write a message as the format says, by a hand of its own."""
    slots = b"".join(SLOT.pack(where, 0, len(data), 5) for where, data in buffers)
    packed = b"".join(data for where, data in buffers if where == PACKED)
    header = HEADER.pack(
        b"RKR1", kind, 1, 2, call, 3, len(payload), len(pickle), 0x102, 0, len(buffers), 0
    )
    frames = [data for where, data in buffers if where == FRAME]
    return [header + slots + payload + pickle + packed, *frames]


BUFFERS = st.lists(
    st.tuples(st.sampled_from([PACKED, FRAME, ARENA]), st.binary(max_size=40)), max_size=5
)
MESSAGES = st.builds(
    build, st.binary(max_size=60), st.binary(max_size=30), BUFFERS, st.integers(1, 5),
    st.integers(0, 2**64 - 1),
)  # fmt: skip


@given(payload=st.binary(max_size=60), pickle=st.binary(max_size=30), buffers=BUFFERS)
def test_a_whole_message_is_read(parse, payload, pickle, buffers) -> None:
    """What was written comes out."""
    frames = build(payload, pickle, buffers)
    assert parse(frames) == (1, 7, payload, len(buffers))


@given(frames=MESSAGES, data=st.data())
def test_a_cut_or_grown_message_is_refused(parse, frames, data) -> None:
    """One byte or frame too few or too many, anywhere."""
    cut = data.draw(st.integers(0, len(frames[0]) - 1))
    for broken in (
        [frames[0][:cut], *frames[1:]],
        [frames[0] + b"x", *frames[1:]],
        [*frames, b""],
        frames[:-1] if len(frames) > 1 else [b""],
    ):
        with pytest.raises(ValueError, match=r"frame|rankcall message"):
            parse(broken)


@given(frames=MESSAGES, data=st.data())
def test_flipped_bytes_never_crash(parse, frames, data) -> None:
    """Sizes and counts that lie are refused, or the message still adds up."""
    head = bytearray(frames[0])
    for _ in range(data.draw(st.integers(1, 8))):
        head[data.draw(st.integers(0, len(head) - 1))] = data.draw(st.integers(0, 255))
    try:
        kind, _, payload, buffers = parse([bytes(head), *frames[1:]])
    except ValueError:
        return
    assert 1 <= kind <= 5
    assert len(payload) + buffers * SLOT.size <= len(head)


@given(frames=st.lists(st.binary(max_size=200), min_size=1, max_size=4))
def test_noise_is_refused(parse, frames) -> None:
    """Nothing that was not meant for us is read."""
    with pytest.raises(ValueError, match=r"frame|rankcall message"):
        parse(frames)


def test_sizes_that_would_overflow_are_refused(parse) -> None:
    """Sums beyond 64 bits and tables beyond the frame."""
    whole = build(b"abc", b"", [])[0]
    for offset, size in ((40, 8), (48, 8), (64, 4), (68, 4)):
        broken = whole[:offset] + b"\xff" * size + whole[offset + size :]
        with pytest.raises(ValueError, match=r"frame|too many"):
            parse([broken])
