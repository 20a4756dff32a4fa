"""A worker's folder: the user's own, cleared of what the killed left."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rankcall.rpc._place import Place


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep the folders below a scratch folder."""
    monkeypatch.setenv("RANKCALL_SHM", str(tmp_path))
    return tmp_path / f"rankcall-{os.getuid()}" / "rpc"


def test_a_folder_goes_with_its_worker(base: Path) -> None:
    """Made for this user alone, and removed with all that is in it, once."""
    place = Place(7)
    assert place.path == base / f"{7:016x}"
    assert place.path.stat().st_mode & 0o777 == 0o700
    (place.path / "1").write_bytes(b"block")
    place.close()
    place.close()
    assert not base.parent.exists()


def test_what_the_killed_left_is_removed(base: Path) -> None:
    """The next worker removes the folders that nobody holds, and no other."""
    alive = Place(1)
    left = base / "left"
    left.mkdir()
    (left / "lock").touch()
    (left / "1").write_bytes(b"block")
    second = Place(2)
    assert not left.exists()
    assert alive.path.exists()
    alive.close()
    second.close()


def test_a_folder_that_others_may_read_is_refused(base: Path) -> None:
    """Memory that others could read or write is not used."""
    base.mkdir(parents=True)
    base.chmod(0o755)
    with pytest.raises(PermissionError, match="not this user's alone"):
        Place(1)
