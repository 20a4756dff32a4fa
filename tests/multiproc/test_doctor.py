"""``rankcall doctor`` says whether recording works, and its exit status says it to scripts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from launch import launch

pytestmark = pytest.mark.multiproc


def states(folder: Path, env: Mapping[str, str]) -> tuple[int, dict[str, str], str]:
    """Return the exit status, the state of each topic, and the output."""
    ended = launch("doctor", cwd=folder, env={"RANKCALL_CAPTURE": "python", **env}, timeout=240)
    *lines, _ = ended.out.splitlines()
    return ended.status, {line[6:20].strip(): line[:5].strip() for line in lines}, ended.out


def test_a_machine_on_which_recording_works(tmp_path: Path) -> None:
    """Each topic has a line, the trial was recorded, nothing is left behind, and it fits."""
    status, by_topic, out = states(tmp_path, {})
    assert status == 0, out
    assert "FAIL" not in by_topic.values()
    assert by_topic["torch"] == by_topic["trial"] == by_topic["shared memory"] == "ok"
    topics = {"python", "torch", "recorder", "shared memory", "stacks", "launcher", "RANKCALL"}
    assert topics | {"store", "GPU", "trial"} == set(by_topic)
    assert "with its line" in out
    assert by_topic["recorder"] == "weak"
    assert "as RANKCALL_CAPTURE says; unset it for the native recorder" in out
    assert len(out.splitlines()) <= 24
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("env", "topic"),
    [
        pytest.param({"RANKCALL": "0"}, "RANKCALL", id="switched off", marks=pytest.mark.slow),
        pytest.param({"PYTHONPATH": "old"}, "torch", id="torch is too old"),
    ],
)
def test_what_keeps_recording_from_working(tmp_path: Path, env: dict[str, str], topic: str) -> None:
    """The topic fails, and so does the command."""
    (tmp_path / "old").mkdir()
    (tmp_path / "old/torch.py").write_text("__version__ = '2.4.1'\n")
    status, by_topic, out = states(tmp_path, env)
    assert status == 1
    assert by_topic[topic] == "FAIL"
    assert "recording will not work here" in out


@pytest.mark.slow
def test_what_only_makes_recording_weaker(tmp_path: Path) -> None:
    """Without a compiler, and with a store that does not answer, recording works all the same."""
    (tmp_path / "bin").mkdir()
    env = {"PATH": str(tmp_path / "bin"), "CXX": "", "RANKCALL_CACHE": str(tmp_path / "cache")}
    env["RANKCALL_CAPTURE"] = "auto"
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "SLURM_JOB_ID": "7"}
    status, by_topic, out = states(tmp_path, {**env, **job})
    assert status == 0, out
    assert by_topic["recorder"] == by_topic["store"] == "weak"
    assert by_topic["trial"] == "ok"
    assert "below Slurm" in out
