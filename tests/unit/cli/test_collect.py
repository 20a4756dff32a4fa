"""``rankcall collect``: one file that holds a whole run and is harmless to read."""

from __future__ import annotations

import io
import itertools
import json
import os
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from pathlib import Path

import pytest
import zstandard
from hostile import group, write_ring
from hypothesis import given, settings
from hypothesis import strategies as st
from liveruns import live_run

from rankcall.analysis.verdicts import diagnose
from rankcall.budget import Budget
from rankcall.cli import main
from rankcall.errors import CorruptRunError
from rankcall.ring.layout import Geometry
from rankcall.ring.writer import Identity, create_locked
from rankcall.run.archive import pack
from rankcall.run.load import load
from rankcall.run.paths import create_run, make_live_dir
from rankcall.run.unpack import unpack
from rankcall.testing.model import Planted
from rankcall.testing.synthetic import synthetic_run

DEAD = Planted("dead", (2,), 21)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run of four ranks on two hosts that rank 2's death hung."""
    return synthetic_run(tmp_path / "job", 4, 40, hosts=2, planted=DEAD).path


def said(path: Path) -> list[tuple[str, tuple[int, ...]]]:
    """Return what a diagnosis finds."""
    return [(finding.kind, finding.ranks) for finding in diagnose(load(path)).findings]


@pytest.mark.parametrize("suffix", [".tar.zst", ".tar.gz", ".tgz", ".tar"])
def test_an_archive_reads_as_the_run(run: Path, suffix: str) -> None:
    """The archive gives the same ranks, records and verdict, and reading it leaves no files."""
    target = run.parent / f"all{suffix}"
    assert main(["collect", str(run), "-o", str(target)]) == 0
    assert target.stat().st_mode & 0o777 == 0o600
    archived, whole = load(target), load(run)
    assert archived.records.equals(whole.records)
    assert archived.about == whole.about
    assert said(target) == said(run) == [("dead", (2,))]
    extracted = archived.path
    assert extracted.exists()
    del archived
    assert not extracted.exists()


def test_the_commands_take_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Report and diagnose read an archive, and name it instead of its temporary directory."""
    target = run.parent / "all.tar.zst"
    main(["collect", str(run), "-o", str(target)])
    assert f"4 of 4 ranks in {target}" in capsys.readouterr().err
    assert main(["diagnose", "--json", str(target)]) == 1
    assert f'"run": "{target}"' in capsys.readouterr().out
    assert main(["report", str(target)]) == 0


def test_nodes_without_a_shared_file_system(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each node's archive names the ranks that it lacks; the merged archive lacks none."""
    archives = []
    for node in ("node-0", "node-1"):
        place = run.parent / node / "job"
        (place / "rings").mkdir(parents=True)
        for ring in (run / "rings").glob(f"*.{node}.*"):
            os.link(ring, place / "rings" / ring.name)
        (place / "exits").mkdir()
        for file in (run / "exits").glob(f"{node}.*"):
            os.link(file, place / "exits" / file.name)
        archives.append(place.with_suffix(".tar.gz"))
        assert main(["collect", str(place), "-o", str(archives[-1])]) == 0
    assert "no records of ranks 2-3 here" in capsys.readouterr().err
    both = run.parent / "both.tar.zst"
    assert main(["collect", *map(str, archives), "-o", str(both)]) == 0
    assert "no records" not in capsys.readouterr().err
    assert said(both) == [("dead", (2,))]


def test_states_of_living_processes_are_kept(tmp_path: Path) -> None:
    """The archive says that a process was alive, and a reader on another host believes it."""
    run = live_run(tmp_path, 4, os.getpid())
    target = tmp_path / "live.tar.zst"
    assert main(["collect", str(run), "-o", str(target)]) == 0
    snapshot = diagnose(load(target), state_of=lambda header: "unknown").snapshot
    assert {rank.state for rank in snapshot.ranks} == {"alive"}


