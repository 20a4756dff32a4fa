"""Formats with a file for each rank: damaged, live, restarted and hostile runs, and a full disk."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ring_fuzz import SHAPE, Damage, apply, body, damages, sound_bytes
from worlds import MS, PAIR, Call, together, write_world

from rankcall.cli import main
from rankcall.errors import ExportError
from rankcall.export import FOLDERS, export
from rankcall.ring.tables import Group
from rankcall.ring.writer import Identity, PythonRing, create
from rankcall.run.load import load
from rankcall.testing.synthetic import synthetic_run


def read(folder: Path) -> dict[str, Any]:
    """Return the content of each file of a folder, by name."""
    contents: dict[str, Any] = {}
    for path in folder.iterdir():
        raw = path.read_bytes()
        contents[path.name] = (
            json.loads(gzip.decompress(raw)) if path.suffix == ".gz" else pickle.loads(raw)
        )
    return contents


@settings(suppress_health_check=list(HealthCheck), max_examples=30)
@given(changes=st.lists(damages, min_size=1, max_size=6))
def test_damaged_rings(tmp_path: Path, changes: list[Damage]) -> None:
    """If one ring is damaged in any way, the sound one is still exported in every format."""
    (tmp_path / "a.ring").write_bytes(sound_bytes())
    (tmp_path / "b.ring").write_bytes(apply(changes))
    run = load(tmp_path)
    for to in FOLDERS:
        shutil.rmtree(tmp_path / to, ignore_errors=True)
        export(run, to, tmp_path / to)
        assert read(tmp_path / to)


@pytest.mark.parametrize("to", FOLDERS)
def test_a_run_that_is_being_written(tmp_path: Path, to: str) -> None:
    """An export of a ring that is being overwritten can be read."""
    (tmp_path / "run" / "rings").mkdir(parents=True)
    path = tmp_path / "run" / "rings" / "live.ring"
    ring = PythonRing(create(path, Identity(rank=0, world_size=1, host="h"), SHAPE), SHAPE)
    known, go_on = ring.group(PAIR), threading.Event()

    def write() -> None:
        issued = 0
        while not go_on.is_set():
            issued += 1
            index = ring.issue(body(seq=issued, enqueued_ns=issued, op=1, group=known))
            ring.finish(index, 2, issued + 1)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for number in range(3):
            export(load(tmp_path / "run"), to, tmp_path / f"out{number}")
            assert len(read(tmp_path / f"out{number}")) == 1
    finally:
        go_on.set()
        writer.join()


@pytest.mark.parametrize("to", FOLDERS)
def test_hostile_text(tmp_path: Path, to: str) -> None:
    """A name that is not valid Unicode does not stop an export."""
    lone = Group("\udcff\x1b[31m", 0, "gloo", "d", (0, 1))
    run = write_world(tmp_path / "run", together(1, [0, 1], MS, lone))
    export(load(run), to, tmp_path / "out")
    assert len(read(tmp_path / "out")) == 2


def test_messages_name_both_ends(tmp_path: Path) -> None:
    """A send and its receive name each other, in the forms of both tools."""
    calls = [
        Call(0, 1, 0, 9 * MS, "send", 256, peer=1, line=9),
        Call(1, 1, 0, 9 * MS, "recv", 256, peer=0, line=9),
    ]
    run = load(write_world(tmp_path / "run", calls))
    export(run, "flight-recorder", tmp_path / "dumps")
    names = {
        name[-1]: dump["entries"][0]["profiling_name"].partition(":")[2]
        for name, dump in read(tmp_path / "dumps").items()
    }
    assert names == {"0": "send 0->1", "1": "recv 1<-0"}
    export(run, "kineto", tmp_path / "traces")
    for trace in read(tmp_path / "traces").values():
        arguments = trace["traceEvents"][1]["args"]
        assert (arguments["Src Rank"], arguments["Dst Rank"]) == (0, 1)


def test_a_restarted_job(tmp_path: Path) -> None:
    """Dumps are those of the last attempt; each attempt has a trace of its own."""
    for attempt in range(2):
        synthetic_run(tmp_path / "run", 2, 10 * (attempt + 1), attempt=attempt)
    run = load(tmp_path / "run")
    export(run, "flight-recorder", tmp_path / "dumps")
    dumps = read(tmp_path / "dumps")
    assert {name: len(dump["entries"]) for name, dump in dumps.items()} == {
        "nccl_trace_rank_0": 20,
        "nccl_trace_rank_1": 20,
    }
    export(run, "kineto", tmp_path / "traces")
    assert len(read(tmp_path / "traces")) == 4


@pytest.mark.parametrize("to", FOLDERS)
def test_a_folder_that_cannot_be_written(
    tmp_path: Path, to: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error is one clear line, no half file is left, and a stream is refused."""
    run = write_world(tmp_path / "run", together(1, [0, 1], MS, PAIR))
    (tmp_path / "file").write_text("")
    assert main(["export", str(run), "--to", to, "-o", str(tmp_path / "file")]) == 2
    assert "cannot be written" in capsys.readouterr().err
    with pytest.raises(ValueError, match="folder"):
        export(load(run), to, io.BytesIO())

    def full(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", full)
    with pytest.raises(ExportError, match="No space left on device"):
        export(load(run), to, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []
