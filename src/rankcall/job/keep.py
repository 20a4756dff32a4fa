"""Keep a verdict in the run directory once, whichever of the node's ranks or other nodes has it."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from rankcall.analysis.verdicts.encoding import encode
from rankcall.analysis.verdicts.kept import kept_in
from rankcall.analysis.verdicts.verdict import Verdict
from rankcall.background import BackgroundCall
from rankcall.capture.source_lines import text_at
from rankcall.folders import run_folder
from rankcall.job.news import is_news
from rankcall.run.frames import code_place
from rankcall.run.hangs import add_lines, add_stacks, claim, fill, next_free
from rankcall.run.paths import HANGS, make_live_dir
from rankcall.whole_numbers import whole_number

OfThisHang = Callable[[Verdict], bool]
_MOST_LINES = 64  # whose source text is kept with a verdict
_READ_S = 1.0  # for all of them: a rank may hang because the disk does that has the program


def keep_verdict(
    run_dir: Path, verdict: Verdict, stacks: Mapping[int, str], of_this_hang: OfThisHang
) -> Path | None:
    """Keep a verdict under the next number and return its folder, or None if it is no news.

    If another node has kept the same verdict on a shared file system, the stacks of our ranks are
    added to it. A folder gets its final name when it is complete. If two processes write at the
    same time, the second compares its verdict with the first one's and tries again. If the run
    directory cannot be written, the verdict is kept beside the live rings.

    Args:
        run_dir: The run directory.
        verdict: The verdict.
        stacks: Our ranks' stacks.
        of_this_hang: Returns whether a verdict that was kept earlier is about the same hang.

    Raises:
        OSError: The verdict cannot be kept in either place.
    """
    try:
        place = _keep(run_dir, run_dir, verdict, stacks, of_this_hang)
    except OSError:
        place = _keep(run_dir, make_live_dir(run_dir), verdict, stacks, of_this_hang)
    if place is not None:
        with contextlib.suppress(OSError):  # the verdict is kept, with or without them
            add_lines(place, _lines_of(stacks))
    return place


def _lines_of(stacks: Mapping[int, str]) -> dict[str, str]:
    """Return the source text of the lines at which ranks stand, as far as it can be read in time.

    It is read now, because a reader of the run may have other files there, or none.
    """
    lines = sorted({code_place(stack).line for stack in stacks.values()} - {""})[:_MOST_LINES]
    texts: dict[str, str] = {}

    def read() -> None:
        for line in lines:
            file, _, number = line.rpartition(":")
            texts[line] = text_at(file, whole_number(number) or 0)

    BackgroundCall(read, "rankcall-lines").ended(_READ_S)
    return {line: text for line, text in texts.copy().items() if text}


def _keep(
    run_dir: Path,
    where: Path,
    verdict: Verdict,
    stacks: Mapping[int, str],
    of_this_hang: OfThisHang,
) -> Path | None:
    folder = run_folder(where, HANGS)
    scratch = where / f".hang.{os.getpid()}.{threading.get_native_id()}"
    try:
        while True:
            place, all_kept = next_free(folder), kept_in(run_dir)
            name = verdict.origin.id
            same = [kept.folder for kept in all_kept if kept.verdict.origin.id == name]
            if same:
                add_stacks(same[0], stacks)
                return same[0]
            earlier = [kept.verdict for kept in all_kept if of_this_hang(kept.verdict)]
            if not is_news(verdict.findings, earlier):
                return None
            if not scratch.exists():
                fill(scratch, encode(verdict), text_of(verdict))
                add_stacks(scratch, stacks)
            if claim(scratch, place):
                return place
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def text_of(verdict: Verdict) -> str:
    """Return a verdict as it is printed."""
    from rankcall.report.diagnosis_text import diagnosis_text  # here, because it imports rich

    return diagnosis_text(verdict)
