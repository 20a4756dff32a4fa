"""Text from files and logs of others, made safe to print.

A terminal acts on control characters: a log could clear the screen, set the title of the window,
or hide a line. So all text that rankcall did not write itself goes through here first.
"""

from __future__ import annotations


def clean(text: str) -> str:
    """Return a text from a file without characters that a terminal would act on."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