def member(
    name: str, data: bytes = b"x", kind: bytes = tarfile.REGTYPE
) -> tuple[tarfile.TarInfo, bytes]:
    """Return a member of a tar file."""
    info = tarfile.TarInfo(name)
    info.type, info.size, info.linkname = kind, len(data), "/etc/passwd"
    return info, data


HOSTILE = [
    "/etc/evil",
    "../evil",
    "job/../../evil",
    "job/rings/../../evil.ring",
    "job/rings/a/b.ring",
    "job/rings/.hidden.ring",
    "job/run.json/x",
    "job/rings/",
    "job/unknown/file",
    "rings/a.ring",
    "job/rings/\x1b.ring",
]


def test_names_are_not_the_archives_to_choose(run: Path) -> None:
    """Only files under a run's own names are extracted: no paths out, no links, no devices."""
    ring = next((run / "rings").iterdir())
    target = run.parent / "evil.tar"
    with tarfile.open(target, "w") as tar:
        for info, data in [
            *map(member, HOSTILE),
            member("job/rings/link.ring", b"", tarfile.SYMTYPE),
            member("job/rings/hard.ring", b"", tarfile.LNKTYPE),
            member("job/rings/pipe.ring", b"", tarfile.FIFOTYPE),
            member("job/rings/good.ring", ring.read_bytes()),
        ]:
            tar.addfile(info, io.BytesIO(data))
    before = sorted(run.parent.rglob("*"))
    folder = unpack(target)
    assert [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()] == [
        "rings/good.ring"
    ]
    assert sorted(run.parent.rglob("*")) == before


@pytest.mark.parametrize("suffix", [".tar.zst", ".tar.gz", ".tar"])
@pytest.mark.parametrize("left", [0.0, 0.01, 0.3, 0.7])
def test_damaged(run: Path, suffix: str, left: float) -> None:
    """A cut archive is one clear error, and leaves nothing behind."""
    target = run.parent / f"all{suffix}"
    main(["collect", str(run), "-o", str(target)])
    whole = target.read_bytes()
    target.write_bytes(whole[: int(left * len(whole))])
    with pytest.raises(CorruptRunError, match="all"):
        load(target)


def test_no_run_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that cannot be collected is one line on stderr, and no file is written."""
    (tmp_path / "empty").mkdir()
    assert main(["collect", str(tmp_path / "empty"), "-o", str(tmp_path / "x.tar.gz")]) == 2
    assert "no ring files" in capsys.readouterr().err
    assert main(["collect", str(tmp_path / "empty"), "-o", str(tmp_path / "x.zip")]) == 2
    assert "ends with one of" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


# --- what goes into an archive ---


def test_links_are_not_packed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A link in a run may lead to any file of the reader, so it is named and left out."""
    private = run.parent / "private"
    private.mkdir()
    (private / "key.txt").write_text("-----BEGIN PRIVATE KEY-----")
    (run / "rings" / "rank-9.ring").symlink_to(private / "key.txt")
    (run / "hangs").mkdir()
    (run / "hangs" / "0001").symlink_to(private)
    (run / "states").symlink_to(private)
    target = run.parent / "all.tar"
    assert main(["collect", str(run), "-o", str(target)]) == 0
    assert b"PRIVATE KEY" not in target.read_bytes()
    err = capsys.readouterr().err
    assert [
        f"{run / name}: it is a link" in err
        for name in (
            "rings/rank-9.ring",
            "hangs/0001",
            "states",
        )
    ] == [True] * 3


def test_secrets_are_not_packed(run: Path) -> None:
    """The run.json of an older rankcall holds the whole command line; its archive does not."""
    about = json.loads((run / "run.json").read_text())
    about["command"] = ["train.py", "--hf-token=hf_SECRET", "--lr", "1"]
    (run / "run.json").write_text(json.dumps(about))
    target = run.parent / "all.tar"
    assert main(["collect", str(run), "-o", str(target)]) == 0
    assert b"hf_SECRET" not in target.read_bytes()
    assert load(target).about["command"] == ["train.py", "--hf-token=[redacted]", "--lr", "1"]


