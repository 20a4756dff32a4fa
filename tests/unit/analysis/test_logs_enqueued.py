"""What NCCL_DEBUG_SUBSYS=COLL writes: different calls of one number, and who seems to be behind."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from nccl_logs import WORDINGS, log_of
from nccl_logs import Call as TimedOut

from rankcall.analysis.logs import diagnose_logs
from rankcall.analysis.verdicts.finding import Finding
from rankcall.imports.logs.reading import Log
from rankcall.imports.logs.sources import markers, repeated

PER_HOST = 4
ALL_REDUCE, ALL_GATHER = "AllReduce", "AllGather"


def head(rank: int) -> str:
    """Return what NCCL writes before each line of a rank."""
    return f"node-{rank // PER_HOST}:{4000 + rank}:{4000 + rank} [{rank % PER_HOST}] NCCL INFO "


def init(ranks: Sequence[int], name: str = "a1", pointer: int = 1) -> list[str]:
    """Return the lines with which the members of a communicator begin."""
    return [
        f"{head(rank)}comm 0x55{pointer} rank {number} nranks {len(ranks)} cudaDev "
        f"{rank % PER_HOST} nvmlDev 0 busId 1000 commId 0x{name} - Init START"
        for number, rank in enumerate(ranks)
    ]


def call(
    rank: int,
    number: int,
    op: str = ALL_REDUCE,
    *,
    count: int = 64,
    size: int = 4,
    pointer: int = 1,
    tail: str = "",
) -> str:
    """Return the line of one call."""
    return (
        f"{head(rank)}{op}: opCount {number:x} sendbuff 0x7f01 recvbuff 0x7f02 count {count} "
        f"datatype 7 op 0 root 0 comm 0x55{pointer} [nranks={size}] stream 0x55bef{tail}"
    )


def judged(tmp_path: Path, lines: Iterable[str]) -> Finding:
    """Return the first finding of a log."""
    path = tmp_path / "job.log"
    path.write_text("\n".join(lines) + "\n")
    return diagnose_logs([path]).findings[0]


def test_another_size_under_one_number(tmp_path: Path) -> None:
    """Rank 5 reduces fewer elements in call 0x1b; all ranks go on with others behind it."""
    lines = init(range(8))
    for number in range(20, 40):
        for rank in range(8):
            count = 32 if (rank, number) == (5, 27) else 64
            lines.append(call(rank, number, count=count, size=8))
    finding = judged(tmp_path, lines)
    assert (finding.kind, finding.ranks, finding.confidence) == ("mismatch", (5,), "likely")
    assert (finding.op, finding.seq) == ("all_reduce", 27)
    assert "opCount 1b of a communicator of 8 ranks" in finding.summary
    assert "rank 5 all_reduce (count 32 " in finding.summary


def test_another_op_in_a_communicator_of_some_ranks(tmp_path: Path) -> None:
    """Rank 6 is number 1 of its communicator, and is named by its number in the job's."""
    members = (2, 6, 7)
    lines = [*init(range(8)), *init(members, "b2", 2)]
    for rank in members:
        op = ALL_GATHER if rank == 6 else ALL_REDUCE
        lines += [call(rank, 0, size=3, pointer=2), call(rank, 1, op, size=3, pointer=2)]
    finding = judged(tmp_path, lines)
    assert (finding.kind, finding.ranks) == ("desync", (6,))


def test_rccl_writes_the_number_in_the_communicator(tmp_path: Path) -> None:
    """No line of the beginning is left; the ranks are on two hosts."""
    lines = [
        call(
            rank,
            9,
            ALL_GATHER if rank == 5 else ALL_REDUCE,
            size=8,
            tail=f" task 0 globalrank {rank}",
        )
        for rank in range(8)
    ]
    finding = judged(tmp_path, lines)
    assert (finding.kind, finding.ranks, finding.confidence) == ("desync", (5,), "possible")


def test_processes_whose_ranks_are_not_known(tmp_path: Path) -> None:
    """On two hosts, a device is no rank: the calls are told of processes, and no rank is named."""
    ops = {rank: ALL_GATHER if rank == 5 else ALL_REDUCE for rank in range(8)}
    finding = judged(tmp_path, [call(rank, 9, op, size=8) for rank, op in ops.items()])
    assert (finding.kind, finding.ranks) == ("desync", ())
    assert "process 4005 on node-1 all_gather" in finding.summary


