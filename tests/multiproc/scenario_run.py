"""Run one scenario; return the findings of its watcher and of a diagnosis from outside."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from scenario_facts import ScenarioFacts
from scenarios import SLOW_KINDS, Cause, Scenario

from rankcall.analysis.verdicts import diagnose
from rankcall.analysis.verdicts.finding import Finding
from rankcall.analysis.verdicts.kept import kept_in
from rankcall.record import RECORD
from rankcall.ring.layout import HEADER, HEADER_BYTES, parse_header
from rankcall.run.load import load
from rankcall.testing import RankResult, Ranks, start_ranks

Object = dict[str, Any]
VERDICT_S = 120.0  # the time that a watcher has to name all causes


@dataclass
class Found:
    """The verdicts on one scenario. ``seconds``: from the threshold to the watcher's verdict."""

    scenario: Scenario
    by: dict[str, list[Cause]]  # "watcher", "outside", "afterwards" -> causes
    seconds: float | None
    results: list[RankResult]
    took: float
    kept: int = 0  # verdicts in the run, before the ranks were ended
    told: int = 0  # verdicts printed beyond those in the run
    false: list[str] = field(default_factory=list)  # facts, with what is not true in them

    @property
    def wrong(self) -> list[str]:
        """Say what is not as it should be."""
        want = sorted(self.scenario.causes)
        problems = [
            f"{judge}: {sorted(causes)} instead of {want}"
            for judge, causes in self.by.items()
            if sorted(causes) != want
        ]
        if self.scenario.healthy and not all(result.ok for result in self.results):
            problems.append(
                f"failed: {[result.error or result.exitcode for result in self.results]}"
            )
        if self.kept > len(want):
            problems.append(f"{self.kept} verdicts on {len(want)} causes")
        if self.told > 0:
            problems.append(f"{self.told} verdicts were printed that are not in the run")
        problems += self.false
        return problems


