"""Text of others, made safe to print."""

from __future__ import annotations

import io

import pytest

from rankcall.printable import always_writable, clean
from rankcall.report import summary_text, top_lines


def test_text_from_files_is_safe_to_print() -> None:
    """Characters that a terminal acts on are replaced."""
    assert clean("\x1b]0;owned\x07 a b\x9b2J\r") == "\ufffd]0;owned\ufffd a b\ufffd2J\ufffd"


def test_a_line_stays_one_line() -> None:
    """In a text of one line, a line end is a character that a terminal acts on, too."""
    assert clean("a\nb\tc") == "a\ufffdb\ufffdc"
    assert clean("gr\u00fc\u00dfe \u65e5\u672c") == "gr\u00fc\u00dfe \u65e5\u672c"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_every_sign_of_ours_has_a_stand_in(encoding: str) -> None:
    """A stream without block characters gets bars of the same width, and no question marks."""
    data = io.BytesIO()
    stream = io.TextIOWrapper(data, encoding=encoding)
    always_writable(stream)
    bars = f"{''.join(top_lines._FILL)}{summary_text._BARS} 3 µs · 4 × 5–6 → ● ▲ ▼ …"
    stream.write(f"{bars}|\N{SNOWMAN}")
    stream.flush()
    written, _, unknown = data.getvalue().decode(encoding).rpartition("|")
    assert len(written) == len(bars)
    assert "?" not in written
    assert unknown == "?"
