"""The table of messages: each row is read, searched for and documented; whose fault words show."""

from __future__ import annotations

import time
from pathlib import Path

import log_messages
import pytest
from log_cases import judged

from rankcall.imports.logs.blame import blame_of, blame_of_code
from rankcall.imports.logs.prefixes import Line, Prefixes, Writer
from rankcall.imports.logs.sources import SOURCES, Message, facts_of, is_incomplete, markers

ROWS = [(source.name, message) for source in SOURCES for message in source.messages]


def line_of(text: str) -> Line:
    """Return a line as the reader passes it on."""
    (line,) = Prefixes(0).read(1, text)
    return line


@pytest.mark.parametrize(("source", "message"), ROWS, ids=lambda value: str(value)[:40])
def test_each_example_is_read(source: str, message: Message) -> None:
    """A marker is in the example, and the example gives one fact of its row."""
    assert any(marker in message.example for marker in message.markers), source
    if message.pattern is not None:
        facts = facts_of(line_of(message.example))
        assert len(facts) == 1, (source, facts)
        assert not is_incomplete(message.example)


def test_the_page_is_written_from_the_table() -> None:
    """docs/log-messages.md is what tools/log_messages.py writes."""
    assert log_messages.PAGE.read_text() == log_messages.page()


def test_markers_are_plain_and_differ() -> None:
    """They are ASCII, because a log is searched as such, and none is so short that it is noise."""
    words = [marker.words for marker in markers()]
    assert len(set(words)) == len(words)
    assert all(word.isascii() and len(word) >= 4 for word in words)
    assert len(words) <= 192  # three passes of the search


@pytest.mark.parametrize("message", [m for _, m in ROWS if m.pattern], ids=lambda m: m.meaning[:40])
def test_no_pattern_takes_long(message: Message) -> None:
    """16 KiB that nearly match, again and again, take no pattern two seconds of processor time."""
    assert message.pattern is not None
    half = message.example[: len(message.example) * 2 // 3]
    for text in (half, "[", "1", "a ", message.markers[0]):
        line = (text * (1 << 14))[: 1 << 14]
        began = time.process_time()
        message.pattern.search(line)
        assert time.process_time() - began < 2.0, text


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("[rank2]:[E402 11:02:07.384372190 NCCLUtils.cpp:75] Abort failed", "undecided"),
        ("[rank2]:[F402 11:02:07.384372190 CUDAEvent.h:75] Check failed", "undecided"),
        ("[E ProcessGroupNCCL.cpp:477] something that no row has", "undecided"),
        ("[rank2]:[W402 11:02:07.384372190 socket.cpp:75] Connection refused", "nothing_found"),
        ("[rank2]:[I402 11:02:07.384372190 ProcessGroupNCCL.cpp:75] started", "nothing_found"),
        ("[rank2]:[Epoch 4] loss 2.1", "nothing_found"),
    ],
)
def test_an_error_of_torch_that_no_row_has(tmp_path: Path, line: str, kind: str) -> None:
    """torch writes the level of a message before it; a warning is no failure."""
    path = tmp_path / "job.log"
    path.write_text(line + "\n")
    assert judged(path) == (kind, ())


def test_a_writer_without_a_prefix_is_nobody() -> None:
    """A plain line has no stream, no rank and no time."""
    line = line_of("step 10")
    assert line == Line(Writer(0), 1, "step 10")


@pytest.mark.parametrize(
    ("message", "kind", "expected"),
    [
        ("CUDA error: unspecified launch failure", "", "own"),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", "torch.OutOfMemoryError", "own"),
        ("Cuda failure 'out of memory'", "", "own"),
        ("Address already in use (addr='tcp://10.0.7.12:1')", "zmq.error.ZMQError", "own"),
        ("'loss'", "KeyError", "own"),
        ("", "AssertionError", "own"),
        ("NCCL communicator was aborted on rank 3", "RuntimeError", "victim"),
        ("[../pair.cc:553] Connection closed by peer [::1]:1", "RuntimeError", "victim"),
        ("remote process exited or there was a network error, NCCL version 2.19", "", "victim"),
        ("socketProgress: Connection closed by remote peer node-c<51159>", "", "victim"),
        ("anything", "torch.distributed.DistNetworkError", "victim"),
        ("", "KeyboardInterrupt", "outside"),
        ("Process 1 got signal: 15", "SignalException", "outside"),
        ("[Errno 28] No space left on device", "OSError", "outside"),
    ],
)
def test_the_classifier(message: str, kind: str, expected: str) -> None:
    """Whose fault an error is, by its words and its type."""
    assert blame_of(message, kind) == expected


def test_exit_codes() -> None:
    """A signal that no failure sends is the rank's own; an abort follows many things."""
    codes = {-9: "own", -11: "own", 135: "own", -6: "victim", 134: "victim", 1: "victim"}
    codes |= {-15: "outside", 143: "outside", 130: "outside"}
    assert {code: blame_of_code(code) for code in codes} == codes
