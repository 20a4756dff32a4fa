"""Names that the tools which rankcall replaces gave to facts, beside our own in ``record.FACTS``.

``hooks.CollectiveStatus`` has the fields of the hooks that torch removed. A description, as it is
printed, written as a JSON line and marked for NVTX, has those of a collective monitor that is in
use. Programs read both, so the names are fixed. They stand nowhere else: what rankcall makes by
these tables are the dictionaries and lines of ``trace.descriptions``, and, through a generated
header, the marks of ``capture/native/marks.h``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

NS_PER_S = 1_000_000_000


class Field(NamedTuple):
    """One field of a description.

    Attributes:
        name: Its name there.
        fact: The name of the fact in ``record.FACTS`` or ``record.DERIVED_FACTS``.
        is_optional: Whether the field is left out if the fact is None: it does not apply.
    """

    name: str
    fact: str
    is_optional: bool = False


# In the order of a line. The order is fixed, too: lines are compared as text.
DESCRIPTION = (
    Field("name", "op"),
    Field("rank", "rank"),
    Field("source_line", "call_site"),
    Field("message_size", "message_bytes"),
    Field("device", "device_index"),  # "cpu" without one
    Field("timestamp", "enqueued_epoch_ns"),  # in whole seconds
    Field("gpu_serial", "gpu_serial"),
    Field("vm_id", "vm_id"),
    Field("group_ranks", "group_ranks"),
    Field("peer_rank", "peer", is_optional=True),
    Field("root_rank", "root", is_optional=True),
    Field("correlation_id", "correlation", is_optional=True),
    Field("seq", "seq"),
    Field("group", "group"),
    Field("dtype", "dtype"),
    Field("duration_ms", "duration_ms"),
    Field("algbw_gbps", "algbw_gbps"),
    Field("busbw_gbps", "busbw_gbps"),
    Field("step", "step"),
    Field("end_unknown", "end_unknown", is_optional=True),
)

# The fields of ``hooks.CollectiveStatus``, in their order, and the facts. ``backend``,
# ``drop_count`` and ``record`` are no facts about the op.
STATUS = {
    "pg_name": "group",
    "backend": None,
    "sequence_number": "seq",
    "operation": "op",
    "timestamp": "enqueued_ns",  # or completed_ns; in ns since the epoch
    "duration": "duration_ms",
    "drop_count": None,
    "status": "status",
    "error": "error",
    "record": None,
}


def description(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return an op's description, as one line of JSON shows it.

    ``facts`` has each fact of ``DESCRIPTION``; one that is not known, or does not apply, is None.
    """
    shown = {
        **facts,
        "device_index": "cpu" if facts["device_index"] < 0 else facts["device_index"],
        "enqueued_epoch_ns": facts["enqueued_epoch_ns"] // NS_PER_S,
    }
    return {
        field.name: shown[field.fact]
        for field in DESCRIPTION
        if not (field.is_optional and shown[field.fact] is None)
    }
