"""The ring file: records that PythonRing writes are read back, and damaged ones are counted."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import pytest
from hostile import entry, group
from hypothesis import given
from hypothesis import strategies as st
from ring_fuzz import COMPLETED, SHAPE, Damage, apply, body, sound_bytes, write_sound

from rankcall.budget import Budget
from rankcall.errors import CorruptRunError
from rankcall.ranks import MAX_RANKS, compress_ranks, expand_ranks
from rankcall.record import COMMIT_CLOSING, COMMIT_WRITING, FLAG_ANY_SOURCE, OPS, RECORD
from rankcall.ring.layout import HEADER, Geometry, Header, make_header, offset_of, parse_header
from rankcall.ring.reader import read_head, read_ring
from rankcall.ring.tables import ENTRY_GROUP, CallSite, Group, parse_tables
from rankcall.ring.writer import Identity, PythonRing, create, put


@dataclass
class Written:
    """A ring being written."""

    path: Path
    ring: PythonRing

    def issue(self, seq: int, **fields: float) -> int:
        """Write one record."""
        return self.ring.issue(body(seq=seq, enqueued_ns=seq, op=1, **fields))

    def set_word(self, slot: int, word: int) -> None:
        """Set a record's commit word."""
        struct.pack_into("<Q", self.ring.map, SHAPE.records_offset + slot * RECORD.itemsize, word)


@pytest.fixture
def written(tmp_path: Path) -> Written:
    """Return an empty ring with 64 slots and room for 8 records in the in-flight table."""
    path = tmp_path / "x.ring"
    identity = Identity(rank=3, world_size=8, local_rank=1, node=2, attempt=4, host="node-ä")
    return Written(path, PythonRing(create(path, identity, SHAPE), SHAPE))


def seqs(path: Path) -> list[int]:
    """Return the sequence numbers that are read."""
    return [int(seq) for seq in read_ring(path).records["seq"]]


def test_what_was_written_is_read(written: Written) -> None:
    """The reader returns the header, side tables and records that were written."""
    group = Group("0", 1, "gloo", "default_pg", (0, 2, 4, 6))
    site = CallSite("a b.py", 7, "f", "all_reduce")
    ids = written.ring.group(group), written.ring.site(site), written.ring.string("c10d::x")
    index = written.issue(1, group=ids[0], call_site=ids[1], variant=ids[2], message_bytes=99)
    assert written.ring.finish(index, completed_ns=50, status=COMPLETED)
    ring = read_ring(written.path)
    head = ring.header
    assert (head.rank, head.world_size, head.local_rank, head.node, head.attempt) == (3, 8, 1, 2, 4)
    assert (head.host, head.capture, head.head, head.closed_ns) == ("node-ä", "python", 1, 0)
    assert ring.tables.groups == {1: group}
    assert ring.tables.sites == {2: site}
    assert ring.tables.strings == {3: "c10d::x"}
    (record,) = ring.records
    assert (record["seq"], record["message_bytes"], record["completed_ns"]) == (1, 99, 50)
    assert (ring.dropped, ring.problem) == (0, None)


def test_files_are_private(written: Written) -> None:
    """Other users cannot read a ring: its mode is 0600."""
    assert written.path.stat().st_mode & 0o777 == 0o600


def test_a_lapped_ring_keeps_the_newest(written: Written) -> None:
    """Of 100 finished records in 64 slots, the first 36 are dropped."""
    for seq in range(1, 101):
        written.ring.finish(written.issue(seq), completed_ns=seq + 1, status=COMPLETED)
    assert seqs(written.path) == list(range(37, 101))
    assert read_ring(written.path).dropped == 36


def test_what_is_in_flight_outlives_a_lap(written: Written) -> None:
    """An unfinished record moves to the in-flight table, comes first, and can still be finished."""
    old = written.issue(1)
    for seq in range(2, 101):
        written.ring.finish(written.issue(seq), completed_ns=seq + 1, status=COMPLETED)
    ring = read_ring(written.path)
    assert seqs(written.path) == [1, *range(37, 101)]
    assert (ring.records["completed_ns"][0], ring.dropped) == (0, 35)
    assert written.ring.finish(old, completed_ns=777, status=COMPLETED)
    assert read_ring(written.path).records["completed_ns"][0] == 777
    assert not written.ring.finish(old, completed_ns=778, status=COMPLETED)


def test_more_in_flight_than_there_is_room_for(written: Written) -> None:
    """An unfinished record that does not fit into the in-flight table is lost and counted."""
    for seq in range(1, 81):
        written.issue(seq)
    head = read_head(written.path).header
    assert head.inflight_lost == 80 - 64 - SHAPE.inflight_capacity
    assert read_ring(written.path).dropped == head.inflight_lost


