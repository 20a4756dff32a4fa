"""``rankcall collect``: one file of a run, whole, and harmless to read."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from rankcall.analysis.diagnosis import diagnose
from rankcall.archive import unpack
from rankcall.cli import main
from rankcall.errors import CorruptRun
from rankcall.process import boot_id, process_start
from rankcall.ring.layout import HEADER
from rankcall.run import load
from rankcall.testing.synthetic import Planted, synthetic_run

DEAD = Planted("dead", (2,), 21)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run of four ranks on two hosts that rank 2's death hung."""
    return synthetic_run(tmp_path / "job", 4, 40, hosts=2, planted=DEAD).path


def said(path: Path) -> list[tuple[str, tuple[int, ...]]]:
    """Return what a diagnosis finds."""
    return [(each.kind, each.ranks) for each in diagnose(load(path)).findings]


@pytest.mark.parametrize("suffix", [".tar.zst", ".tar.gz", ".tgz", ".tar"])
def test_an_archive_reads_as_the_run(run: Path, suffix: str) -> None:
    """The same ranks, records and verdict; nothing is left of what was extracted."""
    target = run.parent / f"all{suffix}"
    assert main(["collect", str(run), "--to", str(target)]) == 0
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
    """Report and diagnose read it; both name the archive, not where it was extracted."""
    target = run.parent / "all.tar.zst"
    main(["collect", str(run), "--to", str(target)])
    assert f"4 of 4 ranks in {target}" in capsys.readouterr().err
    assert main(["diagnose", "--json", str(target)]) == 1
    assert f'"run": "{target}"' in capsys.readouterr().out
    assert main(["report", str(target)]) == 0


def test_nodes_without_a_shared_file_system(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each node's archive says whose records it lacks; put together they are the whole."""
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
        assert main(["collect", str(place), "--to", str(archives[-1])]) == 0
    assert "no records of rank 2-3 here" in capsys.readouterr().err
    both = run.parent / "both.tar.zst"
    assert main(["collect", *map(str, archives), "--to", str(both)]) == 0
    assert "no records" not in capsys.readouterr().err
    assert said(both) == [("dead", (2,))]


def test_states_of_living_processes_are_kept(run: Path) -> None:
    """What a process of this host was doing goes with it: read elsewhere, it is still alive."""
    for ring in (run / "rings").glob("*.ring"):
        data = bytearray(ring.read_bytes())
        for name, value in (
            ("boot_id", boot_id().encode().ljust(40, b"\0")),
            ("process_start", (process_start(os.getpid()) or 0).to_bytes(8, "little")),
            ("pid", os.getpid().to_bytes(4, "little")),
            ("closed_ns", bytes(8)),
        ):
            offset = HEADER.fields[name][1]  # type: ignore[index]
            data[offset : offset + len(value)] = value
        ring.write_bytes(data)
    target = run.parent / "live.tar.zst"
    assert main(["collect", str(run), "--to", str(target)]) == 0
    found = diagnose(load(target), state_of=lambda header: "unknown").snapshot
    assert {each.state for each in found.ranks} == {"alive"}


def member(
    name: str, data: bytes = b"x", kind: bytes = tarfile.REGTYPE
) -> tuple[tarfile.TarInfo, bytes]:
    """Return a member of a tar file."""
    info = tarfile.TarInfo(name)
    info.type, info.size, info.linkname = kind, len(data), "/etc/passwd"
    return info, data


HOSTILE = [
    "/etc/evil", "../evil", "job/../../evil", "job/rings/../../evil.ring", "job/rings/a/b.ring",
    "job/rings/.hidden.ring", "job/run.json/x", "job/rings/", "job/unknown/file", "rings/a.ring",
    "job/rings/\x1b.ring",
]  # fmt: skip


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
    found = unpack(target)
    assert [str(each.relative_to(found)) for each in found.rglob("*") if each.is_file()] == [
        "rings/good.ring"
    ]
    assert sorted(run.parent.rglob("*")) == before


@pytest.mark.parametrize("suffix", [".tar.zst", ".tar.gz", ".tar"])
@pytest.mark.parametrize("left", [0.0, 0.01, 0.3, 0.7])
def test_damaged(run: Path, suffix: str, left: float) -> None:
    """A cut archive is one clear error, and leaves nothing behind."""
    target = run.parent / f"all{suffix}"
    main(["collect", str(run), "--to", str(target)])
    whole = target.read_bytes()
    target.write_bytes(whole[: int(left * len(whole))])
    with pytest.raises(CorruptRun, match="all"):
        load(target)


def test_no_run_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What cannot be collected is said in one line, and no file is written."""
    (tmp_path / "empty").mkdir()
    assert main(["collect", str(tmp_path / "empty"), "--to", str(tmp_path / "x.tar.gz")]) == 2
    assert "no ring files" in capsys.readouterr().err
    assert main(["collect", str(tmp_path / "empty"), "--to", str(tmp_path / "x.zip")]) == 2
    assert "ends with one of" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]
