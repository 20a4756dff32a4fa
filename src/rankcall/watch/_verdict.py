"""Verdicts in the run directory: made, written once, found by every rank of the node."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from pathlib import Path

from rankcall import _hangs
from rankcall._hangs import HANGS, Object
from rankcall.analysis.diagnosis import Diagnosis
from rankcall.analysis.verdicts.finding import Finding
from rankcall.files import run_folder
from rankcall.process import boot_id
from rankcall.report.json import diagnosis_object
from rankcall.rundir import kept_hangs, make_live_dir

_NAMES = {field.name for field in fields(Finding)}
_LISTS = ("ranks", "victims", "hosts", "evidence")
_AGAIN = "again_s"
OfThisHang = Callable[[Object], bool]


def encode(diagnosis: Diagnosis) -> bytes:
    """Return a diagnosis with its printed form as one JSON object."""
    from rankcall.report import diagnosis as report  # rich comes with it: only where it is needed

    words = report.render(diagnosis) if diagnosis.findings else ""
    return _encoded({**diagnosis_object(diagnosis), "text": words})


def put_off(seconds: float) -> bytes:
    """Return what says that it is not clear yet, and will be in so many s."""
    return _encoded({"findings": [], _AGAIN: seconds})


def _encoded(found: Object) -> bytes:
    about = _hangs.origin(time.monotonic_ns(), time.time_ns(), boot_id(), os.getpid())
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


def write(
    run_dir: Path, verdict: Object, stacks: Mapping[int, str], of_this_hang: OfThisHang
) -> Path | None:
    """Keep a verdict under the next number and return where; None if it is no news by now.

    ``of_this_hang`` tells whether a verdict that is kept already is about the same hang. If another
    node has kept this very verdict on a shared file system, the stacks of our ranks are added to
    it. A verdict appears all at once; if two processes write at the same time, the second looks
    again. If the run directory cannot be written, the verdict is kept beside the live rings. Raises
    ``OSError`` if that fails, too.
    """
    try:
        return _write(run_dir, run_dir, verdict, stacks, of_this_hang)
    except OSError:
        return _write(run_dir, make_live_dir(run_dir), verdict, stacks, of_this_hang)


def _write(
    run_dir: Path,
    where: Path,
    verdict: Object,
    stacks: Mapping[int, str],
    of_this_hang: OfThisHang,
) -> Path | None:
    folder = run_folder(where, HANGS)
    scratch = where / f".hang.{os.getpid()}.{threading.get_native_id()}"
    try:
        while True:
            place, all_kept = _hangs.next_free(folder), kept_hangs(run_dir)
            name = _hangs.id_of(verdict)
            same = [Path(each["place"]) for each in all_kept if _hangs.id_of(each) == name]
            if same:
                _add_stacks(same[0], stacks)
                return same[0]
            if not news(findings_of(verdict), filter(of_this_hang, all_kept)):
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


def written(run_dir: Path) -> list[Object]:
    """Return the run's verdicts, oldest first; one that cannot be read is left out."""
    return kept_hangs(run_dir)


class Learned:
    """When this process learned of each verdict, by its own monotonic clock.

    Wall clocks step, and those of two hosts differ, so a verdict is told from another by its id,
    and whether it is about a hang by when it was made: exactly if that was on this host since it
    booted, else when this process first saw it. Verdicts that are there at first came before
    everything.
    """

    def __init__(
        self, first: Iterable[Object], clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._clock = clock
        self._boot_id = boot_id()
        self._seen_ns = {_hangs.id_of(verdict): 0 for verdict in first}

    def made_ns(self, verdict: Object) -> int:
        """Return when a verdict was made, or else when it was first seen, by our clock."""
        about = verdict["hang"]
        if about.get("boot_id") and about["boot_id"] == self._boot_id:
            return int(about["mono_ns"])
        return self._seen_ns.setdefault(_hangs.id_of(verdict), self._clock())


def news(findings: Iterable[Finding], told: Iterable[Object]) -> bool:
    """Tell whether some finding is of a rank that no earlier verdict has named."""
    earlier = list(told)
    named = {rank for verdict in earlier for each in findings_of(verdict) for rank in each.ranks}
    found = list(findings)
    return bool(found) and (
        not earlier or any(rank not in named for each in found for rank in each.ranks)
    )
