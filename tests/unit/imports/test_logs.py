"""Reading logs: the table of messages, prefixes of collectors, wrapped lines, and bounds."""

from __future__ import annotations

import gzip
import random
import re
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

import log_messages
import pytest
from collected_logs import COLLECTORS, LOGS, REAL
from generated_logs import made
from log_cases import ALL, HARMLESS, INCIDENTS, raised, torchrun
from nccl_logs import WORDINGS, Call, log_of

from rankcall.analysis.logs import diagnose_logs
from rankcall.imports.logs.blame import blame_of, blame_of_code
from rankcall.imports.logs.prefixes import Line, Prefixes, Writer
from rankcall.imports.logs.reading import Log
from rankcall.imports.logs.sources import SOURCES, Message, facts_of, is_incomplete, markers

ROWS = [(source.name, message) for source in SOURCES for message in source.messages]


def line_of(text: str) -> Line:
    """Return a line as the reader passes it on."""
    (line,) = Prefixes(0).read(1, text)
    return line


# --- the table ---


@pytest.mark.parametrize(("source", "message"), ROWS, ids=lambda value: str(value)[:40])
def test_each_example_is_read(source: str, message: Message) -> None:
    """A marker is in the example, and the example gives one fact of its row."""
    assert any(marker in message.example for marker in message.markers), source
    if message.pattern is not None:
        facts = facts_of(line_of(message.example))
        assert len(facts) == 1, (source, facts)
        assert not is_incomplete(message.example)


def test_the_page_is_written_from_the_table() -> None:
    """docs/log-messages.md is what tools/log_messages.py writes."""
    assert log_messages.PAGE.read_text() == log_messages.page()


def test_markers_are_plain_and_differ() -> None:
    """They are ASCII, because a log is searched as such, and none is so short that it is noise."""
    words = [marker.words for marker in markers()]
    assert len(set(words)) == len(words)
    assert all(word.isascii() and len(word) >= 4 for word in words)
    assert len(words) <= 192  # three passes of the search


@pytest.mark.parametrize(
    ("message", "kind", "expected"),
    [
        ("CUDA error: unspecified launch failure", "", "own"),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", "torch.OutOfMemoryError", "own"),
        ("Cuda failure 'out of memory'", "", "own"),
        ("Address already in use (addr='tcp://10.0.7.12:1')", "zmq.error.ZMQError", "own"),
        ("'loss'", "KeyError", "own"),
        ("", "AssertionError", "own"),
        ("NCCL communicator was aborted on rank 3", "RuntimeError", "victim"),
        ("[../pair.cc:553] Connection closed by peer [::1]:1", "RuntimeError", "victim"),
        ("remote process exited or there was a network error, NCCL version 2.19", "", "victim"),
        ("socketProgress: Connection closed by remote peer node-c<51159>", "", "victim"),
        ("anything", "torch.distributed.DistNetworkError", "victim"),
        ("", "KeyboardInterrupt", "outside"),
        ("Process 1 got signal: 15", "SignalException", "outside"),
        ("[Errno 28] No space left on device", "OSError", "outside"),
    ],
)
def test_the_classifier(message: str, kind: str, expected: str) -> None:
    """Whose fault an error is, by its words and its type."""
    assert blame_of(message, kind) == expected


def test_exit_codes() -> None:
    """A signal that no failure sends is the rank's own; an abort follows many things."""
    codes = {-9: "own", -11: "own", 135: "own", -6: "victim", 134: "victim", 1: "victim"}
    codes |= {-15: "outside", 143: "outside", 130: "outside"}
    assert {code: blame_of_code(code) for code in codes} == codes


# --- collectors: each puts its own words before a line ---


def judged(path: Path) -> tuple[str, tuple[int, ...]]:
    """Return the kind and the ranks of the first finding."""
    finding = diagnose_logs([path]).findings[0]
    return finding.kind, finding.ranks


@pytest.mark.parametrize("name", LOGS)
@pytest.mark.parametrize("collector", COLLECTORS)
def test_a_collector_changes_no_verdict(tmp_path: Path, collector: str, name: str) -> None:
    """Whatever stands before the lines, the verdict is that of the plain log."""
    lines, kind, ranks = LOGS[name]
    text = "\n".join(COLLECTORS[collector](number, line) for number, line in enumerate(lines))
    path = tmp_path / "job.log"
    path.write_text(text + "\n")
    assert judged(path) == (kind, ranks)


@pytest.mark.parametrize("collector", COLLECTORS)
def test_a_collector_changes_the_verdict_of_no_incident(tmp_path: Path, collector: str) -> None:
    """The same of all incidents, and of all logs without one.

    srun's and mpirun's prefix says that task 0 wrote each line. So what failed is a rank's, whether
    or not another prefix says which; and no other rank is believed to have written it.
    """
    path, of_task = tmp_path / "job.log", (("dead", (0,)), ("undecided", ()))
    for name, (lines, *_) in ALL.items():
        path.write_text("\n".join(lines) + "\n")
        plain = judged(path)
        collected = [COLLECTORS[collector](number, line) for number, line in enumerate(lines)]
        path.write_text("\n".join(collected) + "\n")
        says_who = collector in ("mpirun", "srun --label")
        assert judged(path) in ((plain, *of_task) if says_who else (plain,)), name


