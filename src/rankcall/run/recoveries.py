"""How each attempt of a job that restarts has ended, and what was decided: ``recoveries/``.

The process that restarts the workers, which is torchrun's agent, writes one file::

    recoveries/<host>.<pid>.jsonl          one object a line, in the order of events

A line is an ``AttemptStart``, an ``AttemptEnd`` or a ``NodeChecked``. The workers of the next
attempt learn from the environment why they exist, and one of them adds an ``AttemptResumed`` to the
file. A line that another program could have damaged is left out.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from pathlib import Path
from typing import Any

from rankcall.files import append_line, open_file
from rankcall.folders import run_folder
from rankcall.ranks import MAX_RANKS
from rankcall.run.paths import files_in

RECOVERIES = "recoveries"
# Set by the agent for its workers: the file to which it writes.
FILE_VARIABLE = "RANKCALL_RECOVERIES"
# The same, with the end of the attempt before: the run's disk may be full, or not answer.
END_VARIABLE = "RANKCALL_PREVIOUS_END"
# What stands instead of a rule if no policy was asked.
GAVE_UP = "gave_up"  # torchrun's own limit of restarts was reached
ENDED = "ended"  # the launcher noted how its job ended, for later ones
FOLLOWS = "follows"  # a worker of another node failed, and that node decided
JOINED = "joined"  # nothing had failed: a new node was let in
_MOST_BYTES = 1 << 24  # of one file; the rest is not read
_MOST_LINE = 1 << 16  # characters
_MOST_EVENTS = 4096  # of one file, the newest ones: no job is restarted so often
_MOST_TEXT = 1024
_MOST_RANKS = 64  # of the culprits that are kept
_TEXTS = ("family", "summary", "decision", "rule", "reason", "verdict")  # of an ``AttemptEnd``
_MOST_JOB = 64  # characters
_MOST_CHECKS = 16  # of a node at one time
_LIMIT = 1 << 62  # a larger number is damage


@dataclass(frozen=True)
class Signature:
    """What makes two failures the same one, also if other ranks or hosts have it.

    ``role`` is the part that the ranks have in the job: ``rank 0``, ``one rank``, ``some ranks`` or
    ``all ranks``. ``line`` is where the culprits stand, or what they raised.
    """

    kind: str
    op: str = ""
    line: str = ""
    role: str = ""

    def __str__(self) -> str:
        """Return the signature for people to read."""
        parts = [self.kind, self.role, self.op, self.line]
        return ", ".join(part for part in parts if part)


@dataclass(frozen=True)
class AttemptStart:
    """An attempt's workers were started. ``restart`` is torchrun's count of restarts.

    ``job`` is the same on all nodes of a job, and differs from job to job: the agents agree on it
    in the store of the rendezvous. It is empty if they have none that all nodes share.
    """

    restart: int
    epoch_ns: int
    job: str = ""


@dataclass(frozen=True)
class AttemptEnd:
    """An attempt ended by a failure, and what was decided. Times are in ns since the epoch.

    Attributes:
        restart: torchrun's count of restarts when the attempt was started.
        signature: What failed.
        family: ``program``, ``machine`` or ``unclear``.
        culprits: The ranks at fault; none if no rank is named.
        summary: The sentence of the verdict.
        step: The step that the job had reached; -1 if it is not known.
        steps: The optimizer steps that the attempt had taken.
        lost: The steps since the last checkpoint; -1 if the program has told of none.
        progressed: Whether the job got further since the failure before.
        fault_ns: Since when nothing went on.
        verdict_ns: When the watchers had their verdict; 0: the attempt ended without one.
        ended_ns: When the first worker ended, or rankcall ended it; 0: not known.
        noticed_ns: When the agent saw that.
        stopped_ns: When no worker of this node was left.
        decision: ``restart`` or ``stop``.
        rule: The row of the policy that decided; ``FOLLOWS``, ``JOINED``, ``GAVE_UP`` or ``ENDED``
            if the policy was not asked.
        reason: Why, in words.
        delay_s: The pause before the restart.
        verdict: The folder of the verdict in the run; empty without one.
    """

    restart: int
    signature: Signature
    family: str
    culprits: tuple[int, ...] = ()
    summary: str = ""
    step: int = -1
    steps: int = 0
    lost: int = -1
    progressed: bool = False
    fault_ns: int = 0
    verdict_ns: int = 0
    ended_ns: int = 0
    noticed_ns: int = 0
    stopped_ns: int = 0
    decision: str = ""
    rule: str = ""
    reason: str = ""
    delay_s: float = 0.0
    verdict: str = ""


@dataclass(frozen=True)
class AttemptResumed:
    """When an attempt after a failure was at work again, in ns since the epoch; 0: not yet.

    One rank of each node notes it, because a ring keeps its newest records only: after some minutes
    of training, no reader of the rings could tell when an attempt had begun to work.

    Attributes:
        restart: torchrun's count of restarts when the attempt was started.
        call_ns: When the rank issued its first call.
        step_ns: When it issued its first call after an optimizer step.
        caught_up_ns: When it issued its first call after as many steps as were lost.
    """

    restart: int
    call_ns: int
    step_ns: int = 0
    caught_up_ns: int = 0


# What a check of a node can find. A node on which one has failed leaves the job; what is suspect
# may be another node's fault, and what is absent cannot be looked at here.
WELL, FAILED, SUSPECT, ABSENT = "well", "failed", "suspect", "absent"


@dataclass(frozen=True)
class Check:
    """What one check of a node found, and how long it took."""

    name: str
    state: str
    text: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class NodeChecked:
    """A node was checked before it was to take part in an attempt (``--health-check``)."""

    node: str
    epoch_ns: int
    checks: tuple[Check, ...]

    @property
    def first_failed(self) -> Check | None:
        """The first check that failed; None if the node is well."""
        return next((check for check in self.checks if check.state == FAILED), None)


Event = AttemptStart | AttemptEnd | AttemptResumed | NodeChecked


@dataclass(frozen=True)
class Recoveries:
    """The events of one agent's file, in their order."""

    path: Path
    starts: Sequence[AttemptStart] = field(default=())
    ends: Sequence[AttemptEnd] = field(default=())
    resumed: Sequence[AttemptResumed] = field(default=())
    checks: Sequence[NodeChecked] = field(default=())


