"""Try a compiled recorder in this process: does it record an op of this torch as it was issued?

A recorder that was compiled for another build of torch may find its classes in another shape. That
shows in a record, or ends the process, which must therefore not be a job's.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from rankcall.capture import native, session
from rankcall.capture.settings import read_settings
from rankcall.run.load import load

_ELEMENTS = 24


def main(library: str) -> None:
    """Load a recorder, record a collective on the fake group, and exit with 0 if it is on record.

    The exit status is 1, with a line on stderr, if the record is wrong. It is a signal's if the
    library does not fit at all.
    """
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    native.use_library(Path(library))
    with tempfile.TemporaryDirectory(prefix="rankcall-trial-") as folder:
        session.claim("trial", read_settings(folder, capture="native"))
        dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=3)
        dist.all_reduce(torch.ones(_ELEMENTS), op=dist.ReduceOp.MAX)
        dist.destroy_process_group()
        session.drop("trial")
        rows = load(folder).records.to_dicts()
    seen = [
        (row["op"], row["rank"], row["seq"], row["message_bytes"], row["reduce_op"], row["status"])
        for row in rows
    ]
    if seen != [("all_reduce", 1, 1, 4 * _ELEMENTS, "max", "completed")]:
        sys.exit(f"the trial recorded {seen}")
