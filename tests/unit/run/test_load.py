"""The run directory: finding runs, settling rings, loading what is there and naming what is not."""

from __future__ import annotations

import json
import os
from datetime import datetime, timezone
from pathlib import Path

import polars as pl
import pytest
from ring_fuzz import SHAPE, sound_bytes, write_sound
from worlds import MS, Call, group_of, together, write_world

from rankcall.errors import CorruptRunError, RunNotFoundError
from rankcall.problems import texts
from rankcall.ranks import format_ranks
from rankcall.ring.layout import offset_of
from rankcall.ring.reader import read_ring
from rankcall.ring.tables import Group
from rankcall.run.load import Run, label_groups, load
from rankcall.run.paths import (
    create_run,
    default_run_dir,
    find_run,
    live_dir,
    make_live_dir,
    ring_name,
    ring_paths,
)
from rankcall.run.settle import settle
from rankcall.testing.synthetic import synthetic_run


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty run whose live rings are kept below tmp_path too."""
    monkeypatch.setenv("RANKCALL_SHM", str(tmp_path / "shm"))
    return create_run(tmp_path / "run", {"script": "x.py"})


def live_ring(run: Path, name: str = "rank-00001.attempt-0.a.1.ring", *, alive: bool) -> Path:
    """Write a ring into the live directory; that of a dead process has another start time."""
    folder = make_live_dir(run)
    write_sound(folder / name)
    if not alive:
        with (folder / name).open("r+b") as file:
            file.seek(offset_of("process_start"))
            file.write((1).to_bytes(8, "little"))
    return folder / name


def test_create_run(tmp_path: Path) -> None:
    """run.json is written once, the directory is private, latest points at the newest."""
    first = create_run(tmp_path / "rankcall-runs" / "one", {"script": "a.py"})
    create_run(first, {"script": "b.py"})
    assert json.loads((first / "run.json").read_text())["script"] == "a.py"
    assert first.stat().st_mode & 0o777 == 0o700
    second = create_run(tmp_path / "rankcall-runs" / "two", {})
    assert (tmp_path / "rankcall-runs" / "latest").resolve() == second.resolve()


def test_default_run_dir() -> None:
    """The name says when and what; odd characters are replaced."""
    moment = datetime(2026, 11, 21, 3, 41, 30, tzinfo=timezone.utc)
    assert str(default_run_dir("dir/my train.py", moment)) == (
        "rankcall-runs/20261121T034130-my_train"
    )


def test_find_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a path the latest run is loaded; a missing one is RunNotFoundError, with advice."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunNotFoundError, match=r"rankcall run script\.py"):
        find_run()
    with pytest.raises(RunNotFoundError, match="no such run: nope"):
        find_run("nope")
    Path("loop").symlink_to("loop")
    with pytest.raises(RunNotFoundError, match="no such run: loop"):
        find_run("loop")
    created = create_run(Path("rankcall-runs/one"), {})
    assert find_run() == created.resolve()


def test_find_run_that_was_never_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the run directory could not be made, its path still leads to the live rings."""
    monkeypatch.setenv("RANKCALL_SHM", str(tmp_path / "shm"))
    folder = make_live_dir(tmp_path / "run")
    assert find_run(tmp_path / "run") == folder
    folder.chmod(0o777)  # another user could have written there
    with pytest.raises(RunNotFoundError, match="no such run"):
        find_run(tmp_path / "run")


def test_settle_moves_what_ended(run_dir: Path) -> None:
    """A dead process's ring moves and reads as before; a living one stays."""
    dead = live_ring(run_dir, alive=False)
    living = live_ring(run_dir, "rank-00002.attempt-0.a.2.ring", alive=True)
    before = read_ring(dead)
    (moved,) = settle(run_dir)
    assert moved == run_dir / "rings" / dead.name
    assert not dead.exists()
    assert living.exists()
    after = read_ring(moved)
    assert (after.records == before.records).all()
    assert (after.problem, after.dropped) == (None, before.dropped)
    assert moved.stat().st_mode & 0o777 == 0o600
    living.unlink()


def test_settle_cuts_what_was_never_written(run_dir: Path) -> None:
    """The moved file holds the records that were written and little more."""
    folder = make_live_dir(run_dir)
    write_sound(folder / "x.ring", records=2)
    with (folder / "x.ring").open("r+b") as file:
        file.seek(offset_of("closed_ns"))
        file.write((1).to_bytes(8, "little"))
        # A ring of many more slots than were used.
        file.seek(offset_of("capacity"))
        file.write((1 << 12).to_bytes(4, "little"))
        file.seek(offset_of("file_bytes"))
        file.write((SHAPE.records_offset + (192 << 12)).to_bytes(8, "little"))
        file.truncate(SHAPE.records_offset + (192 << 12))
    (moved,) = settle(run_dir)
    assert moved.stat().st_size < SHAPE.records_offset + 192 * 80
    assert [int(seq) for seq in read_ring(moved).records["seq"]] == [1, 2]
    assert read_ring(moved).problem is None
    assert not folder.exists()