def test_half_written_records_are_counted_not_read(written: Written) -> None:
    """A record is dropped if its writer was killed while it wrote the body."""
    for seq in (1, 2, 3):
        written.issue(seq)
    written.set_word(1, (2 << 2) | COMMIT_WRITING)
    assert seqs(written.path) == [1, 3]
    assert read_ring(written.path).dropped == 1


def test_half_finished_records_read_as_unfinished(written: Written) -> None:
    """While completion fields are being written, the reader ignores all of them."""
    written.issue(9, flags=FLAG_ANY_SOURCE, status=COMPLETED, completed_ns=5, peer=3)
    written.set_word(0, (1 << 2) | COMMIT_CLOSING)
    (record,) = read_ring(written.path).records
    assert (record["completed_ns"], record["seq"], record["peer"]) == (0, 0, -1)
    assert np.isnan(record["device_ms"])


def test_a_record_in_another_ones_slot_is_not_read(written: Written) -> None:
    """A record whose commit word belongs to another slot is dropped."""
    written.issue(1)
    written.set_word(0, (2 << 2) | 3)
    assert seqs(written.path) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ([Damage(0, b"X")], "not a rankcall ring"),
        ([Damage(0, None)], "not a rankcall ring"),
        ([Damage(4000, None)], "not a rankcall ring"),
        ([Damage(offset_of("schema"), b"\x09")], "ring schema 9"),
        ([Damage(offset_of("record_bytes"), b"\xc8")], "impossible sizes"),
        ([Damage(offset_of("capacity"), b"\x3f")], "impossible sizes"),
        ([Damage(offset_of("file_bytes"), b"\xff" * 8)], "impossible sizes"),
        ([Damage(offset_of("rank"), b"\x00\x00\x00\x80")], "impossible rank"),
        ([Damage(offset_of("world_size"), b"\xff\xff\xff\x7f")], "impossible rank"),
    ],
)
def test_foreign_files(tmp_path: Path, changes: list[Damage], words: str) -> None:
    """CorruptRunError names a file that is not a ring, has another schema or impossible sizes."""
    path = tmp_path / "foreign.ring"
    path.write_bytes(apply(changes))
    with pytest.raises(CorruptRunError, match=words) as caught:
        read_ring(path)
    assert str(path) in str(caught.value)


def test_an_absent_file(tmp_path: Path) -> None:
    """A file that was removed raises CorruptRunError with the system's reason."""
    with pytest.raises(CorruptRunError, match="No such file"):
        read_ring(tmp_path / "gone.ring")
    with pytest.raises(CorruptRunError, match="cannot be read"):
        read_head(tmp_path)


@pytest.mark.parametrize("keep", [5, 63])
def test_a_truncated_file_yields_what_is_left(tmp_path: Path, keep: int) -> None:
    """If a file was cut off, the complete records before the cut are read."""
    path = tmp_path / "x.ring"
    path.write_bytes(sound_bytes()[: SHAPE.records_offset + keep * RECORD.itemsize + 100])
    ring = read_ring(path)
    assert "truncated" in (ring.problem or "")
    # Slots 0-15 hold the second lap (65-80); the record of seq 4 is parked.
    second_lap = [seq for seq in range(65, 81) if seq - 65 < keep]
    assert seqs(path) == [4, *range(17, keep + 1), *second_lap]


def test_damaged_side_tables_lose_names_only(tmp_path: Path) -> None:
    """If the checksum of an entry is wrong, records are read without the names after it."""
    path = tmp_path / "x.ring"
    path.write_bytes(apply([Damage(SHAPE.tables_offset + 20, b"???")]))
    ring = read_ring(path)
    assert "damaged side tables" in (ring.problem or "")
    assert len(ring.records) == 65
    assert ring.tables.groups == {}


def test_a_header_gives_back_what_was_written() -> None:
    """Each field has its own place: none takes another one's value, whatever its type."""
    names = [field.name for field in fields(Header) if field.name not in ("geometry", "capture")]
    written: dict[str, int | str] = {}
    for number, name in enumerate(names, 1):
        is_text = HEADER[name].kind == "S"
        written[name] = f"{name} é" if is_text else -number if HEADER[name].kind == "i" else number
    written["rank"], written["world_size"] = 7, 9
    written["file_bytes"] = Geometry().file_bytes
    values = {n: v.encode() if isinstance(v, str) else v for n, v in written.items()}
    header = parse_header(make_header(Geometry(), {**values, "capture": 1}), "")
    assert {name: getattr(header, name) for name in names} == written
    assert (header.geometry, header.capture) == (Geometry(), "native")