def test_names_are_printed_clean(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Characters in a file name that act on a terminal are replaced in messages."""
    (run / "rings" / "\x1b]0;owned\x07.ring").write_bytes(b"no ring")
    assert main(["collect", str(run), "-o", str(run.parent / "all.tar")]) == 0
    err = capsys.readouterr().err
    assert "\x1b" not in err
    assert "owned" in err
    assert main(["report", "\x1b]0;owned\x07"]) == 2
    assert "\x1b" not in capsys.readouterr().err


def test_no_scratch_file_is_left(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If an archive cannot be written, the earlier file of that name stays."""
    target = run.parent / "out" / "all.tar"
    target.parent.mkdir()
    target.write_text("old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rankcall.run.archive._add", fail)
    assert main(["collect", str(run), "-o", str(target)]) == 2
    assert [path.name for path in target.parent.iterdir()] == ["all.tar"]
    assert target.read_text() == "old"


def test_a_live_ring_is_packed_without_its_unused_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The archive holds the records that were written, and reads like the ring."""
    monkeypatch.setenv("RANKCALL_SHM", str(tmp_path / "shm"))
    run_dir = create_run(tmp_path / "run", {})
    ring = make_live_dir(run_dir) / "x.ring"
    _, lock = create_locked(ring, Identity(rank=0, world_size=1, host="h"), Geometry(1 << 12))
    target = tmp_path / "all.tar"
    assert main(["collect", str(run_dir), "-o", str(target)]) == 0
    archived = load(target)
    assert archived.problems == []
    assert archived.heads[0].path.stat().st_size < ring.stat().st_size / 1.5
    lock.release()
    ring.unlink()


# --- what reading an archive can cost ---


def bomb(target: Path, *parts: tuple[tarfile.TarInfo, int], fill: bytes = b"\0") -> Path:
    """Write an archive of headers, each before so many zeros, or other bytes."""
    with target.open("wb") as file, zstandard.ZstdCompressor().stream_writer(file) as out:
        for info, size in parts:
            info.size = size
            out.write(info.tobuf(tarfile.GNU_FORMAT))
            for _ in range(size >> 20):
                out.write(fill * (1 << 20))
            out.write(fill * (size & 0xFFFFF))
        out.write(bytes(1024))
    return target


def of_type(kind: bytes) -> tarfile.TarInfo:
    """Return a member's header of some type."""
    info = tarfile.TarInfo("run/rings/x.ring")
    info.type = kind
    return info


_UNPACK = """
import re, sys
from pathlib import Path
from rankcall.run.unpack import unpack
from rankcall.errors import CorruptRunError
import zstandard
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
before = peak()
try:
    unpack(Path(sys.argv[1]))
except CorruptRunError as error:
    print(peak() - before, error)
"""


def test_a_huge_header_takes_no_memory(tmp_path: Path) -> None:
    """22 kB that unpack to a header of 700 MiB are refused within 64 MiB."""
    target = bomb(tmp_path / "bomb.tar.zst", (of_type(tarfile.XHDTYPE), 700 << 20))
    assert target.stat().st_size < 1 << 16
    done = subprocess.run(
        [sys.executable, "-c", _UNPACK, target],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    extra_kib, _, message = done.stdout.partition(" ")
    assert int(extra_kib) < 64 << 10
    assert (
        message
        == f"{target}: not an archive of a run: it holds an extended header of 734,003,200 bytes\n"
    )


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (tarfile.XGLTYPE, "global or a sparse header"),
        (tarfile.GNUTYPE_SPARSE, "global or a sparse header"),
        (tarfile.GNUTYPE_LONGNAME, "extended header"),
        (tarfile.GNUTYPE_LONGLINK, "extended header"),
        (tarfile.SOLARIS_XHDTYPE, "extended header"),
    ],
)
def test_headers_that_no_run_has(tmp_path: Path, kind: bytes, said: str) -> None:
    """Headers that tarfile would read whole into memory are refused."""
    with pytest.raises(CorruptRunError, match=said):
        unpack(bomb(tmp_path / "bomb.tar.zst", (of_type(kind), 1 << 20)))