@pytest.mark.parametrize("name", [name for name in LOGS if name.startswith("nccl")])
@pytest.mark.parametrize("width", [100, 120, 165])
@pytest.mark.parametrize("breaks", ["words", "columns"])
def test_wrapped_lines(tmp_path: Path, name: str, width: int, breaks: str) -> None:
    """A terminal breaks within words, other programs at spaces: messages are put together again."""
    lines, kind, ranks = LOGS[name]
    path = tmp_path / "job.log"
    path.write_text("\n".join(part for line in lines for part in wrapped(line, width, breaks)))
    assert judged(path) == (kind, ranks)


@pytest.mark.parametrize("name", ["nccl-missing", "nccl-2.14-oom", "gloo-raise"])
@pytest.mark.parametrize("collector", [name for name in COLLECTORS if name != "progress bars"])
def test_lines_that_were_wrapped_before_they_were_collected(
    tmp_path: Path, collector: str, name: str
) -> None:
    """A collector takes each part of a wrapped line for a line: each has the prefix."""
    lines, kind, ranks = LOGS[name]
    parts = [part for line in lines for part in wrapped(line, 110, "columns")]
    path = tmp_path / "job.log"
    path.write_text("\n".join(COLLECTORS[collector](n, part) for n, part in enumerate(parts)))
    assert judged(path) == (kind, ranks)


@pytest.mark.parametrize("name", ["nccl-missing", "nccl-2.14-oom", "gloo-raise"])
@pytest.mark.parametrize("collector", [name for name in COLLECTORS if name != "progress bars"])
def test_lines_that_were_wrapped_after_they_were_collected(
    tmp_path: Path, collector: str, name: str
) -> None:
    """A terminal wraps what a collector wrote: only the first part has the prefix."""
    lines, kind, ranks = LOGS[name]
    parts = [
        part
        for number, line in enumerate(lines)
        for part in wrapped(COLLECTORS[collector](number, line), 140, "columns")
    ]
    path = tmp_path / "job.log"
    path.write_text("\n".join(parts))
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


def wrapped(line: str, width: int, breaks: str) -> Sequence[str]:
    """Wrap one line as a terminal (``columns``) or a program (``words``) does."""
    if breaks == "columns":
        return [line[at : at + width] for at in range(0, len(line), width)] or [""]
    return textwrap.wrap(line, width, break_on_hyphens=False) or [""]


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


# --- the cases of public reports, told again ---


@pytest.mark.parametrize("name", INCIDENTS)
def test_an_incident(tmp_path: Path, name: str, request: pytest.FixtureRequest) -> None:
    """The rank that the log shows to be at fault is named, and nobody if it shows none."""
    case = INCIDENTS[name]
    if case.open:
        request.applymarker(pytest.mark.xfail(reason=case.open, strict=True))
    path = tmp_path / case.file
    path.write_text("\n".join(case.lines) + "\n")
    finding = diagnose_logs([path]).findings[0]
    assert finding.kind in case.kinds
    assert finding.ranks in case.ranks
    assert any(words in finding.summary + finding.advice for words in case.says)


@pytest.mark.parametrize("name", HARMLESS)
def test_a_log_without_a_failure_of_a_job(tmp_path: Path, name: str) -> None:
    """Programs that train nothing, and jobs that ended well, give no finding."""
    path = tmp_path / "job.log"
    path.write_text("\n".join(HARMLESS[name].lines) + "\n")
    assert judged(path) == ("nothing_found", ())


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("[rank2]:[E402 11:02:07.384372190 NCCLUtils.cpp:75] Abort failed", "undecided"),
        ("[rank2]:[F402 11:02:07.384372190 CUDAEvent.h:75] Check failed", "undecided"),
        ("[E ProcessGroupNCCL.cpp:477] something that no row has", "undecided"),
        ("[rank2]:[W402 11:02:07.384372190 socket.cpp:75] Connection refused", "nothing_found"),
        ("[rank2]:[I402 11:02:07.384372190 ProcessGroupNCCL.cpp:75] started", "nothing_found"),
        ("[rank2]:[Epoch 4] loss 2.1", "nothing_found"),
    ],
)
def test_an_error_of_torch_that_no_row_has(tmp_path: Path, line: str, kind: str) -> None:
    """torch writes the level of a message before it; a warning is no failure."""
    path = tmp_path / "job.log"
    path.write_text(line + "\n")
    assert judged(path) == (kind, ())


def test_the_exceptions_of_a_checkpoint_are_gathered_in_a_subgroup(tmp_path: Path) -> None:
    """Ranks 1, 3, 5 and 7 say that rank 1 of their group failed, which may be rank 3: nobody is."""
    lines = INCIDENTS["a-checkpoint-that-rank-3-could-not-write"].lines
    text = "\n".join(lines).replace("(RANK 3)", "(RANK 1)").replace("[3]", "[1]")
    for rank in (3, 2, 1, 0):
        text = text.replace(f"[rank{rank}]", f"[rank{2 * rank + 1}]")
    path = tmp_path / "job.log"
    path.write_text(text)
    assert judged(path) == ("undecided", ())


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


