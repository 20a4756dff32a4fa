"""Write a node's evidence to a URL: any that fsspec knows, for example ``s3://bucket/run``.

The files are those of a bundle. So what lies there is a run like any other, once it is copied to a
disk, and the files of all nodes lie side by side.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from rankcall.errors import RankcallError, warn_once
from rankcall.transfer.bundle import Rings, write_files


def upload(url: str, run_dir: Path, rings: Rings, node: Rings) -> bool:
    """Write the tails of these rings, and what belongs to them, below a URL.

    Any failure is one line on stderr. May take long: call it on a thread of its own.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="rankcall-") as scratch:
            files = write_files(run_dir, rings, node, Path(scratch))
            if (run_dir / "run.json").is_file():
                files.append(("run.json", run_dir / "run.json"))
            _write(url, files)
    except Exception as error:  # of any package that serves a protocol
        warn_once(f"the newest records cannot be written to {url}: {type(error).__name__}: {error}")
        return False
    return True


def check_url(url: str) -> None:
    """Raise ``RankcallError`` if this Python cannot write to a URL."""
    fsspec = _fsspec()
    try:
        fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise RankcallError(f"--collect-to {url}: {error}") from error


def _write(url: str, files: list[tuple[str, Path]]) -> None:
    files_at, root = _fsspec().core.url_to_fs(url)
    made = set()
    for inside, path in files:
        target = f"{root.rstrip('/')}/{inside}"
        folder = target.rpartition("/")[0]
        if folder not in made:
            files_at.makedirs(folder, exist_ok=True)
            made.add(folder)
        files_at.pipe_file(target, path.read_bytes())


def _fsspec() -> Any:
    try:
        import fsspec
    except ImportError as error:
        raise RankcallError(
            "writing to a URL needs fsspec: pip install 'rankcall[remote]'"
        ) from error
    return fsspec
