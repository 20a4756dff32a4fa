"""Errors inside Join reach every rank within 2 s, and the failed rank keeps its own error.

The 2 s are those of a machine that is free. Each scenario is preceded by a model's construction and
five plain steps, milliseconds on such a machine; forty times what that took is allowed on top.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from join_programs import faults, loops
from join_programs.scenario import run_scenarios
from once import once
from ranks import run_ranks, try_ranks

from rankcall.process import host_name

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(400)]  # for a busy machine
SOON_S, SLOWED = 2.0, 40


@once
def outcomes() -> list[dict[str, Any]]:
    """Run all scenarios on the same three ranks; return result rank's outcomes."""
    scenarios = [*faults.SCENARIOS, *loops.SCENARIOS]
    return run_ranks(run_scenarios, 3, scenarios, init=False, timeout=300)


def outcome(name: str) -> list[dict[str, Any]]:
    """Return the ranks' outcomes of one scenario, after which the user's settings are restored."""
    rank_results = [results[name] for results in outcomes()]
    assert not any(result["changed"] for result in rank_results), rank_results
    return rank_results


def check_deadline(results: list[dict[str, Any]], began: float) -> None:
    """Check that every rank was out of its block in time."""
    late = max(result["ended"] for result in results) - began
    assert late < SOON_S + SLOWED * max(result["plain_s"] for result in results), results


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("in_backward", "KeyError"),
        ("without_batches", "KeyError"),
        ("in_shadow", "KeyError"),
        ("in_fsdp", "KeyError"),
        ("in_subgroup_and_receive", "KeyError"),
        ("in_receive_from_one_that_left", "KeyError"),
        ("in_user_code", "KeyError"),
        ("looks_like_torch", "RuntimeError"),
        ("interrupted", "KeyboardInterrupt"),
        ("loader_raises", "OSError"),
        ("long_loader_raises", "OSError"),
    ],
)
def test_a_failure_reaches_every_rank(name: str, error: str) -> None:
    """The failed rank raises its own error; the others raise PeerError with it in time."""
    results = outcome(name)
    assert results[1]["error"] == error, results
    for peer in (results[0], results[2]):
        assert peer["error"] == "PeerError", peer
        assert peer["rank"] == 1
        assert error in peer["text"]
        assert f"rank 1 ({host_name()}) failed inside Join" in peer["text"]
        assert "join_programs/faults.py" in peer["text"], "the traceback came along"
    check_deadline(results, results[1]["began"])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("too_short", "ended after 3 of the 6"),
        ("too_short_replayed", "ended after 3 of the 6"),
        ("too_long", "goes on after the 3"),
        ("too_long_replayed", "goes on after the 3"),
    ],
)
def test_a_loader_that_lies_about_its_length(name: str, text: str) -> None:
    """Every rank raises an error that names the loader's rank and its true length."""
    results = outcome(name)
    assert results[1]["error"] == "UnevenInputsError"
    for result in results:
        assert text in result["text"], results
    check_deadline(results, results[1]["began"])


def test_too_few_in_the_tail_do_no_harm() -> None:
    """A rank may have fewer batches than its length promised if others have run dry before."""
    results = outcome("short_in_the_tail")
    assert [result["error"] for result in results] == [None] * 3
    assert [result["steps"] for result in results] == [2, 4, 6]
    assert results[0]["shadowed"] == [4, 2, 0]


@pytest.mark.parametrize("name", ["one_breaks", "one_breaks_in_fsdp"])
def test_one_rank_breaks(name: str) -> None:
    """Every rank's error names the rank that left and its step; the one that left gets it, too."""
    results = outcome(name)
    assert results[1]["error"] == "PeerError", results
    assert "UnevenInputsError" in (results[0]["error"], results[2]["error"]), results
    for result in results:
        assert result["error"] in ("UnevenInputsError", "PeerError")
        assert "rank 1 left the loop after 3 batches" in result["text"], results
    check_deadline(results, results[1]["began"])


def test_all_break_together() -> None:
    """A limit on steps raises nothing, and the group works afterwards."""
    results = outcome("all_break")
    assert [(result["error"], result["steps"], result["sum"]) for result in results] == [
        (None, 6, 3.0)
    ] * 3


def test_all_break_after_an_uneven_epoch() -> None:
    """The steps that a rank shadowed count: so all are known to leave at the same step."""
    results = outcome("all_break_in_the_second_epoch")
    assert [result["error"] for result in results] == [None] * 3, results
    assert [result["steps"] for result in results] == [3, 4, 5]


def test_break_in_the_tail() -> None:
    """A rank that leaves in the tail shadows the remaining iterations of the others."""
    results = outcome("breaks_in_the_tail")
    assert [result["error"] for result in results] == [None] * 3
    assert results[0]["shadowed"] == [4, 2, 0]


def test_all_fail_together() -> None:
    """Each rank keeps its own error, and no connection is broken."""
    for result in outcome("all_fail_and_go_on"):
        assert (result["error"], result["errors"], result["sum"]) == (None, 3, 3.0)


def test_nothing_to_replay() -> None:
    """Every rank raises the same error before the first batch."""
    for result in outcome("nothing_to_replay"):
        assert result["error"] == "UnevenInputsError"
        assert "rank 1 has no batch at all" in result["text"]
        assert result["steps"] == 0


def test_nothing_on_one_rank() -> None:
    """If one rank has no batch, stop yields nothing, and raise raises before the first batch."""
    for rank, result in enumerate(outcome("nothing_on_one_rank")):
        assert (result["error"], result["steps"], result["stopped"]) == (
            "UnevenInputsError",
            0,
            2,
        ), result
        assert ("Rank 1 exhausted" if rank == 1 else "at least one rank") in result["text"]


def test_different_settings() -> None:
    """Every rank raises the same error before the first batch."""
    for result in outcome("different_settings"):
        assert result["error"] == "ValueError"
        assert "rank 1: on_exhausted='stop'" in result["text"]
        assert result["steps"] == 0


def test_ranks_that_share_data_run_dry_together() -> None:
    """Ranks that share data and run dry apart raise an error, which reaches the other ranks."""
    results = outcome("different_shares")
    assert [result["error"] for result in results] == [
        "UnevenInputsError",
        "UnevenInputsError",
        "PeerError",
    ]
    for result in results:
        assert "ranks 0-1 share their data" in result["text"]
    check_deadline(results, max(results[0]["began"], results[1]["began"]))


@pytest.mark.parametrize("where", ["ddp", "fsdp", "shadowing"])
def test_a_killed_rank_is_named(where: str) -> None:
    """Each survivor names the rank that is gone, and only that."""
    first, dead, last = try_ranks(faults.killed, 3, where, timeout=300)
    assert dead.exitcode == -9
    for result in (first, last):
        assert result.ok, result
        assert result.value["error"] == "PeerError"
        assert result.value["rank"] == 1
        assert f"rank 1 ({host_name()}) ended without an error report" in result.value["text"]


def test_the_store_ends_with_the_rank_that_fails(tmp_path: Path) -> None:
    """The failed rank waits until all have read its report, even if it hosts the store."""
    first, *others = try_ranks(faults.store_host_fails, 3, str(tmp_path), init=False, timeout=300)
    assert first.exitcode == 7
    for result in others:
        assert result.ok, result
        assert result.value["error"] == "PeerError"
        assert "no such sample" in result.value["text"]
