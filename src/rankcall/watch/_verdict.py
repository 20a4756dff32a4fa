"""Verdicts in the run directory: made, written once, found by every rank of the node."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path

from rankcall import _hangs
from rankcall._hangs import HANGS, Object
from rankcall.analysis.diagnosis import Diagnosis
from rankcall.analysis.finding import Finding
from rankcall.files import run_folder
from rankcall.report import diagnosis_json
from rankcall.rundir import kept_hangs, make_live_dir

_NAMES = {field.name for field in fields(Finding)}
_LISTS = ("ranks", "victims", "hosts", "evidence")
_AGAIN = "again_s"


def encode(diagnosis: Diagnosis) -> bytes:
    """Return a diagnosis with its printed form as one JSON object."""
    from rankcall.report import diagnosis as report  # rich comes with it: only where it is needed

    words = report.render(diagnosis) if diagnosis.findings else ""
    return _encoded({**diagnosis_json.as_object(diagnosis), "text": words})


def put_off(seconds: float) -> bytes:
    """Return what says that it is not clear yet, and will be in so many s."""
    return _encoded({"findings": [], _AGAIN: seconds})


def _encoded(found: Object) -> bytes:
    about = {"epoch_ns": time.time_ns(), "by_pid": os.getpid()}
    return json.dumps({**found, "hang": about}).encode()


def put_off_by(verdict: Object) -> float:
    """Return in how many s to judge again; 0 where this is a verdict."""
    return float(verdict.get(_AGAIN, 0.0))


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
    appears all at once, and one of two processes that write at the same time looks again. Where
    the run directory cannot be written, it is kept beside the live rings; raises ``OSError`` where
    that fails, too.
    """
    try:
        return _write(run_dir, run_dir, verdict, stacks, since)
    except OSError:
        return _write(run_dir, make_live_dir(run_dir), verdict, stacks, since)


def _write(
    run_dir: Path, where: Path, verdict: Object, stacks: Mapping[int, str], since: int
) -> Path | None:
    folder = run_folder(where, HANGS)
    scratch = where / f".hang.{os.getpid()}.{threading.get_native_id()}"
    try:
        while True:
            place, all_kept = _hangs.next_free(folder), kept_hangs(run_dir)
            same = [Path(each["place"]) for each in all_kept if each["hang"] == verdict["hang"]]
            if same:
                _add_stacks(same[0], stacks)
                return same[0]
            if not news(findings_of(verdict), _from(all_kept, since)):
                return None
            if not scratch.exists():
                _hangs.fill(scratch, verdict)
                _add_stacks(scratch, stacks)
            if _hangs.claim(scratch, place):
                return place
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _add_stacks(place: Path, stacks: Mapping[int, str]) -> None:
    if stacks:
        (place / _hangs.STACKS).mkdir(mode=0o700, exist_ok=True)
    for rank, text in stacks.items():
        (place / _hangs.STACKS / f"rank-{rank:05d}.txt").write_text(text + "\n")


def written(run_dir: Path, since_epoch_ns: int = 0) -> list[Object]:
    """Return the run's verdicts from a time on, oldest first; what cannot be read is left out."""
    return _from(kept_hangs(run_dir), since_epoch_ns)


def _from(verdicts: Iterable[Object], since_epoch_ns: int) -> list[Object]:
    return [each for each in verdicts if each["hang"]["epoch_ns"] >= since_epoch_ns]


def news(findings: Iterable[Finding], told: Iterable[Object]) -> bool:
    """Tell whether some finding is of a rank that no earlier verdict has named."""
    earlier = list(told)
    named = {rank for verdict in earlier for each in findings_of(verdict) for rank in each.ranks}
    found = list(findings)
    return bool(found) and (
        not earlier or any(rank not in named for each in found for rank in each.ranks)
    )