@pytest.mark.parametrize(
    ("why", "lines"),
    [
        (
            "two communicators of two ranks each, which no line tells apart",
            [call(rank, 9, ALL_GATHER if rank > 1 else ALL_REDUCE, size=2) for rank in range(4)],
        ),
        (
            "half of a larger communicator may be another one on each process",
            [call(0, 9, ALL_GATHER, size=8), *(call(rank, 9, size=8) for rank in range(1, 4))],
        ),
        (
            "sends and receives are counted by two of the members only",
            [
                *init(range(4)),
                *(call(0, number, "Send") for number in range(5)),
                *(
                    call(rank, number, ALL_GATHER if number % 2 else ALL_REDUCE)
                    for number in range(8)
                    for rank in range(1, 4)
                ),
                *(call(0, number + 5, ALL_GATHER) for number in range(3)),
            ],
        ),
        (
            "the same pointer stood for another communicator before",
            [
                *(
                    call(rank, 3, ALL_GATHER if rank == 2 else ALL_REDUCE, size=8)
                    for rank in (1, 2)
                ),
                *init(range(4)),
                *(call(rank, 3) for rank in range(4)),
            ],
        ),
        (
            "two calls are made as one, and the line of the second is lost",
            [
                *init(range(4)),
                *(call(rank, 3) for rank in range(4)),
                *(call(rank, 4) for rank in range(4)),
                *(call(rank, 4, ALL_GATHER) for rank in range(3)),
            ],
        ),
        (
            "a second attempt counts from the beginning again, in processes of the same numbers",
            [
                *(call(rank, 4) for rank in range(4)),
                *(call(rank, 5) for rank in range(3)),
                *(call(rank, 0, ALL_GATHER) for rank in range(4)),
                *(call(rank, 5, ALL_GATHER) for rank in range(4)),
            ],
        ),
        (
            "a reduction that the program made has another number in each process",
            [call(rank, 4).replace(" op 0 ", f" op {5 + rank} ") for rank in range(4)],
        ),
        ("all is well", [call(rank, number) for number in range(9) for rank in range(4)]),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_what_cannot_be_compared(tmp_path: Path, why: str, lines: list[str]) -> None:
    """Nothing is said, and the job is not called failed."""
    finding = judged(tmp_path, lines)
    assert (finding.kind, finding.ranks) == ("nothing_found", ()), why


def test_who_seems_to_be_behind(tmp_path: Path) -> None:
    """The last line of rank 2 is an older call. It may have written more, so it is not blamed."""
    lines = init(range(4))
    lines += [call(rank, n) for n in range(30) for rank in range(4) if rank != 2 or n < 29]
    assert judged(tmp_path, lines).kind == "nothing_found"
    lines += log_of(WORDINGS[-1], {rank: TimedOut(31) for rank in (0, 1, 3)})
    finding = judged(tmp_path, lines)
    assert (finding.kind, finding.ranks) == ("undecided", ())
    assert (
        "the last calls that NCCL wrote are rank 2 all_reduce with opCount 1c; ranks 0-1,3 "
        "all_reduce with opCount 1d. The last lines of a process that was ended may be lost."
    ) in finding.summary


def test_a_job_that_was_ended_from_outside_stops_anywhere(tmp_path: Path) -> None:
    """Where its ranks were then says nothing."""
    lines = [call(rank, n) for n in range(9) for rank in range(4) if rank != 2 or n < 8]
    lines.append("slurmstepd: error: *** STEP 8.0 ON n3 CANCELLED AT 2026-03-14T09:02:36 ***")
    assert "opCount" not in judged(tmp_path, lines).summary


def test_a_call_in_the_middle_of_a_traceback(tmp_path: Path) -> None:
    """Another thread writes it; the exception is still the rank's own."""
    lines = [
        "[rank1]: Traceback (most recent call last):",
        '[rank1]:   File "/job/train.py", line 88, in <module>',
        "[rank1]:     main()",
        f"[rank1]: {call(1, 7)}",
        '[rank1]:   File "/job/torch/data.py", line 12, in load',
        "[rank1]:     return batch[key]",
        "[rank1]: KeyError: 'loss'",
        f"[rank1]: {call(1, 8)}",
    ]
    finding = judged(tmp_path, lines)
    assert (finding.kind, finding.ranks) == ("dead", (1,))


def test_only_the_newest_lines_are_kept(tmp_path: Path) -> None:
    """A rank that stopped long before keeps its last lines, however many the others write."""
    path = tmp_path / "job.log"
    others = (call(rank, n) for n in range(1000, 12_000) for rank in range(3))
    path.write_text("\n".join([*(call(3, n) for n in range(1000)), *others]))
    log = Log(path)
    assert list(log.excerpts(markers(), repeated(), 400)) == []
    assert log.count == 34_000
    of_rank = [[line for line in log.newest if head(rank) in line.text] for rank in range(4)]
    assert [len(lines) for lines in of_rank] == [100] * 4
    assert [line.text for line in of_rank[3]] == [call(3, n) for n in range(900, 1000)]
    assert [line.number for line in of_rank[3]] == [*range(901, 1001)]
    assert of_rank[0][-1] == (33_998, call(0, 11_999))


def test_lines_that_no_program_writes_cost_little(tmp_path: Path) -> None:
    """Ever new processes, and nothing but the words, take time and memory in proportion."""
    path = tmp_path / "job.log"
    with path.open("w") as file:
        for number in range(100_000):
            file.write(f"node-{number}:{number}:1 [0] NCCL INFO X: opCount 1 comm 0x{number:x} [\n")
        file.write(" opCount \n" * 1_000_000)
    began = time.process_time()
    log = Log(path)
    assert list(log.excerpts(markers(), repeated(), 1000)) == []
    assert len(log.newest) <= 1000
    assert time.process_time() - began < 60.0
    assert diagnose_logs([path]).findings[0].ranks == ()
