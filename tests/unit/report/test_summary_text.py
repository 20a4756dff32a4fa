"""The terminal report: its words, its width, and what hostile names can do to it."""

from __future__ import annotations

import re
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table
from worlds import MS, Call, group_of, together, write_world

import golden
from rankcall.analysis.summary import Summary, summarise
from rankcall.analysis.verdicts.facts import Fact, Ranks, Relation
from rankcall.printable import clean
from rankcall.report import summary_text
from rankcall.report.fitting import cut, cut_path, fitted, listed
from rankcall.report.formatting import percent, rate, size, time, wrapped
from rankcall.report.headline import headline
from rankcall.ring.tables import CallSite, Group
from rankcall.run.load import load
from rankcall.testing.model import Op
from rankcall.testing.synthetic import synthetic_run

PROGRAM = (
    Op(
        message_bytes=25 << 20,
        line=41,
        code="loss = criterion(model(batch), target); loss.backward()",
    ),
    Op("all_gather", 4 << 20, family="tp", line=57, function="forward", code="x = gather(x)"),
    Op("exchange", 1 << 16, family="pp", line=90, function="send_forward"),
    Op("reduce_scatter", 1 << 20, family="tp", line=61, function="backward"),
    Op("broadcast", 4096, line=12, function="sync_seed"),
    Op("barrier", line=99, function="main"),
)


@pytest.fixture(scope="module")
def summary(tmp_path_factory: pytest.TempPathFactory) -> Summary:
    """Return a summary of 8 ranks on 2 hosts with tp and pp groups; rank 5 is slow."""
    folder = tmp_path_factory.mktemp("report") / "20261121T034130-train_gpt"
    synthetic_run(
        folder,
        8,
        600,
        hosts=["node-a", "node-b"],
        straggler=5,
        straggler_ms=12.0,
        clock_offsets_ns=[0, 1_000_000_000],
        program=PROGRAM,
        per_step=6,
        groups={"tp": [[0, 1, 2, 3], [4, 5, 6, 7]], "pp": [[0, 4], [1, 5], [2, 6], [3, 7]]},
    )
    return summarise(load(folder))


@pytest.mark.parametrize("width", [80, 120])
def test_golden(summary: Summary, width: int) -> None:
    """The whole report is as it was last looked at, and no line is too wide."""
    text = summary_text.render(summary, width)
    assert max(len(line) for line in text.splitlines()) <= width
    golden.check(f"report-{width}.txt", text)


def test_the_headline_names_the_straggler(summary: Summary) -> None:
    """Rank and host, how often, how long and what share: in the first sentence."""
    first = headline(summary)
    assert first.alarm
    assert first.ranks == (5,)
    assert first.text.startswith("Rank 5 (node-b) came last in ")
    assert "of waiting" in first.text


GC = Fact(
    Relation.LATE_BECAUSE,
    Ranks((5,), ("node-b",), 4711),
    values=(("cause", "gc"), ("of_s", "40.0"), ("seconds", "8.0"), ("full", "yes")),
    number=93.0,
    unit="%",
)


def test_the_report_says_why(summary: Summary) -> None:
    """What the straggler spends the time on, how much of its lateness that is, and what to do."""
    explained = replace(summary, late_because=(GC,))
    words = " ".join(summary_text.render(explained, 80).split())
    assert (
        "It spent 8.0 s of 40 s collecting garbage (mostly full collections): that explains 93 % "
        "of its lateness. Call gc.freeze() once everything is set up"
    ) in words
    assert "lateness" not in summary_text.render(summary, 80)


def test_no_colour_and_no_control_codes(summary: Summary) -> None:
    """A pipe gets plain text."""
    assert "\x1b" not in summary_text.render(summary, 80)


def test_hostile_names(summary: Summary) -> None:
    """Markup, escapes and long names from a damaged file are shown, not acted on."""
    nasty = "[bold red]\x1b[2J\n\x07evil[/]" + "x" * 200
    group = Group(nasty, 0, nasty, nasty, tuple(range(8)))
    site = CallSite("/" + nasty + "/train.py", 10**12, nasty, nasty)
    hostile = replace(
        summary,
        path=f"/{nasty}",
        ranks=[replace(row, host=nasty) for row in summary.ranks],
        groups=[replace(known, label=nasty, group=group) for known in summary.groups],
        collectives=[replace(row, group=nasty) for row in summary.collectives],
        stragglers=[replace(straggler, host=nasty) for straggler in summary.stragglers],
        call_sites=[replace(row, site=site) for row in summary.call_sites],
        about={"torch": nasty},
    )
    for width in (80, 120):
        text = summary_text.render(hostile, width)
        assert "\x1b" not in text
        assert "\x07" not in text
        assert "[bold red]" in text
        assert max(len(line) for line in text.splitlines()) <= width


def test_long_lists_are_cut(tmp_path: Path) -> None:
    """1,024 ranks on 128 hosts fit on a screen of 50 lines."""
    truth = synthetic_run(tmp_path / "run", 1024, 4, hosts=128, straggler=700)
    text = summary_text.render(summarise(load(truth.path)), 80)
    assert len(text.splitlines()) <= 50
    assert "more ranks (--json has all)" in text
    assert "Rank 700 (node-87)" in text


def test_no_collectives(tmp_path: Path) -> None:
    """A run that recorded nothing says so."""
    text = summary_text.render(summarise(load(write_world(tmp_path / "r", [], ranks=[0, 1]))))
    assert text.startswith("No collectives were recorded.")


