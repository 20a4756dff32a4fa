"""A quick part of PyTorch's own Gloo tests, recording off and on; `make test-upstream` has all."""

from __future__ import annotations

import pytest

from upstream import OFF, ON, different, run_suite

pytestmark = pytest.mark.multiproc

# One of each kind: collectives sync and async, sub-groups, objects, point to point and batched,
# any-source, barriers, DDP with buckets, hooks and uneven inputs, time-outs.
NAMES = (
    "test_DistributedDataParallelCPU",
    "test_all_gather_object_default_pg",
    "test_all_reduce_sum_async",
    "test_all_to_all_single_unequal_split",
    "test_barrier",
    "test_broadcast_object_list",
    "test_ddp_hook_parity_allreduce",
    "test_isend",
    "test_monitored_barrier_gloo",
    "test_send_recv_any_source",
    "test_send_recv_with_tag",
)


def test_same_outcomes_with_recording_on() -> None:
    """Each of them ends as it does without recording; most of them pass."""
    off = run_suite(OFF, NAMES, timeout=280)
    on = run_suite(ON, NAMES, timeout=280)
    assert set(off) == set(NAMES)
    assert not different(off, on), (off, on)
    assert list(off.values()).count("passed") >= 8, off
