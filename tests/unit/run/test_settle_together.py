"""Several launchers of one host end at the same time and move the rings of one run."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rankcall.ring.layout import Geometry
from rankcall.ring.writer import Identity, create, put
from rankcall.run.hangs import STACKS, stacks_in
from rankcall.run.load import load
from rankcall.run.paths import live_dir, make_live_dir, ring_name, ring_paths
from rankcall.run.settle import settle


def make_rings(run: Path, count: int) -> None:
    """Make closed rings in the folder of live rings."""
    live = make_live_dir(run)
    for rank in range(count):
        identity = Identity(rank=rank, world_size=count, local_rank=rank, host="h")
        ring = create(live / ring_name(rank, 0, "h", 1), identity, Geometry(1 << 10))
        put(ring, "closed_ns", 1)
        ring.close()


def test_every_ring_is_moved_once(tmp_path: Path) -> None:
    """If two processes settle one run at the same time, every ring arrives complete."""
    for turn in range(30):
        run = tmp_path / f"run-{turn}"
        run.mkdir()
        make_rings(run, 4)
        together = threading.Barrier(3)

        def end(run: Path = run, together: threading.Barrier = together) -> None:
            together.wait()
            settle(run)

        launchers = [threading.Thread(target=end) for _ in range(3)]
        for launcher in launchers:
            launcher.start()
        for launcher in launchers:
            launcher.join()
        assert not live_dir(run).exists()
        assert sorted(path.suffix for path in (run / "rings").iterdir()) == [".ring"] * 4
        assert load(run).problems == []


def make_stacks_dir(verdict: Path) -> Path:
    """Make the folder of the stacks beside a verdict."""
    (verdict / STACKS).mkdir()
    return verdict / STACKS


@pytest.mark.parametrize(
    ("call", "make"),
    [(settle, make_live_dir), (ring_paths, make_live_dir), (stacks_in, make_stacks_dir)],
)
def test_a_folder_goes(
    call: Callable[[Path], list[Path]],
    make: Callable[[Path], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another launcher has moved what was in a folder, and removes it just before it is listed."""
    goes = make(tmp_path)
    listed = []

    def after_removal(listing: Callable[..., Any]) -> Callable[..., Any]:
        def look(folder: Any = ".") -> Any:
            if str(folder) == str(goes):
                listed.append(folder)
                with suppress(FileNotFoundError):
                    goes.rmdir()
            return listing(folder)

        return look

    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, after_removal(getattr(os, name)))
    assert call(tmp_path) == []
    assert listed