def test_a_sparse_member_in_a_pax_header(tmp_path: Path) -> None:
    """Its map may be of any length, so it is refused before it is read."""
    target = tmp_path / "bomb.tar"
    with tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as tar:
        info = tarfile.TarInfo("run/rings/x.ring")
        info.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}
        tar.addfile(info)
    with pytest.raises(CorruptRunError, match="sparse member"):
        unpack(target)


def test_headers_without_an_end(tmp_path: Path) -> None:
    """Headers that only announce further headers end in one clear error."""
    part = of_type(tarfile.XHDTYPE), 0
    with pytest.raises(CorruptRunError, match="damaged"):
        unpack(bomb(tmp_path / "bomb.tar.zst", *[part] * 5000))


@pytest.mark.parametrize(
    ("limit", "value", "said"),
    [
        ("_MOST_TOTAL", 1 << 22, "GiB"),
        ("_RATIO_FROM", 1 << 20, "compressed to less"),
        ("_MOST_MEMBERS", 2, "more than 2 members"),
        ("_MOST_BYTES", 1 << 20, "a member of"),
        ("_MOST_OF_FREE", 0.0, "has room for"),
    ],
)
def test_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: float, said: str
) -> None:
    """The sum, the ratio, the number of members, each member and the free space are limited."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(f"rankcall.run.unpack.{limit}", value)
    part = of_type(tarfile.REGTYPE), 64 << 20
    target = bomb(tmp_path / "bomb.tar.zst", part, part, part, fill=b"x")
    with pytest.raises(CorruptRunError, match=said):
        unpack(target)
    assert [path.name for path in tmp_path.iterdir()] == ["bomb.tar.zst"]


def test_zeros_take_no_disk_and_their_time_is_limited(tmp_path: Path) -> None:
    """64 MiB of zeros become a hole; an archive of them that takes too long is refused."""
    parts = [(of_type(tarfile.REGTYPE), 64 << 20)]
    folder = unpack(bomb(tmp_path / "zeros.tar.zst", *parts), Budget(lambda: 0.0))
    written = next((folder / "rings").iterdir()).stat()
    assert (written.st_size, written.st_blocks) == (64 << 20, 0)
    shutil.rmtree(folder)
    ticks = itertools.count()
    slow = Budget(lambda: float(next(ticks)) * 2.0)
    with pytest.raises(CorruptRunError, match=r"zeros.tar.zst: .*takes longer"):
        unpack(tmp_path / "zeros.tar.zst", slow)


@settings(deadline=None)
@given(pieces=st.lists(st.tuples(st.booleans(), st.integers(0, 3 << 12)), max_size=8))
def test_holes_are_where_zeros_were(pieces: list[tuple[bool, int]]) -> None:
    """What is extracted is what was packed, wherever its zeros begin and end."""
    content = bytes(4096) + b"".join((b"x" if has_data else b"\0") * n for has_data, n in pieces)
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "x.ring").write_bytes(content)
        pack([("rings/x.ring", Path(name) / "x.ring")], Path(name) / "x.tar.zst", "run")
        folder = unpack(Path(name) / "x.tar.zst")
        assert (folder / "rings" / "x.ring").read_bytes() == content
        shutil.rmtree(folder)


def many_unused_rings(folder: Path, ranks: int) -> Path:
    """Write an archive of a job of so many ranks, each of which has issued nothing yet."""
    paths = []
    for rank in range(ranks):
        path = folder / f"rank-{rank}.ring"
        write_ring(path, rank, ranks, [group("0", f"[[0, {ranks}, 1]]")], shape=Geometry())
        paths.append((f"rings/{path.name}", path))
    pack(paths, folder / "all.tar.zst", "run")
    return folder / "all.tar.zst"


def test_rings_that_are_hardly_used_are_no_bomb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are mostly zeros, so they are compressed as well as a bomb is."""
    monkeypatch.setattr("rankcall.run.unpack._RATIO_FROM", 1 << 20)
    monkeypatch.setattr("rankcall.run.unpack._MOST_RATIO", 1000)
    archive = many_unused_rings(tmp_path, 64)
    assert 64 * Geometry().records_offset > 1000 * archive.stat().st_size
    assert len(load(archive).heads) == 64


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1024, 4096])
def test_an_archive_of_a_large_job_that_did_nothing(tmp_path: Path, ranks: int) -> None:
    """It was refused from 1,000 ranks on."""
    run = load(many_unused_rings(tmp_path, ranks))
    assert (len(run.heads), run.problems) == (ranks, [])
    used = sum(path.stat().st_blocks * 512 for path in run.path.rglob("*.ring"))
    assert used < ranks * (32 << 10)


