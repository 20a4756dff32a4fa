"""``RANKCALL=1`` in the environment of a notebook's kernel. ``make setup-integrations``."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from framework_programs import KERNEL, NOTEBOOK
from launch import Ended, launch, run_program
from launchers import digests, hang_of, line_of

from rankcall.cli.environment import BOOT
from rankcall.run.load import load

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("ipykernel", "jupyter_client")),
        reason="no ipykernel or jupyter_client: make setup-integrations",
    ),
]


def in_a_kernel(folder: Path, cell: str, **env: str) -> Ended:
    """Execute a cell in a new kernel, which finds the folder that the wheel's line loads."""
    folder.mkdir()
    (folder / "cell.py").write_text(cell)
    (folder / "kernel.py").write_text(KERNEL)
    places = {"IPYTHONDIR": str(folder / "ipython"), "JUPYTER_RUNTIME_DIR": str(folder / "runtime")}
    env = {"PYTHONPATH": str(BOOT), "RANKCALL_CAPTURE": "python", **places, **env}
    return run_program(
        sys.executable, "kernel.py", str(folder / "kernel"), cwd=folder, env=env, timeout=500
    )


def run_in(folder: Path) -> Path:
    """Return the only run that was recorded in a folder."""
    (run,) = [path for path in (folder / "rankcall-runs").iterdir() if not path.is_symlink()]
    return run


def test_ranks_of_a_cell_are_recorded(tmp_path: Path) -> None:
    """Both forked ranks are, the kernel is not; the cell prints the same, and ends the same."""
    without = in_a_kernel(tmp_path / "without", NOTEBOOK)
    ended = in_a_kernel(tmp_path / "with", NOTEBOOK, RANKCALL="1")
    assert len(set(digests(without))) == 2, without.out + without.err
    assert set(digests(ended)) == set(digests(without)), ended.out + ended.err
    assert "the cell: ok" in without.out
    assert "the cell: ok" in ended.out
    assert not (tmp_path / "without/rankcall-runs").exists()
    run = run_in(tmp_path / "with")
    assert run.name.endswith("-ipykernel_launcher")
    recorded = load(run)
    headers = [head.header for head in recorded.heads]
    assert sorted((header.rank, header.attempt) for header in headers) == [(0, 0), (1, 0)]
    assert all("all_reduce" in set(recorded.frame(ring)["op"]) for ring in recorded.rings)


def test_a_cell_that_fails(tmp_path: Path) -> None:
    """The cell's error is the one that it has without rankcall."""
    names = []
    for name, env in (("without", {}), ("with", {"RANKCALL": "1"})):
        ended = in_a_kernel(tmp_path / name, NOTEBOOK, FAULT="crash", **env)
        assert "ValueError: sample 17 has no label" in ended.out, ended.out + ended.err
        names.append(ended.out.splitlines()[-1])
    assert names[0] == names[1]
    assert names[0].startswith("the cell: error Process")
    judged = launch("diagnose", run_in(tmp_path / "with"), cwd=tmp_path, timeout=120)
    assert "failed with ValueError: sample 17 has no label" in " ".join(judged.out.split())


def test_a_rank_that_hangs_is_named(tmp_path: Path) -> None:
    """The verdict names rank 1 and its line in the cell, below the cell and in the run."""
    ended = in_a_kernel(
        tmp_path / "with",
        NOTEBOOK,
        RANKCALL="1",
        RANKCALL_HANG_AFTER="10",
        RANKCALL_ON_HANG="abort",
        FAULT="hang",
    )
    assert "the cell: error ProcessExitedException" in ended.out, ended.out + ended.err
    assert "missing: Rank 1 (" in ended.out + ended.err
    run = run_in(tmp_path / "with")
    judged = launch("diagnose", run, cwd=tmp_path, timeout=120)
    assert judged.out.startswith("missing: Rank 1 ("), judged.out
    hang_folder = hang_of(run)
    assert (hang_folder / "verdict.txt").read_text().startswith("missing: Rank 1 (")
    (finding,) = json.loads((hang_folder / "verdict.json").read_text())["findings"]
    assert (finding["kind"], finding["ranks"], finding["victims"]) == ("missing", [1], [0])
    # IPython gives a cell a file name of its own: ipykernel_PID/NUMBER.py.
    assert f".py:{line_of(NOTEBOOK, '# the hang')} in work" in finding["summary"]
    assert "/ipykernel_" in finding["summary"]
