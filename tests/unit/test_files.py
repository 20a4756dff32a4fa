"""Files in shared places: made private, checked before use, and never through a link."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rankcall import process
from rankcall.files import append_line, create_file, open_file, replacing
from rankcall.folders import UnsafeFolderError, check_file, check_folder, make_folder, run_folder


@contextmanager
def umask(value: int) -> Iterator[None]:
    """Set the umask for a block."""
    before = os.umask(value)
    try:
        yield
    finally:
        os.umask(before)


def mode_of(path: Path) -> int:
    """Return the permission bits of a path itself."""
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.mark.parametrize("mask", [0, 0o022, 0o077, 0o777])
def test_a_new_folder_is_private_whatever_the_umask(tmp_path: Path, mask: int) -> None:
    """A new folder has mode 0700, and other users cannot write to its new parents."""
    with umask(mask):
        make_folder(tmp_path / "a" / "b" / "c")
    assert mode_of(tmp_path / "a" / "b" / "c") == 0o700
    for parent in (tmp_path / "a", tmp_path / "a" / "b"):
        assert mode_of(parent) & 0o722 == 0o700


@pytest.mark.parametrize("mask", [0, 0o777])
def test_a_new_file_has_the_mode_that_was_asked_for(tmp_path: Path, mask: int) -> None:
    """The umask neither opens a private file to others nor locks us out of it."""
    with umask(mask):
        os.close(create_file(tmp_path / "x"))
    assert mode_of(tmp_path / "x") == 0o600


def test_a_folder_that_others_can_write(tmp_path: Path) -> None:
    """A folder that others can write to is refused, unless ``private=False``; its mode stays."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o2775)
    with pytest.raises(UnsafeFolderError, match=r"other users \(mode 2775; chmod go-w\)"):
        make_folder(shared)
    make_folder(shared, private=False)
    assert mode_of(shared) == 0o2775


def test_a_folder_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of another user is refused, unless that user is trusted."""
    make_folder(tmp_path / "theirs")
    owner = os.geteuid()
    monkeypatch.setattr(process.os, "geteuid", lambda: owner + 1)
    with pytest.raises(
        UnsafeFolderError, match=f"belongs to user {owner}, not to user {owner + 1}"
    ):
        make_folder(tmp_path / "theirs")
    check_folder(tmp_path / "theirs", {owner})


def test_links_and_files_are_no_folders(tmp_path: Path) -> None:
    """A link is refused even if it leads to a folder of ours; a file is an error, too."""
    make_folder(tmp_path / "real")
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(UnsafeFolderError, match="symbolic link"):
        make_folder(tmp_path / "link")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        make_folder(tmp_path / "file")


def test_a_parent_that_cannot_be_made(tmp_path: Path) -> None:
    """If another process keeps removing the parents, making a folder fails after a few attempts."""
    with pytest.raises(OSError):  # noqa: PT011  # which one is the kernel's to say
        make_folder(Path("/proc/nowhere/at/all"))


def test_a_folder_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder may belong to the run's owner: some servers give all files to one user."""
    run_folder(tmp_path, "rings")
    owner = os.geteuid()
    monkeypatch.setattr(process.os, "geteuid", lambda: owner + 1)
    assert run_folder(tmp_path, "rings") == tmp_path / "rings"
    (tmp_path / "exits").symlink_to("rings")
    with pytest.raises(UnsafeFolderError, match="symbolic link"):
        run_folder(tmp_path, "exits")


def test_what_is_read_is_a_regular_file(tmp_path: Path) -> None:
    """Links are not followed, and a pipe without a writer is not waited for."""
    (tmp_path / "secret").write_text("x")
    (tmp_path / "link").symlink_to("secret")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(UnsafeFolderError):
            open_file(tmp_path / name)
        with pytest.raises(UnsafeFolderError):
            check_file(tmp_path / name)
    with open_file(tmp_path / "secret") as file:
        assert file.read() == b"x"


def test_a_planted_link_is_not_written_through(tmp_path: Path) -> None:
    """Neither a new file nor an appended line reaches what a link leads to."""
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (tmp_path / "link").symlink_to("precious")
    with pytest.raises(FileExistsError):
        create_file(tmp_path / "link")
    with pytest.raises(OSError, match="symbolic link"):
        append_line(tmp_path / "link", b"x\n")
    with replacing(tmp_path / "link") as file:
        file.write(b"new")
    assert precious.read_text() == "precious"
    assert (tmp_path / "link").read_text() == "new"
    assert not (tmp_path / "link").is_symlink()


def test_a_file_that_is_not_finished_leaves_nothing(tmp_path: Path) -> None:
    """If writing fails, the old file stays and no scratch file; scratch names are random."""
    (tmp_path / "x").write_text("old")
    names = set()

    def fail() -> None:
        with replacing(tmp_path / "x") as file:
            file.write(b"half")
            names.update(path.name for path in tmp_path.iterdir())
            raise RuntimeError

    for _ in range(2):
        with pytest.raises(RuntimeError):
            fail()
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x").read_text() == "old"
    assert len(names) == 3
