"""The cgroup of this process: where the kernel counts its waiting, and which limit it has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


def own_cgroup() -> Path | None:
    """Return the folder of this process's cgroup of version 2; None if it cannot be seen."""
    return next(_and_above(), None)


def limited_cgroup() -> Path | None:
    """Return the folder of the nearest cgroup that limits this process's CPU time.

    The kernel counts throttling in the cgroup that has the limit, and not in those below. None
    without a limit, or if it cannot be seen.
    """
    for folder in _and_above():
        quota = _text(folder / "cpu.max")
        if quota and not quota.startswith("max"):
            return folder
    mount = next((_ROOT / name for name in ("cpu", "cpu,cpuacct") if (_ROOT / name).is_dir()), None)
    for path in _paths_of("cpu"):
        if mount is None:
            break
        for folder in (mount / path, mount):  # in a container, only the mount itself may be there
            quota = _text(folder / "cpu.cfs_quota_us")
            if quota:
                return folder if not quota.startswith("-") else None
    return None


def _and_above() -> Iterator[Path]:
    """Yield the folders of the process's cgroup of version 2, and of those above it."""
    for path in _paths_of(""):
        folder = _ROOT / path
        # In a container the kernel may name a path outside it, which has no folder here.
        folder = folder if (folder / "cgroup.procs").exists() else _ROOT
        if not (folder / "cgroup.procs").exists():
            return
        while True:
            yield folder
            if folder == _ROOT:
                return
            folder = folder.parent


def _paths_of(controller: str) -> Iterator[str]:
    """Yield the paths below the mount of a controller's hierarchy; "" is version 2."""
    for line in _text(Path("/proc/self/cgroup")).splitlines():
        number, controllers, path = line.split(":", 2)
        if controller in controllers.split(",") if controller else number == "0":
            yield path.lstrip("/")


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