def test_ranks_that_end_together_by_one_signal(tmp_path: Path) -> None:
    """Four ranks got SIGBUS in one second: torchrun's first is not special; /dev/shm is small."""
    block = (
        "[{rank}]:\n  time      : 2026-04-14_06:35:35\n  host      : node-a\n"
        "  rank      : {rank} (local_rank: {rank})\n  exitcode  : -7 (pid: {pid})\n"
        "  error_file: <N/A>\n  traceback : Signal 7 (SIGBUS) received by PID {pid}\n"
    )
    others = "".join(block.format(rank=rank, pid=3111 + rank) for rank in (1, 2, 3))
    text = (
        (
            f"===\nx.py FAILED\n---\nFailures:\n{others}---\nRoot Cause (first observed failure):\n"
            f"{block.format(rank=0, pid=3111)}=====\n"
        )
        .replace("===\n", "=====\n")
        .replace("---\n", "-----\n")
    )
    path = tmp_path / "job.log"
    path.write_text(text)
    (finding,) = diagnose_logs([path]).findings
    assert (finding.kind, finding.ranks) == ("dead", (0, 1, 2, 3))
    assert "--shm-size" in finding.advice
    assert "first" not in finding.summary.replace("which was first", "")


def summary_of(*ends: tuple[int, int, int]) -> str:
    """Return torchrun's report of ranks with their exit codes and seconds; the last is the root."""
    block = (
        "[{0}]:\n  time      : 2026-04-14_06:35:{2:02d}\n  host      : node-a\n"
        "  rank      : {0} (local_rank: {0})\n  exitcode  : {1} (pid: {3})\n"
        "  error_file: <N/A>\n  traceback : To enable traceback see: ...\n"
    )
    *others, root = [block.format(*end, 3000 + end[0]) for end in ends]
    line = "-" * 20
    return (
        f"x.py FAILED\n{line}\nFailures:\n{''.join(others)}{line}\n"
        f"Root Cause (first observed failure):\n{root}{'=' * 20}\n"
    )


def test_nobody_is_first_within_the_resolution_of_a_clock(tmp_path: Path) -> None:
    """torchrun writes whole seconds: of two failures in one second, none is called the first."""
    path = tmp_path / "job.log"
    path.write_text(summary_of((1, 1, 3), (5, -9, 3)))
    (finding,) = diagnose_logs([path]).findings
    assert (finding.kind, finding.ranks) == ("dead", (5,))
    assert "before any other" not in finding.summary
    assert "The log does not show which was first" in finding.summary
    path.write_text(summary_of((1, 1, 4), (5, -9, 3)))
    (finding,) = diagnose_logs([path]).findings
    assert "before any other rank failed on its node" in finding.summary


def test_no_advice_that_was_followed(tmp_path: Path) -> None:
    """A setting that the log shows is not asked for again."""
    path = tmp_path / "job.log"
    bus = summary_of((0, -7, 3))
    path.write_text(bus)
    assert "--shm-size" in diagnose_logs([path]).findings[0].advice
    path.write_text(f"+ docker run --shm-size=64g --gpus all train\n{bus}")
    assert "--shm-size" not in diagnose_logs([path]).findings[0].advice
    lines = log_of(WORDINGS[-1], {0: Call(51), 1: Call(51)})
    path.write_text("\n".join(lines))
    assert "TORCH_FR_BUFFER_SIZE=2000" in diagnose_logs([path]).findings[0].advice
    path.write_text("\n".join(["export TORCH_FR_BUFFER_SIZE=20000", *lines]))
    advice = diagnose_logs([path]).findings[0].advice
    assert "TORCH_FR_BUFFER_SIZE=2000" not in advice
    assert "give the folder of its dumps" in advice
    path.write_text("\n".join(["TORCH_DISTRIBUTED_DEBUG=DETAIL torchrun x.py", *lines]))
    assert "DETAIL" not in diagnose_logs([path]).findings[0].advice


KERNEL_OOM = (
    "Mar 14 09:02:36 node-a kernel: Out of memory: Killed process {} (python) total-vm:91234kB"
)


@pytest.mark.parametrize(
    ("lines", "summary", "asked", "advised"),
    [
        (
            ["srun: error: node-2: task 5: Out Of Memory"],
            "Rank 5 was ended by SIGKILL, because memory ran out, says the launcher.",
            "oom-kill",
            "use less",
        ),
        (
            ["srun: error: node-2: task 5: Segmentation fault"],
            "Rank 5 was ended by SIGSEGV, says the launcher.",
            "oom-kill",
            "core dump",
        ),
        (
            [*torchrun(3, -9), KERNEL_OOM.format(5003)],
            "The reason: memory ran out.",
            "dmesg",
            "use less",
        ),
        (
            [*torchrun(3, -9), KERNEL_OOM.format(77)],
            "Rank 3 (node-0) was ended",
            "dmesg",
            "use less",
        ),
        ([*torchrun(3, -9)], "Rank 3 (node-0) was ended by SIGKILL at", "use less", "dmesg"),
        (
            [
                "[rank4]: RuntimeError: x",
                *raised("RuntimeError: CUDA error: unspecified launch failure", "[rank4]: "),
                "node-a kernel: NVRM: Xid (PCI:0000:1b:00): 31, pid=77, MMU Fault",
            ],
            "unspecified launch failure",
            "look for Xid",
            "drain",
        ),
    ],
)
def test_no_advice_that_the_log_answers(
    tmp_path: Path, lines: list[str], summary: str, asked: str, advised: str
) -> None:
    """Where the log has what an advice would look for, the advice is about that."""
    path = tmp_path / "job.log"
    path.write_text("\n".join(lines) + "\n")
    (finding,) = diagnose_logs([path]).findings
    assert summary in finding.summary
    assert asked not in finding.advice
    assert advised in finding.advice


