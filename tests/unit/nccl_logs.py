"""Logs of jobs on NCCL that failed, in the forms that torch's versions write.

There is no GPU here, so these are made from the form of the messages in public issues, which
docs/log-messages.md lists. The fault is planted: the text follows from it, and the expectation does
not look at what the reader makes of the text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ADVICE = (
    "This is most likely caused by incorrect usages of collectives, e.g., wrong sizes used across "
    "ranks, the order of collectives is not same for all ranks"
)


@dataclass(frozen=True)
class Call:
    """The call that a rank was in when its watchdog ended it."""

    seq: int
    op: str = "ALLREDUCE"
    numel: int = 1024
    enqueued: int = -1  # -1: the same as ``seq``


@dataclass(frozen=True)
class Wording:
    """How one version writes, and the issue that shows it. ``group`` precedes a rank's state."""

    seen_in: str
    work: str
    group: str
    state: str
    dump: str = ""
    prefix: str = "[rank{rank}]:[E321 02:07:08.408271257 ProcessGroupNCCL.cpp:607] "


_WORK = "SeqNum={seq}, OpType={op}, NumelIn={numel}, NumelOut={numel}, Timeout(ms)=600000"
_STATE = (
    "Exception (either an error or timeout) detected by watchdog at work: {seq}, last enqueued "
    "NCCL work: {enqueued}, last completed NCCL work: {completed}."
)
_NEW_STATE = (
    " failure detected by watchdog at work sequence id: {seq} PG status: last enqueued work: "
    "{enqueued}, last completed work: {completed}"
)
_DUMP = (
    "Received a dump signal due to a collective timeout from  rank {other} and we will try our "
    "best to dump the debug info. Last enqueued NCCL work: {enqueued}, last completed NCCL work: "
    "{completed}." + ADVICE
)
WORDINGS = (
    Wording("llamafactory-6269", _WORK, "[PG {name} Rank {number}]", _STATE, _DUMP),
    Wording("verl-597", _WORK, "[PG {name} ({desc}) Rank {number}]", _STATE, _DUMP),
    Wording("basicsr-737", _WORK, "[PG ID 0 PG GUID {name}({desc}) Rank {number}]", _STATE, _DUMP),
    Wording(
        "openrlhf-1126", _WORK, "[PG ID 0 PG GUID {name}({desc}) Rank {number}]", _NEW_STATE, _DUMP
    ),
    Wording(
        "pytorch-183656",
        _WORK,
        "[PG ID 0 PG GUID {name}({desc}) Rank {number}]",
        _NEW_STATE.replace(", last completed", ", last started work: {seq}, last completed"),
        _DUMP,
    ),
    Wording(
        "torch-2.14.1",  # as it wrote on simulated devices
        _WORK,
        "[PG ID 0 PG GUID {name}({desc}) Rank {number}]",
        _NEW_STATE.replace(", last completed", ", last started work: -1 (), last completed"),
        _DUMP,
    ),
)
OLD = (  # no state of a group: such a log never tells which rank is at fault
    Wording(
        "softgroup-83",
        "OpType={op}, Timeout(ms)=1800000",
        "",
        "",
        prefix="[E ProcessGroupNCCL.cpp] ",
    ),
    Wording(
        "ofa-271", "SeqNum={seq}, OpType={op}, Timeout(ms)=1800000", "", "", prefix="[E x.cpp:737] "
    ),
    Wording("pytorch-118369", _WORK, "", "", prefix="[E ProcessGroupNCCL.cpp:474] "),
    Wording("without-state", _WORK, "", "", prefix="[rank{rank}]:[E ProcessGroupNCCL.cpp:523] "),
)


def log_of(
    wording: Wording,
    timed_out: Mapping[int, Call],
    dumped: Mapping[int, tuple[int, int]] | None = None,
    *,
    name: str = "0",
    desc: str = "default_pg",
    members: Sequence[int] | None = None,
) -> list[str]:
    """Return the lines of a job.

    Args:
        wording: The version of torch.
        timed_out: The calls that ranks timed out in.
        dumped: By rank: the last work enqueued and completed, of ranks that got the signal to dump.
        name: The group.
        desc: Its description.
        members: The ranks of the group, in order; None: of the whole job.
    """
    lines = []
    for rank, call in timed_out.items():
        number = members.index(rank) if members else rank
        values = {
            "rank": rank,
            "number": number,
            "seq": call.seq,
            "op": call.op,
            "numel": call.numel,
            "enqueued": call.seq if call.enqueued < 0 else call.enqueued,
            "completed": call.seq - 1,
            "name": name,
            "desc": desc,
        }
        prefix = wording.prefix.format(**values)
        lines.append(
            f"{prefix}[Rank {number}] Watchdog caught collective operation timeout: "
            f"WorkNCCL({wording.work.format(**values)}) ran for 600013 milliseconds before timing "
            "out."
        )
        if wording.state:
            lines.append(f"{prefix}{(wording.group + ' ' + wording.state).format(**values)}")
        lines.append(
            f"{prefix}[Rank {number}] To avoid data inconsistency, we are taking the entire "
            "process down."
        )
    for rank, (enqueued, completed) in (dumped or {}).items():
        text = f"{wording.prefix}{wording.group} {wording.dump}"
        lines.append(
            text.format(
                rank=rank,
                number=rank,
                name="0",
                desc="default_pg",
                other=min(timed_out),
                enqueued=enqueued,
                completed=completed,
            )
        )
    return lines
