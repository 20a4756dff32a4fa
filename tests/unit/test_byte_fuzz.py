"""Whatever the bytes are, each reader of what others wrote returns or raises its own error.

The same few inputs every time; ``make test-long`` fuzzes each reader for ten minutes, from
another seed each time, and goes on from inputs that reach new lines.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from byte_fuzz import Reached, fuzz, minimised, read_corpus, write_corpus
from dumps import Fault, simulate, write_dumps
from ring_fuzz import _record_field, apply, sound_bytes

from rankcall.analysis import node_snapshot
from rankcall.analysis.logs import diagnose_logs
from rankcall.analysis.run_snapshot import snapshot_of_run
from rankcall.analysis.summary import summarise
from rankcall.analysis.verdicts import diagnose
from rankcall.analysis.verdicts.decoding import decode
from rankcall.analysis.verdicts.encoding import encode
from rankcall.analysis.verdicts.kept import kept_of, stacks_beside, whole_verdict
from rankcall.analysis.verdicts.verdict import Origin
from rankcall.c10d.requests import Add, Check, CompareSet, Now, Read, ReadMany, Steps
from rankcall.errors import RankcallError
from rankcall.files import write_private
from rankcall.folders import run_folder
from rankcall.job import choice
from rankcall.job.keep import keep_verdict
from rankcall.job.other_nodes import Exchange
from rankcall.job.posts import Posts
from rankcall.job.sealing import sealed
from rankcall.job.viewers import Questions
from rankcall.packed_json import pack
from rankcall.record import RECORD
from rankcall.report.diagnosis_text import diagnosis_text
from rankcall.report.summary_text import render
from rankcall.run.archive import pack as pack_files
from rankcall.run.exits import STATES, Exit, describe_states, note_exit, states_name
from rankcall.run.hangs import note_over
from rankcall.run.joins import JoinSummary, RankSummary, append_join
from rankcall.run.load import load
from rankcall.run.recoveries import AttemptEnd, AttemptStart, Signature, file_of, note
from rankcall.run.stderr_tails import STDERR, TailFile
from rankcall.testing.model import Planted
from rankcall.testing.synthetic import synthetic_run

CORPORA = Path(__file__).parents[1] / "corpora"
_WORLD = 4
_TIMES = 60


class Target(NamedTuple):
    """A reader, sound inputs for it, and the errors that it may raise."""

    read: Callable[[bytes], object]
    seeds: Sequence[bytes]
    allowed: tuple[type[Exception], ...]


def _hang(folder: Path) -> Path:
    """Return a run of four ranks that rank 2's death hung."""
    return synthetic_run(folder / "job", _WORLD, 40, planted=Planted("dead", (2,), 21)).path


def _ring(folder: Path) -> Target:
    run = folder / "run"
    (run / "rings").mkdir(parents=True)
    (run / "run.json").write_text("{}")

    def read(data: bytes) -> None:
        (run / "rings/rank-00001.ring").write_bytes(data)
        diagnosis_text(diagnose(load(run), 60.0))

    return Target(read, [sound_bytes()], (RankcallError,))


def _verdict(folder: Path) -> Target:
    text = encode(diagnose(load(_hang(folder)), 60.0))

    def read(data: bytes) -> None:
        diagnosis_text(decode(data))

    return Target(read, [text], (ValueError,))


def _summary(folder: Path) -> bytes:
    return node_snapshot.encode(node_snapshot.node_snapshot_of(_snapshot(folder)))


def _snapshot(folder: Path) -> Any:
    return snapshot_of_run(load(_hang(folder)))


def _node(folder: Path) -> Target:
    """Another node's snapshot: half of the inputs are damaged before they are compressed."""
    text = zlib.decompress(_summary(folder))

    def read(data: bytes) -> None:
        for packed in (data, pack(data)):
            try:
                node_snapshot.merge([node_snapshot.decode(packed, _WORLD)])
            except ValueError:
                continue

    return Target(read, [text, pack(text)], ())