def test_a_device_fault_is_the_cause_of_later_time_outs(tmp_path: Path) -> None:
    """Rank 9's device fails; ten minutes later the others time out: they are its victims."""
    fault = (
        "[rank9]:[E808 10:31:07.406255799 ProcessGroupNCCL.cpp:1895] [PG ID 1 PG GUID 1 Rank 9] "
        "Process group watchdog thread terminated with exception: CUDA error: an illegal memory "
        "access was encountered"
    )
    path = tmp_path / "job.log"
    path.write_text("\n".join([fault, *log_of(WORDINGS[-1], {0: Call(51), 1: Call(51)})]))
    (finding,) = diagnose_logs([path]).findings
    assert (finding.kind, finding.ranks, finding.victims) == ("dead", (9,), (0, 1))


def test_a_pid_is_tied_to_a_rank_by_nccl(tmp_path: Path) -> None:
    """Init START says which rank a process is; its warning, without a rank, then names it."""
    lines = [
        f"node-c:{4000 + rank}:{5000 + rank} [{rank}] NCCL INFO comm 0x55a5 rank {rank} nranks 4 "
        f"cudaDev {rank} nvmlDev {rank} busId 1000 commId 0x4d5e - Init START"
        for rank in range(4)
    ]
    own = "node-c:4002:5102 [2] include/alloc.h:178 NCCL WARN Cuda failure 2 'out of memory'"
    victim = (
        "node-c:4000:5100 [0] misc/socket.cc:49 NCCL WARN socketProgress: Connection closed by "
        "remote peer node-c<51159>"
    )
    path = tmp_path / "job.log"
    path.write_text("\n".join([*lines, own, victim]))
    (finding,) = diagnose_logs([path]).findings
    assert (finding.kind, finding.ranks, finding.victims) == ("dead", (2,), (0,))
    path.write_text("\n".join([own, victim]))
    (finding,) = diagnose_logs([path]).findings
    assert (finding.kind, finding.ranks) == ("undecided", ())
    assert "Process 4002 on node-c failed with Cuda failure 2 'out of memory'" in finding.summary


def test_hccl_ties_a_pid_to_a_rank(tmp_path: Path) -> None:
    """Only one line has the rank; the error of the same process, which has no prefix, names it."""
    lines = [
        "[ERROR] 2026-03-14-18:07:20 (PID:4711, Device:1, RankID:9) ERR01100 OPS call failed",
        "EJ0002: [PID: 4711] 2026-03-14-12:45:31.202.787 The network port is down.",
        "EI0002: [PID: 4700] 2026-03-14-13:15:31.713.335 The wait execution of the Notify register "
        "times out. Reason: The Notify register has not received the Notify record from remote "
        "rank: [1]. base information: [streamID:[109], taskID[38]]",
    ]
    path = tmp_path / "job.log"
    path.write_text("\n".join(lines))
    (finding,) = diagnose_logs([path]).findings
    assert (finding.kind, finding.ranks) == ("dead", (9,))
    assert "cable" in finding.advice
    path.write_text(lines[2])
    (finding,) = diagnose_logs([path]).findings
    assert (finding.kind, finding.ranks) == ("undecided", ())
    assert "Process 4700 waited for rank 1 of its group, which did not answer." in finding.summary


def test_the_table_of_links_of_hccl(tmp_path: Path) -> None:
    """Both ends of a link that was not made are named by address, and no rank of the job is."""
    head = (
        "[ERROR] HCCL(669593,python3):2026-03-14-18:13:19.031.74{} [hccl_socket_manager.cc:64{}] "
    )
    rows = [
        "[673943]   _________________________LINK_ERROR_INFO___________________________",
        "[673943]   |  comm error, device[0]",
        "[673943]   |  dest_ip(user_rank)  |   dest_port   |  src_ip(user_rank)   |   src_port   |"
        "   MyRole   |   Status   |    TlsStatus   |",
        "[673943]   |  192.7.3.198(1)   |  16666  |   192.7.2.199(0)   |  0  |  server  |"
        " time out |   DISABLE  |",
    ]
    path = tmp_path / "job.log"
    path.write_text("\n".join(head.format(n, n) + row for n, row in enumerate(rows)))
    (finding,) = diagnose_logs([path]).findings
    assert (finding.kind, finding.ranks) == ("undecided", ())
    assert "192.7.2.199 (rank 0 of its group) and 192.7.3.198 (rank 1 of its" in finding.advice


