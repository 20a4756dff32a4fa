"""A ring file has its name only once its header tells whose it is."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from rankcall.ring import writer
from rankcall.ring.layout import Geometry, parse_header
from rankcall.ring.lock import try_lock
from rankcall.ring.writer import Identity, create_locked, create_unnamed, name_file

GEOMETRY = Geometry(64, 8, 4096)
ME = Identity(rank=3, world_size=4, host="node-a")


def _is_whole(path: Path, lock: writer.WriterLock) -> None:
    """Check a ring of this process: it is locked, of mode 0600, and has a header."""
    header = parse_header(path.read_bytes(), "")
    assert (header.rank, header.pid, header.locked) == (3, os.getpid(), True)
    assert path.stat().st_mode & 0o777 == 0o600
    with path.open("rb") as file:
        assert not try_lock(file.fileno())
        lock.release()
        assert try_lock(file.fileno())


def test_no_file_without_a_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed while it makes its ring leaves no file.

    Nobody could tell whose such a file is, so it would stay for ever.
    """
    there: list[list[str]] = []

    def prepared(*arguments: Any) -> Any:
        there.append(os.listdir(tmp_path))
        return make(*arguments)

    make = writer._prepared
    monkeypatch.setattr(writer, "_prepared", prepared)
    old = os.umask(0o277)  # it would take the owner's right to write
    try:
        _, lock = create_locked(tmp_path / "a.ring", ME, GEOMETRY, tmp_path)
    finally:
        os.umask(old)
    assert there == [[]]
    _is_whole(tmp_path / "a.ring", lock)


@pytest.mark.parametrize("refused", ["open", "link"])
def test_a_file_system_without_unnamed_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """The ring is made under its name."""
    real = getattr(os, refused)

    def refusing(path: Any, *arguments: Any, **options: Any) -> Any:
        if refused == "link" or arguments[0] & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not supported")
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, refused, refusing)
    _, lock = create_locked(tmp_path / "a.ring", ME, GEOMETRY, tmp_path)
    monkeypatch.undo()
    _is_whole(tmp_path / "a.ring", lock)
    assert os.listdir(tmp_path) == ["a.ring"]


def test_a_name_that_is_taken(tmp_path: Path) -> None:
    """The file of that name stays as it is."""
    (tmp_path / "a.ring").write_bytes(b"another's")
    with pytest.raises(FileExistsError):
        create_locked(tmp_path / "a.ring", ME, GEOMETRY)
    _, fd, lock = create_unnamed(tmp_path, ME, GEOMETRY)
    with pytest.raises(FileExistsError):
        name_file(fd, tmp_path / "a.ring")
    os.close(fd)
    lock.release()
    assert (tmp_path / "a.ring").read_bytes() == b"another's"
    assert os.listdir(tmp_path) == ["a.ring"]


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    """``create_locked`` says so: the caller makes it anew."""
    with pytest.raises(FileNotFoundError):
        create_locked(tmp_path / "gone" / "a.ring", ME, GEOMETRY)
