"""Put lines together again that a terminal or a collector wrapped at a fixed width.

A terminal breaks at its last column, within a word if need be. Other programs break at the last
space that fits. Either way, the rest of a message stands in a line of its own, without a prefix.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from rankcall.imports.logs.prefixes import Prefixes, plain
from rankcall.imports.logs.reading import RawLine
from rankcall.imports.logs.sources import is_incomplete, is_whole
from rankcall.imports.logs.tracebacks import has_frame, is_part_of_frame

__all__ = ["Wrapping", "wrapping_of"]

_NARROWEST, _WIDEST = 72, 400  # columns
_SPACES = 2  # between two words of some messages of torch
_SHAPES = 3  # of rests, if no message proves the wrapping
_PREFIXED, _LINES = 2, 4  # lines with a prefix, and all of them, if only rests have none
_LOOKED_AT = 2000  # lines whose prefixes are looked for
_MOST_JOINED = 6  # lines of one message
_LONGEST = 1 << 14  # characters of a line that was put together, as many as of any other line
_BOX = ("│", "╭", "╰", "╮", "╯")
_BEGINS_NO_LINE = re.compile(r"[,;:)\]}]| \S")
# A rule across the page continues nothing, and neither does the line that names an exception. But
# if the line above has a prefix, each line has, and it is a name that was broken.
_RULE = re.compile(r"([=*#~-])\1{7,}\s*$")
# torch begins a line so, also without the prefix that others have.
_LOGGED = re.compile(r"\[[EFIW](?:\d{3,4} \S{1,30})? ?(?:\d{1,10} )?\w{1,80}\.(?:cpp|hpp|cc|h):\d")
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]{0,200}(?:Error|Exception):(?: |$)")
_DIGIT = re.compile(r"\d")
_REST_OF_NAME, _INDENT = re.compile(r"[\w.]{0,200}>?"), "    "  # of a frame's name, and its source
# Each of two lines was coloured by itself, after something had wrapped what both hold.
_COLOUR_ENDS, _COLOUR_BEGINS = "\x1b[0m", "\x1b["


@dataclass(frozen=True)
class Wrapping:
    """How a log was wrapped: at which column, and whether only at spaces."""

    width: int
    at_words: bool
    prefixes: Prefixes

    def goes_on(self, text: str, following: str) -> bool:
        """Whether the line below can be the rest of this one: its first word would not have fitted.

        A line that begins like the one above, but for its digits, is a line of its own.
        """
        return (
            self._is_full(text, following)
            and 2 * len(text.rstrip()) > self.width
            and _shape(text) != _shape(following)
            and not _RULE.match(following)
            and not _LOGGED.match(following)
            and not self.prefixes.has_prefix(following)
            and (not _EXCEPTION.match(following) or self.prefixes.has_prefix(text))
        )

    def _is_full(self, text: str, following: str) -> bool:
        """Whether the first word below would not have fitted into a line."""
        if not self.at_words and len(text) != self.width:
            return False
        if "\n" in text or "\n" in following:
            return False  # a collector's record of several lines
        if text.endswith(_COLOUR_ENDS) and following.startswith(_COLOUR_BEGINS):
            return False
        if plain(text).rstrip().endswith(_BOX) or plain(following).startswith(_BOX):
            return False  # rich draws a box around a traceback: each of its lines is whole
        word = len(following.split(None, 1)[0]) if following.strip() else 0
        if not self.at_words:  # a full line may end with spaces
            return bool(word)
        return bool(word) and len(text.rstrip()) + _SPACES + word > self.width

    def _must_go_on(self, whole: str, text: str, following: str) -> bool:
        """Whether a line is the rest of a record or a message that lacks it, whatever its form.

        A rest can look like a line of its own: it begins with a date, or as the part above it.
        """
        if not self._is_full(text, following):
            return False
        if self.prefixes.is_open_record(whole, following):
            return True
        return not self.prefixes.has_prefix(following) and _lacks_rest(whole)

    def joined(self, text: str, following: str) -> str:
        """Return both parts of a line. A space at which it was broken may have been dropped."""
        is_kept = text.endswith(" ") or following.startswith(" ")
        return text + ("" if is_kept or not self.at_words else " ") + following

    def undone(self, run: Sequence[RawLine]) -> Iterator[RawLine]:
        """Yield the lines of a run, wrapped ones put together."""
        whole, last = run[0], run[0].text
        for line in run[1:]:
            if len(whole.text) < _LONGEST and (
                self.goes_on(last, line.text) or self._must_go_on(whole.text, last, line.text)
            ):
                whole = whole._replace(text=self.joined(whole.text, line.text))
            else:
                yield whole
                whole = line
            last = line.text
        yield whole

    def _is_whole_together(self, run: Sequence[RawLine], at: int) -> bool:
        """Whether lines have a message that none has alone: the words to find it were broken."""
        text = last = run[at].text
        if is_whole(text, also_failed=True):
            return False
        for line in run[at + 1 : at + _MOST_JOINED]:
            if not self.goes_on(last, line.text) or is_whole(line.text, also_failed=True):
                return False
            text, last = self.joined(text, line.text), line.text
            if is_whole(text, also_failed=True):
                return True
        return False

    def _breaks_name(self, run: Sequence[RawLine], at: int) -> bool:
        """Whether the name of a frame's function is broken: its source stands two lines below."""
        if self.at_words or not has_frame(run[at].text) or len(run) <= at + 2:
            return False
        rest, source = run[at + 1].text, run[at + 2].text
        is_rest = self.goes_on(run[at].text, rest) and _REST_OF_NAME.fullmatch(rest) is not None
        return is_rest and _INDENT in source and not has_frame(source)

    def closes_record(self, run: Sequence[RawLine], at: int) -> bool:
        """Whether a collector's record in JSON is complete only with the lines below it."""
        text = last = run[at].text
        for line in run[at + 1 : at + _MOST_JOINED]:
            if not self._is_full(last, line.text) or not self.prefixes.is_open_record(
                text, line.text
            ):
                return False
            text, last = self.joined(text, line.text), line.text
            if not self.prefixes.is_open_record(text):
                return True
        return False

    def completes(self, run: Sequence[RawLine], at: int) -> bool:
        """Whether a message that is incomplete in one line is complete with those below it."""
        text = last = run[at].text
        if not _lacks_rest(text):
            return self._is_whole_together(run, at) or self._breaks_name(run, at)
        for line in run[at + 1 : at + _MOST_JOINED]:
            if not self.goes_on(last, line.text) or is_whole(line.text):
                return False
            text, last = self.joined(text, line.text), line.text
            if not _lacks_rest(text):
                return True
        return False