def test_which_node_the_links_are_bad_of(tmp_path: Path) -> None:
    """Of 43 broken connections, node-b reports 41, and 41 others cannot reach it."""
    text = "{}:{}:5102 [2] misc/socket.cc:49 NCCL WARN Connection closed by remote peer {}<{}>"
    bad = [text.format("node-b", 4000 + n, f"node-{n % 5}x", 50000 + n) for n in range(41)]
    others = [text.format("node-a", 1, "node-c", 1), text.format("node-c", 1, "node-a", 1)]
    path = tmp_path / "job.log"
    path.write_text("\n".join([*bad, *others]))
    (finding,) = diagnose_logs([path]).findings
    assert (finding.kind, finding.ranks) == ("undecided", ())
    assert "node-b reports 41 of 43 link errors." in finding.summary
    path.write_text("\n".join(text.format(f"node-{n}", 1, "node-b-ib", n) for n in range(9)))
    (finding,) = diagnose_logs([path]).findings
    assert "link errors" not in finding.summary  # nothing to compare with: all name one peer
    lines = [text.format(f"node-{n}", 1, "node-b-ib", n) for n in range(9)]
    path.write_text("\n".join([*lines, text.format("node-1", 1, "node-2", 1)]))
    (finding,) = diagnose_logs([path]).findings
    assert "9 of 10 link errors are about the connection to node-b-ib." in finding.summary


@pytest.mark.parametrize(
    ("line", "words", "advice"),
    [
        ("kernel: mlx5_core 0000:5e:00.0 ens1f0np0: Link down", "ens1f0np0: Link down", "cable"),
        ("kernel: mce: [Hardware Error]: CPU 12: Machine Check Exception: 5", "CPU 12", "drain"),
        ("kernel: amdgpu 0000:c5:00.0: amdgpu: GPU reset begin!. Source:  3", "reset", "drain"),
    ],
)
def test_what_the_kernel_reports(tmp_path: Path, line: str, words: str, advice: str) -> None:
    """A report of a device that may be nobody's names the node, and no rank of the file's name."""
    path = tmp_path / "rank3.log"
    path.write_text(f"Mar 14 09:02:36 node-a {line}\n")
    (finding,) = diagnose_logs([path]).findings
    assert (finding.kind, finding.ranks) == ("undecided", ())
    assert "The kernel of node-a reports" in finding.summary
    assert words in finding.summary
    assert advice in finding.advice


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("Global rank 3 (PID 4711) exited with code -11", ("dead", (3,))),
        ("Global rank 3 (PID 4711) exited with code -9", ("undecided", ())),  # composer kills, too
        ("Global rank 3 (PID 4711) exited with code 1", ("undecided", ())),
    ],
)
def test_what_composer_says_of_a_worker(
    tmp_path: Path, line: str, expected: tuple[str, tuple[int, ...]]
) -> None:
    """composer names the rank in the job; a signal that no failure sends is the rank's own."""
    path = tmp_path / "job.log"
    path.write_text(line + "\n")
    assert judged(path) == expected


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        (
            "W0330 12:13:49.388000 1 torch/distributed/elastic/agent/server/api.py:723] Received "
            "15 death signal, shutting down workers",
            "scheduler",
        ),
        (
            "slurmstepd: error: *** STEP 812.0 ON node-3 CANCELLED AT 2026-03-14T09:02:36 DUE TO "
            "TIME LIMIT ***",
            "ask for more time",
        ),
        ("The node was low on resource: memory. Threshold quantity: 100Mi.", "use less"),
    ],
)
def test_something_outside_the_job(tmp_path: Path, line: str, advice: str) -> None:
    """No rank is blamed for a scheduler's or a person's decision; the answer says who it was."""
    path = tmp_path / "job.log"
    path.write_text(line + "\n")
    (finding,) = diagnose_logs([path]).findings
    assert (finding.kind, finding.ranks) == ("undecided", ())
    assert "outside" in finding.summary
    assert advice in finding.advice


UNRELATED = {
    "nginx": "2026/03/14 09:02:36 [error] 31#31: *7 recv() failed (104: Connection reset by peer) "
    "while reading response header from upstream",
    "pip": "WARNING: Retrying after connection broken by 'ReadTimeoutError': Timed out waiting",
    "pytest": 'Traceback (most recent call last):\n  File "/src/test_x.py", line 3, in test\n'
    "    assert 1 == 2\nAssertionError\n=== 1 failed, 3 passed in 0.12s ===",
    "training": "step 10 loss 0.31\n[W710 02:01:11.1 socket.cpp:767] [c10d] The client socket has "
    "failed to connect to [node-a]:29500 (errno: 97 - Address family not supported).",
    "shell": "bash: line 1: 4711 Broken pipe   yes | head",
}


@pytest.mark.parametrize("name", UNRELATED)
def test_an_unrelated_log_says_nothing(tmp_path: Path, name: str) -> None:
    """A log that is not of a job of ranks, or of one that went well, has no finding."""
    path = tmp_path / "x.log"
    path.write_text(UNRELATED[name] + "\n")
    (finding,) = diagnose_logs([path]).findings
    assert (finding.kind, finding.is_fault) == ("nothing_found", False)
    assert "No line that rankcall knows reports a failure" in finding.summary


