"""``rankcall run``'s own decisions: names, environment, user mistakes, ranks without records."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

import pytest
import typer

from rankcall.cli import run
from rankcall.cli.environment import BOOT, environment
from rankcall.cli.job_options import FLAGS, JobOptions, Recorder, prepare
from rankcall.cli.torchrun import TorchrunJob, arming, own_options_first, parse
from rankcall.errors import CaptureUnavailableError

JOB = TorchrunJob(("train.py",), "train.py", True, 1, 4, None, None)


def header(rank: int, local_rank: int, attempt: int = 0) -> Any:
    """Return the part of a ring's header that the command reads."""
    return SimpleNamespace(rank=rank, local_rank=local_rank, attempt=attempt)


def test_pythonpath_has_no_empty_entry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty entry would be the working directory; the user's own entries stay as they are."""
    for before, after in {"": str(BOOT), "/a:/b": f"{BOOT}:/a:/b"}.items():
        monkeypatch.setenv("PYTHONPATH", before)
        assert arming(tmp_path, "auto", JOB)["PYTHONPATH"] == after


def test_arming_names_an_absolute_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Workers may change their directory: the run's path is absolute."""
    monkeypatch.chdir(tmp_path)
    variables = arming(Path("here"), "python", JOB)
    assert variables["RANKCALL_RUN_DIR"] == str(tmp_path / "here")
    assert variables["RANKCALL_CAPTURE"] == "python"
    assert "RANKCALL_HOST" not in variables


def test_local_addr_names_the_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two agents on two addresses of one machine count as two hosts; a name that is set stays."""
    job = replace(JOB, local_addr="127.0.0.2")
    monkeypatch.delenv("RANKCALL_HOST", raising=False)
    assert arming(tmp_path, "auto", job)["RANKCALL_HOST"] == "127.0.0.2"
    monkeypatch.setenv("RANKCALL_HOST", "node-a")
    assert "RANKCALL_HOST" not in arming(tmp_path, "auto", job)


def test_the_environment_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables that were set get their value again, others go; after an exception too."""
    monkeypatch.setenv("RANKCALL_A", "old")
    with (
        contextlib.suppress(KeyError),
        environment({"RANKCALL_A": None, "RANKCALL_B": "new"}),
    ):
        assert "RANKCALL_A" not in os.environ
        assert os.environ["RANKCALL_B"] == "new"
        raise KeyError
    assert os.environ["RANKCALL_A"] == "old"
    assert "RANKCALL_B" not in os.environ


