"""What stands before a line, and what wraps it, changes no verdict."""

from __future__ import annotations

import functools
import gzip
import re
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest
from collected_logs import COLLECTORS, LOGS
from log_cases import ALL, INCIDENTS, judged

from rankcall.analysis.logs import diagnose_logs
from rankcall.imports.logs.prefixes import Prefixes
from rankcall.imports.logs.reading import RawLine
from rankcall.imports.logs.wrapping import wrapping_of

CASES = {name: case.lines for name, case in ALL.items()} | {
    name: log[0] for name, log in LOGS.items()
}
WRAPS = ("no line", "lines before", "lines after")
GPU_HANGS = "HW Exception by GPU node-9 (Agent handle: 0x631351bb5a20) reason :GPU Hang"
BY_COLUMNS = 110, 140  # before a collector took each part for a line, and after it


@functools.cache
def verdict_of(name: str) -> tuple[str, tuple[int, ...]]:
    """Return the verdict of a plain log."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.log"
        path.write_text("\n".join(CASES[name]) + "\n")
        return judged(path)


@pytest.mark.parametrize("name", LOGS)
def test_a_plain_log_has_the_verdict_that_was_planted(name: str) -> None:
    """The logs that torch wrote, and the forms of NCCL's watchdogs."""
    assert verdict_of(name) == LOGS[name][1:]


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("wraps", WRAPS)
@pytest.mark.parametrize("collector", COLLECTORS)
def test_a_collector_changes_no_verdict(
    tmp_path: Path, collector: str, wraps: str, every: int
) -> None:
    """Whatever stands before the lines, the verdict is that of the plain log; wrapped ones, too.

    ``make test`` takes every fourth log, for each collector and way to wrap from another one on.
    """
    path = tmp_path / "job.log"
    before, after = BY_COLUMNS
    first = (list(COLLECTORS).index(collector) + WRAPS.index(wraps)) % every
    for name in list(CASES)[first::every]:
        plain = CASES[name]
        lines = [part for line in plain for part in _parts(line, wraps == "lines before", before)]
        lines = [COLLECTORS[collector](number, line) for number, line in enumerate(lines)]
        lines = [part for line in lines for part in _parts(line, wraps == "lines after", after)]
        path.write_text("\n".join(lines) + "\n")
        assert judged(path) == verdict_of(name), name


def _parts(line: str, is_wrapped: bool, width: int) -> Sequence[str]:
    return wrapped(line, width, "columns") if is_wrapped else [line]


def wrapped(line: str, width: int, breaks: str) -> Sequence[str]:
    """Wrap one line as a terminal (``columns``) or a program (``words``) does."""
    if breaks == "columns":
        return [line[at : at + width] for at in range(0, len(line), width)] or [""]
    return textwrap.wrap(line, width, break_on_hyphens=False) or [""]


@pytest.mark.parametrize("name", [name for name in LOGS if name.startswith("nccl")])
@pytest.mark.parametrize("width", [100, 120, 165])
@pytest.mark.parametrize("breaks", ["words", "columns"])
def test_wrapped_lines(tmp_path: Path, name: str, width: int, breaks: str) -> None:
    """A terminal breaks within words, other programs at spaces: messages are put together again."""
    lines, kind, ranks = LOGS[name]
    path = tmp_path / "job.log"
    path.write_text("\n".join(part for line in lines for part in wrapped(line, width, breaks)))
    assert judged(path) == (kind, ranks)


@pytest.mark.parametrize("width", [100, 120])
@pytest.mark.parametrize("breaks", ["words", "columns"])
def test_a_wrapped_incident_is_no_healthy_job(tmp_path: Path, width: int, breaks: str) -> None:
    """However short a log is, a wrapped message is found, and no other rank is named for it."""
    path = tmp_path / "job.log"
    for name, case in INCIDENTS.items():
        if case.open:
            continue
        path.write_text("\n".join(case.lines) + "\n")
        plain = judged(path)
        parts = [part for line in case.lines for part in wrapped(line, width, breaks)]
        path.write_text("\n".join(parts))
        kind, ranks = judged(path)
        assert kind != "nothing_found", name
        assert set(ranks) <= set(plain[1]), name


# Collector, log, width and breaks, whose rests looked like lines of their own, for one reason each.
HARD_TO_JOIN = [
    ("json log", "gloo-kill", 80, "columns"),  # the rest of a record begins with a date
    ("kubectl with both", "gloo-shape", 100, "columns"),  # it begins as the part above it
    ("pdsh with names", "gloo-shape", 140, "columns"),  # it begins with a word and a colon
    ("ray", "nccl-old-missing", 100, "words"),  # there were two spaces before its first word
    ("srun --label", "nccl-desync", 165, "words"),  # most parts end at the last column by chance
    ("json message", "nccl-2.14-oom", 140, "words"),  # a link follows that is almost a line long
    ("jsonPayload", "nccl-2.14-raise", 80, "words"),  # spaces of a traceback are gone
    ("progress bars", "gloo-kill", 120, "words"),  # the carriage return is a space
    ("progress bars", "nccl-missing", 100, "columns"),  # the column counts what it overwrote
]