def run(
    scenario: Scenario, folder: Path, capture: str = "python", *, check_facts: bool = True
) -> Found:
    """Run a scenario in ``folder`` and judge it every way that there is.

    Only the Python capture plants faults; with the native one, the program does so itself.
    """
    began, hang_after = time.monotonic(), scenario.hang_after
    by: dict[str, list[Cause]] = {}
    seconds, findings = None, list[Finding]()
    rows: list[Object] = []
    run_dir = folder / "run"
    with _nodes(scenario, folder, capture) as env:
        with start_ranks(
            scenario.program,
            scenario.world_size,
            scenario.plan,
            *scenario.args,
            timeout=120,
            faults=scenario.plan if capture == "python" else None,
            run_dir=run_dir,
            init=scenario.init,
            env=env,
            watch={"hang_after": hang_after},
        ) as ranks:
            if scenario.healthy or scenario.ends or scenario.slow:
                assert ranks.wait(200), scenario.name
            else:
                seconds = _await_verdict(scenario, run_dir, ranks)
                by["watcher"] = _watchers(run_dir)
                if scenario.nodes == 1:
                    by["outside"] = _diagnosed_in_time(scenario, run_dir, findings)
                    rows = load(run_dir).records.to_dicts()
            kept = len(_verdicts(run_dir))
        if scenario.healthy:
            by["watcher"] = _watchers(run_dir)
        if scenario.ahead:
            set_ahead(run_dir, scenario.ahead, scenario.world_size // 2)
        if (scenario.healthy or scenario.ends or scenario.slow) and scenario.nodes == 1:
            by["afterwards"] = _diagnosed(scenario, run_dir, findings)
            rows = load(run_dir).records.to_dicts()
    only_printed = sum(result.stderr.count("kept with all stacks in") for result in ranks.results)
    only_printed -= len(_verdicts(run_dir))
    findings += [finding for said in kept_in(run_dir) for finding in said.verdict.findings]
    took = time.monotonic() - began
    if not check_facts:
        findings = []
    facts = ScenarioFacts(scenario, [result.pid for result in ranks.results], took, rows)
    false = [problem for finding in findings for problem in facts.false(finding)]
    return Found(scenario, by, seconds, ranks.results, took, kept, only_printed, false)


def _verdicts(run_dir: Path) -> list[Path]:
    return sorted(run_dir.glob("hangs/*/verdict.json"))


def _watchers(run_dir: Path) -> list[Cause]:
    """Return all that the watcher has named, each once.

    The watcher may name a second cause later than the first, once it has lasted long enough.
    """
    findings = [finding for kept in kept_in(run_dir) for finding in kept.verdict.findings]
    return sorted({(finding.kind, finding.ranks) for finding in findings})


def _await_verdict(scenario: Scenario, run_dir: Path, ranks: Ranks) -> float | None:
    """Wait until as many causes are named as there are; return how long the first took, s."""
    deadline = time.monotonic() + VERDICT_S
    while time.monotonic() < deadline and len(_watchers(run_dir)) < len(scenario.causes):
        ranks.note_exits()
        time.sleep(0.02)
    places = _verdicts(run_dir)
    return _after_threshold(places[0], scenario.hang_after) if places else None


def _after_threshold(place: Path, hang_after: float) -> float:
    """Return how long after the threshold of the call that waits longest the verdict was there."""
    verdict: dict[str, Any] = json.loads(place.read_text())
    since = max(finding["since_s"] for finding in verdict["findings"])
    judged = verdict["hang"]["epoch_ns"] / 1e9
    return float(place.stat().st_mtime - (judged - since) - hang_after)


def _diagnosed_in_time(scenario: Scenario, run_dir: Path, findings: list[Finding]) -> list[Cause]:
    """Diagnose a run once its calls are as old as the threshold: a watcher may be sooner."""
    deadline = time.monotonic() + VERDICT_S
    while True:
        found: list[Finding] = []
        causes = _diagnosed(scenario, run_dir, found)
        if len(causes) >= len(scenario.causes) or time.monotonic() > deadline:
            findings += found
            return causes
        time.sleep(0.1)


def _diagnosed(scenario: Scenario, run_dir: Path, findings: list[Finding]) -> list[Cause]:
    """Diagnose a run; add the findings that count to a list."""
    relevant = diagnose(load(run_dir), scenario.hang_after).findings
    relevant = [finding for finding in relevant if scenario.slow or finding.kind not in SLOW_KINDS]
    findings += relevant
    return [(finding.kind, finding.ranks) for finding in relevant]


def set_ahead(run_dir: Path, seconds: float, first: int) -> None:
    """Make a run one of two hosts: from rank ``first`` on they are on one whose clocks are ahead.

    Every time that such a rank has noted is later by so much, and so are the ends that its
    launcher has noted.
    """
    ns = round(seconds * 1e9)
    for path in (run_dir / "rings").glob("*.ring"):
        raw = bytearray(path.read_bytes())
        header = parse_header(bytes(raw[:HEADER_BYTES]), str(path))
        if header.rank < first:
            continue
        top = np.frombuffer(raw, HEADER, 1)
        shape = header.geometry
        tables = [np.frombuffer(raw, RECORD, shape.inflight_capacity, shape.inflight_offset)]
        tables.append(np.frombuffer(raw[shape.records_offset :], RECORD))
        for row in [top, *tables]:
            for name in [name for name in row.dtype.names or () if name.endswith("_ns")]:
                row[name][row[name] != 0] += ns
        top["host"], top["boot_id"] = b"node-b", b"another-boot"
        path.write_bytes(bytes(raw[: shape.records_offset]) + tables[1].tobytes())
    for path in (run_dir / "exits").glob("*.jsonl"):
        ends = [json.loads(line) for line in path.read_text().splitlines()]
        for end in ends:
            if end["rank"] >= first:
                end["host"], end["epoch_ns"] = "node-b", end["epoch_ns"] + ns
        path.write_text("".join(json.dumps(end) + "\n" for end in ends))


@contextmanager
def _nodes(scenario: Scenario, folder: Path, capture: str) -> Iterator[Any]:
    """Give every node of a scenario a host name and a place for live rings of its own."""
    if scenario.nodes == 1:
        yield {"RANKCALL_CAPTURE": capture}
        return
    import os

    base = Path(os.environ.get("RANKCALL_SHM") or "/dev/shm")
    places = [base / f"{folder.name}-node-{number}" for number in range(scenario.nodes)]
    node_size = scenario.world_size // scenario.nodes
    for place in places:
        place.mkdir(parents=True)
    try:
        yield lambda rank: {
            "RANKCALL_CAPTURE": capture,
            "RANKCALL_HOST": f"node-{rank // node_size}",
            "RANKCALL_SHM": str(places[rank // node_size]),
        }
    finally:
        for place in places:
            shutil.rmtree(place, ignore_errors=True)
