"""Small files cannot make a reader take much memory or time, however many they are."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hostile import group, peak_of_reading, write_ring
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ring_fuzz import body

from rankcall.budget import MEMBER_BYTES, RANK_BYTES, Budget
from rankcall.errors import CorruptRunError
from rankcall.ranks import MAX_RANKS
from rankcall.ring.layout import HEADER_BYTES, MAX_CAPACITY, MAX_TABLES_BYTES, Geometry
from rankcall.ring.reader import read_head, read_ring
from rankcall.ring.tables import ENTRY_SIZES, ENTRY_STRING, Group
from rankcall.ring.tail import tail_of
from rankcall.ring.writer import Identity, PythonRing, create
from rankcall.run.joins import read_joins
from rankcall.run.load import load

_RINGS = 10
_MOST_MIB = 420  # the 256 MiB of the budget, and what a process takes that reads an empty run
_OF_HOLES_MIB = 200  # holes cost nothing

Write = Callable[[Path, int], None]


def _ranks(count: int = MAX_RANKS, first: int = 0) -> str:
    return f"[[{first}, {count}, 1]]"


def _large_groups(path: Path, rank: int) -> None:
    """Write eight groups of a million ranks, in a world of ten."""
    names = (f"{rank}.{number}" for number in range(8))
    write_ring(path, rank, _RINGS, [group(name, _ranks()) for name in names])


def _large_groups_of_a_large_world(path: Path, rank: int) -> None:
    names = (f"{rank}.{number}" for number in range(8))
    write_ring(path, rank, 200_000, [group(name, _ranks(200_000)) for name in names])


def _many_groups(path: Path, rank: int) -> None:
    payloads = [group(f"{rank}.{number}", _ranks(20_000)) for number in range(200)]
    write_ring(path, rank, 20_000, payloads)


def _ranks_of_many_digits(path: Path, rank: int) -> None:
    runs = f"[[{'9' * 4200}, {1 << 20}, 1]]"
    write_ring(path, rank, _RINGS, [group(f"{rank}", runs)])


def _strides_of_many_digits(path: Path, rank: int) -> None:
    runs = f"[[0, {1 << 20}, {'9' * 4200}]]"
    write_ring(path, rank, _RINGS, [group(f"{rank}", runs)])


def _one_rank_again_and_again(path: Path, rank: int) -> None:
    write_ring(path, rank, _RINGS, [group(f"{rank}", f"[[0, {1 << 20}, 0]]")])


def _large_world(path: Path, rank: int) -> None:
    write_ring(path, rank, MAX_RANKS)


def _last_rank_of_a_large_world(path: Path, rank: int) -> None:
    write_ring(path, MAX_RANKS - 1 - rank, -1)


def _hole_of_records(path: Path, rank: int) -> None:
    write_ring(path, rank, _RINGS, shape=Geometry(MAX_CAPACITY, 0, 4096), head=1 << 30)


def _hole_of_ops_in_flight(path: Path, rank: int) -> None:
    write_ring(path, rank, _RINGS, shape=Geometry(64, MAX_CAPACITY, 4096), head=1 << 30)


def _hole_of_tables(path: Path, rank: int) -> None:
    shape = Geometry(64, 0, MAX_TABLES_BYTES)
    write_ring(path, rank, _RINGS, shape=shape, tables_used=MAX_TABLES_BYTES)


def _hole_behind_tables(path: Path, rank: int) -> None:
    shape = Geometry(64, 0, MAX_TABLES_BYTES)
    payload = [group("0", _ranks(_RINGS))]
    write_ring(path, rank, _RINGS, payload, shape=shape, tables_used=MAX_TABLES_BYTES)


def _empty_texts(path: Path, rank: int) -> None:
    write_ring(path, rank, _RINGS, [b""] * 20_000, kind=ENTRY_STRING)


def _nested_lists(path: Path, rank: int) -> None:
    write_ring(path, rank, _RINGS, [group("0", "[" + "[]," * 30_000 + "[]]")])


def _sizes_of_many_digits(path: Path, rank: int) -> None:
    numbers = ",".join(["9" * 4200] * 20)
    payload = f'{{"hash": {"9" * 4200}, "numels": [{numbers}]}}'.encode()
    write_ring(path, rank, _RINGS, [payload], kind=ENTRY_SIZES)


@pytest.mark.parametrize(
    "write",
    [
        _large_groups,
        _large_groups_of_a_large_world,
        _many_groups,
        _ranks_of_many_digits,
        _strides_of_many_digits,
        _one_rank_again_and_again,
        _large_world,
        _last_rank_of_a_large_world,
        _hole_of_records,
        _hole_of_ops_in_flight,
        _hole_of_tables,
        _hole_behind_tables,
        _empty_texts,
        _nested_lists,
        _sizes_of_many_digits,
    ],
    ids=lambda write: write.__name__.strip("_"),
)
def test_small_rings_take_little_memory(tmp_path: Path, write: Write) -> None:
    """A process that reads and judges ten small rings stays within the budget of a run."""
    for rank in range(_RINGS):
        write(tmp_path / "rings" / f"{rank}.ring", rank)
    used = sum(path.stat().st_blocks * 512 for path in tmp_path.rglob("*.ring"))
    assert used < 6 << 20
    most = _OF_HOLES_MIB if "hole" in write.__name__ else _MOST_MIB
    assert peak_of_reading(tmp_path)[1] < most


def test_a_hostile_ring_is_the_only_one_left_out(tmp_path: Path) -> None:
    """Rings that ask for too much are named and left out; those between them are read."""
    for rank in range(4):
        write_ring(tmp_path / f"{rank}.ring", rank, 4, [group("0", "[[0, 4, 1]]")])
    for rank in range(4, 8):
        _large_groups(tmp_path / f"{rank}.ring", rank)
    run = load(tmp_path)
    assert [head.header.rank for head in run.heads] == [0, 1, 2, 3]
    texts = [problem.text for problem in run.problems]
    assert all(any(f"{rank}.ring: " in text for text in texts) for rank in range(4, 8))


def test_one_large_world_is_read(tmp_path: Path) -> None:
    """A few rings of a job of 100,000 ranks are evidence like any other."""
    groups = [group("0", _ranks(100_000)), group("1", f"[[0, {100_000 // 8}, 8]]")]
    for rank in range(3):
        write_ring(tmp_path / f"{rank}.ring", rank, 100_000, groups)
    run = load(tmp_path)
    assert len(run.heads) == 3
    assert {len(known.ranks) for known in run.run_groups} == {100_000, 12_500}


# --- budgets ---


def _reading(budget: Budget, path: Path, size: int, spend: Callable[[], None]) -> None:
    path.write_bytes(b"x" * size)
    with budget.reading(path, path.stat()):
        spend()


def test_files_bring_their_own_memory(tmp_path: Path) -> None:
    """What is on disk may be read however much has been spent, and no file lends to another."""
    budget = Budget(lambda: 0.0)
    budget.spend(256 << 20)
    with pytest.raises(CorruptRunError, match="more memory"):
        budget.spend(1)
    _reading(budget, tmp_path / "a", 1 << 20, lambda: budget.spend(8 << 20))
    with pytest.raises(CorruptRunError, match=r"b: .*more memory"):
        _reading(budget, tmp_path / "b", 4096, lambda: budget.spend(64 << 20))


def test_a_refused_file_has_spent_nothing(tmp_path: Path) -> None:
    """A file that is left out takes nothing from the others, whatever it has spent before."""
    budget = Budget(lambda: 0.0)

    def waste() -> None:
        budget.spend_on_world(50_000)
        budget.spend_once("a group", 100 << 20)
        budget.spend(1 << 40)

    for number in range(20):
        with pytest.raises(CorruptRunError):
            _reading(budget, tmp_path / f"{number}", 1, waste)
    budget.spend_once("a group", 100 << 20)
    budget.spend_on_world(150_000 * 1024 // RANK_BYTES)


def test_what_files_share_is_paid_once() -> None:
    """16,384 rings of one job list the same group of all ranks; it is one object in memory."""
    budget = Budget(lambda: 0.0)
    for _ in range(16_384):
        budget.spend_once(b"the world", 16_384 * MEMBER_BYTES)
        budget.spend_on_world(16_384)


def test_time_is_bounded_too(tmp_path: Path) -> None:
    """A run that takes longer than any of its size is given up; larger ones have more time."""
    now = [0.0]
    budget = Budget(lambda: now[0])
    now[0] = 59.0
    budget.check_time()
    now[0] = 61.0
    with pytest.raises(CorruptRunError, match="longer"):
        budget.spend(1)
    _reading(budget, tmp_path / "a", 8 << 20, lambda: budget.spend(1))


# --- the files beside the rings ---

_HOLE = 3 << 30


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("run.json", b""),
        ("hangs/0001/verdict.json", b"["),
        pytest.param("joins.jsonl", b"", marks=pytest.mark.slow),
        pytest.param("hangs/0001/verdict.json", b"", marks=pytest.mark.slow),
        pytest.param("run.json", b"[", marks=pytest.mark.slow),
        pytest.param("joins.jsonl", b"[", marks=pytest.mark.slow),
    ],
)
def test_a_file_beside_the_rings(tmp_path: Path, name: str, content: bytes) -> None:
    """One that is a hole of 3 GiB, or 40 MiB of lists, which JSON makes 1 GiB of, is not read."""
    write_ring(tmp_path / "rings/0.ring", 0, 1, [group("0", _ranks(1))])
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(content + (b"[]," * ((40 << 20) // 3) if content else b""))
        file.truncate(max(file.tell(), 0 if content else _HOLE))
    rings, peak = peak_of_reading(tmp_path)
    assert rings == 1
    assert peak < _MOST_MIB


def test_many_damaged_lines_of_joins(tmp_path: Path) -> None:
    """Each of the first ones is named."""
    (tmp_path / "joins.jsonl").write_bytes(b"\n" * 100_000)
    joins, problems = read_joins(tmp_path)
    assert (joins, len(problems)) == ([], 64)


# --- holes ---


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    issued=st.integers(0, 400),
    open_at=st.sets(st.integers(0, 399), max_size=5),
    torn=st.booleans(),
)
def test_holes_read_as_zeros(tmp_path: Path, issued: int, open_at: set[int], torn: bool) -> None:
    """A ring with holes gives the records of the same ring without holes, also if records are torn.

    The pages without a record become holes in one copy, and zeros on disk in the other.
    """
    path, geometry = tmp_path / "x.ring", Geometry(128, 32, 8192)
    path.unlink(missing_ok=True)
    mapped = create(path, Identity(rank=0, world_size=1), geometry)
    ring = PythonRing(mapped, geometry)
    ring.group(Group("0", 0, "gloo", "default_pg", (0,)))
    for number in range(issued):
        index = ring.issue(body(seq=number + 1))
        if number not in open_at:
            ring.finish(index, 1, 3)
    mapped.close()
    raw = bytearray(path.read_bytes())
    if torn:  # a page that a file system lost, in the middle of records
        at = geometry.records_offset + 64 * 192
        raw[at : at + 8192] = bytes(8192)
    dense, sparse = tmp_path / "dense.ring", tmp_path / "sparse.ring"
    dense.write_bytes(raw)
    with sparse.open("wb") as file:
        for at in range(0, len(raw), 4096):
            page = raw[at : at + 4096]
            file.seek(at)
            if any(page) or at < HEADER_BYTES:
                file.write(page)
        file.truncate(len(raw))
    assert sparse.stat().st_blocks < dense.stat().st_blocks or issued >= 64
    for newest in (None, 16):
        one, other = read_ring(dense, newest), read_ring(sparse, newest)
        assert np.array_equal(one.records, other.records)
        assert (one.dropped, one.tables) == (other.dropped, other.tables)
    assert tail_of(dense, 16) == tail_of(sparse, 16)
    assert read_head(dense).tables == read_head(sparse).tables


def test_a_file_system_without_holes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the file system cannot tell where data is, all of the ring is read."""
    write_ring(tmp_path / "x.ring", 0, 4, [group("0", "[[0, 4, 1]]")], shape=Geometry(64, 8, 4096))

    def refuse(*_: object) -> int:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "lseek", refuse)
    assert len(read_ring(tmp_path / "x.ring").tables.groups) == 1