@pytest.mark.parametrize(("collector", "name", "width", "breaks"), HARD_TO_JOIN)
def test_rests_that_look_like_lines_of_their_own(
    tmp_path: Path, collector: str, name: str, width: int, breaks: str
) -> None:
    """What a collector wrote was wrapped; only the first part has its prefix."""
    lines, kind, ranks = LOGS[name]
    collected = [COLLECTORS[collector](number, line) for number, line in enumerate(lines)]
    path = tmp_path / "job.log"
    path.write_text("\n".join(part for line in collected for part in wrapped(line, width, breaks)))
    assert judged(path) == (kind, ranks)


# Collector, log, width, breaks and what came first. These logs cannot be put together again.
BROKEN = [
    ("journald json", "gloo-two-families-of-addresses", 80, "words", "wrapped"),
    ("kubectl --timestamps", "gloo-two-families-of-addresses", 100, "words", "collected"),
    ("pdsh with names", "gaudi-a-graph-that-does-not-compile", 80, "words", "wrapped"),
]


@pytest.mark.parametrize(("collector", "name", "width", "breaks", "first"), BROKEN)
def test_what_is_lost_names_no_other_rank(
    tmp_path: Path, collector: str, name: str, width: int, breaks: str, first: str
) -> None:
    """The message of an exception may be cut off: its words do not say whose fault it is."""

    def parts(lines: Sequence[str]) -> list[str]:
        return [part for line in lines for part in wrapped(line, width, breaks)]

    def collected(lines: Sequence[str]) -> list[str]:
        return [COLLECTORS[collector](number, line) for number, line in enumerate(lines)]

    plain = CASES[name]
    lines = collected(parts(plain)) if first == "wrapped" else parts(collected(plain))
    path = tmp_path / "job.log"
    path.write_text("\n".join(lines) + "\n")
    kind, ranks = judged(path)
    assert kind != "nothing_found"
    assert set(ranks) <= set(verdict_of(name)[1])


@pytest.mark.parametrize("collector", ["a time", "mpirun", "torchrun --tee", "ray, repeated"])
def test_a_line_that_was_broken_before_a_space_and_then_collected(
    tmp_path: Path, collector: str
) -> None:
    """The space belongs to the message, although some prefixes end with one."""
    lines, kind, ranks = LOGS["gloo-shape"]
    parts = [part for line in lines for part in wrapped(line, 80, "columns")]
    path = tmp_path / "job.log"
    path.write_text("\n".join(COLLECTORS[collector](n, part) for n, part in enumerate(parts)))
    assert judged(path) == (kind, ranks)


def test_a_worker_is_not_its_child(tmp_path: Path) -> None:
    """Ray's prefix is that of process 812, and NCCL's line of process 4711, which it started."""
    lines = [
        "node-2:4711:5120 [5] p2p.cc:271 NCCL WARN HIP failure 'invalid device pointer'",
        "[rank3]: step 812",
    ]
    path = tmp_path / "job.log"
    for pid, expected in ((812, ("undecided", ())), (4711, ("dead", (3,)))):
        path.write_text("\n".join(f"(TrainWorker pid={pid}) {line}" for line in lines) + "\n")
        assert judged(path) == expected


def test_wrapped_lines_of_two_pods_alternate(tmp_path: Path) -> None:
    """The parts of one line may stand apart, with lines of another pod between them."""
    lines, kind, ranks = LOGS["nccl-missing"]
    mixed = []
    for number, line in enumerate(lines):
        rank = int(re.findall(r"rank(\d)", line)[0])
        for part in wrapped(line, 110, "columns"):
            mixed += [f"[pod/train-{rank}/x] {part}", f"[pod/train-{9 - rank}/x] step {number}"]
    path = tmp_path / "job.log"
    path.write_text("\n".join(mixed))
    assert judged(path) == (kind, ranks)


def test_a_pod_is_no_process(tmp_path: Path) -> None:
    """Only rank 0 of a pod has put its rank before a line: what others of the pod write is not its.

    The process that ran out of memory is not known: no line ties its pid to a rank.
    """
    lines = [
        "[rank0]: step 1",
        "node-c:4002:5102 [2] include/alloc.h:178 NCCL WARN Cuda failure 2 'out of memory'",
        "[rank0]: step 2",
    ]
    path = tmp_path / "job.log"
    path.write_text("\n".join(f"[pod/train-0/x] {line}" for line in lines))
    assert judged(path) == ("undecided", ())