def file_of(run_dir: Path, host: str, pid: int) -> Path:
    """Return the file of an agent."""
    return run_dir / RECOVERIES / f"{re.sub(r'[^A-Za-z0-9_-]+', '_', host)}.{pid}.jsonl"


def agent_of(path: Path) -> tuple[str, int]:
    """Return the host and the pid of the agent that writes a file. Raises ``ValueError``."""
    host, _, pid = path.stem.rpartition(".")
    return host, int(pid)


_NAMES = {
    AttemptStart: "start",
    AttemptEnd: "end",
    AttemptResumed: "resumed",
    NodeChecked: "checked",
}


def note(path: Path, event: Event) -> None:
    """Append an event to an agent's file. Raises ``OSError`` if it cannot be written."""
    run_folder(path.parent.parent, RECOVERIES)
    name = _NAMES[type(event)]
    append_line(path, json.dumps({name: asdict(event)}).encode() + b"\n")


def read_file(path: Path) -> Recoveries:
    """Return the events of one file; none if it cannot be read."""
    starts: list[AttemptStart] = []
    ends: list[AttemptEnd] = []
    resumed: list[AttemptResumed] = []
    checks: list[NodeChecked] = []
    try:
        with open_file(path) as file:
            lines = file.read(_MOST_BYTES).splitlines()
    except OSError:
        return Recoveries(path)
    for line in lines[-_MOST_EVENTS:]:
        try:
            content = json.loads(line[:_MOST_LINE])
            if "start" in content:
                starts.append(_start(content["start"]))
            elif "resumed" in content:
                resumed.append(_resumed(content["resumed"]))
            elif "checked" in content:
                checks.append(_checked(content["checked"]))
            else:
                ends.append(_end(content["end"]))
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError, AttributeError):
            continue
    return Recoveries(path, starts, ends, resumed, checks)


def newest_checks(agents: Sequence[Recoveries]) -> list[NodeChecked]:
    """Return how each node was when it was checked last, by its name."""
    known = sorted((checked for agent in agents for checked in agent.checks), key=_checked_at)
    by_node = {checked.node: checked for checked in known}
    return [by_node[node] for node in sorted(by_node)]