@pytest.mark.parametrize(
    ("job", "ending"),
    [
        (JOB, "-train"),
        (replace(JOB, script="pkg.train", is_file=False), "-pkg-train"),
        (replace(JOB, script="/usr/bin/bash", is_file=False), "-bash"),
    ],
)
def test_a_run_is_named_after_what_runs(
    job: TorchrunJob, ending: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A script's stem, a module's full name, a program's name; two in one second differ."""
    monkeypatch.chdir(tmp_path)
    first, second = run._default(job), run._default(job)
    assert first.name.endswith(ending)
    assert first != second


def test_nodes_agree_on_a_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a rendezvous id, the name comes from it alone; without one, the output says so."""
    monkeypatch.chdir(tmp_path)
    job = replace(JOB, max_nodes=2, rdzv_id="../job 7")
    assert run._default(job) == run._default(job) == Path("rankcall-runs/_job_7-train")
    assert capsys.readouterr().err == ""
    run._default(replace(job, rdzv_id=None))
    assert "neither --rdzv-id nor --run-dir" in capsys.readouterr().err


def test_missing_ranks_are_named() -> None:
    """By their rank; of several nodes only this one's are known, and they are consecutive."""
    assert run._missing(JOB, [header(0, 0), header(2, 2)]) == "ranks 1 and 3"
    assert run._missing(JOB, [header(rank, rank) for rank in range(4)]) == ""
    nodes = replace(JOB, max_nodes=2)
    assert run._missing(nodes, [header(rank, rank - 4) for rank in (4, 5, 7)]) == "rank 6"
    assert run._missing(nodes, []) == "any of this node's 4 workers"


def test_missing_ranks_are_those_of_the_last_attempt() -> None:
    """A ring that an earlier attempt left does not stand for the last one's."""
    first = [header(rank, rank) for rank in range(4)]
    last = [header(rank, rank, 1) for rank in range(3)]
    assert run._missing(JOB, first + last) == "rank 3"
    # A node may have had other ranks in the attempt before.
    nodes = replace(JOB, max_nodes=3, nproc=1)
    assert run._missing(nodes, [header(3, 0), header(4, 0, 1)]) == ""


@pytest.mark.parametrize(
    ("arguments", "ours", "rest"),
    [
        (
            "--nproc-per-node 3 --hang-after 6 a.py -x 1",
            "--hang-after 6",
            "--nproc-per-node 3 a.py -x 1",
        ),
        ("--nproc=3 --history -m pkg.a", "--history", "--nproc=3 -m pkg.a"),  # -m takes no value
        ("--nproc 3 --on-hang=abort a.py", "--on-hang=abort", "--nproc 3 a.py"),  # an abbreviation
        ("--run-dir r --standalone --serve 0 a.py", "--run-dir r --serve 0", "--standalone a.py"),
        ("--no-python bash --history", "", "--no-python bash --history"),  # bash is the script
        ("--standalone a.py --run-dir r", "", "--standalone a.py --run-dir r"),
        ("a.py --hang-after 6", "", "a.py --hang-after 6"),
        ("--standalone -- a.py --history", "", "--standalone -- a.py --history"),
    ],
)
def test_own_options_may_stand_among_those_of_torchrun(
    arguments: str, ours: str, rest: str
) -> None:
    """They are moved to the front; what comes after the script is the script's."""
    assert own_options_first(arguments.split()) == [*ours.split(), *rest.split()]


def test_options_without_a_value() -> None:
    """As typer has them."""
    hints = get_type_hints(JobOptions)
    names = {f"--{name.replace('_', '-')}" for name, kind in hints.items() if kind is bool}
    assert names == set(FLAGS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.py"], "no such script: none.py"),
        (["--none", "1", "--run-dir", "x", "a.py"], "unrecognized arguments: --none"),
        (["--nnodes=a", "a.py"], "--nnodes a is neither a number nor MIN:MAX"),
        (["--nproc-per-node=many", "a.py"], "--nproc-per-node many: "),
        (["--standalone"], "training_script"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Wrong arguments: one line, exit 2, before anything is made or started."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(typer.Exit) as caught:
        run.command(arguments, capture=Recorder.python)
    assert caught.value.exit_code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("rankcall: ")
    assert message in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["t.py", "--hang-after", "5"], ["--hang-after"]),
        (["t.py", "--epochs", "3", "--run-dir=x"], ["--run-dir"]),
        (["t.py", "--hang-after-all", "--lr", "1"], []),
        (["-m", "job", "x"], []),
    ],
)
def test_own_options_after_the_script_are_pointed_out(
    arguments: list[str], named: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The script gets them all the same, as torchrun would give them to it."""
    assert parse(arguments).argv == tuple(arguments)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines] == named
    assert all("goes to the script" in line for line in lines)


def test_a_run_dir_that_is_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--run-dir must not be a file."""
    (tmp_path / "file").touch()
    with pytest.raises(typer.Exit):
        JobOptions(run_dir=tmp_path / "file").check()
    assert "is not a directory" in capsys.readouterr().err


def test_capture_that_cannot_be_built(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """auto falls back and says so once; native, asked for by name, is an error."""
    from rankcall._native import NativeModule

    def fail(module: NativeModule) -> Path:
        raise CaptureUnavailableError("no compiler")

    monkeypatch.setattr(NativeModule, "prebuild", fail)
    assert prepare("auto") == "python"
    assert "no compiler; recording with the slower Python capture" in capsys.readouterr().err
    with pytest.raises(CaptureUnavailableError):
        prepare("native")
