"""The version of this rankcall."""

__version__ = "0.1.0"
