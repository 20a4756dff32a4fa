"""The line of a report that says where its times come from."""

from __future__ import annotations

from rankcall.analysis.device_times import TimeSources
from rankcall.report.formatting import plural


def times_of_ops(sources: TimeSources) -> str:
    """Write where the times behind all figures come from; empty if no op runs on a device."""
    if not sources.device and not sources.unknown:
        return ""
    parts = (
        (sources.host, "by the host"),
        (sources.device, "by their devices' durations"),
        (sources.unknown, "only issued: when they ran is not known"),
    )
    return "; ".join(f"{plural(count, 'op')} {text}" for count, text in parts if count)
