"""The decoder of messages and chunks, against ones that are cut, grown, flipped and made up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rpcwire import CHUNK, PACKED, PART, RETURNED, SHARED, build, cut


@pytest.fixture(scope="module")
def decode():
    """Return the native decoder: ZeroMQ messages in, the messages that are whole out."""
    pytest.importorskip("zmq")
    from rankcall.rpc.backends.zmq.agent_module import agent_module

    return agent_module().decode


@pytest.fixture(scope="module")
def parse(decode):
    """Return the decoder for the frames of one message that does not come in chunks."""
    return lambda frames: decode([frames], 1 << 20, True)[0]


BUFFERS = st.lists(
    st.tuples(st.sampled_from([PACKED, PART, SHARED, RETURNED]), st.binary(max_size=40)), max_size=5
)
MESSAGES = st.builds(
    build,
    st.binary(max_size=60),
    st.binary(max_size=30),
    BUFFERS,
    st.integers(1, 6),
    st.integers(0, 2**64 - 1),
)


@given(payload=st.binary(max_size=60), pickle=st.binary(max_size=30), buffers=BUFFERS)
def test_a_whole_message_is_read(parse, payload, pickle, buffers) -> None:
    """The decoder returns the message that was written."""
    frames = build(payload, pickle, buffers)
    parts = [data for where, data in buffers if where == PART]
    assert parse(frames) == (1, 7, payload, parts)


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
        with pytest.raises(ValueError, match=r"head|frame|rankcall message|buffer"):
            parse(broken)


@given(frames=MESSAGES, data=st.data())
def test_flipped_bytes_never_crash(parse, frames, data) -> None:
    """Sizes and counts that lie are refused, or the message still adds up."""
    head = bytearray(frames[0])
    for _ in range(data.draw(st.integers(1, 8))):
        head[data.draw(st.integers(0, len(head) - 1))] = data.draw(st.integers(0, 255))
    try:
        kind, _, payload, parts = parse([bytes(head), *frames[1:]])
    except ValueError:
        return
    assert 1 <= kind <= 6
    assert len(payload) <= len(head)
    assert parts == list(frames[1:])


@given(frames=st.lists(st.binary(max_size=200), min_size=1, max_size=4))
def test_noise_is_refused(parse, frames) -> None:
    """Frames of other programs are refused."""
    with pytest.raises(ValueError, match=r"head|frame|rankcall message|buffer"):
        parse(frames)


def test_sizes_that_would_overflow_are_refused(parse) -> None:
    """Sums beyond 64 bits and tables beyond the frame."""
    whole = build(b"abc", b"", [])[0]
    for offset, size in ((40, 8), (48, 8), (60, 4), (64, 4)):
        broken = whole[:offset] + b"\xff" * size + whole[offset + size :]
        with pytest.raises(ValueError, match=r"head|too many"):
            parse([broken])


@given(messages=st.lists(MESSAGES, max_size=4), size=st.integers(1, 50), data=st.data())
def test_chunks_make_the_message(decode, messages, size, data) -> None:
    """Messages of several sessions that arrive in turns come out as they would in one piece."""
    streams = [cut(frames, 3, size, session) for session, frames in enumerate(messages)]
    mixed = []
    while any(streams):
        stream = data.draw(st.sampled_from([stream for stream in streams if stream]))
        mixed.append(stream.pop(0))
    whole = [decode([frames], 1 << 20, True)[0] for frames in messages]
    assert sorted(decode(mixed, 1 << 20, True)) == sorted(whole)


@given(frames=MESSAGES, size=st.integers(1, 50), data=st.data())
def test_chunks_that_are_missing_or_swapped_are_refused(decode, frames, size, data) -> None:
    """No message is made of chunks that are not all there in order."""
    chunks = cut(frames, 3, size)
    at = data.draw(st.integers(0, len(chunks) - 1))
    missing = [*chunks[:at], *chunks[at + 1 :]]
    if at == len(chunks) - 1:
        assert decode(missing, 1 << 20, True) == []
    else:
        with pytest.raises(ValueError, match="chunk"):
            decode(missing, 1 << 20, True)
    if at:
        swapped = [*chunks[: at - 1], chunks[at], chunks[at - 1], *chunks[at + 1 :]]
        with pytest.raises(ValueError, match="chunk"):
            decode(swapped, 1 << 20, True)


def test_a_newer_message_replaces_one_that_was_broken_off(decode) -> None:
    """The chunks of a transfer that never ends are dropped with the first of the next."""
    first, second = build(b"a" * 90, b"", []), build(b"b" * 90, b"", [(PART, b"xyz")])
    messages = [*cut(first, 1, 20)[:3], *cut(second, 2, 20)]
    assert decode(messages, 1 << 20, True) == [(1, 7, b"b" * 90, [b"xyz"])]


def test_no_memory_for_what_is_too_large(decode) -> None:
    """A head that announces more than the limit is refused before its memory is allocated."""
    huge = CHUNK.pack(b"RKC2", 0, 9, 1, 0, 1 << 40)
    with pytest.raises(ValueError, match="larger than max_message_bytes"):
        decode([[huge, b"x"]], 1 << 20, True)


def test_a_stranger_sends_one_chunk_at_most(decode) -> None:
    """The introduction of a newcomer fits in one; nothing is kept for others."""
    frames = build(b"hello", b"", [], kind=3)
    assert decode(cut(frames, 1, 1000), 1 << 20, False) == [(3, 7, b"hello", [])]
    for refused in (cut(frames, 1, 50), cut(build(b"hello", b"", [(PART, b"xy")]), 1, 1000)):
        with pytest.raises(ValueError, match="stranger"):
            decode(refused, 1 << 20, False)