def test_a_world_of_one(tmp_path: Path) -> None:
    """A job of one rank has no waits."""
    calls = together(1, [0], MS, group_of(1))
    text = summary_text.render(summarise(load(write_world(tmp_path / "r", calls))))
    assert text.startswith("A world of one rank")
    assert "all_reduce" in text


def test_a_healthy_run_accuses_nobody(tmp_path: Path) -> None:
    """Jitter alone names no rank."""
    truth = synthetic_run(tmp_path / "run", 8, 200)
    first = headline(summarise(load(truth.path)))
    assert (first.alarm, first.ranks) == (False, ())


def test_two_stragglers_are_both_named(tmp_path: Path) -> None:
    """Ranks that are late together bear half each, and both stand in the headline."""
    truth = synthetic_run(tmp_path / "run", 8, 200, straggler=[1, 6])
    first = headline(summarise(load(truth.path)))
    assert sorted(first.ranks) == [1, 6]


def test_a_slow_host_is_named_as_one(tmp_path: Path) -> None:
    """If all ranks of a host are late, the report names the host and not its ranks."""
    truth = synthetic_run(
        tmp_path / "run", 32, 200, hosts=["a", "b", "c", "d"], straggler=range(8, 16)
    )
    first = headline(summarise(load(truth.path)))
    assert first.text.startswith("Host b is late as a whole: its 8 ranks (8-15)")


def test_ranks_without_rings_are_named(tmp_path: Path) -> None:
    """The facts say whose records are missing."""
    calls = [Call(0, 1, 0, MS, group=group_of(4)), Call(2, 1, 0, MS, group=group_of(4))]
    text = summary_text.render(summarise(load(write_world(tmp_path / "r", calls, world_size=4))))
    assert "no records of ranks 1 and 3" in text


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (None, "-"),
        (0.0, "0"),
        (0.00042, "0.4 µs"),
        (0.154, "154 µs"),
        (1.234, "1.23 ms"),
        (20.18, "20.2 ms"),
        (999.7, "1.00 s"),
        (66_800, "66.8 s"),
        (151_000, "151 s"),
        (750_000, "12.5 min"),
        (20_182_000, "5.61 h"),
    ],
)
def test_times(ms: float | None, text: str) -> None:
    """Durations have three digits and a unit."""
    assert time(ms) == text


def test_numbers() -> None:
    """Sizes, rates and shares keep three digits, and never say 100 % of what is not all."""
    assert [size(n) for n in (0, 999, 1000, 174_771_404_800)] == [
        "0 B",
        "999 B",
        "1.00 kB",
        "175 GB",
    ]
    assert [rate(r) for r in (None, 0.0, 0.0001, 9.76, 123.4)] == [
        "-",
        "0.00",
        "<0.01",
        "9.76",
        "123",
    ]
    assert [percent(p) for p in (None, 0, 0.001, 0.5, 0.999, 1)] == [
        "-",
        "0 %",
        "<1 %",
        "50 %",
        "99 %",
        "100 %",
    ]


def test_tables_never_cut_file_names() -> None:
    """First directories go, then other names are shortened; a longer file name is folded."""
    row = ["/home/somebody/train_a_rather_long_name.py:1234", "a_function_of_a_long_name", "12 ms"]
    printed = [
        _printed(fitted(["line", "function", "time"], [row], room, names=2, paths=0), room)
        for room in (100, 70, 30)
    ]
    assert row[0] in printed[0]
    assert "train_a_rather_long_name.py:1234" in printed[1]
    assert "/home" not in printed[1]
    column = [line.split()[0] for line in printed[2].splitlines()[1:]]
    assert "".join(column) == "train_a_rather_long_name.py:1234"
    for room, text in zip((100, 70, 30), printed, strict=True):
        assert max(map(len, text.splitlines())) <= room


def _printed(table: Table, width: int) -> str:
    out = StringIO()
    Console(file=out, width=width, color_system=None).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def test_names_are_cut_to_fit() -> None:
    """Lists say how many are left out; paths keep their end."""
    assert listed(["node-a", "node-b", "node-c"], 80) == "node-a, node-b, node-c"
    assert listed(["node-a", "node-b", "node-c"], 20) == "node-a and 2 more"
    assert cut_path("/very/long/path/train.py:10", 18) == "…/path/train.py:10"
    assert cut_path("/very/long/path/train.py:10", 17) == "train.py:10"
    assert cut_path("/very/long/path/train.py:10", 4) == "train.py:10"
    assert cut("short", 10) == "short"
    assert cut("shortened", 6) == "short…"
    assert clean("a\x1b[0m\nb") == "a\N{REPLACEMENT CHARACTER}[0m\N{REPLACEMENT CHARACTER}b"


@pytest.mark.parametrize("width", [20, 31, 60, 100])
def test_long_paths_break_behind_slashes_only(width: int) -> None:
    """No name is broken, no line is wider than it must be, and only line ends are added."""
    path = "/home/ada/experiments-2026/a_long_name/train_a_model.py:6"
    text = f"Rank 1 comes late to all_reduce of group 0 at {path}, by 30 ms at the median."
    lines = wrapped(text, width).split("\n")
    names = re.split(r"(?<=/)| ", text)
    assert [name for line in lines for name in re.split(r"(?<=/)| ", line) if name] == [
        name for name in names if name
    ]
    assert all(len(line) <= width or (" " not in line and "/" not in line) for line in lines)
    assert (path in "\n".join(lines)) == (len(path) < width)