# --- bounds ---


def test_lines_are_counted_whatever_the_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An excerpt has three lines before a marker and after it, with their numbers in the log."""
    words = "Watchdog caught"
    lines = [f"line {number}" for number in range(1, 400)]
    for number in (1, 57, 58, 200, 399):
        lines[number - 1] = f"{words} {number}"
    path = tmp_path / "x.log"
    path.write_text("\n".join(lines) + "\n")
    wanted = {*range(1, 5), *range(54, 62), *range(197, 204), *range(396, 400)}
    for size in (16, 64, 100, 1000, 1 << 22):
        monkeypatch.setattr("rankcall.imports.logs.reading._BLOCK", size)
        log = Log(path)
        kept = [line for run in log.excerpts(markers()) for line in run]
        assert {line.number for line in kept} == wanted, size
        assert all(lines[line.number - 1] == line.text for line in kept)
        assert log.count == 399


def test_hostile_lines_cost_little(tmp_path: Path) -> None:
    """NULs, invalid UTF-8, deep JSON and huge numbers are text like any other."""
    path = tmp_path / "x.log"
    bad = [
        b"\x00" * 1000 + b"Watchdog caught",
        b"\xff\xfe Watchdog caught \xc3\x28",
        b'{"log":' * 5000 + b'"Watchdog caught"' + b"}" * 5000,
        b"[rank99999999999]: Watchdog caught",
        b"a:1:1 [0] NCCL INFO rank 9999999 nranks 1 - Init START",
        b"(Worker_TP9999999 pid=1) Traceback (most recent call last):",
    ]
    path.write_bytes(b"\n".join(bad))
    (finding,) = diagnose_logs([path]).findings
    assert finding.ranks == ()


def test_lines_of_ten_megabytes(tmp_path: Path) -> None:
    """A long line costs no more than its bytes, and a message behind it is read."""
    lines, kind, ranks = LOGS["nccl-missing"]
    path = tmp_path / "job.log"
    with path.open("w") as file:
        for piece in ("x", "[rank3]: ", '{"log": "', "Watchdog caught "):
            file.write((piece * (10_000_000 // len(piece))) + "\n")
        file.write("\n".join(lines) + "\n")
    assert judged(path) == (kind, ranks)


def test_times_that_run_backwards(tmp_path: Path) -> None:
    """A clock that was set back makes no rank the first one: all that failed are named together."""
    text = (
        "[rank{0}]:[E808 10:31:{1:02d}.406255799 ProcessGroupNCCL.cpp:1895] [PG ID 1 PG GUID 1 "
        "Rank {0}] Process group watchdog thread terminated with exception: CUDA error: an illegal "
        "memory access was encountered"
    )
    path = tmp_path / "job.log"
    path.write_text("\n".join(text.format(rank, 40 - rank) for rank in range(3)))
    (finding,) = diagnose_logs([path]).findings
    assert (finding.kind, set(finding.ranks) <= {0, 1, 2}) == ("dead", True)
    assert "first" not in finding.summary


def test_two_jobs_in_one_file(tmp_path: Path) -> None:
    """The same rank counts from the beginning again: the jobs are not mixed, and it is said."""
    first = log_of(WORDINGS[-1], {0: Call(500), 1: Call(500)}, {2: (499, 499)})
    second = log_of(WORDINGS[-1], {0: Call(20), 1: Call(20)}, {2: (20, 19)})
    path = tmp_path / "job.log"
    path.write_text("\n".join([*first, *second]))
    diagnosis = diagnose_logs([path])
    assert diagnosis.findings[0].ranks in ((), (2,))
    assert any("several attempts" in problem for problem in diagnosis.problems)


def test_a_writer_without_a_prefix_is_nobody() -> None:
    """A plain line has no stream, no rank and no time."""
    line = line_of("step 10")
    assert line == Line(Writer(0), 1, "step 10")


@pytest.mark.parametrize(
    "name", [name for name in LOGS if name.startswith(("nccl-m", "nccl-o", "nccl-d"))]
)
def test_a_truncated_log_is_never_called_healthy(tmp_path: Path, name: str) -> None:
    """Wherever a log ends, one that shows a time-out is not ``nothing_found``."""
    text = "\n".join(LOGS[name][0])
    path = tmp_path / "job.log"
    begin = text.index("Watchdog caught") + len("Watchdog caught")
    for end in range(begin, len(text), 97):
        path.write_text(text[:end])
        kind, ranks = judged(path)
        assert kind != "nothing_found", text[:end][-80:]
        assert set(ranks) <= {2} or (kind == "desync" and 2 in ranks)


@pytest.mark.parametrize("seed", range(200))
def test_generated_logs(tmp_path: Path, seed: int) -> None:
    """The verdict on a whole log is the plan's; on a truncated one, nobody else is blamed."""
    names = sorted(COLLECTORS)
    plan = made(seed, COLLECTORS[names[seed % len(names)]])
    path = tmp_path / "job.log"
    path.write_text("\n".join(plan.lines) + "\n")
    assert judged(path) == (plan.kind, (plan.culprit,)), plan.fault
    chance = random.Random(seed)
    for _ in range(3):
        end = chance.randint(plan.shown + 1, len(plan.lines))
        path.write_text("\n".join(plan.lines[:end]) + "\n")
        kind, ranks = judged(path)
        assert kind != "nothing_found"
        assert set(ranks) <= {plan.culprit} or (kind == "desync" and plan.culprit in ranks)


