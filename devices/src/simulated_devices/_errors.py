"""Errors that a user can do something about. Each message is one sentence that says what to do."""

from __future__ import annotations


class DevicesError(Exception):
    """Base of all errors of this package."""


class TorchError(DevicesError):
    """Raised if the installed torch cannot run on simulated devices."""


class BuildError(DevicesError):
    """Raised if the libraries cannot be compiled."""
