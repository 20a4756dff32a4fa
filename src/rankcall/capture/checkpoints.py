"""The step that a program has saved, written into its ring for whoever restarts the job."""

from __future__ import annotations

import struct

from rankcall.capture import session
from rankcall.ring.layout import offset_of
from rankcall.ring.writer import put

_STEP = struct.Struct("<Q")
_MOST = 1 << 62


def checkpointed(step: int) -> None:
    """Note that the job can go on from this step if it is restarted.

    Call it when a checkpoint is complete, on at least one rank. A recovery then says how many steps
    were lost, and a failure that comes back is recognised by the step of the whole job, not by that
    of one attempt. It costs microseconds, and does nothing if recording is off.

    Args:
        step: The number of steps that the job has taken, over all of its attempts.

    Raises:
        TypeError: ``step`` is not a whole number.
        ValueError: ``step`` is negative.
    """
    if not isinstance(step, int) or isinstance(step, bool):
        raise TypeError(f"checkpointed() takes the number of a step; got {type(step).__name__}")
    if not 0 <= step < _MOST:
        raise ValueError(f"checkpointed() takes a step from 0 on; got {step}")
    recording = session.current()
    if recording is None:
        return
    try:
        (own,) = _STEP.unpack_from(recording.ring, offset_of("step"))
        put(recording.ring, "saved_at", own)
        put(recording.ring, "saved", step + 1)
    except ValueError:  # the recording has just ended, and its ring is closed
        return
