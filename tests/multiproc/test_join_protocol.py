"""The join protocol on real ranks: drop-in both ways, policies, groups, and torch's defects."""

from __future__ import annotations

from pathlib import Path

import pytest
from join_programs import protocol
from ranks import run_ranks

import rankcall

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(400)]  # for a busy machine


def test_joinables_of_both_work_under_both() -> None:
    """Our joinables work under torch's Join, and torch's under ours, with the tutorial's counts."""
    first, second = run_ranks(protocol.both_ways, 2, timeout=300)
    assert [figures[1] for figures in first + second] == [5.0] * 8
    assert [figures[0] for figures in first] == [4.0] * 4
    assert [figures[0] for figures in second] == [5.0] * 4
    assert [figures[2] for figures in first + second] == [[False]] * 4 + [[True]] * 4


def test_all_of_the_last_round_are_last_joiners() -> None:
    """``is_last_joiner`` is true, once, on every rank that joined in the last round."""
    assert run_ranks(protocol.last_joiners, 3, timeout=300) == [[False], [True], [True]]


def test_torchs_defects_are_absent() -> None:
    """None of the defects of torch's Join that the program provokes is there."""
    for rank, results in enumerate(run_ranks(protocol.defects, 2, timeout=300)):
        assert results["made"] is False
        assert results["inside"] is True
        assert results["after"] is False
        assert results["sum"] == 100.0
        assert results["inner"] is True
        assert results["filters"]
        assert len(results["warnings"]) == (1 if rank == 0 else 0), results["warnings"]
        assert results["entered"]
        assert results["unused"]
        assert results["restored"]
        assert results["hooks"] == [0, 0]


def test_several_groups() -> None:
    """A model on some of the ranks and one on all of them train together."""
    results = run_ranks(protocol.groups, 4, timeout=300)
    # The gradient of the last bias is the batch, 2, of each rank at work; in the last step that is
    # rank 3 alone, in the first pair's last step rank 1.
    assert results[3]["world"] == [1.0, 0.5]
    assert results[3]["active"] == [2.0, 2.0]
    assert results[1]["world"] == [1.0, 1.5]
    assert results[1]["active"] == [2.0, 2.0]
    for divide_by in ("world same", "active same"):
        assert len({result[divide_by][1] for result in results}) == 1
    assert [result["counts"][1] for result in results] == [4.0, 7.0, 9.0, 10.0]
    assert [result["counts"][0] for result in results] == [2.0, 3.0, 6.0, 7.0]
    assert results[0]["ranks"] == [0, 1, 2, 3]
    assert "pass a group with all of them" in results[0]["error"]


def test_stop_and_raise() -> None:
    """Every rank ends at the same step, after the shortest input."""
    results = run_ranks(protocol.policies, 2, timeout=300)
    for rank, result in enumerate(results):
        for way in ("known", "unknown"):
            for start in (3, 9):
                assert result[f"stop {start} {way}"] == start
                steps, error = result[f"raise {start} {way}"]
                assert steps == start
                text = "Detected at least one" if rank else "Rank 0 exhausted all inputs."
                assert error.startswith(f"UnevenInputsError: {text}")
            assert result[f"stop 4 {way}"] == 4
            assert result[f"raise 4 {way}"] == [4, ""]
    assert results[0]["thrown"] == [3, "Rank 0 exhausted all inputs."]
    assert results[1]["thrown"][0] == 3
    assert results[1]["thrown"][1].startswith("Detected at least one rank that exhausted inputs.")


def test_replay_hands_out_the_last_batch() -> None:
    """A rank replays at weight zero until all are done; other weights follow ``divide_by``."""
    first, second = run_ranks(protocol.replay, 2, timeout=300)
    assert first["seen"] == [
        [0, True, 1.0, 1.0],
        [1, True, 1.0, 1.0],
        [1, False, 0.0, 0.0],
    ]
    assert second["seen"] == [
        [10, True, 1.0, 1.0],
        [11, True, 1.0, 1.0],
        [12, True, 2.0, 2.0],
    ]
    for results in (first, second):
        assert results["summary"] == [[0, 2, 0, 1], [1, 3, 0, 0]]
        assert results["finite"]
        assert results["compiles"] == 1
    assert len(first["warned"]) == 1
    assert "not finite" in first["warned"][0]
    assert second["warned"] == []


def test_a_length_limits_a_loader() -> None:
    """``length`` ends a loader, even one that never ends."""
    assert run_ranks(protocol.capped, 2, timeout=300) == [[0, 1], [0, 1, 2, 3]]


def test_switched_off() -> None:
    """With ``enable=False``, every batch is yielded and nothing is configured or summed up."""
    first, second = run_ranks(protocol.off, 2, timeout=300)
    assert first == [[[0, True, 1.0]], False, None]
    assert second == [[[0, True, 1.0], [1, True, 1.0]], False, None]


def test_the_summary_is_in_the_run(tmp_path: Path) -> None:
    """The run keeps, for each rank, its batches, its shadowed steps and their time."""
    results = run_ranks(protocol.recorded, 2, str(tmp_path / "run"), timeout=300)
    assert results[0] == results[1]
    assert results[0][0].split() == ["rank", "batches", "shadowed", "replayed", "extra", "time"]
    (join,) = rankcall.load(tmp_path / "run").joins
    assert join.on_exhausted == "shadow"
    assert "join_programs/protocol.py" in join.call_site
    assert [row.batches for row in join.ranks] == [1, 2]
    assert [row.shadowed for row in join.ranks] == [1, 0]
    assert join.ranks[0].extra_s > 0


def test_the_last_step_of_all_ranks() -> None:
    """``is_last`` is true in the last step that any rank makes, and None where no rank can know."""
    short, long = run_ranks(protocol.last_steps, 2, timeout=300)
    no = False
    assert long == {
        "shadow, known": [no] * 5 + [True],
        # Rank 0 runs dry in the first window of 4, so no rank looks further ahead.
        "shadow, unknown": [no] * 3 + [None] * 3,
        # It is known to have run dry in the second one, in which this rank has 4 again.
        "shadow, unknown, whole windows": ([no] * 3 + [None]) * 2,
        "replay, known": [no] * 5 + [True],
        "replay, unknown": [no] * 3 + [None, no, True],
        "replay, unknown, whole windows": [no] * 3 + [None] + [no] * 3 + [None],
        "stop, known": [no] * 2 + [True],
        "stop, unknown": [no] * 2 + [True],
        "stop, unknown, whole windows": [no] * 3 + [None],
    }
    assert short["replay, known"] == long["replay, known"]
    assert short["shadow, known"] == [no] * 3
