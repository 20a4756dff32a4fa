"""From records to numbers: pure functions over arrays. Imports no torch."""

from rankcall.analysis.summary import Summary, summarise

__all__ = ["Summary", "summarise"]
