"""``rankcall mcp``: what the protocol's reference client can read, and what it cannot."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp")

import anyio
from mcp import Client, StdioServerParameters

from rankcall.run.hangs import hang_folders
from rankcall.serve.assistant import ReadableRuns, server
from rankcall.testing.model import Planted
from rankcall.testing.synthetic import synthetic_run

RUN = "rankcall-runs/20261125T010203-train"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a run in which rank 5 never comes to the last call, and a run elsewhere."""
    base = tmp_path_factory.mktemp("mcp")
    job = base / "job"
    synthetic_run(job / RUN, 8, 200, planted=Planted("missing", (5,), 160))
    (job / RUN / "run.json").write_text(
        json.dumps({"command": ["torchrun", "train.py"], "started": "2026-11-25T01:02:03+00:00"})
    )
    synthetic_run(base / "elsewhere", 2, 50)
    yield job
    shutil.rmtree(base)


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """Return size and time of change of each file below a folder."""
    return {
        str(path): (path.lstat().st_size, path.lstat().st_mtime_ns)
        for path in folder.rglob("*")
        if not path.is_dir()
    }


def asked(folder: Path, tool: str, **arguments: Any) -> tuple[bool, Any]:
    """Return whether a call failed, and its result, through the reference client in-process."""

    async def ask() -> tuple[bool, Any]:
        async with Client(server(folder)) as client:
            result = await client.call_tool(tool, arguments)
            text = "".join(getattr(part, "text", "") for part in result.content)
            return bool(result.is_error), result.structured_content or text

    return anyio.run(ask)


def test_a_real_client_over_a_pipe(folder: Path) -> None:
    """The command answers the reference client, and stdout carries nothing but the protocol."""

    async def ask() -> tuple[set[str], list[bool | None], Any]:
        started = StdioServerParameters(
            command=sys.executable,
            args=["-m", "rankcall", "mcp", str(folder)],
            env=dict(os.environ),
        )
        with anyio.fail_after(120):
            async with Client(started) as client:
                tools = (await client.list_tools()).tools
                verdict = await client.call_tool("verdict", {"run": RUN})
        hints = [tool.annotations and tool.annotations.read_only_hint for tool in tools]
        return {tool.name for tool in tools}, hints, verdict.structured_content

    names, hints, verdict = anyio.run(ask)
    assert names == {"list_runs", "verdict", "report", "stacks"}
    assert all(hints)
    assert verdict["findings"][0]["ranks"] == [5]  # the rank that was planted


def test_the_verdict_names_the_planted_rank(folder: Path) -> None:
    """Without a run, the latest one is read."""
    failed, found = asked(folder, "verdict")
    assert not failed
    assert found["findings"][0]["ranks"] == [5]
    assert "rank 5" in found["text"].lower()
    assert found["ranks_left_out"] == 0


def test_runs_are_listed(folder: Path) -> None:
    """With the command that started them."""
    _, found = asked(folder, "list_runs")
    assert [run["run"] for run in found["result"]] == [RUN]
    assert found["result"][0]["command"] == ["torchrun", "train.py"]


def test_a_report_is_text(folder: Path) -> None:
    """As ``rankcall report`` prints it."""
    failed, found = asked(folder, "report", run=RUN)
    assert not failed
    assert "all_reduce" in str(found)


@pytest.mark.parametrize("run", ["../elsewhere", "rankcall-runs/../../elsewhere", "/etc", "away"])
def test_nothing_outside_the_folder_is_read(folder: Path, run: str) -> None:
    """By dots, by an absolute path, or through a link; the error reaches the client as text."""
    away = folder / "away"
    if not away.is_symlink():
        away.symlink_to("../elsewhere")
    failed, text = asked(folder, "verdict", run=run)
    assert failed
    assert "is not below" in text


@pytest.mark.parametrize(
    ("tool", "arguments", "error"),
    [
        ("verdict", {"run": "rankcall-runs/none"}, "no such run"),
        ("verdict", {"run": RUN, "attempt": 7}, "has no attempt 7"),
        ("stacks", {"run": RUN}, "no verdict with stacks"),
        ("report", {"run": "rankcall-runs"}, "rankcall-runs"),
    ],
)
def test_errors_say_what_is_wrong(
    folder: Path, tool: str, arguments: dict[str, Any], error: str
) -> None:
    """The program that asked can correct itself."""
    failed, text = asked(folder, tool, **arguments)
    assert failed
    assert error in text


def test_reading_changes_nothing(folder: Path) -> None:
    """No file is written, moved or removed, and no lock is taken in the run."""
    before = snapshot(folder)
    runs = ReadableRuns(folder)
    runs.list_runs()
    runs.verdict()
    runs.report()
    assert snapshot(folder) == before


def test_stacks_that_the_watcher_kept(folder: Path, tmp_path: Path) -> None:
    """Those of the ranks that the verdict names, or of those that are asked for; never too many."""
    shutil.copytree(folder / RUN, tmp_path / "run")
    place = tmp_path / "run/hangs/0001"
    (place / "stacks").mkdir(parents=True)
    finding = ReadableRuns(folder).verdict()["findings"][0]
    kept = {"schema": 1, "hang": {"id": "x", "epoch_ns": 1}, "findings": [finding]}
    (place / "verdict.json").write_text(json.dumps(kept))
    for rank in (0, 5):
        (place / f"stacks/rank-{rank:05d}.txt").write_text(f"stack of {rank}")
    assert len(hang_folders(tmp_path / "run")) == 1
    runs = ReadableRuns(tmp_path)
    assert runs.stacks("run")["5"] == "stack of 5"
    assert runs.stacks("run", [0]) == {"0": "stack of 0"}
    with pytest.raises(ValueError, match="at most 16 ranks"):
        runs.stacks("run", list(range(17)))


def test_answers_have_a_bound(tmp_path: Path) -> None:
    """Of many ranks, those that the verdict names are told, and how many are left out."""
    synthetic_run(tmp_path / "run", 200, 40, planted=Planted("missing", (150,), 20))
    found = ReadableRuns(tmp_path).verdict("run")
    assert len(found["ranks"]) == 64
    assert {place["rank"] for place in found["ranks"]} == {*range(63), 150}
    assert found["ranks_left_out"] == 136
    assert len(json.dumps(found)) < 120_000