def overlapping(target: Path, members: int, size: int) -> Path:
    """Write a zip file whose members are each the quoted header of the next, and then its data.

    So all of them share one piece of compressed zeros. The form is David Fifield's, of 2019.
    """
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = deflate.compress(bytes(size)) + deflate.flush()
    plain, whole, central = bytes(size), b"", []
    for number in reversed(range(members)):
        name = f"run/rings/rank-{number:05d}.ring".encode()
        sizes = zlib.crc32(plain), len(packed), len(plain), len(name), 0
        header = struct.pack("<IHHHHHIIIHH", 0x04034B50, 20, 0, 8, 0, 33, *sizes) + name
        whole = header + packed
        central.append((name, sizes, len(whole)))
        packed = struct.pack("<BHH", 0, len(header), len(header) ^ 0xFFFF) + header + packed
        plain = header + plain
    listing = b""
    for name, sizes, from_end in central:
        fields = *sizes, 0, 0, 0, 0, len(whole) - from_end
        listing += struct.pack("<IHHHHHHIIIHHHHHII", 0x02014B50, 20, 20, 0, 8, 0, 33, *fields)
        listing += name
    end = struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, members, members, len(listing), len(whole), 0)
    target.write_bytes(whole + listing + end)
    return target


def test_a_zip_whose_members_share_their_data(tmp_path: Path) -> None:
    """A bomb of overlapping members is refused, though each of them is sound."""
    target = overlapping(tmp_path / "bomb.zip", 40, 1 << 20)
    assert target.stat().st_size < 1 << 14
    with zipfile.ZipFile(target) as archive:
        members = archive.infolist()
    # zipfile itself refuses to read such members, from Python 3.11.8 and 3.12.2 on.
    for member in members:
        begin = member.header_offset + 30 + len(member.filename)
        inflate = zlib.decompressobj(-15)
        plain = inflate.decompress(target.read_bytes()[begin:])
        assert (len(plain), zlib.crc32(plain)) == (member.file_size, member.CRC)
    assert sum(member.file_size for member in members) > 40 << 20
    with pytest.raises(CorruptRunError, match="it holds members that overlap"):
        unpack(target)


def test_a_zip_that_is_compressed_too_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ratio of a zip file is limited as that of a tar file is; lzma reaches 1 in 6,000."""
    monkeypatch.setattr("rankcall.run.unpack._RATIO_FROM", 1 << 20)
    monkeypatch.setattr("rankcall.run.unpack._MOST_RATIO", 5000)
    target = tmp_path / "bomb.zip"
    with zipfile.ZipFile(target, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("run/rings/x.ring", bytes(64 << 20))
    with pytest.raises(CorruptRunError, match="compressed to less than 1 in 5,000"):
        unpack(target)


def test_rings_without_a_header_are_not_extracted(run: Path) -> None:
    """An archive of 100,000 of them has 1 MB, and would cost half a minute of making files."""
    target = run.parent / "many.tar"
    ring = next((run / "rings").iterdir())
    with tarfile.open(target, "w") as tar:
        tar.add(ring, f"run/rings/{ring.name}")
        for number in range(100):
            tar.addfile(tarfile.TarInfo(f"run/rings/x-{number}.ring"))
    folder = unpack(target)
    assert [path.name for path in (folder / "rings").iterdir()] == [ring.name]
    shutil.rmtree(folder)
