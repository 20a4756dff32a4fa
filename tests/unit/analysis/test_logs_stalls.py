"""Horovod's reports on stalls: which ranks others wait for, and for which ops."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from log_cases import torchrun

from rankcall.analysis.logs import diagnose_logs
from rankcall.analysis.verdicts.finding import Finding

HEADER = (
    "One or more tensors were submitted to be reduced, gathered or broadcasted by subset of ranks "
    "and are waiting for remainder of ranks for more than {seconds} seconds. This may indicate "
    "that different ranks are trying to submit different tensors or that only subset of ranks is "
    "submitting tensors, which will cause deadlock. "
)
PLACE = "[2026-04-02 11:02:07.{:06d}: W horovod/common/stall_inspector.cc:107] "
SHOWN = 6  # ops of a rank that Horovod writes


def report(missing: Mapping[int, Sequence[str]], *, seconds: int = 60, ends: bool = False) -> str:
    """Return a report as Horovod 0.18 and newer write it, by rank."""
    lines = [PLACE.format(715) + HEADER.format(seconds=seconds), "Missing ranks:"]
    for rank, ops in sorted(missing.items()):
        names = sorted(ops)
        more = " ..." if len(names) > SHOWN else ""
        lines.append(f"{rank}{'!' if ends else ''}: [{', '.join(names[:SHOWN])}{more}]")
    return "\n".join(lines)


def old_report(missing: Mapping[str, Sequence[int]]) -> str:
    """Return a report as older versions write it, by op."""
    place = PLACE.replace("stall_inspector.cc:107", "operations.cc:588")
    lines = [place.format(1) + HEADER.format(seconds=60), "Stalled ops:"]
    for number, (op, ranks) in enumerate(missing.items()):
        text = f"{op} [missing ranks: {', '.join(map(str, ranks))}]"
        lines.append(place.format(number + 2) + text)
    return "\n".join(lines)


def judged(tmp_path: Path, text: str) -> Finding:
    """Return the first finding of a log."""
    path = tmp_path / "job.log"
    path.write_text(text + "\n")
    return diagnose_logs([path]).findings[0]


def each(put: Callable[[str], str]) -> Callable[[str], str]:
    """Return what puts a prefix before each line."""
    return lambda text: "\n".join(put(line) for line in text.split("\n"))


PREFIXES = {
    "none": lambda text: text,
    "mpirun": each(lambda line: f"[1,0]<stderr>:{line}"),
    "horovodrun": each(lambda line: f"[0]<stderr>:{line}"),
    "srun": each(lambda line: f"0: {line}"),
    "a record of several lines": lambda text: json.dumps({"log": text}),
    "kubectl": each(lambda line: f"[pod/train-0/x] {line}"),
}


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("missing", [(3,), (1, 6), tuple(range(1, 40))], ids=str)
def test_ranks_that_have_not_submitted_an_op(
    tmp_path: Path, prefix: str, missing: tuple[int, ...]
) -> None:
    """They are named with the op, whatever stands before the lines."""
    text = report(dict.fromkeys(missing, ("allreduce.loss", "allreduce.weight")))
    finding = judged(tmp_path, PREFIXES[prefix](f"step 1\n{text}\nstep 2"))
    assert (finding.kind, finding.ranks) == ("missing", missing)
    assert "had not submitted allreduce.loss, allreduce.weight. Other ranks" in finding.summary
    assert finding.since_s == 60


@pytest.mark.parametrize("ranks", [(1,), (0, 2, 3)], ids=str)
def test_older_versions_write_a_line_for_each_op(tmp_path: Path, ranks: tuple[int, ...]) -> None:
    """The ranks stand behind the op."""
    text = old_report({"HorovodBroadcast_bias_0": ranks, "HorovodBroadcast_kernel_0": ranks})
    finding = judged(tmp_path, text)
    assert (finding.kind, finding.ranks) == ("missing", ranks)
    assert "HorovodBroadcast_bias_0, HorovodBroadcast_kernel_0" in finding.summary


def test_a_rank_that_waits_itself_is_not_missing(tmp_path: Path) -> None:
    """Rank 1 has submitted ``b``, and waits for rank 2, which has submitted nothing."""
    finding = judged(tmp_path, report({1: ("a",), 2: ("a", "b")}))
    assert (finding.kind, finding.ranks, finding.victims) == ("missing", (2,), (1,))


def test_ranks_that_wait_for_each_other(tmp_path: Path) -> None:
    """Rank 3 has submitted ``a``, all others ``b``: of four ranks, it differs."""
    finding = judged(tmp_path, report({0: ("a",), 1: ("a",), 2: ("a",), 3: ("b",)}))
    assert (finding.kind, finding.ranks) == ("desync", (3,))
    assert "Rank 3 had not submitted b; ranks 0-2 had not submitted a." in finding.summary
    # Of a job whose other ranks are not in the report, neither side is known to be the smaller one.
    assert judged(tmp_path, report({4: ("a",), 5: ("a",), 7: ("b",)})).ranks == (4, 5, 7)


def test_only_some_of_the_ops_are_written(tmp_path: Path) -> None:
    """Horovod writes the first six by name: rank 1 may lack ``z``, too."""
    many = [f"a{number}" for number in range(9)]
    finding = judged(tmp_path, report({1: many, 2: ("z",)}))
    assert (finding.kind, finding.ranks) == ("missing", (1,))  # rank 2 has submitted a0
    assert "a0, a1, a2 and other ops" in finding.summary
    finding = judged(tmp_path, report({1: [*many, "z"], 2: [*many, "y"]}))
    assert (finding.kind, finding.ranks) == ("missing", (1, 2))


def test_the_last_report_counts(tmp_path: Path) -> None:
    """Rank 1 came after the first report."""
    text = "\n".join(
        [
            report({1: ("a",), 2: ("a",)}),
            report({2: ("a",)}, seconds=120, ends=True),
            'One or more rank (marked by "!") is stalled for longer than 120 seconds.',
        ]
    )
    finding = judged(tmp_path, text)
    assert (finding.kind, finding.ranks, finding.since_s) == ("missing", (2,), 120)


def test_a_process_that_was_killed_explains_a_stall(tmp_path: Path) -> None:
    """It could not submit anything."""
    finding = judged(tmp_path, "\n".join([report({2: ("a",)}), *torchrun(2, -9)]))
    assert (finding.kind, finding.ranks) == ("dead", (2,))


@pytest.mark.parametrize(
    "rows",
    [
        "Missing ranks:\n99999999: [a]",
        "Missing ranks:\n[1, 2]",
        "Missing ranks: [1, 2]",
        "Missing ranks:\nloss: [3]\n1: [a]",  # the list was over
        "HorovodBroadcast_bias_0 [missing ranks: 99999999]",
        "",
    ],
)
def test_what_is_no_row_of_a_report(tmp_path: Path, rows: str) -> None:
    """A report without rows is a failure of which nothing more is known."""
    finding = judged(tmp_path, f"{HEADER.format(seconds=60)}\n{rows}")
    assert (finding.kind, finding.ranks) == ("undecided", ())
    assert judged(tmp_path, f"x\n{rows}").ranks == ()


def test_a_report_of_very_many_ranks_and_ops(tmp_path: Path) -> None:
    """Each rank lacks other ops: it takes time in proportion to the text."""
    text = report({rank: [f"op{rank}.{n}" for n in range(6)] for rank in range(900)})
    finding = judged(tmp_path, text)
    assert (finding.kind, finding.ranks) == ("desync", ())
