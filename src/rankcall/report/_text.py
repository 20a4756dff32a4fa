"""Paragraphs that fit a terminal."""

from __future__ import annotations

import re
import textwrap


def wrapped(text: str, width: int) -> str:
    """Break a text into lines, but not between a number and its unit."""
    glued = re.sub(r"(?<=\d) (?=%|\w{1,3}\b)", "\N{NO-BREAK SPACE}", text)
    return textwrap.fill(glued, width).replace("\N{NO-BREAK SPACE}", " ")
