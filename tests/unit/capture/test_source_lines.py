"""The text of lines that issue ops: read by the process that runs them, kept in the ring."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from rankcall.capture.source_lines import SourceLines, line_text
from rankcall.ring.layout import Geometry
from rankcall.ring.reader import read_ring
from rankcall.ring.tables import ENTRY_LINE, CallSite, Group, UserLine, parse_tables
from rankcall.ring.writer import Identity, PythonRing, create

PAST = time.time() - 3600


def written(path: Path, *lines: str) -> Path:
    """Write a source file of an hour ago."""
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    os.utime(path, (PAST, PAST))
    return path


def at(path: Path | str, line: int) -> CallSite:
    """Return a call site."""
    return CallSite(str(path), line, "f", "all_reduce")


def test_a_line_is_one_line_and_bounded(tmp_path: Path) -> None:
    """Without its indentation; an unknown line is empty, and raises no error."""
    file = written(tmp_path / "a.py", "x = 1", "\t  dist.all_reduce( t )  ", "y" * 5000)
    assert line_text(at(file, 2)) == "dist.all_reduce( t )"
    assert line_text(at(file, 3)) == "y" * 159 + "…"
    assert line_text(at(file, 4)) == ""
    assert line_text(at(tmp_path / "gone.py", 1)) == ""
    assert line_text(at("<string>", 1)) == ""
    assert line_text(at("nul\0.py", 1)) == ""
    assert line_text(at(tmp_path, 1)) == ""
    (tmp_path / "bytes.py").write_bytes(b"\xff\xfe = 1\n")
    os.utime(tmp_path / "bytes.py", (PAST, PAST))
    assert line_text(at(tmp_path / "bytes.py", 1)) == ""


def test_the_users_line_comes_before_a_frameworks(tmp_path: Path) -> None:
    """Of a call site with two lines, the text is that of the user's."""
    framework, user = written(tmp_path / "f.py", "dist.x()"), written(tmp_path / "u.py", "f.fit()")
    site = replace(at(framework, 1), user=UserLine(str(user), 1, "main"))
    assert line_text(site) == "f.fit()"


def test_a_file_that_was_edited_meanwhile_says_nothing(tmp_path: Path) -> None:
    """Its lines are not those that run."""
    file = written(tmp_path / "b.py", "dist.barrier()")
    os.utime(file, (time.time() + 60, time.time() + 60))
    assert line_text(at(file, 1)) == ""


@pytest.fixture
def ring(tmp_path: Path) -> PythonRing:
    """Return a ring in a file, its side tables small."""
    geometry = Geometry(64, tables_bytes=8192)
    return PythonRing(create(tmp_path / "x.ring", Identity(0, 1), geometry), geometry)


def test_sites_that_come_later_get_their_lines(ring: PythonRing, tmp_path: Path) -> None:
    """At each look those since the last, among entries of other kinds, each once."""
    file = written(tmp_path / "c.py", *(f"line {number}" for number in range(1, 9)))
    added: list[tuple[int, str]] = []

    def add(site: int, text: str) -> None:
        added.append((site, text))
        ring.line(site, text)

    lines = SourceLines(ring.map, Geometry(64, tables_bytes=8192), add)
    lines.look()
    ring.string("c10d::allreduce_")
    first = ring.site(at(file, 1))
    ring.group(Group("0", 0, "gloo", "", (0,)))
    lines.look()
    lines.look()
    second = ring.site(at(file, 7))
    lines.start()
    lines.stop()
    assert added == [(first, "line 1"), (second, "line 7")]
    assert read_ring(tmp_path / "x.ring").tables.lines == {first: "line 1", second: "line 7"}


def test_lines_leave_room_for_what_counts(ring: PythonRing, tmp_path: Path) -> None:
    """A quarter of the side tables at most; further sites are recorded without their text."""
    file = written(tmp_path / "d.py", *("x" * 150 for _ in range(100)))
    lines = SourceLines(ring.map, Geometry(64, tables_bytes=8192), ring.line)
    for line in range(1, 19):
        assert ring.site(at(file, line))
        lines.look()
    tables = read_ring(tmp_path / "x.ring").tables
    assert len(tables.sites) == 18
    assert 0 < len(tables.lines) < 18


def test_a_hostile_ring_s_lines_are_bounded() -> None:
    """Text of any length and kind is cut, or ends the tables."""
    import json
    import struct
    import zlib

    def entry(number: int, fields: object) -> bytes:
        payload = json.dumps(fields).encode()
        head = struct.pack("<IIII", number, ENTRY_LINE, len(payload), zlib.crc32(payload))
        return head + payload.ljust((len(payload) + 7) // 8 * 8, b"\0")

    raw = entry(1, {"site": 7, "text": "x" * 10_000}) + entry(2, {"site": 8, "text": ["\ud800"]})
    tables = parse_tables(raw + entry(3, {"site": "no", "text": ""}) + entry(4, {}))
    assert tables.damaged
    assert len(tables.lines.pop(7)) == 400
    assert tables.lines == {8: "['\\ud800']"}
