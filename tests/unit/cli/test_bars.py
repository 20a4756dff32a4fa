"""The nodes that are barred from a job, in its run, and the commands that write them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rankcall.cli import main
from rankcall.run.bars import BARS, bar_of, decode_bar, encode_bar, newest, read_bars

SOUND = {"node": "a", "barred": True, "reason": "b", "at_ns": 1, "until_ns": 2}


def test_the_newest_line_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A node is barred, and let in again; what holds is said."""
    assert main(["bar", "node-b", str(tmp_path), "--for", "60", "--reason", "fan"]) == 0
    assert main(["bar", "node-c", str(tmp_path)]) == 0
    (first, second) = read_bars(tmp_path)
    assert (first.node, first.reason, first.until_ns - first.at_ns) == ("node-b", "fan", 60 * 10**9)
    assert first.holds(first.at_ns)
    assert not first.holds(first.until_ns)
    said = capsys.readouterr().err
    assert f"node-c is barred until {second.shown_end}: a person barred it" in said
    assert main(["unbar", "node-b", str(tmp_path)]) == 0
    said = capsys.readouterr().err
    assert "node-b may take part" in said
    assert "node-b is barred" not in said
    assert not newest(read_bars(tmp_path))["node-b"].holds(first.at_ns)


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b"[" * 100_000,
        b'"text"',
        b"{}",
        json.dumps({**SOUND, "until_ns": 1e9}).encode(),
        json.dumps({**SOUND, "at_ns": -1}).encode(),
        json.dumps({**SOUND, "node": "a" * 300}).encode(),
        json.dumps({**SOUND, "barred": "no"}).encode(),
    ],
)
def test_damage_is_left_out(damage: bytes, tmp_path: Path) -> None:
    """A line that is none bars nobody, and hides no other line."""
    with pytest.raises(ValueError, match="no bar"):
        decode_bar(damage)
    whole = bar_of("node-b", "fan", 60.0)
    (tmp_path / BARS).write_bytes(damage + b"\n" + encode_bar(whole) + b"\n")
    assert read_bars(tmp_path) == [whole]


def test_the_end_of_a_long_file_counts(tmp_path: Path) -> None:
    """A node whose agent is started for days adds lines; the newest is read all the same."""
    line = encode_bar(bar_of("node-b", "x" * 1000, 60.0)) + b"\n"
    whole = bar_of("node-b", "mended", 0.0, barred=False)
    (tmp_path / BARS).write_bytes(line * 1200 + encode_bar(whole) + b"\n")
    assert newest(read_bars(tmp_path))["node-b"] == whole


def test_not_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A path without a run is the user's mistake."""
    file = tmp_path / "file"
    file.write_text("")
    assert main(["bar", "node-b", str(file)]) == 2
    assert "no run directory" in capsys.readouterr().err