def test_models_that_differ(tmp_path: Path) -> None:
    """DDP compares with rank 0: if all others report, it is rank 0 that differs."""
    text = (
        "[rank{0}]: RuntimeError: [{0}]: params[0] in this process with sizes [11, 10] appears not "
        "to match sizes of the same param in process 0."
    )
    path = tmp_path / "job.log"
    path.write_text("\n".join(text.format(rank) for rank in (1, 2, 3)))
    assert judged(path) == ("mismatch", (0,))
    path.write_text("\n".join([text.format(2), *(f"[rank{rank}]: waits" for rank in (0, 1, 3))]))
    assert judged(path)[0] == "mismatch"
    assert 2 in judged(path)[1]


def test_a_traceback_whose_lines_have_no_prefix(tmp_path: Path) -> None:
    """SGLang writes its prefix before the first line of a message only."""
    lines = [
        "[2026-03-14 09:02:18] server_args=ServerArgs(model_path='m', tp_size=8, mem=0.9)",
        "[2026-03-14 09:02:36 TP3] Scheduler hit an exception: Traceback (most recent call last):",
        '  File "/sgl/python/sglang/srt/managers/scheduler.py", line 2748, in run_scheduler',
        "    scheduler.event_loop()",
        '  File "/sgl/python/sglang/srt/model_runner.py", line 12, in forward',
        "    return self.model(batch)",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "",
        "[2026-03-14 09:02:36] Received sigquit from a child process.",
    ]
    path = tmp_path / "job.log"
    path.write_text("\n".join(lines))
    finding = diagnose_logs([path]).findings[0]
    assert (finding.kind, finding.ranks) == ("dead", (3,))
    assert "no memory left" in finding.advice


def test_a_spawned_process(tmp_path: Path) -> None:
    """The index of a spawned process may not be its rank: it is told, and no rank is named."""
    path = tmp_path / "job.log"
    path.write_text(
        "torch.multiprocessing.spawn.ProcessExitedException: process 2 terminated with signal "
        "SIGKILL\n"
    )
    finding = diagnose_logs([path]).findings[0]
    assert (finding.kind, finding.ranks) == ("undecided", ())
    assert (
        "Process 2 of those that torch.multiprocessing started ended by SIGKILL" in finding.summary
    )


def test_what_torch_wrote_on_simulated_devices() -> None:
    """Two watchdogs tell the op, its number and the line that issued it; nobody is blamed."""
    (finding,) = diagnose_logs([REAL / "nccl-2.14-missing.log"]).findings
    assert (finding.op, finding.seq, finding.call_site) == ("all_reduce", 6, "/job/job.py:9")
    assert finding.victims == (0, 2)
    assert finding.since_s == pytest.approx(8.0, abs=0.5)