def test_settle_leaves_what_it_cannot_read(run_dir: Path) -> None:
    """Garbage among the live rings stays, and keeps no other from moving."""
    live_ring(run_dir, alive=False)
    junk = live_dir(run_dir) / "junk.ring"
    junk.write_bytes(b"junk")
    assert len(settle(run_dir)) == 1
    assert junk.exists()


def test_settle_without_anything(run_dir: Path) -> None:
    """A run with nothing on this host has nothing to settle."""
    assert settle(run_dir) == []


def test_load_reads_live_and_moved(run_dir: Path) -> None:
    """Rings are found in the run, beside it and in shared memory; each counts once."""
    living = live_ring(run_dir, alive=True)
    (run_dir / "rings" / "other.ring").write_bytes(sound_bytes())
    (run_dir / "rings" / living.name).write_bytes(sound_bytes())
    assert len(ring_paths(run_dir)) == 2
    assert load(run_dir).records.height == 2 * 65
    living.unlink()


def test_a_ring_that_moves_between_load_and_read(run_dir: Path) -> None:
    """If a job ends during the load, its moved ring is found in its new place."""
    live_ring(run_dir, alive=False)
    run = load(run_dir)
    settle(run_dir)
    assert run.records.height == 65
    assert texts(run.problems) == [
        f"{run_dir}: no ring for ranks 0,2-3 of 4: the results cover the other ranks only"
    ]


def test_a_ring_that_goes_away_is_a_problem(run_dir: Path) -> None:
    """A ring that disappears between load and read is named."""
    ring = run_dir / "rings" / "x.ring"
    ring.write_bytes(sound_bytes())
    run = load(run_dir)
    ring.unlink()
    assert list(run.iter_rings()) == []
    assert any("No such file" in problem for problem in texts(run.problems))


def test_frames(tmp_path: Path) -> None:
    """Records, groups and ranks have names for codes and global ranks for group ranks."""
    pair = Group("pair", 0, "gloo", "pairs", (2, 5))
    calls = [
        Call(5, 1, 3 * MS, None, "broadcast", 8, group=pair, root=0, line=4),
        Call(5, 1, 4 * MS, 5 * MS, "send", 8, group=pair, peer=0, tag=9),
        *together(1, [0] * 6, MS, group_of(6)),
    ]
    run = load(write_world(tmp_path / "run", calls, hosts={5: "node-b"}))
    mine = run.records.filter(pl.col("rank") == 5)
    cast, sent, reduced = mine.to_dicts()
    assert (cast["op"], cast["root"], cast["completed_ns"], cast["status"]) == (
        "broadcast",
        2,
        None,
        "started",
    )
    assert (cast["group"], cast["group_ranks"], cast["call_site"]) == ("pair", "2,5", "train.py:4")
    assert (sent["kind"], sent["peer"], sent["tag"], sent["root"]) == ("p2p", 2, 9, None)
    assert (reduced["op"], reduced["host"], reduced["reduce_op"]) == ("all_reduce", "node-b", None)
    group = run.groups.filter(pl.col("group") == "pair").to_dicts()[0]
    assert (group["ranks"], group["hosts"], group["cross_host"]) == (
        [2, 5],
        ["node-a", "node-b"],
        True,
    )
    assert run.ranks["records"].to_list() == [1, 1, 1, 1, 1, 3]
    assert run.dropped == dict.fromkeys(range(6), 0)


def test_a_part_of_a_run(tmp_path: Path) -> None:
    """``only`` keeps the rings of an attempt, a host or some ranks; the whole run keeps all."""
    calls = [Call(rank, 1, MS, 2 * MS, attempt=n) for rank in range(2) for n in range(2)]
    folder = write_world(tmp_path / "run", calls, hosts={1: "node-b"})
    ring = next((folder / "rings").glob("rank-00001.attempt-1.*"))
    ring.rename(ring.with_name(ring.name.replace(".ring", ".tail.ring")))
    run = load(folder)

    def rings(part: Run) -> list[tuple[int, int]]:
        return [(head.header.attempt, head.header.rank) for head in part.heads]

    assert rings(run.only(1)) == [(1, 0), (1, 1)]
    assert rings(run.only(host="node-b")) == [(0, 1), (1, 1)]
    assert rings(run.only(1, "node-b", tails_of=())) == []
    assert rings(run.only(tails_of=())) == [(0, 0), (0, 1), (1, 0)]
    assert rings(run.only(ranks=[1], tails_of=[1])) == [(0, 1), (1, 1)]
    assert rings(run) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    with pytest.raises(RunNotFoundError, match="has no attempt 7: its attempts are 0-1"):
        run.only(7)
    with pytest.raises(AttributeError):
        run.heads = []  # type: ignore[misc]


