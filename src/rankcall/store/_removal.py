"""Which keys of a store are ours, and their removal."""

from __future__ import annotations

import re

from rankcall.store._link import Link
from rankcall.store._member import IDENTITY

__all__ = ["remove"]

_OURS = re.compile(r"/rankcall\.[a-z](\d+)/")


def remove(link: Link, prefix: str, attempts_below: int | None = None) -> bool:
    """Delete our keys under a prefix; those of earlier attempts only, where it says so."""
    listed = link.list_keys()
    ours = re.compile(re.escape(prefix) + r"(?:/hosts)?" + _OURS.pattern)
    theirs = [key for key in listed if not ours.match(key)]
    for key in listed:
        found = ours.match(key)
        if found and (attempts_below is None or int(found.group(1)) < attempts_below):
            link.delete(key)
    if attempts_below is None and not any(_OURS.search(key) for key in theirs):
        link.delete(IDENTITY)  # the last prefix in use takes the store's name with it
    return True