# --- dumps ---


def _entry(group_name: str = "0", seq: int = 1, op: str = "gloo:all_reduce") -> dict[str, object]:
    return {
        "process_group": (group_name, "default_pg"),
        "collective_seq_id": seq,
        "profiling_name": op,
        "time_created_ns": 1_700_000_000_000_000_000,
        "input_sizes": [[4]],
        "input_dtypes": ["Float"],
        "state": "scheduled",
        "is_p2p": False,
    }


def _groups_that_share_a_list(rank: int) -> dict[str, object]:
    members = [*range(50_000)]
    return {"pg_config": {str(n): {"ranks": members} for n in range(5_000)}, "entries": [_entry()]}


def _one_entry_again_and_again(rank: int) -> dict[str, object]:
    return {"entries": [_entry()] * 400_000}


def _groups_of_all_ranks(rank: int) -> dict[str, object]:
    return {"entries": [_entry(f"{rank}.{number}") for number in range(3_000)]}


def _ranks_of_digits(rank: int) -> dict[str, object]:
    text = str([*range(60_000)])
    groups = {f"{number}": {"ranks": text[:-1] + f", {70_000 + number}]"} for number in range(2)}
    return {"pg_config": groups, "entries": [_entry()]}


@pytest.mark.parametrize(
    "content",
    [
        _groups_that_share_a_list,
        _one_entry_again_and_again,
        # Until the budget of a minute is spent.
        pytest.param(_groups_of_all_ranks, marks=pytest.mark.slow),
        _ranks_of_digits,
    ],
    ids=lambda content: content.__name__.strip("_"),
)
def test_small_dumps_take_little_memory(
    tmp_path: Path, content: Callable[[int], dict[str, object]]
) -> None:
    """A process that reads the dumps of two ranks, one of them the last of a million, stays small.

    ``pickle`` writes an object once, and then refers to it by two bytes.
    """
    for rank in (0, 900_000):
        dump = {"version": "2.5", **content(rank)}
        (tmp_path / f"dump_rank_{rank}").write_bytes(pickle.dumps(dump))
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 3 << 20
    assert peak_of_reading(tmp_path)[1] < _MOST_MIB
