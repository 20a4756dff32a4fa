"""The lines at the end of a rank's stderr that say why it ended; the verdict that quotes them."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
from diagnosing import START_EPOCH_NS, THREE_ENDED, WORLD, unfinished
from worlds import MS, START, write_world

from rankcall.analysis.last_words import MOST_LINES, last_words
from rankcall.analysis.verdicts import diagnose
from rankcall.analysis.verdicts.facts import Relation
from rankcall.cli import main
from rankcall.run.exits import Exit, note_exit
from rankcall.run.load import load
from rankcall.run.stderr_tails import KEPT, STDERR, TailFile, tails_of

SECOND = 1000 * MS
SECRET = "sk-abcdefghijklmnopqrstuvwxyz0123456789"


def said_by(program: str) -> str:
    """Return what a real program writes to stderr before it ends."""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode != 0
    return ended.stderr


def test_the_traceback_of_a_real_program() -> None:
    """All of it is quoted, without what stands around it, and whoever wrote the prefixes."""
    text = said_by("import sys\nprint('loading', file=sys.stderr)\n{}['x']")
    words = last_words(text)
    assert words[0] == "Traceback (most recent call last):"
    assert words[-1] == "KeyError: 'x'"
    prefixed = "".join(f"[rank3]: {line}\n" for line in text.splitlines())
    assert last_words(prefixed + "rankcall: recorded something\n") == words


def test_a_chain_of_exceptions_is_one_quotation() -> None:
    """It begins with the exception that came first, and an earlier, handled one is left out."""
    text = said_by(
        "import traceback\n"
        "try: 1 / 0\nexcept ZeroDivisionError: traceback.print_exc()\n"
        "print(flush=True)\n"
        "try: {}['x']\nexcept KeyError as error: raise ValueError('no x') from error"
    )
    words = last_words(text.replace("ZeroDivisionError: division by zero\n", "\\g<0>\n\n", 1))
    assert "KeyError: 'x'" in words
    assert words[-1] == "ValueError: no x"
    assert not any("Division" in line for line in words)


@pytest.mark.parametrize(
    "lines",
    [
        [
            "terminate called after throwing an instance of 'c10::Error'",
            "  what():  CUDA error: an illegal memory access was encountered",
        ],
        [
            "terminate called after throwing an instance of 'std::length_error'",
            "  what():  no such expert",
            "Fatal Python error: Aborted",
        ],
        ["python: allocator.cpp:17: void f(): Assertion `size > 0' failed."],
        ["free(): invalid pointer"],
        ["Fatal Python error: Segmentation fault"],
    ],
)
def test_what_cpp_says(lines: list[str]) -> None:
    """Before an abort, C++ writes what the exception says; that is quoted instead of older text."""
    before = OWN + "\nstep 7\n" + "\n".join(lines) + "\n"
    assert last_words(before) == tuple(lines)
    assert last_words(before + "\n" + OWN) == tuple(OWN.splitlines())
    assert last_words(before + "step\n" * 200) == ("step",) * 3


def test_bounded_and_printable() -> None:
    """However much was written, in whatever form, some short lines come of it, without secrets."""
    frames = "".join(f'  File "a.py", line {number}, in f\n    f()\n' for number in range(5000))
    text = f"Traceback (most recent call last):\n{frames}RecursionError: too deep token={SECRET}\n"
    words = last_words(text)
    assert len(words) == MOST_LINES
    assert words[0] == "Traceback (most recent call last):"
    assert "lines left out" in words[2]
    assert words[-1] == "RecursionError: too deep token=[redacted]"
    assert last_words("step 1\rstep 2\rstep 3") == ("step 3",)
    assert last_words("\x1b[31mred\x07") == (
        "\N{REPLACEMENT CHARACTER}[31mred\N{REPLACEMENT CHARACTER}",
    )
    assert max(map(len, last_words("x" * 100_000))) <= 300
    assert last_words("\n\n") == ()
    assert last_words("a\nb\nc\nd\n") == ("b", "c", "d")


@pytest.mark.parametrize("seed", range(50))
def test_noise(seed: int) -> None:
    """Random bytes give short printable lines."""
    noise = random.Random(seed).randbytes(3000) + b"Traceback (most recent call last):\n" * (
        seed % 3
    )
    words = last_words(noise.decode("utf-8", "replace"))
    assert len(words) <= MOST_LINES
    assert all(line.isprintable() and len(line) <= 300 for line in words)


def run_with(folder: Path, tails: dict[int, str], exits: dict[int, tuple[int, int]]) -> Path:
    """Return a run that rank 2's end stopped. ``exits``: the code of each rank, and when, in ms."""
    run = write_world(
        folder / "run",
        [*THREE_ENDED, *unfinished(WORLD, 4, (0, 1, 3), 5 * MS, line=7)],
        closed=lambda rank: False,
    )
    for rank, (code, at) in exits.items():
        note_exit(run, Exit(rank, 0, "node-a", 1000 + rank, code, START_EPOCH_NS + at * MS))
    (run / STDERR).mkdir()
    for rank, text in tails.items():
        tail = TailFile(run / STDERR, rank, 0, "node-a")
        tail._started = START_EPOCH_NS - SECOND
        tail.write(text.encode())
        tail.close()
    return run


