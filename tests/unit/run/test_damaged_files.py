"""A command survives any content of a run's small files, which any user may have written."""

from __future__ import annotations

import json
import lzma
import os
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

import pytest

from rankcall.analysis.node_snapshot import SCHEMA
from rankcall.analysis.node_snapshot import decode as decode_node
from rankcall.analysis.snapshot import RankState
from rankcall.cli import main
from rankcall.errors import CorruptRunError
from rankcall.run.exits import read_exits
from rankcall.run.hangs import next_free
from rankcall.run.load import load
from rankcall.run.unpack import unpack
from rankcall.run.views import _decoded as decode_answers
from rankcall.testing.model import Planted
from rankcall.testing.synthetic import synthetic_run

RANKCALL = Path(sys.executable).with_name("rankcall")
EXIT = {"rank": 3, "attempt": 0, "host": "node-a", "pid": 78, "code": -9, "epoch_ns": 10**18}
SUM = {"rank": 0, "batches": 1, "shadowed": 0, "replayed": 0, "extra_s": 0.5}
INFINITE, HUGE, MORE_THAN_64_BITS = float("inf"), 10**400, 10**30


def short(value: object) -> str:
    """Return the name of a test with a value."""
    return str(value)[:20]


COMMANDS = (["diagnose"], ["diagnose", "--json"], ["report"], ["report", "--json"])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run of four ranks that rank 2's death hung."""
    return synthetic_run(tmp_path / "job", 4, 40, planted=Planted("dead", (2,), 21)).path