def _store(folder: Path) -> Target:
    """What watchers read from the store: the same bytes at each key, as they are or compressed."""
    mine, summary = _snapshot(folder), _summary(folder)
    text = encode(diagnose(load(folder / "job"), 60.0))

    def judge(snapshot: Any, before: bytes) -> bytes:
        return before and encode(decode(before))

    readers: list[Callable[[], Steps[object]]] = [
        lambda: Exchange(lambda: None, settle_s=0.0).steps(mine, _WORLD, judge),
        lambda: Exchange(lambda: None)._ask([(0, "a", 1)]),
        lambda: Questions("").ask({0}, _WORLD),
        lambda: Posts("p", _WORLD).fresh(set()),
        lambda: choice.agree("k", lambda: choice.Choice(folder)),
    ]

    def read(data: bytes) -> None:
        for value in (data, pack(data)):
            for reader in readers:
                for secret in (None, b"a secret of the tests"):
                    try:
                        _answer(sealed(reader(), lambda secret=secret: secret), value)
                    except ValueError:
                        continue

    seeds = [
        *(b"1", b"80", b'[[0, "a", 7], [1, "a", 8]]', b'{"ranks": [1], "parts": 2}'),
        *(b"3\n" + summary, summary, text, b'{"run_dir": "/tmp/x", "attempt": 1}'),
    ]
    return Target(read, seeds, ())


def _answer(steps: Steps[object], value: bytes) -> None:
    """Run steps against a store with two entries of everything, and this value in each."""
    reply: object = None
    for _ in range(300):
        try:
            request = steps.send(reply)
        except StopIteration:
            return
        is_count = isinstance(request, Read) and request.key.endswith(("posts", "nodes", "latest"))
        match request:
            case Read() if is_count:
                reply = b"2"
            case Read():
                reply = value
            case ReadMany():
                reply = [value] * len(request.keys)
            case CompareSet():
                reply = request.value
            case Now():
                reply = 1.0
            case Check():
                reply = True
            case Add():
                reply = 2
            case _:
                reply = None


def _dump(folder: Path) -> Target:
    job = simulate(8, 6, [Fault("missing", 1, 4)])  # small: more inputs in the same time
    kinds = [write_dumps(folder / kind, job, as_json=kind == "json") for kind in ("json", "pickle")]
    seeds = [next(iter(kind.iterdir())).read_bytes() for kind in kinds]
    place = write_dumps(folder / "damaged", job)

    def read(data: bytes) -> None:
        (place / "nccl_trace_rank_0").write_bytes(data)
        diagnosis_text(diagnose(load(place), 60.0))

    return Target(read, seeds, (RankcallError,))


def _log(folder: Path) -> Target:
    places = (Path(__file__).parents[1] / "logs").rglob("*.log")
    logs = [path.read_bytes() for path in sorted(places)]
    assert logs

    def read(data: bytes) -> None:
        (folder / "job.log").write_bytes(data)
        diagnosis_text(diagnose_logs([folder / "job.log"]))

    return Target(read, logs, (RankcallError,))


def _beside(folder: Path) -> Target:
    """The files beside the rings of a run; the first byte of an input chooses one of them."""
    run, diagnosis = _hang(folder), diagnose(load(folder / "job"), 60.0)
    head = load(run).heads[2].header
    note_exit(run, Exit(2, 0, head.host, head.pid, -9, head.last_sign_epoch_ns))
    append_join(run, JoinSummary("replay", "active", "train.py:7", [RankSummary(0, 5, 1, 2, 0.5)]))
    recoveries = file_of(run, head.host, 9)
    note(recoveries, AttemptStart(0, 7))
    note(recoveries, AttemptEnd(0, Signature("dead"), "machine", (2,)))
    tail = TailFile(run_folder(run, STDERR), 2, 0, head.host)
    tail.write(b"Traceback (most recent call last):\nValueError: no such file\n")
    tail.close()
    write_private(run_folder(run, STATES) / states_name(), describe_states([head]))
    origin = Origin("x", head.boot_id, head.native_heartbeat_ns, head.last_sign_epoch_ns, 1)
    place = keep_verdict(run, replace(diagnosis, origin=origin), {2: _STACK}, lambda kept: True)
    assert place is not None
    note_over(place, 2.0)
    files = sorted(path for path in run.rglob("*") if path.is_file() and path.suffix != ".ring")
    sound = [path.read_bytes() for path in files]

    def read(data: bytes) -> None:
        number = data[0] % len(files) if data else 0
        files[number].write_bytes(data[1:])
        try:
            loaded = load(run)
            diagnosis_text(diagnose(loaded, 60.0))
            render(summarise(loaded))
            for kept in kept_of(loaded):
                stacks_beside(kept), whole_verdict(kept)
        finally:
            files[number].write_bytes(sound[number])

    seeds = [bytes([number]) + content for number, content in enumerate(sound)]
    return Target(read, seeds, (RankcallError,))


