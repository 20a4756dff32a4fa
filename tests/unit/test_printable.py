"""Text of others, made safe to print."""

from __future__ import annotations

from rankcall.printable import clean


def test_text_from_files_is_safe_to_print() -> None:
    """Characters that a terminal acts on are replaced."""
    assert clean("\x1b]0;owned\x07 a b\x9b2J\r") == "\ufffd]0;owned\ufffd a b\ufffd2J\ufffd"


def test_a_line_stays_one_line() -> None:
    """In a text of one line, a line end is a character that a terminal acts on, too."""
    assert clean("a\nb\tc") == "a\ufffdb\ufffdc"
    assert clean("gr\u00fc\u00dfe \u65e5\u672c") == "gr\u00fc\u00dfe \u65e5\u672c"