def _lacks_rest(text: str) -> bool:
    """Whether a line has a part of a message, or of a traceback's frame, and not the whole."""
    return is_incomplete(text) or is_part_of_frame(text)


def wrapping_of(runs: Iterable[Sequence[RawLine]], prefixes: Prefixes) -> Wrapping | None:
    """Return how a log was wrapped; None if it was not.

    A log is wrapped if its longest lines are followed by lines without a prefix whose first word
    would not have fitted, and these words are of several forms: a table or a report repeats few.
    One message that is complete only with the line below it is proof enough.
    """
    runs = list(runs)
    widest = max((len(line.text.rstrip()) for run in runs for line in run), default=0)
    if not _NARROWEST <= widest <= _WIDEST:
        return None
    wrapping = Wrapping(widest, _breaks_at_words(runs, Wrapping(widest, True, prefixes)), prefixes)
    return wrapping if _is_sure(runs, wrapping) else None


def _breaks_at_words(runs: Sequence[Sequence[RawLine]], wrapping: Wrapping) -> bool:
    """Whether lines that are not full go on below. Of a terminal's lines, only full ones do.

    A message or record that is complete only with a space between its parts, or only without,
    tells, too.
    """
    full = others = 0
    by_columns = replace(wrapping, at_words=False)
    for run in runs:
        for index, (line, following) in enumerate(pairwise(run)):
            closes_record = wrapping.closes_record(run, index)
            if closes_record != by_columns.closes_record(run, index):
                return closes_record
            if following.text[:1].isspace() or not wrapping.goes_on(line.text, following.text):
                continue
            is_proven = wrapping.completes(run, index)
            if len(line.text) == wrapping.width:
                if is_proven != by_columns.completes(run, index):
                    return is_proven
                full += 1
            elif is_proven:
                return True
            else:
                others += 1
    return 4 * others > full  # at spaces, one line in six or so is full by chance


def _is_sure(runs: Sequence[Sequence[RawLine]], wrapping: Wrapping) -> bool:
    shapes = set()
    if _is_all_that_lacks_a_prefix(runs, wrapping):
        return True
    for run in runs:
        for index, (line, following) in enumerate(pairwise(run)):
            if wrapping.closes_record(run, index):
                return True
            # At spaces, an indented line is not the rest of one: it belongs to a traceback.
            if wrapping.at_words and following.text[:1].isspace():
                continue
            if not wrapping.goes_on(line.text, following.text):
                continue
            shapes.add(_shape(following.text))
            if len(shapes) >= _SHAPES or wrapping.completes(run, index):
                return True
    return False


def _is_all_that_lacks_a_prefix(runs: Sequence[Sequence[RawLine]], wrapping: Wrapping) -> bool:
    """Whether every line but the rests of others has a prefix.

    Then a line without one is a rest: a collector puts its prefix before each line. But one line
    alone may be the launcher's, which stands below the longest line by chance, unless a word goes
    on in it, or it begins as no line does.
    """
    rests = prefixed = 0
    is_broken = False
    for run in runs:
        last = ""
        if rests + prefixed > _LOOKED_AT:
            break
        for line in run:
            if wrapping.prefixes.has_prefix(line.text):
                prefixed += 1
            elif wrapping.goes_on(last, line.text):
                rests += 1
                is_broken |= last[-1:].isalpha() and line.text[:1].islower()
                is_broken |= _BEGINS_NO_LINE.match(line.text) is not None
            elif line.text.strip():
                return False
            last = line.text
    is_proven = rests > 1 or (is_broken and not wrapping.at_words)
    return is_proven and prefixed >= _PREFIXED and rests + prefixed >= _LINES


def _shape(text: str) -> str:
    """Return the first word of a line with all digits alike."""
    return _DIGIT.sub("0", text.split(None, 1)[0]) if text.strip() else ""
