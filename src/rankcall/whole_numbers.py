"""Whole numbers in text that somebody else wrote: a log, a dump, a store, the environment.

``int`` is no check of such text. It raises ``ValueError`` for more than 4,300 digits, and
``str.isdigit`` lets through characters that it does not take, such as a superscript two. It also
takes signs, blanks, underscores and the digits of other scripts, none of which these writers use.
"""

from __future__ import annotations

LARGEST = (1 << 63) - 1  # what a signed integer of 64 bits holds, as in the tables
_MOST_DIGITS = 19  # of LARGEST


def whole_number(text: str | bytes | None, least: int = 0, most: int = LARGEST) -> int | None:
    """Return the number that a text is; None if it is anything else.

    The text holds ASCII digits only. A minus may stand before them if ``least`` is negative.

    Args:
        text: What was read. None, for example of a key that is not set, gives None.
        least: The least number that can be meant.
        most: The greatest number that can be meant.
    """
    if text is None or len(text) > _MOST_DIGITS + 1:
        return None
    if isinstance(text, bytes):
        text = text.decode("ascii", "replace")
    digits = text.removeprefix("-") if least < 0 else text
    if not digits.isascii() or not digits.isdigit() or len(digits) > _MOST_DIGITS:
        return None
    value = int(text)
    return value if least <= value <= most else None
