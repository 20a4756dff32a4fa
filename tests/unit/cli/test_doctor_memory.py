"""``rankcall doctor`` counts the memory for the rings of as many ranks as a job has here."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from rankcall.cli import doctor
from rankcall.ring.layout import DEFAULT_SAMPLES, Geometry

RING = Geometry(sample_capacity=DEFAULT_SAMPLES).file_bytes


@pytest.mark.parametrize(
    ("free", "ranks", "state", "words"),
    [
        (16 * RING, 16, "ok", f"16 ranks (as the launcher says) take {16 * RING / 1e6:.1f} MB"),
        (16 * RING - 1, 16, "weak", "each ring will hold 4,096 records, not 16,384"),
        (1 << 20, 8, "weak", "each ring will hold 256 records"),
        (1 << 20, 9, "weak", "some go to the run directory"),
    ],
)
def test_room_for_all_ranks(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    free: int,
    ranks: int,
    state: str,
    words: str,
) -> None:
    """A small /dev/shm is weak, with the size of the rings and what gives more room."""
    monkeypatch.setenv("RANKCALL_SHM", str(tmp_path))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    usage = SimpleNamespace(free=free, total=64 << 20)
    monkeypatch.setattr("rankcall.cli.doctor.shutil.disk_usage", lambda path: usage)
    (finding,) = doctor._memory()
    assert (finding.topic, finding.state) == ("shared memory", state)
    assert words in finding.text
    assert ("--shm-size" in finding.text and "RANKCALL_SHM" in finding.text) == (state == "weak")
    assert os.listdir(tmp_path) == []
