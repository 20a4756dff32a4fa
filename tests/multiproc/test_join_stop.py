"""``join.stop()`` on real ranks: all stop at one step, whichever rank gets the signal, and when."""

from __future__ import annotations

import pytest
from join_programs import stopping
from ranks import run_ranks, try_ranks

from rankcall.process import host_name

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(400)]  # for a busy machine


def test_a_signal_stops_all_ranks_at_one_step() -> None:
    """Under every policy, the step is the newest that a rank had begun; then the job goes on."""
    results = run_ranks(stopping.asked_by_signal, 3, timeout=300)
    for name, first in results[0].items():
        # Rank 1 is asked in step 2. The others may have begun step 3, but cannot end it without it.
        assert first["steps"] in ([2], [3]), name
        for result in results:
            assert result[name]["steps"] == first["steps"], (name, results)
            assert result[name]["stopped"], name
            assert result[name]["sum"] == 3.0, name
            # Of a loader whose length is known, no batch is drawn that was not used.
            ahead = 0 if name.endswith(", known") else 8
            assert result[name]["unused"] == ahead, (name, results)


def test_a_rank_that_shadows_is_asked() -> None:
    """The others stop, and the rank that has run dry stops with them; no loop follows."""
    first, *others = run_ranks(stopping.asked_while_shadowing, 3, timeout=300)
    steps = others[0][0]
    assert steps >= 20
    assert others == [[steps, True, 0, steps - 1, 3.0]] * 2
    assert first == [1, True, 0, steps - 1, 3.0]


def test_a_request_after_the_last_step() -> None:
    """Each loop has all its steps, also in a later block; ``stopped`` is equal on all ranks."""
    results = run_ranks(stopping.asked_too_late, 3, timeout=300)
    assert len({tuple(result) for result in results}) == 1, results
    assert results[0][:2] == [6, 3.0]
    assert results[0][3] is False


def test_a_rank_that_has_ended_is_named() -> None:
    """Ranks do not wait for the report of a process that has ended."""
    first, dead, last = try_ranks(stopping.ended_before_the_stop, 3, timeout=300)
    assert dead.exitcode == -9
    for result in (first, last):
        assert result.ok, result
        assert result.value["error"] == "PeerError"
        assert result.value["rank"] == 1
        assert f"rank 1 ({host_name()}) ended without an error report" in result.value["text"]
        assert "cannot stop at the same step without it" in result.value["text"]
