"""The join protocol on real ranks: drop-in both ways, policies, groups, and torch's defects."""

from __future__ import annotations

from pathlib import Path

import joinprotocol
import pytest
from ranks import run_ranks

import rankcall

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(400)]  # for a busy machine


def test_joinables_of_both_work_under_both() -> None:
    """Ours under torch's Join, torch's under ours: the same counts as torch's tutorial has."""
    first, second = run_ranks(joinprotocol.both_ways, 2, timeout=300)
    assert [each[1] for each in first + second] == [5.0] * 8
    assert [each[0] for each in first] == [4.0] * 4
    assert [each[0] for each in second] == [5.0] * 4
    assert [each[2] for each in first + second] == [[False]] * 4 + [[True]] * 4


def test_all_of_the_last_round_are_last_joiners() -> None:
    """is_last_joiner is true on every rank that joined in the last round; once each."""
    assert run_ranks(joinprotocol.last_joiners, 3, timeout=300) == [[False], [True], [True]]


def test_torchs_defects_are_absent() -> None:
    """Configuration, forward-only passes, nesting, warning filters, as."""
    for rank, told in enumerate(run_ranks(joinprotocol.defects, 2, timeout=300)):
        assert told["made"] is False
        assert told["inside"] is True
        assert told["after"] is False
        assert told["sum"] == 100.0
        assert told["inner"] is True
        assert told["filters"]
        assert len(told["warnings"]) == (1 if rank == 0 else 0), told["warnings"]
        assert told["entered"]
        assert told["unused"]
        assert told["restored"]
        assert told["hooks"] == [0, 0]


def test_several_groups() -> None:
    """A model on a part of the ranks and one on all of them train together."""
    told = run_ranks(joinprotocol.groups, 4, timeout=300)
    # The gradient of the last bias is the batch, 2, of each rank at work; in the last step that is
    # rank 3 alone, in the first pair's last step rank 1.
    assert told[3]["world"] == [1.0, 0.5]
    assert told[3]["active"] == [2.0, 2.0]
    assert told[1]["world"] == [1.0, 1.5]
    assert told[1]["active"] == [2.0, 2.0]
    for divide_by in ("world same", "active same"):
        assert len({each[divide_by][1] for each in told}) == 1
    assert [each["counts"][1] for each in told] == [4.0, 7.0, 9.0, 10.0]
    assert [each["counts"][0] for each in told] == [2.0, 3.0, 6.0, 7.0]
    assert told[0]["ranks"] == [0, 1, 2, 3]
    assert "pass a group with all of them" in told[0]["error"]


def test_stop_and_raise() -> None:
    """Every rank ends at the same step, after the shortest input."""
    told = run_ranks(joinprotocol.policies, 2, timeout=300)
    for rank, each in enumerate(told):
        for way in ("known", "unknown"):
            for start in (3, 9):
                assert each[f"stop {start} {way}"] == start
                steps, error = each[f"raise {start} {way}"]
                assert steps == start
                says = "Detected at least one" if rank else "Rank 0 exhausted all inputs."
                assert error.startswith(f"UnevenInputs: {says}")
            assert each[f"stop 4 {way}"] == 4
            assert each[f"raise 4 {way}"] == [4, ""]
    assert told[0]["thrown"] == [3, "Rank 0 exhausted all inputs."]
    assert told[1]["thrown"][0] == 3
    assert told[1]["thrown"][1].startswith("Detected at least one rank that exhausted inputs.")


def test_replay_hands_out_the_last_batch() -> None:
    """With no weight, until all are done; the others' weights follow divide_by."""
    first, second = run_ranks(joinprotocol.replay, 2, timeout=300)
    assert first["seen"] == [
        [0, True, 1.0, 1.0], [1, True, 1.0, 1.0], [1, False, 0.0, 0.0],
    ]  # fmt: skip
    assert second["seen"] == [
        [10, True, 1.0, 1.0], [11, True, 1.0, 1.0], [12, True, 2.0, 2.0],
    ]  # fmt: skip
    for told in (first, second):
        assert told["summary"] == [[0, 2, 0, 1], [1, 3, 0, 0]]
        assert told["finite"]
        assert told["compiles"] == 1
    assert len(first["warned"]) == 1
    assert "not finite" in first["warned"][0]
    assert second["warned"] == []


def test_a_length_limits_a_loader() -> None:
    """Also one that never ends."""
    assert run_ranks(joinprotocol.capped, 2, timeout=300) == [[0, 1], [0, 1, 2, 3]]


def test_switched_off() -> None:
    """enable=False leaves everything alone."""
    first, second = run_ranks(joinprotocol.off, 2, timeout=300)
    assert first == [[[0, True, 1.0]], False, None]
    assert second == [[[0, True, 1.0], [1, True, 1.0]], False, None]


def test_the_summary_is_in_the_run(tmp_path: Path) -> None:
    """Per rank: its batches, what it shadowed, and the time it took."""
    told = run_ranks(joinprotocol.recorded, 2, str(tmp_path / "run"), timeout=300)
    assert told[0] == told[1]
    assert told[0][0].split() == ["rank", "batches", "shadowed", "replayed", "extra", "time"]
    (join,) = rankcall.load(tmp_path / "run").joins
    assert join.on_exhausted == "shadow"
    assert "joinprotocol.py" in join.call_site
    assert [each.batches for each in join.ranks] == [1, 2]
    assert [each.shadowed for each in join.ranks] == [1, 0]
    assert join.ranks[0].extra_s > 0
