"""A sink that keeps descriptions in a list, for tests."""

from __future__ import annotations

from rankcall.trace.descriptions import Description, Descriptions
from rankcall.trace.sinks.protocols import Origin


class MemorySink:
    """Keeps descriptions in a list, for tests."""

    def __init__(self) -> None:
        self.descriptions: list[Description] = []
        self.origin: Origin | None = None
        self.closed = False

    def open(self, origin: Origin) -> None:
        """Keep the origin."""
        self.origin = origin

    def write(self, descriptions: Descriptions) -> None:
        """Keep the descriptions."""
        self.descriptions.extend(descriptions)

    def close(self) -> None:
        """Set ``closed``."""
        self.closed = True