def test_a_header_that_claims_much_costs_little(tmp_path: Path) -> None:
    """The memory for reading is bounded by the size of the file, not by the header."""
    path = tmp_path / "x.ring"
    row = np.frombuffer(sound_bytes()[:4096], HEADER).copy()
    huge = Geometry(1 << 24, 1 << 24, 1 << 28)
    row["capacity"], row["inflight_capacity"] = huge.capacity, huge.inflight_capacity
    row["tables_bytes"], row["tables_used"] = huge.tables_bytes, huge.tables_bytes
    row["file_bytes"], row["head"] = huge.file_bytes, 1 << 63
    path.write_bytes(row.tobytes() + sound_bytes()[4096:])
    import tracemalloc

    tracemalloc.start()
    ring = read_ring(path)
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()
    assert "truncated" in (ring.problem or "")


def test_groups_that_expand_to_more_than_is_believed() -> None:
    """A few bytes of compressed ranks cannot expand to gigabytes; equal groups are one object."""
    ranks = f"[[0, {MAX_RANKS}, 1]]"

    def raw(names: Iterable[str]) -> bytes:
        payloads = enumerate((group(name, ranks) for name in names), 1)
        return b"".join(entry(number, ENTRY_GROUP, payload) for number, payload in payloads)

    alike = parse_tables(raw("0" * 20), Budget())
    assert len({id(known) for known in alike.groups.values()}) == 1
    with pytest.raises(CorruptRunError, match="more memory"):
        parse_tables(raw(map(str, range(20))), Budget())


@given(st.lists(st.integers(0, 5000), unique=True))
def test_ranks_survive_compression(ranks: list[int]) -> None:
    """expand_ranks undoes compress_ranks, in order."""
    assert list(expand_ranks(compress_ranks(ranks))) == ranks


@pytest.mark.parametrize("runs", [[[0, -1, 1]], [[-1, 1, 1]], [[0, 1 << 30, 0]], [[0.5, 1, 1]]])
def test_impossible_ranks(runs: list) -> None:
    """Impossible ranks raise ValueError."""
    with pytest.raises(ValueError, match="rank"):
        expand_ranks(runs)


def test_a_full_side_table_says_so(written: Written) -> None:
    """An entry without room gets id 0 and is counted."""
    ids = [written.ring.string("x" * 200) for _ in range(12)]
    assert ids[-1] == 0
    head = read_head(written.path)
    assert head.header.tables_lost == ids.count(0)
    assert len(head.tables.strings) == 12 - ids.count(0)


def test_started_and_closed(written: Written) -> None:
    """start() notes when an enqueued op began; a closed ring is read once, not twice."""
    index = written.issue(1)
    written.ring.start(index, 42)
    put(written.ring.map, "closed_ns", 99)
    ring = read_ring(written.path)
    assert (ring.records["started_ns"][0], ring.header.closed_ns) == (42, 99)
    assert OPS[ring.records["op"][0]] == "all_reduce"


def test_a_ring_in_memory() -> None:
    """Without a path the ring is anonymous memory of the same layout."""
    ring = create(None, Identity(), SHAPE)
    assert len(ring) == SHAPE.file_bytes
    assert ring[:8] == b"RANKCALL"
    ring.close()


def test_a_ring_is_never_overwritten(tmp_path: Path) -> None:
    """A ring file that exists already is not overwritten."""
    write_sound(tmp_path / "x.ring")
    with pytest.raises(FileExistsError):
        write_sound(tmp_path / "x.ring")


@pytest.mark.parametrize("written", [10, 64, 100, 128, 129, 200, 255, 256, 300])
@pytest.mark.parametrize("capacity", [128, 512])
def test_the_newest_only(tmp_path: Path, written: int, capacity: int) -> None:
    """With ``newest``, the last records and old unfinished ones equal those of a full read."""
    path = tmp_path / "x.ring"
    geometry = Geometry(capacity, 8, 4096)
    mapped = create(path, Identity(rank=0, world_size=1), geometry)
    ring = PythonRing(mapped, geometry)
    for number in range(written):
        index = ring.issue(body(seq=number + 1))
        if number != 3:
            ring.finish(index, COMPLETED, 1)
    whole, quick = read_ring(path), read_ring(path, newest=32)
    last = whole.records[-32:]
    assert np.array_equal(quick.records[-len(last) :], last)
    assert len(quick.records) <= 32 + 64 + 1
    if written >= capacity + 4:
        assert quick.records["commit"][0] >> 2 == 4  # the parked one
    assert quick.dropped == whole.dropped
    mapped.close()
