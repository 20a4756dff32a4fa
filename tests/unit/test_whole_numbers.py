"""Whole numbers in text that somebody else wrote, and each place that reads one."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from rankcall import errors
from rankcall.analysis.logs import diagnose_logs
from rankcall.analysis.run_snapshot import snapshot_of_run
from rankcall.c10d.requests import Add, CompareSet, ListKeys, Now, Read, ReadMany, Steps
from rankcall.capture.hosts import ranks_of_this_node
from rankcall.capture.settings import read_settings
from rankcall.cli import doctor
from rankcall.cli.page import address_of
from rankcall.errors import RankcallError
from rankcall.imports.dumps.records import _int
from rankcall.imports.logs.prefixes import Prefixes
from rankcall.imports.logs.sources import SOURCES, Message, facts_of
from rankcall.job.other_nodes import Exchange
from rankcall.job.posts import Posts
from rankcall.job.viewers import Questions
from rankcall.rpc.backends.zmq.addresses import endpoints
from rankcall.run.frames import all_training_frames
from rankcall.run.hangs import kept_stacks
from rankcall.run.load import load
from rankcall.store.failing_over import failover
from rankcall.store.keys import Keys, attempt_of_this_process
from rankcall.store.protocol import registered_sizes
from rankcall.testing.synthetic import synthetic_run
from rankcall.whole_numbers import LARGEST, whole_number

HUGE = "1" * 7000  # int() refuses more than 4,300 digits
ODD = [HUGE, "²", "٣", "3²", "-1", "--1", "+3", " 3", "3_0", "0x3", "1e3", "", "9" * 19]


def _short(value: object) -> str:
    """Return the name of a case."""
    return ascii(value)[:12]


MESSAGES = [message for source in SOURCES for message in source.messages]


@pytest.mark.parametrize(
    "text", [*ODD, *(text.encode() for text in ODD), b"\xff", None], ids=_short
)
def test_what_is_no_number(text: str | bytes | None) -> None:
    """Only ASCII digits are one, and only as many as fit 64 bits."""
    assert whole_number(text) is None


def test_what_is_a_number() -> None:
    """Digits, in the bounds; a minus only where a negative number can be meant."""
    assert [whole_number(text) for text in ("0", b"7", "007", str(LARGEST))] == [0, 7, 7, LARGEST]
    assert whole_number("7", most=6) is None
    assert whole_number("0", least=1) is None
    assert whole_number("-9", least=-255) == -9
    assert whole_number("-", least=-255) is None


@pytest.mark.parametrize(
    "odd", [HUGE, "²" * 5, "٣" * 5, "-" + HUGE, "--5", "+5", "1-2-3", ","], ids=_short
)
@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.meaning[:40])
def test_odd_numbers_in_each_message(message: Message, odd: str) -> None:
    """Whatever stands in the place of a message's numbers, reading it raises nothing."""
    places = list(re.finditer(r"\d+", message.example))
    texts = [message.example[: at.start()] + odd + message.example[at.end() :] for at in places]
    for text in [*texts, re.sub(r"\d+", lambda _: odd, message.example)]:
        for line in Prefixes(0, [text] * 9).read(1, text):
            facts_of(line)


def test_a_list_of_ranks_that_is_one_long_number(tmp_path: Path) -> None:
    """A log that lists such a rank is judged, and names nobody."""
    path = tmp_path / "job.log"
    path.write_text(f"[rank0]: ranks [{HUGE}] are the lagging ranks\n")
    assert {finding.ranks for finding in diagnose_logs([path]).findings} == {()}


@pytest.mark.parametrize("odd", ODD, ids=_short)
def test_dumps(odd: str) -> None:
    """A text in a dump that is no number counts as 0."""
    assert _int(odd) == 0


@pytest.mark.parametrize("odd", ODD, ids=_short)
def test_stacks(tmp_path: Path, odd: str) -> None:
    """A frame whose line is no number has no line; a file whose rank is none is left out."""
    stack = f'Thread 0x1 (most recent call first):\n  File "a.py", line {odd} in f\n'
    assert {frame.line for frame in all_training_frames(stack)} <= {0}
    (tmp_path / "stacks").mkdir()
    (tmp_path / "stacks" / f"rank-{odd[:99]}.txt").write_text("stack")
    assert kept_stacks(tmp_path, 10) == {}


def answered(steps: Steps[object], value: bytes) -> object:
    """Run steps against a store that holds the same bytes under each key; one look at each."""
    listed = [f"p/rankcall.{value.decode()}/2/b{value.decode()}/log"]
    reply = None
    for _ in range(200):
        try:
            request = steps.send(reply)
        except StopIteration as end:
            return end.value
        if isinstance(request, Read):
            reply = value
        elif isinstance(request, ReadMany):
            reply = [value] * len(request.keys)
        elif isinstance(request, ListKeys):
            reply = listed
        else:
            reply = 0.0 if isinstance(request, Now) else 1
    return None


