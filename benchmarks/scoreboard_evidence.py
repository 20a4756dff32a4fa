"""How often the verdict is right on logs and on dumps whose fault is known, beside torch's tools.

``logs`` are the logs that torch wrote of planted faults (``tests/logs``) and the forms of NCCL's
messages; ``collected`` are the same behind what each of 24 collectors and launchers puts before a
line, as it is and wrapped by a terminal; ``generated`` are made-up jobs; ``reports`` are logs of
public reports, told again (``tests/logs/cases``). ``torchrun`` is the rank
that torchrun's report calls the root cause, for logs that have the report.

``dumps`` are those of made-up jobs of 16 ranks in Megatron's groups, in which rank 5 does something
wrong. ``torchfrtrace`` has the ranks that torch's own analyser names on the same files; it needs
the package tabulate. The jobs send no messages, because the analyser refuses those of batches.

An answer is right if it has the kind and exactly the ranks that were planted. ``blamed`` counts
answers that name a rank that was not at fault.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rankcall.analysis.logs import diagnose_logs
from rankcall.analysis.verdicts import diagnose
from rankcall.run.load import load

HELPERS = Path(__file__).resolve().parents[1] / "tests/unit"
CULPRIT, RANKS, OPS = 5, 16, 360
_ROOT_CAUSE = re.compile(r"Root Cause \(first observed failure\):.*?rank      : (\d+)", re.DOTALL)
Answer = tuple[str, set[int]]


def figures(peer_seconds: float) -> dict[str, Any]:
    """Return the figures of logs and dumps; torch's analyser gets so many seconds for each job."""
    sys.path.insert(0, str(HELPERS))
    with tempfile.TemporaryDirectory(prefix="rankcall-bench-") as name:
        folder = Path(name)
        return {"logs": _logs(folder), "dumps": _dumps(folder, peer_seconds)}


def _logs(folder: Path) -> dict[str, Any]:
    from collected_logs import COLLECTORS, LOGS  # type: ignore[import-not-found]
    from generated_logs import made  # type: ignore[import-not-found]
    from log_cases import ALL  # type: ignore[import-not-found]

    path = folder / "job.log"

    def answer(lines: Iterable[str]) -> Answer:
        path.write_text("\n".join(lines) + "\n")
        finding = diagnose_logs([path]).findings[0]
        return finding.kind, set(finding.ranks)

    plain: Counter[str] = Counter()
    collected: Counter[str] = Counter()
    wrapped: Counter[str] = Counter()
    torchrun: Counter[str] = Counter()
    for lines, kind, ranks in LOGS.values():
        planted = kind, set(ranks)
        _count(plain, answer(lines), planted)
        first = _ROOT_CAUSE.search("\n".join(lines))
        if first:
            _count(torchrun, (kind, {int(first[1])}), planted)
        for collect in COLLECTORS.values():
            gathered = [collect(number, line) for number, line in enumerate(lines)]
            _count(collected, answer(gathered), planted)
            _count(wrapped, answer(part for line in gathered for part in _broken(line)), planted)
    generated: Counter[str] = Counter()
    names = sorted(COLLECTORS)
    for seed in range(200):
        plan = made(seed, COLLECTORS[names[seed % len(names)]])
        _count(generated, answer(plan.lines), (plan.kind, {plan.culprit}))
    reports: Counter[str] = Counter()
    for case in ALL.values():
        (folder / case.file).write_text("\n".join(case.lines) + "\n")
        finding = diagnose_logs([folder / case.file]).findings[0]
        found = finding.kind, set(finding.ranks)
        kind = finding.kind if finding.kind in case.kinds else case.kinds[0]
        ranks = finding.ranks if finding.ranks in case.ranks else case.ranks[0]
        _count(reports, found, (kind, set(ranks)))
    kinds = {
        "plain": plain,
        "reports": reports,
        "collected": collected,
        "collected_and_wrapped": wrapped,
    }
    kinds |= {"generated": generated, "torchrun": torchrun}
    return {name: dict(counts) for name, counts in kinds.items()}


def _broken(line: str, width: int = 140) -> list[str]:
    return [line[at : at + width] for at in range(0, len(line), width)] or [""]


def _count(counts: Counter[str], found: Answer, planted: Answer) -> None:
    counts["cases"] += 1
    counts["right"] += found == planted
    counts["blamed"] += bool(found[1] - planted[1])


def _dumps(folder: Path, peer_seconds: float) -> dict[str, Any]:
    from dumps import PROGRAM, Fault, simulate, write_dumps  # type: ignore[import-not-found]

    program = [step for step in PROGRAM if step.op != "exchange"]
    # The members of an all_to_all may have sizes of their own, and of a group's two members, none
    # can be called the one that differs: these places are left out.
    cases = [(fault, place) for fault in ("missing", "lagging") for place in range(len(program))]
    cases += [("desync", place) for place in (0, 1, 3, 5)]
    cases += [("mismatch", place) for place in (0, 1, 3, 5)]
    ours: Counter[str] = Counter()
    torchs: Counter[str] = Counter()
    by_kind: Counter[str] = Counter()
    for number, (fault, place) in enumerate(cases):
        planted = Fault(fault, CULPRIT, 23 * len(program) + place)
        dumps = write_dumps(folder / str(number), simulate(RANKS, OPS, [planted], program=program))
        kind = "missing" if fault == "lagging" else fault
        findings = diagnose(load(dumps)).findings
        named = {rank for finding in findings for rank in finding.ranks}
        _count(ours, (findings[0].kind if findings else "", named), (kind, {CULPRIT}))
        by_kind[fault] += named == {CULPRIT}
        by_torch = _torchfrtrace(dumps, peer_seconds)
        if by_torch is None:
            torchs["no_answer"] += 1
        _count(torchs, (kind, by_torch or set()), (kind, {CULPRIT}))
    return {"rankcall": dict(ours), "torchfrtrace": dict(torchs), "right_by_fault": dict(by_kind)}


def _torchfrtrace(dumps: Path, seconds: float) -> set[int] | None:
    """Return the ranks that torch's analyser names; None if it failed or took too long."""
    module = "torch.distributed.flight_recorder.fr_trace"
    command = [sys.executable, "-m", module, str(dumps), "-p", "nccl_trace_rank_"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return None
    text = done.stdout + done.stderr
    named = set(map(int, re.findall(r"Culprit rank (\d+)", text)))
    for ranks in re.findall(r"missing ranks: \{([\d, ]*)\}", text):
        named.update(map(int, re.findall(r"\d+", ranks)))
    return named if named or done.returncode == 0 else None
