"""The version of this rankcall."""

__version__ = "0.2.0"
