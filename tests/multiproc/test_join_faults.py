"""Errors inside Join reach every rank within 2 s, and the one that failed keeps its own.

The 2 s are those of a machine that is free. Each scenario is preceded by a model's construction and
five plain steps, milliseconds on such a machine; forty times what that took is allowed on top.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import joinfaults
import joinloops
import pytest
from joinrun import run_scenarios
from once import once
from ranks import run_ranks, try_ranks

from rankcall.rundir import host_name

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(400)]  # for a busy machine
SOON_S, SLOWED = 2.0, 40


@once
def outcomes() -> list[dict[str, Any]]:
    """Run all scenarios on the same three ranks; return what each rank says of them."""
    scenarios = [*joinfaults.SCENARIOS, *joinloops.SCENARIOS]
    return run_ranks(run_scenarios, 3, scenarios, init=False, timeout=300)


def outcome(name: str) -> list[dict[str, Any]]:
    """Return what the ranks say of one scenario; the user's settings are as before after it."""
    found = [told[name] for told in outcomes()]
    assert not any(each["changed"] for each in found), found
    return found


def soon(told: list[dict[str, Any]], began: float) -> None:
    """Check that every rank was out of its block in time."""
    late = max(each["ended"] for each in told) - began
    assert late < SOON_S + SLOWED * max(each["plain_s"] for each in told), told


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
    """The rank that fails keeps its error; the others raise PeerError with it, soon."""
    told = outcome(name)
    assert told[1]["error"] == error, told
    for other in (told[0], told[2]):
        assert other["error"] == "PeerError", other
        assert other["rank"] == 1
        assert error in other["text"]
        assert f"rank 1 ({host_name()}) failed inside Join" in other["text"]
        assert "joinfaults.py" in other["text"], "the traceback came along"
    soon(told, told[1]["began"])


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("too_short", "ended after 3 of the 6"),
        ("too_short_replayed", "ended after 3 of the 6"),
        ("too_long", "goes on after the 3"),
        ("too_long_replayed", "goes on after the 3"),
    ],
)
def test_a_loader_that_lies_about_its_length(name: str, says: str) -> None:
    """It is named on every rank."""
    told = outcome(name)
    assert told[1]["error"] == "UnevenInputs"
    for each in told:
        assert says in each["text"], told
    soon(told, told[1]["began"])


def test_too_few_in_the_tail_do_no_harm() -> None:
    """A rank may end earlier than promised once others have run dry."""
    told = outcome("short_in_the_tail")
    assert [each["error"] for each in told] == [None] * 3
    assert [each["steps"] for each in told] == [2, 4, 6]
    assert told[0]["shadowed"] == [4, 2, 0]


@pytest.mark.parametrize("name", ["one_breaks", "one_breaks_in_fsdp"])
def test_one_rank_breaks(name: str) -> None:
    """Every rank says who left, and when: the one that left is told by one of the others."""
    told = outcome(name)
    assert told[1]["error"] == "PeerError", told
    assert "UnevenInputs" in (told[0]["error"], told[2]["error"]), told
    for each in told:
        assert each["error"] in ("UnevenInputs", "PeerError")
        assert "rank 1 left the loop after 3 batches" in each["text"], told
    soon(told, told[1]["began"])


def test_all_break_together() -> None:
    """A limit on steps is no error, and the group goes on working."""
    told = outcome("all_break")
    assert [(each["error"], each["steps"], each["sum"]) for each in told] == [(None, 6, 3.0)] * 3


def test_break_in_the_tail() -> None:
    """Who leaves among notifications shadows the rest."""
    told = outcome("breaks_in_the_tail")
    assert [each["error"] for each in told] == [None] * 3
    assert told[0]["shadowed"] == [4, 2, 0]


def test_all_fail_together() -> None:
    """Nobody's error is replaced, and nobody's connections are broken."""
    for each in outcome("all_fail_and_go_on"):
        assert (each["error"], each["errors"], each["sum"]) == (None, 3, 3.0)


def test_nothing_to_replay() -> None:
    """The same clear error on every rank, before the first batch."""
    for each in outcome("nothing_to_replay"):
        assert each["error"] == "UnevenInputs"
        assert "rank 1 has no batch at all" in each["text"]
        assert each["steps"] == 0


def test_nothing_on_one_rank() -> None:
    """Stop hands out nothing, lengths known or not; raise raises on every rank before the first."""
    for rank, each in enumerate(outcome("nothing_on_one_rank")):
        assert (each["error"], each["steps"], each["stopped"]) == ("UnevenInputs", 0, 2), each
        assert ("Rank 1 exhausted" if rank == 1 else "at least one rank") in each["text"]


def test_different_settings() -> None:
    """The same clear error on every rank, before the first batch."""
    for each in outcome("different_settings"):
        assert each["error"] == "ValueError"
        assert "rank 1: on_exhausted='stop'" in each["text"]
        assert each["steps"] == 0


def test_ranks_that_share_data_run_dry_together() -> None:
    """Where they would not, they say so, and the others hear of it."""
    told = outcome("different_shares")
    assert [each["error"] for each in told] == ["UnevenInputs", "UnevenInputs", "PeerError"]
    for each in told:
        assert "ranks 0-1 share their data" in each["text"]
    soon(told, max(told[0]["began"], told[1]["began"]))


@pytest.mark.parametrize("where", ["ddp", "fsdp", "shadowing"])
def test_a_killed_rank_is_named(where: str) -> None:
    """Each survivor names the rank that is gone, and only that."""
    first, dead, last = try_ranks(joinfaults.killed, 3, where, timeout=300)
    assert dead.exitcode == -9
    for each in (first, last):
        assert each.ok, each
        assert each.value["error"] == "PeerError"
        assert each.value["rank"] == 1
        assert f"rank 1 ({host_name()}) is gone without a word" in each.value["text"]


def test_the_store_ends_with_the_rank_that_fails(tmp_path: Path) -> None:
    """The cause is heard all the same: the rank lingers until it is."""
    first, *others = try_ranks(
        joinfaults.store_host_fails, 3, str(tmp_path), init=False, timeout=300
    )
    assert first.exitcode == 7
    for each in others:
        assert each.ok, each
        assert each.value["error"] == "PeerError"
        assert "no such sample" in each.value["text"]
