"""The strings of a Perfetto trace: a trace contains each once, and refers to it by number.

``Interned.news`` returns those that were not written yet: they come before their first use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from rankcall.export.protobuf import message, number, text
from rankcall.ring.tables import CallSite

# Fields of perfetto.protos.InternedData.
_CATEGORIES, _EVENTS, _ANNOTATIONS, _SITES, _STRINGS = 1, 2, 3, 4, 29


@dataclass
class NameTable:
    """The interned strings of one kind. ``entry`` encodes the part of an entry after its number."""

    tag: int
    entry: Callable[[str], bytes]
    numbers: dict[str, int] = field(default_factory=dict)
    fresh: list[bytes] = field(default_factory=list)

    def __getitem__(self, name: str) -> int:
        """Return the number of a name; ``Interned.news`` returns the entries of new names."""
        known = self.numbers.get(name)
        if known is None:
            known = self.numbers[name] = len(self.numbers) + 1
            self.fresh.append(message(self.tag, number(1, known), self.entry(name)))
        return known


class Interned:
    """All names of a trace."""

    def __init__(self) -> None:
        self._sites: dict[str, CallSite] = {}
        self.categories = NameTable(_CATEGORIES, lambda name: text(2, name))
        self.events = NameTable(_EVENTS, lambda name: text(2, name))
        self.annotations = NameTable(_ANNOTATIONS, lambda name: text(2, name))
        self.strings = NameTable(_STRINGS, lambda name: text(2, name))
        self._site_numbers = NameTable(_SITES, self._site)

    def site(self, site: CallSite) -> int:
        """Return the number of a call site."""
        key = f"{site}\0{site.function}"
        self._sites[key] = site
        return self._site_numbers[key]

    def _site(self, key: str) -> bytes:
        site = self._sites[key]
        return text(2, site.file) + text(3, site.function) + number(4, site.line)

    def news(self) -> bytes:
        """Return the entries added since the last call, as fields of InternedData."""
        out = []
        kinds = (self.categories, self.events, self.annotations, self.strings)
        for table in (*kinds, self._site_numbers):
            out += table.fresh
            table.fresh.clear()
        return b"".join(out)
