"""Bandwidth as nccl-tests defines it, so that figures compare with ``all_reduce_perf``.

``algbw = S / t`` and ``busbw = algbw * f``; 1 GB = 1e9 bytes; n is the group's size.
Source of S and f: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md, with S in
terms of what a record holds:

==================  ==========================================  ============
op                  S                                           f
==================  ==========================================  ============
all_reduce          message bytes                               2 (n - 1) / n
broadcast, reduce   message bytes                               1
all_gather          the whole output                            (n - 1) / n
reduce_scatter      one rank's output * n                       (n - 1) / n
all_to_all          one rank's input; uneven: the larger of     (n - 1) / n
                    what any member sends and receives
gather              one rank's input * n                        (n - 1) / n
scatter             one rank's output * n                       (n - 1) / n
send, recv          message bytes                               1
barrier             none                                        none
==================  ==========================================  ============
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rankcall.record import OPS

__all__ = ["BYTES_PER_GB", "bus_factor", "sizes"]

BYTES_PER_GB = 1e9
_NO_DATA = ("barrier", "unknown")
_CODE = {name: code for code, name in enumerate(OPS)}


def bus_factor(op: str, n: int) -> float:
    """Return f, the factor from an op's algbw to the bandwidth that its hardware carries."""
    if op in ("broadcast", "reduce", "send", "recv"):
        return 1.0
    if op in _NO_DATA or n < 1:
        return 0.0
    return (2.0 if op == "all_reduce" else 1.0) * (n - 1) / n


def sizes(columns: dict[str, npt.NDArray[Any]], n: int) -> npt.NDArray[np.float64]:
    """Return each record's S in bytes, as far as its own rank can know it (0: moves no data).

    The largest S of all members is the collective's: in a gather only the destination knows its
    output, and in an uneven all_to_all each member has a size of its own.
    """
    op = columns["op"]
    result = columns["message_bytes"].astype(np.float64)
    for code in np.flatnonzero(np.bincount(op, minlength=len(OPS))):
        name, rows = OPS[code], op == code
        if name in _NO_DATA:
            result[rows] = 0.0
        elif name in ("all_gather", "scatter", "reduce_scatter"):
            result[rows] = columns["out_bytes"][rows] * (1.0 if name == "all_gather" else n)
        elif name == "gather":
            result[rows] = columns["in_bytes"][rows] * float(n)
        elif name == "all_to_all":
            result[rows] = np.maximum(columns["in_bytes"][rows], columns["out_bytes"][rows])
    return result
