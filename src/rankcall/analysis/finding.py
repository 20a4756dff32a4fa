"""A finding: one cause of trouble, who it is, who suffers, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass, field

# From the bottom of a tie upwards: what comes first is likelier to be the root cause.
KINDS = (
    "dead", "stopped", "exhausted", "mismatch", "desync", "deadlock", "missing", "slow_link",
    "straggler",
)  # fmt: skip
_SLOWS = ("slow_link", "straggler")  # the others keep a run from going on
HEALTHY = "healthy"
CONFIDENCES = ("certain", "likely", "possible")


@dataclass(frozen=True)
class Finding:
    """One cause. ``ranks`` are the culprits, never the victims.

    ``hosts`` are the culprits'. ``group``, ``seq``, ``op`` and ``call_site`` say what the victims
    are in (empty, 0 where nobody is in anything); ``since_s`` how long, in s.
    """

    kind: str
    ranks: tuple[int, ...]
    victims: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    group: str = ""
    seq: int = 0
    op: str = ""
    call_site: str = ""
    since_s: float = 0.0
    confidence: str = "certain"
    summary: str = ""
    evidence: tuple[str, ...] = field(default=())
    advice: str = ""

    @property
    def stops(self) -> bool:
        """Whether it keeps the run from going on, and does not only slow it."""
        return self.kind not in _SLOWS


def less_sure(confidence: str, steps: int = 1) -> str:
    """Return the confidence that is so many steps lower."""
    return CONFIDENCES[min(CONFIDENCES.index(confidence) + steps, len(CONFIDENCES) - 1)]


def in_order(findings: list[Finding]) -> list[Finding]:
    """Put the likeliest root cause first: by confidence, then kind, then what lasts longest."""
    return sorted(
        findings,
        key=lambda each: (
            CONFIDENCES.index(each.confidence), KINDS.index(each.kind), -each.since_s, each.ranks,
        ),
    )  # fmt: skip