def test_lines_that_were_made_to_be_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All messages of all logs have one budget of time; what was not read is said."""
    monkeypatch.setattr("rankcall.imports.logs.job._MOST_SECONDS", 0.05)
    line = "Detected mismatch between collectives on ranks. Rank 1 is running collective: "
    path = tmp_path / "job.log"
    path.write_text("\n".join([(line * 200)[: 1 << 14]] * 200))
    diagnosis = diagnose_logs([path])
    assert "not read beyond line" in diagnosis.problems[0]


@pytest.mark.parametrize("message", [m for _, m in ROWS if m.pattern], ids=lambda m: m.meaning[:40])
def test_no_pattern_takes_long(message: Message) -> None:
    """16 KiB that nearly match, again and again, take no pattern two seconds of processor time."""
    assert message.pattern is not None
    half = message.example[: len(message.example) * 2 // 3]
    for text in (half, "[", "1", "a ", message.markers[0]):
        line = (text * (1 << 14))[: 1 << 14]
        began = time.process_time()
        message.pattern.search(line)
        assert time.process_time() - began < 2.0, text


def test_a_wrapped_line_without_an_end(tmp_path: Path) -> None:
    """Lines that all seem to go on are put together up to the length of any other line."""
    rows = [f"{'x' * 90} {'yz' * (1 + number % 3)}word" for number in range(3000)]
    path = tmp_path / "job.log"
    path.write_text("\n".join(["Watchdog caught", *(row[:100] for row in rows)] * 3))
    assert judged(path)[1] == ()


OLD_FAULT = (
    "[E ProcessGroupNCCL.cpp:916] [Rank {0}] NCCL watchdog thread terminated with exception: CUDA "
    "error: an illegal memory access was encountered"
)
OLD_TIMEOUT = (
    "[E ProcessGroupNCCL.cpp:474] [Rank {0}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum={1}, OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1800123 milliseconds "
    "before timing out."
)


@pytest.mark.parametrize(
    ("why", "lines", "expected"),
    [
        (
            "the others wait in one call",
            [OLD_FAULT.format(2), *(OLD_TIMEOUT.format(rank, 7) for rank in (0, 1, 3))],
            ("dead", (2,)),
        ),
        (
            "the exception is repeated when the process ends",
            [OLD_FAULT.format(2), f"  what():  {OLD_FAULT.format(2).partition('] ')[2]}"],
            ("dead", (2,)),
        ),
        (
            "torchrun reports the rank",
            [OLD_FAULT.format(2), *torchrun(2, -6, [(0, -15)])],
            ("dead", (2,)),
        ),
        (
            "one process may have both numbers",
            [OLD_FAULT.format(2), OLD_FAULT.format(6)],
            ("undecided", ()),
        ),
        (
            "time-outs in two groups",
            [OLD_FAULT.format(2), OLD_TIMEOUT.format(0, 7), OLD_TIMEOUT.format(1, 9)],
            ("undecided", ()),
        ),
        (
            "two processes have one number",
            [OLD_FAULT.format(2), OLD_TIMEOUT.format(0, 7), OLD_TIMEOUT.format(0, 7)],
            ("undecided", ()),
        ),
        (
            "a rank has another number",
            [OLD_FAULT.format(1), "[rank5]:" + OLD_TIMEOUT.format(2, 7)],
            ("undecided", ()),
        ),
        (
            "it has waited before",
            [OLD_TIMEOUT.format(2, 7), OLD_FAULT.format(2)],
            ("undecided", ()),
        ),
        (
            "the job has groups of several kinds",
            ["+ train.py --tensor-model-parallel-size 4", OLD_FAULT.format(2)],
            ("undecided", ()),
        ),
        (
            "torchrun reports other ranks",
            [OLD_FAULT.format(2), *torchrun(6, -6, [(0, -15)])],
            ("undecided", ()),
        ),
    ],
)
def test_a_number_in_a_group_is_a_rank_if_there_is_one_group(
    tmp_path: Path, why: str, lines: list[str], expected: tuple[str, tuple[int, ...]]
) -> None:
    """torch before 2.3 wrote no rank in the job before its messages."""
    path = tmp_path / "job.log"
    path.write_text("\n".join(lines) + "\n")
    assert judged(path) == expected, why


@pytest.mark.parametrize(
    ("collector", "name"),
    [
        # A record of JSON begins behind another prefix.
        ("cri", "ecc-when-rank-1-takes-its-device"),
        ("kubectl --prefix", "ecc-when-rank-1-takes-its-device"),
        # Only one line is longer than the terminal is wide, and no message is in two lines.
        ("json log", "the-masters-name-is-not-known"),
        # The only line that is broken ends with spaces.
        ("jsonPayload", "bar-and-a-shells-segmentation-fault"),
        # The line that explains the one above is some lines below it.
        ("kubectl with both", "ascend-vector-core-exception-of-rank-7"),
    ],
)
def test_records_that_were_wrapped(tmp_path: Path, collector: str, name: str) -> None:
    """A terminal of 140 columns breaks what a collector wrote of a public report."""
    path = tmp_path / "job.log"
    path.write_text("\n".join(ALL[name].lines))
    plain = judged(path)
    lines = [COLLECTORS[collector](number, line) for number, line in enumerate(ALL[name].lines)]
    path.write_text("\n".join(part for line in lines for part in wrapped(line, 140, "columns")))
    assert judged(path) == plain


@pytest.mark.parametrize("collector", ["cri", "kubectl --prefix", "pdsh with addresses"])
def test_records_that_were_wrapped_before_they_were_collected(
    tmp_path: Path, collector: str
) -> None:
    """Each part of a record has the prefix of another collector: it is no part of the record."""
    lines = ALL["ecc-when-rank-1-takes-its-device"].lines
    parts = [part for line in lines for part in wrapped(line, 110, "columns")]
    path = tmp_path / "job.log"
    path.write_text("\n".join(COLLECTORS[collector](n, part) for n, part in enumerate(parts)))
    assert judged(path) == ("dead", (1,))


@pytest.mark.parametrize("limit", ["_MOST_LINES", "_MOST_KEPT"])
def test_exceptions_all_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    """A job that catches exceptions by the thousand still says at the end why it failed."""
    most = 2000 if limit == "_MOST_LINES" else 100_000
    monkeypatch.setattr(f"rankcall.imports.logs.reading.{limit}", most)
    lines, kind, ranks = LOGS["nccl-missing"]
    caught = [
        "Traceback (most recent call last):",
        '  File "/job/x.py", line 1, in load',
        "KeyError",
    ]
    steps = [f"step {step}" for step in range(300)]
    path = tmp_path / "job.log"
    path.write_text("\n".join([*[*caught, *steps] * 100, *lines, ""]))
    diagnosis = diagnose_logs([path])
    assert (diagnosis.findings[0].kind, diagnosis.findings[0].ranks) == (kind, ranks)
    (problem,) = diagnosis.problems
    assert "in its middle are left out" in problem
    log = Log(path)
    kept = [line for run in log.excerpts(markers()) for line in run]
    assert len(kept) + log.left_out == 100 * 303 + len(lines)
    assert len(kept) <= most + 2 * 4096
    assert log.count == 100 * 303 + len(lines)
