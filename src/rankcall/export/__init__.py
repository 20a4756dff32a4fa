"""Write a run as a file for other tools: Parquet, CSV, JSON lines, or a Perfetto trace."""

from rankcall.export.formats import FORMATS, export

__all__ = ["FORMATS", "export"]
