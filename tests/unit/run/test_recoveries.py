"""The file of recoveries: what is written is read, and damage is left out."""

from __future__ import annotations

import json
import os
import subprocess
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import rankcall
from rankcall.run.recoveries import (
    END_VARIABLE,
    FILE_VARIABLE,
    AttemptEnd,
    AttemptStart,
    Check,
    NodeChecked,
    Signature,
    file_of,
    newest_checks,
    note,
    previous_end,
    read_file,
    read_recoveries,
    tell_workers,
)

END = AttemptEnd(
    0,
    Signature("stopped", "all_reduce", "train.py:9", "one rank"),
    "machine",
    (1,),
    "Rank 1 is stopped.",
    step=10,
    steps=10,
    lost=4,
    progressed=True,
    fault_ns=5,
    verdict_ns=6,
    ended_ns=7,
    noticed_ns=8,
    stopped_ns=9,
    decision="restart",
    rule="goes_on",
    reason="the machine is at fault, and the job makes progress",
    delay_s=2.0,
    verdict="0001",
)


def test_what_is_noted_is_read(tmp_path: Path) -> None:
    """Each event is a line; the files of two agents are read, the earlier one first."""
    path, other = file_of(tmp_path, "node/a", 7), file_of(tmp_path, "node-b", 3)
    for event in (AttemptStart(0, 4), END, AttemptStart(1, 12)):
        note(path, event)
    note(other, AttemptStart(0, 3))
    assert path.name == "node_a.7.jsonl"
    first, second = read_recoveries(tmp_path)
    assert (first.path, first.starts, first.ends) == (other, [AttemptStart(0, 3)], [])
    assert (second.starts, second.ends) == ([AttemptStart(0, 4), AttemptStart(1, 12)], [END])


CHECKED = NodeChecked(
    "node-a", 5, (Check("disk", "well", "", 0.5), Check("network", "suspect", "no transfer"))
)


def test_how_a_node_was(tmp_path: Path) -> None:
    """The newest check of each node counts, whichever of its agents noted it."""
    later = replace(CHECKED, epoch_ns=9, checks=())
    note(file_of(tmp_path, "node-a", 8), later)
    note(file_of(tmp_path, "node-a", 7), CHECKED)
    note(file_of(tmp_path, "node-b", 7), replace(CHECKED, node="node-b"))
    agents = read_recoveries(tmp_path)
    assert newest_checks(agents) == [later, replace(CHECKED, node="node-b")]
    assert [agent.checks for agent in agents].count([CHECKED]) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"node": 5},
        {"epoch_ns": -1},
        {"checks": 5},
        {"checks": [[]]},
        {"checks": [{"name": "disk", "state": "great", "text": "", "seconds": 0}]},
        {"checks": [{"name": "disk", "state": "well", "text": 1, "seconds": 0}]},
        {"checks": [{"name": "disk", "state": "well", "text": "", "seconds": -1}]},
        {"checks": [{"name": "disk", "state": ["well"], "text": "", "seconds": 0}]},
    ],
)
def test_damaged_checks_are_left_out(change: dict[str, Any], tmp_path: Path) -> None:
    """They hide neither the others nor the attempts."""
    path = file_of(tmp_path, "node-a", 7)
    note(path, CHECKED)
    with path.open("a") as file:
        file.write(json.dumps({"checked": {**asdict(CHECKED), **change}}) + "\n")
    note(path, AttemptStart(0, 4))
    (agent,) = read_recoveries(tmp_path)
    assert (agent.checks, agent.starts) == ([CHECKED], [AttemptStart(0, 4)])


def test_many_checks_of_a_node(tmp_path: Path) -> None:
    """No more are kept than a node has."""
    note(file_of(tmp_path, "node-a", 7), replace(CHECKED, checks=CHECKED.checks * 50))
    assert len(newest_checks(read_recoveries(tmp_path))[0].checks) == 16


@pytest.mark.parametrize(
    "change",
    [
        {"restart": -1},
        {"restart": True},
        {"step": 1 << 70},
        {"lost": -2},
        {"culprits": ["x"]},
        {"culprits": [1 << 60]},
        {"signature": []},
        {"summary": 5},
        {"delay_s": float("nan")},
        {"delay_s": -1},
        {"fault_ns": 1.5},
    ],
)
def test_damaged_lines_are_left_out(change: dict[str, Any], tmp_path: Path) -> None:
    """One line of another program's does not hide the others."""
    path = file_of(tmp_path, "node-a", 7)
    note(path, END)
    with path.open("a") as file:
        file.write(json.dumps({"end": {**asdict(END), **change}}) + "\n[" * 3 + "\nnull\n{}\n")
    note(path, AttemptStart(1, 12))
    read = read_file(path)
    assert (read.starts, read.ends) == ([AttemptStart(1, 12)], [END])


def test_previous_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restarted attempt learns of the one before it; the first one has none."""
    for variable in (FILE_VARIABLE, END_VARIABLE):
        monkeypatch.setenv(variable, "")
    tell_workers(tmp_path / "file", replace(END, fault_ns=time.time_ns() - int(3e9)))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert rankcall.previous_attempt() is None
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    previous = rankcall.previous_attempt()
    assert previous is not None
    assert (previous.verdict, previous.culprits, previous.step) == ("stopped", (1,), 10)
    assert (previous.summary, previous.restarts) == (END.summary, 1)
    assert 3 <= previous.downtime_s < 60
    for damaged in ("", "{}", "[" * 100_000, os.environ[END_VARIABLE].replace("10", "-7")):
        monkeypatch.setenv(END_VARIABLE, damaged)
        assert rankcall.previous_attempt() is None


def test_a_long_verdict_keeps_no_worker_from_being_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel starts no process with a variable of more than 128 KiB."""
    for name in (FILE_VARIABLE, END_VARIABLE):
        monkeypatch.setenv(name, "")
    long = replace(END, culprits=tuple(range(16_384)), summary="🧨" * 200_000, reason="é" * 200_000)
    tell_workers(Path("file"), long)
    told = subprocess.run(
        ["/bin/sh", "-c", f"echo ${END_VARIABLE}"], capture_output=True, check=True
    )
    assert json.loads(told.stdout)["culprits"] == list(range(64))
    end = previous_end()
    assert end is not None
    assert (end.step, end.culprits[:2], end.summary[:1]) == (10, (0, 1), "🧨")
