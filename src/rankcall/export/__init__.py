"""A run as a file for other tools: Parquet, CSV, JSON lines, a Perfetto trace."""

from rankcall.export.formats import FORMATS, export

__all__ = ["FORMATS", "export"]