OWN = "Traceback (most recent call last):\n  File 'a.py', line 3\nValueError: no sample 17\n"
LOST = (
    "Traceback (most recent call last):\n  File 'a.py', line 9\nRuntimeError: Connection closed\n"
)


def said(run: Path) -> list[tuple[tuple[int, ...], str]]:
    """Return the ranks that a diagnosis quotes, with their words."""
    diagnosis = diagnose(
        load(run), state_of=lambda header: "gone", now_ns=lambda: START + 9 * SECOND
    )
    facts = [fact for finding in diagnosis.findings for fact in finding.facts]
    return [
        (fact.ranks.numbers, fact.value("text"))
        for fact in facts
        if fact.relation is Relation.SAID_LAST and fact.ranks
    ]


def test_the_first_failure_is_quoted_and_the_others_are_counted(tmp_path: Path) -> None:
    """Rank 2 failed; the others failed because of that, and their words are not shown."""
    words = {0: LOST, 1: LOST, 2: OWN, 3: LOST}
    run = run_with(tmp_path, words, {2: (1, 900), 0: (1, 950), 1: (1, 960), 3: (1, 970)})
    assert said(run) == [((2,), OWN.strip())]
    diagnosis = diagnose(
        load(run), state_of=lambda header: "gone", now_ns=lambda: START + 9 * SECOND
    )
    (finding,) = diagnosis.findings
    assert "| ValueError: no sample 17" in finding.evidence
    assert finding.evidence[-1] == "3 other ranks failed after that: ranks 0-1,3 (node-a)"
    assert not any("Connection closed" in line for line in finding.evidence)


def test_a_failure_at_the_same_time_is_not_called_later(tmp_path: Path) -> None:
    """Between the noted ends of ranks 2 and 3 is less time than such notes are exact to."""
    words = {0: LOST, 2: OWN}
    run = run_with(tmp_path, words, {2: (1, 900), 0: (1, 950), 3: (1, 905)})
    diagnosis = diagnose(
        load(run), state_of=lambda header: "gone", now_ns=lambda: START + 9 * SECOND
    )
    (finding,) = diagnosis.findings
    assert finding.evidence[-2:] == (
        "1 other rank failed at that time, too: rank 3 (node-a, pid 1003)",
        "1 other rank failed after that: rank 0 (node-a, pid 1000)",
    )


def test_nothing_is_quoted_that_another_process_said(tmp_path: Path) -> None:
    """A newer tail is of a later attempt; one of another host is of another process."""
    run = run_with(tmp_path, {}, {2: (1, 900)})
    for started, host in ((START_EPOCH_NS + 99 * SECOND, "node-a"), (START_EPOCH_NS - 1, "node-b")):
        tail = TailFile(run / STDERR, 2, 0, host)
        tail._started = started
        tail.write(OWN.encode())
        tail.close()
    assert said(run) == []


def test_damaged_tails_are_not_quoted(tmp_path: Path) -> None:
    """A tail may be cut, forged, or a link to another file."""
    run = run_with(tmp_path, {2: OWN}, {2: (1, 900)})
    (tail,) = (run / STDERR).iterdir()
    whole = tail.read_bytes()
    for content in (b"", whole[:20], b"x" * len(whole), whole[:16] + b"\xff" * 8 + whole[24:]):
        tail.write_bytes(content)
        assert len(said(run)) <= 1
    tail.unlink()
    tail.symlink_to(tmp_path / "secret")
    (tmp_path / "secret").write_bytes(whole)
    assert said(run) == []


def test_the_ring_of_a_tail(tmp_path: Path) -> None:
    """Only the newest 256 KiB are kept, from the first whole line on."""
    tail = TailFile(tmp_path, 2, 0, "node a/b")
    lines = [f"line {number}\n" for number in range(60_000)]
    for number in range(0, 60_000, 1000):
        tail.write("".join(lines[number : number + 1000]).encode())
    assert tail.path.stat().st_size <= KEPT + 24
    (tmp_path / STDERR).mkdir()
    tail.path.rename(tmp_path / STDERR / tail.path.name)
    (kept,) = tails_of(tmp_path, [2])
    text = kept.text()
    assert "".join(lines).endswith(text)
    assert text.startswith("line ")
    assert len(text) > KEPT - 20
    tail.close()


def test_an_archive_has_the_words_without_secrets(tmp_path: Path) -> None:
    """``collect`` packs what was kept, redacted, and the archive's verdict quotes it."""
    run = run_with(tmp_path, {2: f"api_key={SECRET}\n{OWN}", 0: LOST}, {2: (1, 900)})
    archive = tmp_path / "run.tar"
    assert main(["collect", str(run), "-o", str(archive)]) == 0
    content = archive.read_bytes()
    assert b"no sample 17" in content
    assert SECRET.encode() not in content
    assert said(archive) == [((2,), OWN.strip())]
