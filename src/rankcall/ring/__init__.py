"""The ring file: one rank's records, which survive the process that wrote them."""

from rankcall.ring.layout import DEFAULT_CAPACITY, Geometry, Header
from rankcall.ring.reader import Head, Ring, read_head, read_ring
from rankcall.ring.tables import CallSite, Group, Tables
from rankcall.ring.writer import Identity, PythonRing, create

__all__ = [
    "DEFAULT_CAPACITY",
    "CallSite",
    "Geometry",
    "Group",
    "Head",
    "Header",
    "Identity",
    "PythonRing",
    "Ring",
    "Tables",
    "create",
    "read_head",
    "read_ring",
]
