"""The version of this rankcall."""

__version__ = "0.3.0"