def test_the_words_of_the_only_message_are_broken(tmp_path: Path) -> None:
    """Neither line has the words that are searched for, and both together are a known message."""
    line = (
        "(raylet) The node with node id: 5a1f and address: 10.0.3.4 and node name: 10.0.3.4 has "
        "been marked dead because the detector has missed too many heartbeats from it."
    )
    width = line.index("marked dead") + 4
    path = tmp_path / "job.log"
    path.write_text("\n".join(wrapped(line, width, "columns")))
    assert judged(path) == ("undecided", ())


def test_two_nodes_in_one_file(tmp_path: Path) -> None:
    """Lines of two nodes alternate, each behind its host."""
    lines, kind, ranks = LOGS["nccl-missing"]
    mixed = []
    for number, line in enumerate(lines):
        rank = int(re.findall(r"rank(\d)", line)[0])
        mixed += [f"node-{rank // 2}: {line}", f"node-{number % 2}: step {number}"]
    path = tmp_path / "job.log"
    path.write_text("\n".join(mixed))
    assert judged(path) == (kind, ranks)


def test_files_of_nodes_in_any_order(tmp_path: Path) -> None:
    """One file a node, compressed or not, in either order."""
    lines, kind, ranks = LOGS["nccl-desync"]
    first, second = tmp_path / "node-a.log", tmp_path / "node-b.log.gz"
    half = len(lines) // 2
    first.write_text("\n".join(lines[:half]))
    second.write_bytes(gzip.compress("\n".join(lines[half:]).encode()))
    for paths in ([first, second], [second, first]):
        finding = diagnose_logs(paths).findings[0]
        assert (finding.kind, finding.ranks) == (kind, ranks)


def test_a_message_behind_hours_of_a_progress_bar(tmp_path: Path) -> None:
    """The bar is one line of a megabyte, and the first line of the message is at its end."""
    lines, kind, ranks = LOGS["nccl-2.14-oom"]
    bar = "".join(f"\rTrain:  41%|####  | {n}/90000 [00:10<00:59, 1.5it/s]" for n in range(20_000))
    path = tmp_path / "job.log"
    path.write_text(bar + "\r" + "\n".join(lines))
    assert judged(path) == (kind, ranks)


def test_a_bar_without_a_carriage_return(tmp_path: Path) -> None:
    """Some collectors drop it: the message begins where the bar ends."""
    lines, kind, ranks = LOGS["gloo-kill"]
    bar = "Epoch 0:   6%|█▍   | 32040/500150 [6:28:43<94:39:17,  1.37it/s, loss=2.6]"
    path = tmp_path / "job.log"
    path.write_text("\n".join(f"{bar}{line}" for line in lines))
    assert judged(path) == (kind, ranks)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["1: step 1", f"0: {GPU_HANGS}"], ("dead", (0,))),
        # Task 1 is seen among the first lines only.
        (["1: step 1", *["0: step 2"] * 9, f"0: {GPU_HANGS}"], ("dead", (0,))),
        ([f"0: {GPU_HANGS}", "srun: error: node-1: tasks 1-7: Killed"], ("dead", (0,))),
        # All that srun started is task 0, and the job has more ranks.
        (["0: step 1", f"0: {GPU_HANGS}"], ("undecided", ())),
        # Rank 3 cannot have written what a process with rank 0 did: task 0 is a launcher.
        (
            [
                "1: step 1",
                f"0: {GPU_HANGS}",
                "0: RuntimeError: [Rank 3]: Ranks 1 failed to pass monitoredBarrier in 9 ms",
            ],
            ("missing", (1,)),
        ),
        (
            ["0: + torchrun --nproc-per-node 8 train.py", "1: ", f"0: {GPU_HANGS}"],
            ("undecided", ()),
        ),
        (
            [
                "1: ",
                f"0: {GPU_HANGS}",
                "0: [launch.py:319:sigkill_handler] Killing subprocess 70213",
            ],
            ("undecided", ()),
        ),
    ],
)
def test_a_task_of_srun_may_be_a_launcher(
    tmp_path: Path, lines: list[str], expected: tuple[str, tuple[int, ...]]
) -> None:
    """Its number is taken for a rank only if nothing shows that it started several."""
    path = tmp_path / "job.log"
    path.write_text("\n".join(lines) + "\n")
    assert judged(path) == expected


@pytest.mark.parametrize(
    ("below", "is_wrapped"),
    [
        ("torch.distributed.elastic: the launcher's own line", False),
        ("uler's log has the rest", True),
        (" of the job has the rest", True),
    ],
)
def test_a_line_below_the_longest_one(below: str, is_wrapped: bool) -> None:
    """It is the rest of that one only if a word is broken: a launcher writes without a prefix."""
    longest = f"[rank2]: {'x' * 90} err=-3" if not is_wrapped else f"[rank2]: {'x' * 90} the sched"
    texts = ["[rank0]: step 1", "[rank1]: step 1", longest, below]
    lines = [RawLine(number, text) for number, text in enumerate(texts, 1)]
    assert (wrapping_of([lines], Prefixes(0, texts)) is not None) == is_wrapped
