"""Run one row of the scoreboard's table, and judge it by rankcall and by torch's own messages."""

from __future__ import annotations

import re
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from planted_facts import subject
from scoreboard_calls import plain, run_calls
from scoreboard_case import Case, Cause
from scoreboard_facts import ScoreboardFacts

from rankcall.analysis.verdicts import diagnose
from rankcall.analysis.verdicts.facts import Relation
from rankcall.analysis.verdicts.finding import Finding
from rankcall.run.load import load
from rankcall.testing import RankResult, start_ranks

RANK_S = 120.0  # how long a rank may run beyond its groups' time-out
# The kinds of messages of torch. A message can name exactly the ranks that were planted, these and
# others, some of them, or only others.
NOTHING, ERROR, TIME_OUT = "nothing", "error", "time-out"
RIGHT, AMONG, SOME, WRONG = "right ranks", "among others", "some of them", "other ranks"
TORCH = (NOTHING, TIME_OUT, ERROR, RIGHT, AMONG, SOME, WRONG)


@dataclass
class Judged:
    """One row with the verdicts on it. The verdicts of torch are ``TORCH``'s, by its mode."""

    case: Case
    findings: list[Finding]
    torch: dict[str, str]
    false: list[str]  # the findings' facts that are not so
    errors: dict[str, list[str]] = field(default_factory=dict)  # of the ranks, by mode

    @property
    def found(self) -> list[Cause]:
        """The kinds with the ranks that each finding names."""
        return [(finding.kind, _named(self.case, finding)) for finding in self.findings]

    @property
    def right(self) -> int:
        """How many causes were found."""
        return sum((Counter(self.found) & Counter(self.case.causes)).values())

    @property
    def problem(self) -> str:
        """The findings beside the right ones, if they differ; else empty."""
        if Counter(self.found) == Counter(self.case.causes):
            return ""
        return f"{self.case.name}: {sorted(self.found)} instead of {sorted(self.case.causes)}"


def _named(case: Case, finding: Finding) -> tuple[int, ...]:
    """Return the ranks that a finding blames; in a tie, those that it calls concerned.

    A finding that blames a rank of a tie is wrong: nothing tells which side is at fault. Its facts
    name the sides.
    """
    if not case.tie or finding.kind not in ("mismatch", "desync"):
        return finding.ranks
    if finding.ranks:
        return (-1, *finding.ranks)
    sides = [fact for fact in finding.facts if fact.relation is Relation.PASSED]
    return tuple(sorted({rank for side in sides for rank in subject(side)}))


def run(case: Case, folder: Path, timeout_s: float, *, torch_detail: bool = True) -> Judged:
    """Run a case under rankcall, and then without it under torch's DETAIL mode.

    Args:
        case: The case.
        folder: An empty folder.
        timeout_s: The time-out of the groups, in s.
        torch_detail: Run it in DETAIL mode as well.
    """
    run_dir, began = folder / "run", time.monotonic()
    results = _run(case, timeout_s, run_dir, {"TORCH_DISTRIBUTED_DEBUG": None})
    torch_verdicts = {"plain": torch_says(case, results)}
    errors = {"plain": [result.error or "" for result in results]}
    loaded = load(run_dir)
    findings = [finding for finding in diagnose(loaded).findings if finding.stops]
    took, pids = time.monotonic() - began, [result.pid for result in results]
    facts = ScoreboardFacts(case, pids, took, loaded.records.to_dicts())
    false = [problem for finding in findings for problem in facts.false(finding)]
    if torch_detail:
        results = _run(case, timeout_s, None, {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
        torch_verdicts["detail"] = torch_says(case, results)
        errors["detail"] = [result.error or "" for result in results]
    return Judged(case, findings, torch_verdicts, false, errors)


def _run(
    case: Case, timeout_s: float, run_dir: Path | None, env: dict[str, str | None]
) -> list[RankResult]:
    """Run the ranks until they have ended; their groups' time-outs end those that hang."""
    programs = [[plain(call) for call in calls] for calls in case.program]
    groups = {name: list(ranks) for name, ranks in case.groups}
    with start_ranks(
        run_calls,
        case.world_size,
        programs,
        groups,
        timeout_s,
        init=False,
        env=env,
        run_dir=run_dir,
    ) as ranks:
        limit = timeout_s + RANK_S
        ended = ranks.wait(limit, limit)
    if not ended:
        text = "\n".join(result.stderr[-1500:] for result in ranks.results)
        raise AssertionError(f"{case.name}: not done after {limit:g} s\n{text}")
    return ranks.results


def torch_says(case: Case, results: list[RankResult]) -> str:
    """Return which of ``TORCH`` fits best to what the ranks have printed and raised."""
    texts = [f"{result.stderr}\n{result.error or ''}" for result in results]
    named = {rank for text in texts for rank in _ranks_in(text)}
    planted = {rank for _, ranks in case.causes for rank in ranks}
    if named:
        if named == planted:
            return RIGHT
        if planted < named:
            return AMONG
        return SOME if named < planted else WRONG
    if all(result.ok for result in results):
        return NOTHING
    own = [result.rank for result in results if _is_refusal(result.error or "")]
    if own and set(own) == planted:
        return RIGHT  # the rank at fault has raised an error about its own arguments
    late = any(re.search(r"[Tt]imed out|[Tt]imeout", result.error or "") for result in results)
    return TIME_OUT if late else ERROR


def _ranks_in(text: str) -> set[int]:
    """Return the ranks that messages of torch point at."""
    late = re.findall(r"Rank (\d+) failed to pass monitoredBarrier", text)
    ranks = set(map(int, late))
    for ours, theirs in re.findall(
        r"Rank (\d+) is running collective.{0,600}?but Rank (\d+) is running", text, re.DOTALL
    ):
        ranks |= {int(ours), int(theirs)}
    for listed in re.findall(r"[Rr]anks? ((?:\d+, ?)*\d+) (?:failed|timed out|did not)", text):
        ranks |= {int(number) for number in re.findall(r"\d+", listed)}
    return ranks


def _is_refusal(error: str) -> bool:
    """Tell whether a rank's error is about what it has passed, not about its peers."""
    last = error.strip().rpartition("\n")[2]
    return bool(last) and not re.search(
        r"[Tt]imed out|[Tt]imeout|[Cc]onnection|closed by peer|[Mm]ismatch|monitoredBarrier|"
        r"[Rr]ecv|[Ss]end|unbound|preamble|peer",
        error,
    )
