"""Which file systems depend on another host."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankcall.file_systems import check_mappable, file_system, is_local
from rankcall.folders import UnsafeFolderError

MOUNTS = """\
21 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 21 0:25 / /dev/shm rw,nosuid shared:4 - tmpfs tmpfs rw
31 21 0:40 / /home rw shared:9 master:2 - nfs4 server:/home rw,vers=4.2
32 31 254:1 / /home/fast\\040disk rw - xfs /dev/vdb rw
33 21 0:50 / /data rw - fuse.sshfs host:/data rw
34 21 0:51 / /data rw - ext4 /dev/vdc rw
"""


@pytest.mark.parametrize(
    ("path", "kind", "local"),
    [
        ("/dev/shm/rankcall-0", "tmpfs", True),
        ("/var/tmp", "ext4", True),
        ("/home/me/run", "nfs4", False),
        ("/homes", "ext4", True),
        ("/home/fast disk/run", "xfs", True),
        ("/data/x", "ext4", True),
    ],
)
def test_file_systems(path: str, kind: str, local: bool) -> None:
    """The innermost mount counts, and of two at one place the later one."""
    assert file_system(Path(path), MOUNTS) == kind
    assert is_local(Path(path), MOUNTS) is local


def test_an_unknown_file_system_is_not_local() -> None:
    """A type that is not listed, or no answer at all, counts as remote."""
    assert not is_local(Path("/x"), "21 1 0:1 / / rw - newfs new rw\n")
    assert not is_local(Path("/x"), "")
    assert not is_local(Path("/x"), "damaged\n")


@pytest.mark.parametrize("kind", ["nfs4", "btrfs", "zfs"])
def test_where_no_ring_is_mapped(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that waits for a server, or whose reserved room may be gone, would harm the job."""
    monkeypatch.setattr("rankcall.file_systems.file_system", lambda path: kind)
    with pytest.raises(UnsafeFolderError, match=kind):
        check_mappable(Path("/x"))
