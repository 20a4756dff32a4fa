"""The files of the page: its template, style and script. No build step makes them."""

from __future__ import annotations

from importlib import resources


def text(name: str) -> str:
    """Return the text of one file."""
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