ODD_BYTES = [text.encode() for text in (HUGE, "²", "-1", "+3", "1e3")]
READERS: dict[str, Callable[[], Steps[object]]] = {
    "posts": lambda: Posts("p", 2, settle_s=0).fresh(set()),
    "question": lambda: Questions("").question(),
    "nodes": lambda: Questions("")._learn_nodes(2),
}


@pytest.mark.parametrize("value", ODD_BYTES, ids=lambda value: value[:5])
@pytest.mark.parametrize("reader", READERS)
def test_values_of_the_store(reader: str, value: bytes) -> None:
    """A count in the store that is no number counts as 0."""
    assert not answered(READERS[reader](), value)


@pytest.mark.parametrize("value", [*ODD_BYTES, b"00007"], ids=lambda value: value[:5])
def test_rounds_that_another_process_counts(value: bytes, tmp_path: Path) -> None:
    """A round does not start over for ever: the exchange ends, as if the store were gone."""
    snapshot = snapshot_of_run(load(synthetic_run(tmp_path / "run", 2, 20).path))
    steps = Exchange(lambda: None, settle_s=0.0).steps(snapshot, 2, lambda known, before: b"v")
    reply: object = None
    with pytest.raises(ValueError, match="latest is not"):  # noqa: PT012  # at one of the requests
        for _ in range(200):
            request = steps.send(reply)
            reply = value if isinstance(request, (Read, CompareSet)) else 0.0
            if isinstance(request, Read) and request.key.endswith("posts"):
                reply = b"1"
            elif isinstance(request, Add):
                reply = 1
    with pytest.raises(ValueError, match="posts is not a number up to 72"):
        answered(Exchange(lambda: None)._remove(1, 2), b"%d" % 10**15)


def test_a_counter_that_was_raised_takes_no_memory() -> None:
    """It was a list of as many numbers; each bundle that is not there is looked up once."""
    steps = Posts("p", 2, settle_s=0).fresh(set())
    reads = 0
    with pytest.raises(StopIteration):  # noqa: PT012  # at one of the requests
        request = steps.send(None)
        while True:
            reads += 1
            request = steps.send(b"%d" % 10**15 if request.key.endswith("posts") else None)
    assert reads <= 4 * 2 + 64 + 1


@pytest.mark.parametrize("value", ODD_BYTES, ids=lambda value: value[:5])
def test_an_answer_to_no_question(value: bytes) -> None:
    """An answer whose number is none is not an answer to the question that was asked."""
    questions = Questions("")
    questions._nodes, questions._first = {1: ()}, 1
    questions._answered = {1: (value + b"\ndata", 0.0)}
    assert questions._newest(1, 5.0).data == b""


@pytest.mark.parametrize("value", ODD_BYTES, ids=lambda value: value[:5])
def test_keys_of_the_store(value: bytes) -> None:
    """A world's size, a generation and an attempt that are no numbers are left out."""
    assert registered_sizes(value + b"\n8\n0\n") == [8]
    keys, text = Keys("p", 0, 2, appends=True, counts=True), value.decode()
    own = f"p/rankcall.0/2/b{text}/log"
    assert keys.newest_generation("b", [own, keys.log("b", 3)]) == 3
    assert keys.ours([f"p/rankcall.{text}/x", "p/rankcall.4/x"]) == ["p/rankcall.4/x"]


@pytest.mark.parametrize("odd", [HUGE, "²", "٣", "65536", "-1"], ids=_short)
def test_ports(odd: str) -> None:
    """A port that is none is the user's mistake, and the message has what was passed."""
    with pytest.raises(RankcallError, match="neither a port nor HOST:PORT"):
        address_of(f"host:{odd}")
    with pytest.raises(ValueError, match="port must be a port"):
        list(endpoints("10.0.0.5", odd))
    with pytest.raises(ValueError, match="port must be a port"):
        list(endpoints("10.0.0.5", f"1-{odd}"))
    with pytest.raises(ValueError, match="a host is 'address:port'"):
        failover([f"host:{odd}"])


@pytest.mark.parametrize("odd", [HUGE, "²", "٣"], ids=_short)
def test_the_environment(monkeypatch: pytest.MonkeyPatch, odd: str) -> None:
    """A variable that is no number counts as not set, or is named in the error."""
    for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
        monkeypatch.setenv(name, odd)
    for name in ("SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", odd)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", odd)
    monkeypatch.setenv("RANKCALL_CAPACITY", odd)
    assert errors.local_rank() == -1
    assert ranks_of_this_node() is None
    assert attempt_of_this_process() == 0
    assert "no port" in next(iter(doctor._store())).text
    with pytest.raises(ValueError, match="RANKCALL_CAPACITY must be a number of records"):
        read_settings()
