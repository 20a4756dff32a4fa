"""List the differences between a run without recording and the same program recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samejob.harness import Harness, RankReport, RunReport
from samejob.modes import MODES
from samejob.programs import PROGRAMS

# Peak memory may differ by 1 %, or by this much: the recording needs memory of its own, and the
# number of ops in flight is a matter of chance. Measured: 0.2 to 2.4 MiB natively, and 5 MiB in
# Python, because it reads the schemas of all ops of torch.
MEMORY_FLOOR_KIB = {"python": 8 * 1024}
OTHER_MEMORY_FLOOR_KIB = 5 * 1024
_MEMORY_RUNS = 3  # the amount in flight varies from run to run; a leak is in all of them


@dataclass(frozen=True)
class Difference:
    """One way in which a recorded run is not the same. ``kind`` is one of a few fixed words."""

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


def compare(
    harness: Harness, before: RunReport, mode: str, make_folder: Callable[[str], Path]
) -> list[Difference]:
    """Run a program in a mode and return how it differs; more than once only for its memory."""
    deviations: list[Difference] = []
    memory: list[Difference] = []
    for _ in range(_MEMORY_RUNS):
        after = harness.run(before.program, mode, make_folder(before.program), before)
        deviations = differences(before, after)
        memory = memory_differences(before, after)
        if not deviations and mode in MODES and not PROGRAMS[before.program].quiet:
            assert any(rank.recorded for rank in after.ranks), "nothing was recorded"
        if deviations or not memory:
            break
    return deviations + memory


def differences(plain: RunReport, recorded: RunReport) -> list[Difference]:
    """Return how a recorded run differs from the run without recording, memory apart."""
    changes = [Difference("hang", f"ranks {recorded.hung} hung\n{recorded.stacks}")] * bool(
        recorded.hung
    )
    extra = Counter(recorded.strays) - Counter(plain.strays)
    if extra:
        changes.append(Difference("processes", f"left behind: {dict(extra)}"))
    for number, (before, after) in enumerate(zip(plain.ranks, recorded.ranks, strict=True)):
        changes += [
            Difference(kind, f"rank {number}: {text}")
            for kind, text in _of_rank(before, after, recorded.mode)
        ]
    return changes


def memory_differences(plain: RunReport, recorded: RunReport) -> list[Difference]:
    """Return which ranks needed more memory than without recording."""
    increases = []
    floor = MEMORY_FLOOR_KIB.get(recorded.mode, OTHER_MEMORY_FLOOR_KIB)
    for number, (before, after) in enumerate(zip(plain.ranks, recorded.ranks, strict=True)):
        allowed = max(before.peak_kib // 100, floor)
        if after.peak_kib > before.peak_kib + allowed:
            text = f"rank {number}: peak {before.peak_kib:,} KiB became {after.peak_kib:,} KiB"
            increases.append(Difference("memory", text))
    return increases


def _of_rank(plain: RankReport, recorded: RankReport, mode: str) -> list[tuple[str, str]]:
    changes = [
        (kind, f"{getattr(plain, kind)!r} became {getattr(recorded, kind)!r}")
        for kind in ("status", "stdout", "stderr")
        if getattr(plain, kind) != getattr(recorded, kind)
    ]
    for name in sorted(plain.seen.keys() | recorded.seen.keys()):
        before, after = plain.seen.get(name, "absent"), recorded.seen.get(name, "absent")
        if before != after:
            kind = "error" if _is_error(before) or _is_error(after) else "result"
            changes.append((kind, f"{name}: {before!r} became {after!r}"))
    if recorded.left:
        for kind, usual in plain.left.items():
            extra = Counter(recorded.left[kind]) - Counter(usual)
            if extra:
                changes.append((kind, f"left after the program: {dict(extra)}"))
    if mode == "stopped" and recorded.our_threads:
        changes.append(("threads", f"of rankcall after disable(): {recorded.our_threads}"))
    return changes


def _is_error(value: Any) -> bool:
    return isinstance(value, dict) and "error" in value
