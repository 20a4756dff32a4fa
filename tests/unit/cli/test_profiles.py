"""``rankcall profile``: which ranks, what py-spy is asked, and what is made of its answer."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from rankcall.cli import main
from rankcall.ring.layout import Geometry, Header, read_header
from rankcall.ring.writer import Identity, create
from rankcall.run import profiles
from rankcall.run.profiles import busiest_lines

# Answers as py-spy does: to its own arguments, with a profile of the process it was asked for.
SPY = """#!{python}
import json, sys
options = dict(zip(sys.argv[2::2], sys.argv[3::2]))
with open({log!r}, "a") as log:
    print(json.dumps(sys.argv[1:]), file=log)
fails = {fails!r}
if fails:
    sys.exit(fails)
sys.argv.remove("--idle")
options = dict(zip(sys.argv[2::2], sys.argv[3::2]))
frames = [
    {{"name": "<module>", "file": "train.py", "line": 9}},
    {{"name": "load", "file": "/home/me/load.py", "line": 6}},
    {{"name": "wait", "file": "/x/site-packages/torch/futures.py", "line": 7}},
    {{"name": "wait", "file": "threading.py", "line": 1}},
]
thread = f"Thread {{options['--pid']}} \\"MainThread\\""
main = {{"name": thread, "samples": [[0, 1, 2]] * 3 + [[0]]}}
other = {{"name": "Thread 1 \\"helper\\"", "samples": [[3]] * 4}}
with open(options["--output"], "w") as out:
    json.dump({{"profiles": [other, main], "shared": {{"frames": frames}}}}, out)
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run of two ranks, both of which are this process."""
    folder = tmp_path / "run" / "rings"
    folder.mkdir(parents=True)
    for rank in (0, 1):
        identity = Identity(rank=rank, world_size=2, host="node-a")
        create(folder / f"rank-{rank:05d}.{os.getpid()}-0.ring", identity, Geometry(64, 8, 4096))
    return tmp_path / "run"


@pytest.fixture
def spy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that puts a program in place of py-spy, and one that reads its calls."""

    def place(fails: str = "") -> None:
        script = tmp_path / "py-spy"
        log = str(tmp_path / "log")
        script.write_text(SPY.format(python=sys.executable, log=log, fails=fails))
        script.chmod(0o700)
        monkeypatch.setattr(profiles, "py_spy", lambda: str(script))

    return place


def test_two_ranks(run: Path, spy: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each is profiled once; the files are in the run, and the user's lines are printed."""
    spy()
    assert main(["profile", str(run), "--ranks", "0-1", "--seconds", "2"]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines() == [
        line
        for rank in (0, 1)
        for line in (
            f"rank {rank} (node-a, pid {os.getpid()})",
            "   75%  load.py:6 in load",
            "   25%  train.py:9 in <module>",
        )
    ]
    kept = run / "profiles" / "0001"
    assert str(kept) in said.err.replace("\n", "")
    names = ["rank-00000.speedscope.json", "rank-00001.speedscope.json"]
    assert sorted(path.name for path in kept.iterdir()) == names
    assert stat.S_IMODE(kept.stat().st_mode) == 0o700
    asked = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert len(asked) == 2
    for arguments in asked:
        assert arguments[:5] == ["record", "--pid", str(os.getpid()), "--duration", "2"]
        assert arguments[5:7] == ["--rate", "50"]
    assert main(["profile", str(run), "--ranks", "1", "--json"]) == 0
    (profile,) = json.loads(capsys.readouterr().out)["profiles"]
    assert profile["lines"][0] == {"share": 0.75, "line": "load.py:6 in load"}
    assert profile["file"] == str(run / "profiles" / "0002" / names[1])
    assert profile["problem"] is None


def test_py_spy_that_may_not(run: Path, spy: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Its last words are the problem, and the command exits with 1."""
    spy(fails="Error: Permission Denied: Try running again with elevated permissions")
    assert main(["profile", str(run), "--ranks", "1"]) == 1
    said = capsys.readouterr().err.replace("\n", " ")
    assert "rank 1: py-spy: Error: Permission Denied" in said
    assert "kept in" not in said


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ("7", "rank 7 does not run on this host, or is not in this run"),
        ("0-9", "--ranks takes ranks, as in 5,6 or 0-3"),
        ("x", "--ranks takes ranks, as in 5,6 or 0-3"),
        ("3-1", "--ranks takes ranks, as in 5,6 or 0-3"),
        ("0-4,10-14", "8 ranks at most; got 10"),
    ],
)
def test_ranks_that_cannot_be(
    run: Path, spy: Any, ranks: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error says which, and nothing is made in the run."""
    spy()
    assert main(["profile", str(run), "--ranks", ranks]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (run / "profiles").exists()


def test_without_py_spy(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error says how to install it."""
    monkeypatch.setattr(profiles, "py_spy", lambda: None)
    assert main(["profile", str(run), "--ranks", "0"]) == 2
    assert "pip install 'rankcall[stacks]'" in capsys.readouterr().err
    assert not (run / "profiles").exists()


def test_no_rank_stands_out(run: Path, spy: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Without --ranks, the verdict has to name one."""
    spy()
    assert main(["profile", str(run)]) == 2
    assert "say which to profile with --ranks" in " ".join(capsys.readouterr().err.split())


def header(run: Path) -> Header:
    """Return the header of a rank."""
    found = read_header(next((run / "rings").iterdir()))
    assert found is not None
    return found


@pytest.mark.parametrize(
    "profile",
    [
        None,
        {},
        {"profiles": []},
        {"profiles": [{"name": "Thread 1", "samples": []}], "shared": {"frames": []}},
        {"profiles": [{"name": 5}]},
        {"profiles": [{"name": "Thread PID", "samples": [[99]]}], "shared": {"frames": []}},
    ],
)
def test_another_format(run: Path, profile: Any) -> None:
    """It is refused, whatever it is."""
    text = json.dumps(profile).replace("PID", str(os.getpid()))
    with pytest.raises((ValueError, KeyError, TypeError, IndexError)):
        busiest_lines(json.loads(text), header(run))