def _checked_at(checked: NodeChecked) -> int:
    return checked.epoch_ns


def read_recoveries(run_dir: Path) -> list[Recoveries]:
    """Return the events of all agents of a run, that with the earliest event first."""
    agents = [read_file(path) for path in files_in(run_dir / RECOVERIES, ".jsonl")]
    return sorted(
        (agent for agent in agents if agent.starts or agent.ends or agent.checks), key=_first_ns
    )


def _first_ns(agent: Recoveries) -> int:
    starts = [start.epoch_ns for start in agent.starts] + [end.noticed_ns for end in agent.ends]
    # A spare may have been checked long before it was let in.
    return min(starts or [checked.epoch_ns for checked in agent.checks])


def _start(fields: Any) -> AttemptStart:
    # An agent of an older rankcall notes no job.
    job = _text(fields.get("job", ""))[:_MOST_JOB]
    return AttemptStart(_number(fields["restart"]), _number(fields["epoch_ns"]), job)


def _resumed(fields: Any) -> AttemptResumed:
    names = "restart", "call_ns", "step_ns", "caught_up_ns"
    return AttemptResumed(*(_number(fields[name]) for name in names))


def _end(fields: Any) -> AttemptEnd:
    signature = fields["signature"]
    values: dict[str, Any] = {
        name: _number(fields[name])
        for name in ("fault_ns", "verdict_ns", "ended_ns", "noticed_ns", "stopped_ns", "steps")
    }
    for name in _TEXTS:
        values[name] = _text(fields[name])
    delay_s = float(fields["delay_s"])
    if not 0 <= delay_s < 1e9:
        raise ValueError("an impossible pause")
    return AttemptEnd(
        _number(fields["restart"]),
        Signature(*(_text(signature[name]) for name in ("kind", "op", "line", "role"))),
        culprits=tuple(_number(rank, most=MAX_RANKS) for rank in fields["culprits"][:_MOST_RANKS]),
        step=_number(fields["step"], least=-1),
        lost=_number(fields["lost"], least=-1),
        progressed=fields["progressed"] is True,
        delay_s=delay_s,
        **values,
    )


def _checked(fields: Any) -> NodeChecked:
    checks = tuple(_check(check) for check in fields["checks"][:_MOST_CHECKS])
    return NodeChecked(_text(fields["node"]), _number(fields["epoch_ns"]), checks)


def _check(fields: Any) -> Check:
    seconds = float(fields["seconds"])
    if fields["state"] not in (WELL, FAILED, SUSPECT, ABSENT) or not 0 <= seconds < 1e9:
        raise ValueError("an impossible check")
    return Check(_text(fields["name"]), fields["state"], _text(fields["text"]), seconds)


def _number(value: Any, least: int = 0, most: int = _LIMIT) -> int:
    if type(value) is not int or not least <= value < most:
        raise ValueError("an impossible number")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("not a text")
    return value[:_MOST_TEXT]


def own_file() -> Path | None:
    """Return the file of the agent that started this process, as the environment names it."""
    name = os.environ.get(FILE_VARIABLE)
    return Path(name) if name else None


def tell_workers(file: Path, end: AttemptEnd | None) -> None:
    """Have the workers that this process starts next inherit where to write, and why they exist."""
    os.environ[FILE_VARIABLE] = str(file)
    if end is not None:
        # A variable of more than 128 KiB would keep every process from being started (E2BIG).
        signature = Signature(*(text[:_MOST_TEXT] for text in astuple(end.signature)))
        texts = {name: getattr(end, name)[:_MOST_TEXT] for name in _TEXTS}
        culprits = end.culprits[:_MOST_RANKS]
        end = replace(end, signature=signature, culprits=culprits, **texts)
    os.environ[END_VARIABLE] = "" if end is None else json.dumps(asdict(end))


def previous_end() -> AttemptEnd | None:
    """Return how the attempt before that of this process ended; None if there was none."""
    try:
        return _end(json.loads(os.environ.get(END_VARIABLE, "")[:_MOST_LINE]))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError, AttributeError):
        return None
