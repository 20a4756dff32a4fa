"""Text from files and logs of others, made safe to print.

A terminal acts on control characters: a log could clear the screen, set the title of the window,
or hide a line. So all text that rankcall did not write itself goes through here first.
"""

from __future__ import annotations

import codecs
from typing import TextIO

# What stands for a character that an encoding lacks: bars of our charts, and signs of our texts.
_STAND_INS = {
    **dict.fromkeys("▁▂", "_"),
    **dict.fromkeys("▃▄▏▎▍▌", "-"),
    **dict.fromkeys("▅▆", "="),
    **dict.fromkeys("▇█▋▊▉", "#"),
    **dict.fromkeys("▓▒░", "-"),
    **{
        "–": "-",
        "·": "|",
        "●": "*",
        "▲": "^",
        "▼": "v",
        "→": ">",
        "×": "x",
        "µ": "u",
        "…": ".",
        "\N{NO-BREAK SPACE}": " ",
    },
}
_HANDLER = "rankcall"


def clean(text: str) -> str:
    """Return a text from a file without characters that a terminal would act on."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def always_writable(stream: TextIO) -> None:
    """Have a stream write a stand-in for each character that its encoding lacks, and not fail.

    Of the same width, so that tables keep their columns. Streams of UTF-8 stay as they are.
    """
    encoding = (stream.encoding or "").lower().replace("-", "")
    if encoding != "utf8" and hasattr(stream, "reconfigure"):
        codecs.register_error(_HANDLER, _stand_in)
        stream.reconfigure(errors=_HANDLER)


def _stand_in(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(_STAND_INS.get(char, "?") for char in lacking), error.end
