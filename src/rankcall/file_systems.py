"""Tell file systems of this host from those that depend on another host.

Rings are mapped, and a mapped page of a network file system can wait for its server while the
training thread writes a record.
"""

from __future__ import annotations

import os
from pathlib import Path

from rankcall.folders import UnsafeFolderError

# A mapped page of these never waits for another host. Any other type, also one that is not listed
# yet, counts as remote. Recording then stays in memory.
_LOCAL = {"tmpfs", "ramfs", "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "jfs", "overlay"}

# These write a changed page to a new block, so a page whose room was reserved can still find none,
# and that is a SIGBUS in the process that maps it.
_COPY_ON_WRITE = {"btrfs", "zfs"}


def is_local(path: Path, mountinfo: str | None = None) -> bool:
    """Return whether a path is on a file system that does not depend on another host.

    ``mountinfo`` is the text of proc(5)'s mountinfo, for tests. False if it cannot be read.
    """
    return file_system(path, mountinfo) in _LOCAL


def check_mappable(folder: Path) -> None:
    """Raise ``UnsafeFolderError`` if a mapped file in a folder could harm its writer.

    Its pages must not wait for another host. Once their room is reserved, they must never find the
    disk full.
    """
    kind = file_system(folder) or "unknown"
    if kind not in _LOCAL:
        raise UnsafeFolderError(folder, f"is on a file system that is not local ({kind})")
    if kind in _COPY_ON_WRITE:
        raise UnsafeFolderError(folder, f"is on a file system that keeps no room reserved ({kind})")


def file_system(path: Path, mountinfo: str | None = None) -> str:
    """Return the type of the file system that a path is on; empty if that is not known."""
    if mountinfo is None:
        try:
            mountinfo = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
        except OSError:
            return ""
    wanted = os.path.realpath(path)
    best, kind = "", ""
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, rest = before.split(" "), after.split(" ")
        if len(fields) < 5 or not rest[0]:
            continue
        mounted_at = _unescaped(fields[4])
        inside = wanted == mounted_at or wanted.startswith(mounted_at.rstrip("/") + "/")
        if inside and len(mounted_at) >= len(best):  # of two at one place the later hides the first
            best, kind = mounted_at, rest[0]
    return kind


def _unescaped(text: str) -> str:
    for code, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, char)
    return text