def ends_well(run: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Run the commands; each ends with a status and not with an exception."""
    for command in COMMANDS:
        assert main([*command, str(run)]) in (0, 1)
    return capsys.readouterr().err


@pytest.mark.parametrize("value", [INFINITE, -INFINITE, HUGE, -HUGE, MORE_THAN_64_BITS], ids=short)
@pytest.mark.parametrize("name", ["rank", "attempt", "pid", "code", "epoch_ns"])
def test_impossible_exits(
    run: Path, name: str, value: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """An exit with a number that no process can have is left out; the others count."""
    (run / "exits").mkdir(exist_ok=True)
    lines = [json.dumps({**EXIT, name: value}), json.dumps({**EXIT, "pid": 77})]
    (run / "exits/a.jsonl").write_text("\n".join(lines))
    ends_well(run, capsys)
    assert {ended.pid for ended in read_exits(run) if ended.rank == 3} == {77}


@pytest.mark.parametrize("value", [INFINITE, HUGE, -1, MORE_THAN_64_BITS], ids=short)
@pytest.mark.parametrize("name", ["mono_ns", "pid", "start"])
def test_impossible_states(
    run: Path, name: str, value: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """States of processes with impossible numbers are left out."""
    header = load(run).heads[0].header
    process = {"pid": header.pid, "start": header.process_start, "state": "stopped"}
    states = {"boot_id": header.boot_id, "mono_ns": 5, "processes": [process]}
    (states if name == "mono_ns" else process)[name] = value
    (run / "states").mkdir()
    (run / "states/a.json").write_text(json.dumps(states))
    ends_well(run, capsys)
    main(["diagnose", "--json", str(run)])
    assert "stopped" not in capsys.readouterr().out


def test_a_pipe_instead_of_a_file(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A named pipe, which blocks its reader until somebody writes, is left out."""
    ring = next((run / "rings").iterdir())
    for path in (
        *(run / "exits/a.jsonl", run / "states/a.json", run / "joins.jsonl", run / "run.json"),
        *(ring, ring.with_name(ring.name.replace(".ring", ".tail.ring"))),
    ):
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        os.mkfifo(path)
    said = " ".join(ends_well(run, capsys).split())
    for name in ("joins.jsonl", "run.json", ring.name):
        assert f"{name}: cannot be read" in said


def test_a_pipe_instead_of_a_log(tmp_path: Path) -> None:
    """A named pipe that somebody holds open, and never writes to, is refused; a shell's is read."""
    log = tmp_path / "job.log"
    os.mkfifo(log)
    holder = os.open(log, os.O_RDWR)
    try:
        done = subprocess.run(
            [RANKCALL, "diagnose", "--log", log],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
    finally:
        os.close(holder)
    assert done.returncode == 2
    assert "job.log: not a file" in done.stderr
    script = '"$0" diagnose --log <(echo "step 1")'
    read = subprocess.run(
        ["bash", "-c", script, RANKCALL], capture_output=True, text=True, timeout=100, check=False
    )
    assert "it read 1 line" in " ".join(read.stdout.split())


def test_impossible_sums_of_a_join(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A report says which line of the joins is damaged."""
    join = {"on_exhausted": "shadow", "divide_by": "world", "call_site": "a.py:1"}
    line = json.dumps({**join, "ranks": [{**SUM, "extra_s": HUGE}]})
    (run / "joins.jsonl").write_text(line)
    main(["report", str(run)])
    printed = capsys.readouterr()
    assert "line 1 is damaged" in " ".join((printed.out + printed.err).split())


@pytest.mark.parametrize("depth", [120, 490, 900])
def test_a_description_that_is_nested_deeply(
    run: Path, tmp_path: Path, depth: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Functions that call themselves for each level would fail; the description is left out."""
    (run / "run.json").write_text('{"a": ' + "[" * depth + "]" * depth + "}")
    ends_well(run, capsys)
    assert main(["collect", str(run), "-o", str(tmp_path / "all.tar.zst")]) == 0


def test_folders_beside_those_of_verdicts(tmp_path: Path) -> None:
    """Only plain numbers count: not a digit that is no decimal, and not one of 200 digits."""
    for name in ("0003", "\N{SUPERSCRIPT TWO}", "9" * 200, "x"):
        (tmp_path / name).mkdir()
    assert next_free(tmp_path).name == "0004"


def test_a_damaged_zip(tmp_path: Path) -> None:
    """Bytes that LZMA cannot read are an archive that is damaged."""
    archive = tmp_path / "run.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_LZMA) as file:
        file.writestr("job/run.json", "{}" * 500)
    raw = bytearray(archive.read_bytes())
    raw[raw.index(b"run.json") + len("run.json") + 4] = 0xFF  # the properties of the filter
    archive.write_bytes(raw)
    with zipfile.ZipFile(archive) as file, pytest.raises(lzma.LZMAError):
        file.read("job/run.json")
    with pytest.raises(CorruptRunError, match="damaged"):
        unpack(archive)


@pytest.mark.parametrize("value", [INFINITE, HUGE, -1], ids=short)
def test_impossible_answers_of_other_nodes(value: float) -> None:
    """The page leaves out answers with an impossible time."""
    answers = {"mono_ns": value, "attempt": 0, "notice_s": 1, "problem": "", "nodes": []}
    with pytest.raises((ValueError, OverflowError)):
        decode_answers(json.dumps(answers).encode(), b"")


SNAPSHOT = {"schema": SCHEMA, "world": 2, "groups": [], "sites": [], "calls": ""}
SNAPSHOT |= {"spent": "", "problems": []}


def test_impossible_snapshots_of_nodes() -> None:
    """A node's snapshot with an infinite number of ranks is none."""
    raw = zlib.compress(json.dumps({**SNAPSHOT, "ranks": [], "world": INFINITE}).encode())
    with pytest.raises(ValueError, match="snapshot"):
        decode_node(raw)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("host", 5), ("stack", ["a"]), ("pid", "5"), ("steps", HUGE), ("closed", "no")),
        *(("silent_s", INFINITE), ("silent_s", None), ("gone_s", "long")),
        *(("rank", 1.5), ("rank", HUGE)),
    ],
    ids=short,
)
def test_impossible_states_of_ranks(name: str, value: object) -> None:
    """A node's snapshot is none if a field of a rank has another type, or is no possible number.

    Every other rank takes it from the job's store, and would fail where it uses the field.
    """
    state = {"rank": 1, "host": "a", "pid": 4, "silent_s": 1, "gone_s": None}
    raw = zlib.compress(json.dumps({**SNAPSHOT, "ranks": [state]}).encode())
    assert decode_node(raw).ranks == [RankState(1, "a", 4, silent_s=1.0)]
    raw = zlib.compress(json.dumps({**SNAPSHOT, "ranks": [{**state, name: value}]}).encode())
    with pytest.raises(ValueError, match=f"{name} of a rank"):
        decode_node(raw)
