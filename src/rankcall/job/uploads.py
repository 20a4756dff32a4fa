"""Write a node's newest records below a URL, beside those of the other nodes (``--collect-to``).

The URL is any that fsspec knows, for example ``s3://bucket/run``. A copy of what is there on a disk
is a run like any other.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from rankcall.errors import RankcallError, warn_once
from rankcall.job.bundles import NEWEST, Rings, bundle_files
from rankcall.run.redaction import redact_text


def upload(url: str, run_dir: Path, rings: Rings, node: Rings) -> bool:
    """Write the tails of these rings, with states and stacks, below a URL.

    Any failure is one line on stderr. May take long: call it on a thread of its own.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="rankcall-") as scratch:
            files = list(bundle_files(run_dir, rings, node, NEWEST[0], Path(scratch)))
            if (run_dir / "run.json").is_file():
                files.append(("run.json", run_dir / "run.json"))
            _write(url, files)
    except Exception as error:  # of any package that serves a protocol
        reason = f"{redact_text(url)}: {type(error).__name__}: {redact_text(str(error))}"
        warn_once(f"the newest records cannot be written to {reason}")
        return False
    return True


def check_url(url: str) -> None:
    """Raise ``RankcallError`` if this Python cannot write to a URL."""
    fsspec = _fsspec()
    try:
        fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise RankcallError(redact_text(f"--collect-to {url}: {error}")) from None


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