def test_nothing_is_read_before_it_is_asked_for(tmp_path: Path) -> None:
    """load() reads headers and tables; a damaged record region does not keep it from that."""
    run = load(write_world(tmp_path / "run", together(1, [0, 1], MS, group_of(2))))
    assert "rings" not in vars(run)
    assert run.world_size == 2
    assert next(iter(run.run_groups.values())).label == "0"
    assert "rings" not in vars(run)


def test_problems_are_listed(tmp_path: Path) -> None:
    """One bad ring, one missing rank and an unreadable run.json leave the rest readable."""
    folder = write_world(tmp_path / "run", [Call(0, 1, 0, MS)], world_size=2)
    (folder / "rings" / "bad.ring").write_bytes(b"RANKCALL" + b"\0" * 5000)
    (folder / "run.json").write_text("{")
    run = load(folder)
    assert len(run.problems) == 3
    assert [
        word in "".join(texts(run.problems)) for word in ("schema 0", "run.json", "rank 1 of 2")
    ] == [
        True,
        True,
        True,
    ]


def test_nothing_readable(tmp_path: Path) -> None:
    """A directory without rings, and one with a bad one only, are CorruptRunError."""
    with pytest.raises(CorruptRunError, match="no ring files"):
        load(tmp_path)
    (tmp_path / "bad.ring").write_bytes(b"nothing")
    with pytest.raises(CorruptRunError, match="not a rankcall ring"):
        load(tmp_path)


def test_progress_is_told(tmp_path: Path) -> None:
    """Each ring counts, the last call says all are done."""
    folder = write_world(tmp_path / "run", together(1, [0, 1], MS, group_of(2)))
    progress: list[tuple[int, int]] = []
    run = load(folder, lambda done, total: progress.append((done, total)))
    list(run.iter_rings(lambda done, total: progress.append((done, total))))
    assert progress == [(1, 2), (2, 2)] * 2


def test_labels_are_unique() -> None:
    """Groups that share a name, an epoch, ranks and more still get labels of their own."""
    groups = [
        Group("0", 0, "gloo", "a", (0, 1)),
        Group("0", 0, "nccl", "a", (0, 1)),
        Group("0", 0, "nccl", "b", (0, 1)),
        Group("0", 2000, "nccl", "b", (0, 1)),
    ]
    labels = [known.label for known in label_groups(groups, {}).values()]
    assert len(set(labels)) == 4
    assert labels[0] == "0"
    assert labels[-1] == "0#3"


def test_names() -> None:
    """Ranks are written as people do; file names say rank, attempt, host and pid."""
    assert format_ranks([3, 1, 2, 8, 10, 11, 0]) == "0-3,8,10-11"
    assert format_ranks([]) == ""
    assert ring_name(3, 1, "node/é", 42) == "rank-00003.attempt-1.node_.42.ring"
    assert ring_name(-1, 0, "a", 1).startswith("rank-unknown")


def test_a_run_of_symlinks(tmp_path: Path) -> None:
    """A ring may be a link; a link to nothing is a problem, not an error."""
    (tmp_path / "rings").mkdir()
    (tmp_path / "sound").write_bytes(sound_bytes())
    os.symlink(tmp_path / "sound", tmp_path / "rings" / "a.ring")
    os.symlink(tmp_path / "gone", tmp_path / "rings" / "b.ring")
    run = load(tmp_path)
    assert run.records.height == 65
    assert any("b.ring" in problem for problem in texts(run.problems))


def test_a_run_is_one_line_in_a_notebook(tmp_path: Path) -> None:
    """It says which ranks are there, of how many, and whether something is wrong."""
    synthetic_run(tmp_path / "run", 8, 40, hosts=2, without_ranks=(3,))
    text = repr(load(tmp_path / "run"))
    assert text.startswith(f"<Run {tmp_path / 'run'}: rank 0-2,4-7 of 8, 2 hosts")
    assert "\n" not in text
    assert len(text) < len(str(tmp_path)) + 100
    assert "rank none of 0" in repr(Run(tmp_path, {}, []))


def test_what_a_notebook_shows(tmp_path: Path) -> None:
    """A run is a small table, whose names cannot be markup; ``repr`` is one line."""
    run = load(synthetic_run(tmp_path / "<b>job", 4, 40, hosts=2).path)
    table = run._repr_html_()
    assert "rank 0-3 of 4, 2 hosts" in table
    assert "&lt;b&gt;job" in table
    assert "<b>" not in table
    assert table.count("<tr>") == 2
    assert repr(run).count("\n") == 0
    assert "rank 0-3 of 4, 2 hosts" in repr(run)
