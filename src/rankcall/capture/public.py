"""What ops are called in public: by the names of torch.distributed's functions."""

from __future__ import annotations

from rankcall.record import DTYPES, OPS, op_of_variant

# How many ops each function that sends pickles consists of: lengths go ahead of (or behind) them.
OBJECT_CALLS = {
    "all_gather_object": 2,
    "broadcast_object_list": 2,
    "gather_object": 2,
    "recv_object_list": 2,
    "scatter_object_list": 3,
    "send_object_list": 2,
}
PICKLES = DTYPES.index("uint8")
BATCH = "batch_isend_irecv"
# Described by the root alone: what the others give or get is part of what it counts.
ROOT_ONLY = (OPS.index("gather"), OPS.index("scatter"))
_OWN_NAME = {"alltoall_base_": "all_to_all_single", "monitored_barrier_": "monitored_barrier"}


def public_name(variant: str) -> str:
    """Return the public function's name for a c10d op; its own where there is none."""
    op = op_of_variant(variant)
    return _OWN_NAME.get(variant, op if op != "unknown" else variant)
