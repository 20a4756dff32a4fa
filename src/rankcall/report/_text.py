"""Paragraphs that fit a terminal."""

from __future__ import annotations

import re
import textwrap


def wrapped(text: str, width: int) -> str:
    """Break a text into lines, but not between a number and its unit, nor inside a path."""
    glued = re.sub(r"(?<=\d) (?=%|\w{1,3}\b)", "\N{NO-BREAK SPACE}", text)
    return textwrap.fill(glued, width, break_on_hyphens=False).replace("\N{NO-BREAK SPACE}", " ")
