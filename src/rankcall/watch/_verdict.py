"""Verdicts in the run directory: written once, found by every rank of the node.

::

    hangs/0001/verdict.json         as ``rankcall diagnose --json``, and when and by whom
    hangs/0001/verdict.txt          what was printed
    hangs/0001/stacks/rank-00003.txt
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import threading
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from rankcall.analysis.diagnosis import Diagnosis
from rankcall.analysis.finding import Finding
from rankcall.report import diagnosis_json

HANGS = "hangs"
_NAMES = {field.name for field in fields(Finding)}
_LISTS = ("ranks", "victims", "hosts", "evidence")
Object = dict[str, Any]


def encode(diagnosis: Diagnosis, about: Mapping[str, Any]) -> bytes:
    """Return a diagnosis with its printed form as one JSON object."""
    from rankcall.report import diagnosis as report  # rich comes with it: only where it is needed

    words = report.render(diagnosis) if diagnosis.findings else ""
    found = {**diagnosis_json.as_object(diagnosis), "hang": dict(about), "text": words}
    return json.dumps(found).encode()


def decode(raw: bytes) -> Object:
    """Read what ``encode`` wrote; raises ``ValueError`` where it is not that."""
    found = json.loads(raw)
    if not (isinstance(found, dict) and isinstance(found.get("findings"), list)):
        raise ValueError("no verdict")
    return found


def findings_of(verdict: Object) -> list[Finding]:
    """Return a verdict's findings."""
    return [_finding(each) for each in verdict["findings"]]


def _finding(found: Object) -> Finding:
    fields: Object = {
        name: tuple(value) if name in _LISTS else value
        for name, value in found.items()
        if name in _NAMES and value is not None
    }
    return Finding(**fields)


def write(run_dir: Path, verdict: Object, stacks: Mapping[int, str], since: int) -> Path | None:
    """Keep a verdict under the next number and return where; None where it is no news by now.

    ``since``: epoch ns from which on verdicts are of the same hang. Where another node has kept
    this very one, on a file system that is shared, the stacks of our ranks are added to it. It
    appears all at once, and one of two processes that write at the same time looks again. Raises
    ``OSError`` where the run directory cannot be written.
    """
    folder = run_dir / HANGS
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    scratch = run_dir / f".hang.{os.getpid()}.{threading.get_native_id()}"
    try:
        _fill(scratch, verdict, stacks)
        while True:
            number = 1 + max((int(each.name) for each in _numbered(folder)), default=0)
            told = written(run_dir, since)
            same = [Path(each["place"]) for each in told if each["hang"] == verdict["hang"]]
            if same:
                _add_stacks(same[0], stacks)
                return same[0]
            if not news(findings_of(verdict), told):
                return None
            place = folder / f"{number:04d}"
            try:
                scratch.rename(place)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
            else:
                return place
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _fill(place: Path, verdict: Object, stacks: Mapping[int, str]) -> None:
    place.mkdir(mode=0o700)
    _add_stacks(place, stacks)
    (place / "verdict.txt").write_text(str(verdict.get("text", "")))
    kept = {key: value for key, value in verdict.items() if key != "text"}
    (place / "verdict.json").write_text(json.dumps(kept, indent=1))


def _add_stacks(place: Path, stacks: Mapping[int, str]) -> None:
    if stacks:
        (place / "stacks").mkdir(mode=0o700, exist_ok=True)
    for rank, text in stacks.items():
        (place / "stacks" / f"rank-{rank:05d}.txt").write_text(text + "\n")


def written(run_dir: Path, since_epoch_ns: int = 0) -> list[Object]:
    """Return the run's verdicts from a time on, oldest first; what cannot be read is left out."""
    found = []
    for place in _numbered(run_dir / HANGS):
        with contextlib.suppress(OSError, ValueError):
            verdict = decode((place / "verdict.json").read_bytes())
            if int(verdict.get("hang", {}).get("epoch_ns", 0)) >= since_epoch_ns:
                found.append({**verdict, "place": str(place)})
    return found


def text_of(verdict: Object) -> str:
    """Return what was printed of a verdict that ``written`` found."""
    try:
        return (Path(verdict["place"]) / "verdict.txt").read_text()
    except OSError:
        return f"verdict: {verdict.get('verdict')}"


def news(findings: Iterable[Finding], told: Iterable[Object]) -> bool:
    """Tell whether some finding is of a rank that no earlier verdict has named."""
    earlier = list(told)
    named = {rank for verdict in earlier for each in findings_of(verdict) for rank in each.ranks}
    found = list(findings)
    return bool(found) and (
        not earlier or any(rank not in named for each in found for rank in each.ranks)
    )


def _numbered(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(each for each in folder.iterdir() if each.name.isdigit())