_STACK = """Thread 0x00007f0000000700 (most recent call first):
  File "/job/data.py", line 8 in fetch
"""


def _archive(folder: Path) -> Target:
    run, archives = _hang(folder), []
    for name in ("a.tar.zst", "a.tar.gz", "a.tar"):
        files = [(str(path.relative_to(run)), path) for path in run.rglob("*") if path.is_file()]
        pack_files(files, folder / name, "job")
        archives.append((folder / name).read_bytes())

    def read(data: bytes) -> None:
        (folder / "x.tar.zst").write_bytes(data)
        diagnosis_text(diagnose(load(folder / "x.tar.zst"), 60.0))

    return Target(read, archives, (RankcallError,))


TARGETS = {
    "ring": _ring,
    "verdict": _verdict,
    "node": _node,
    "store": _store,
    "dump": _dump,
    "log": _log,
    "archive": _archive,
    "beside": _beside,
}


@pytest.mark.parametrize("name", TARGETS)
def test_any_bytes(name: str, tmp_path: Path) -> None:
    """A reader of damaged bytes raises nothing but its own error, and stays small and quick."""
    target = TARGETS[name](tmp_path)
    for seed in target.seeds:
        target.read(seed)
    assert fuzz(target.read, target.seeds, target.allowed, times=_TIMES) == _TIMES


def test_inputs_that_reach_new_lines_are_kept() -> None:
    """So a fuzzer gets through comparisons one after the other, not only all at once."""
    deepest = 0

    def read(data: bytes) -> None:
        nonlocal deepest
        if data[0:1] in near:
            deepest = max(deepest, 1)
            if data[1:2] in near:
                deepest = max(deepest, 2)
                if data[2:3] in near:
                    deepest = max(deepest, 3)
                    if data[3:4] in near:
                        deepest = 4

    near = [bytes([byte]) for byte in range(128, 136)]
    fuzz(read, [bytes(8)], (), times=4000)
    assert deepest < 4
    fuzz(read, [bytes(8)], (), times=4000, reached=Reached(__file__))
    assert deepest == 4


def test_a_signalling_nan(tmp_path: Path) -> None:
    """A device time that is a signalling NaN made numpy warn on stderr."""
    nan = {4: 0x7F80_0001, 8: 0x7FF0_0000_0000_0001}[RECORD["device_ms"].itemsize]
    data = apply([_record_field(slot, "device_ms", nan) for slot in range(64)])
    _ring(tmp_path).read(data)


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("name", TARGETS)
def test_any_bytes_for_long(name: str, tmp_path: Path) -> None:
    """The same for ten minutes, or for RANKCALL_FUZZ_SECONDS, from another seed each time.

    It goes on from the inputs that earlier runs kept. With RANKCALL_KEEP_CORPORA=1 it adds those
    that reached new lines, and leaves out those that have become superfluous.
    """
    target, reached = TARGETS[name](tmp_path), Reached()
    seconds = float(os.environ.get("RANKCALL_FUZZ_SECONDS", "600"))
    seed, place = time.time_ns(), CORPORA / f"{name}.zip"
    corpus, began = read_corpus(place), time.process_time()
    about = {"seconds": seconds, "seed": seed, "reached": reached, "corpus": corpus}
    try:
        count = fuzz(target.read, target.seeds, target.allowed, **about)
    except AssertionError as error:
        (tmp_path / "failing-input").write_bytes(error.args[1])
        raise
    if os.environ.get("RANKCALL_KEEP_CORPORA"):
        corpus = minimised(target.read, target.seeds, target.allowed, corpus)
        write_corpus(place, corpus)
    lines = f"{len(reached.lines):,} lines, {len(corpus)} inputs in the corpus"
    took = f"{time.process_time() - began:.0f} s of CPU time"
    print(f"{name}: {count:,} inputs of seed {seed} reached {lines}, {took}")
    assert count
