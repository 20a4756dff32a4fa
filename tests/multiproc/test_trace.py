"""Descriptions on four real ranks and three groups: every row of the table, and who prints."""

from __future__ import annotations

import io
import json
import os
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nvtx_tool
import pytest
import tracecases
from once import once
from ranks import run_ranks
from world import SUBGROUPS, World

from rankcall import load
from rankcall.trace import describe

# The limits are for what hangs: on a busy machine the cases have taken two minutes.
pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]

RANKS = 4
CAPTURES = ("native", "python")
FIELDS = [
    "name",
    "rank",
    "source_line",
    "message_size",
    "device",
    "timestamp",
    "gpu_serial",
    "vm_id",
    "group_ranks",
    "peer_rank",
    "root_rank",
    "correlation_id",
    "seq",
    "group",
    "dtype",
    "duration_ms",
    "algbw_gbps",
    "busbw_gbps",
    "step",
]
WHERE_THEY_APPLY = {"peer_rank", "root_rank", "correlation_id"}


@dataclass
class Told:
    """The descriptions that a rank expected and got, and its output."""

    expected: list[list[dict[str, Any]]]
    described: list[list[dict[str, Any]]]
    printed: list[list[dict[str, Any]]]
    heard: list[nvtx_tool.Heard]
    run_dir: Path
    began: float
    ended: float


@once
def traced_run(capture: str, factory: pytest.TempPathFactory) -> Told:
    """Return a capture's run of all cases."""
    folder = factory.mktemp(capture)
    env = {
        "RANKCALL_CAPTURE": capture,
        "GPU_SERIAL": 'a"b',
        "VM_ID": "vm-7",
        "NVTX_INJECTION64_PATH": str(nvtx_tool.built(folder)),
        "NVTX_COLLECTED": str(folder / "nvtx"),
    }
    began = time.time()
    accounts = run_ranks(_issue_everything, RANKS, str(folder / "run"), env=env, timeout=240)
    expected, described, printed, pids = map(list, zip(*accounts, strict=True))
    by_pid = nvtx_tool.heard(folder / "nvtx")
    heard = [by_pid[pid] for pid in pids]
    return Told(expected, described, printed, heard, folder / "run", began, time.time())


@pytest.fixture(params=CAPTURES)
def told(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Told:
    """Return the run of a capture."""
    return traced_run(request.param, tmp_path_factory)


def _issue_everything(rank: int, world_size: int, run_dir: str) -> Any:
    import rankcall
    from rankcall import trace
    from rankcall.trace import order

    order.OVERDUE_NS = (
        1 << 62
    )  # on a busy machine an op in flight for long would be described twice
    world = World.of(rank)
    out, sink, expected = io.StringIO(), trace.MemorySink(), []
    made = {"1": None, "2": None} | {group.label: group.pg for group in world.groups}
    import torch.distributed as dist

    made = {label: pg or dist.GroupMember.NON_GROUP_MEMBER for label, pg in made.items()}
    sinks = [sink, trace.Stdout(out), trace.Nvtx()]
    with rankcall.enable(run_dir), trace.enable("all", sinks=sinks) as handle:
        for case in tracecases.CASES:
            for group in world.groups:
                tell = tracecases.Expectations(rank, group)
                case(tell)
                expected += [{**want, "case": case.__name__} for want in tell.expected]
        tracecases.not_a_member(world, made)
        assert handle.flush(60)
    printed = [json.loads(line) for line in out.getvalue().splitlines()]
    return expected, sink.descriptions, printed, os.getpid()


def by_group(descriptions: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Sort out what belongs to which group, in order."""
    groups = defaultdict(list)
    for description in descriptions:
        groups[description["group"]].append(description)
    return groups


def test_every_row(told: Told) -> None:
    """Name, size, line, ranks, dtype and bandwidths of each, in issue order in each group."""
    for rank in range(RANKS):
        expected, described = by_group(told.expected[rank]), by_group(told.described[rank])
        assert set(described) == {"0"} | {
            str(number) for number, ranks in enumerate(SUBGROUPS.values(), 1) if rank in ranks
        }
        for group, wanted in expected.items():
            names = [description["name"] for description in described[group]]
            assert names == [want["name"] for want in wanted], f"rank {rank}, group {group}"
            for want, got in zip(wanted, described[group], strict=True):
                _compare(want, got, rank)


def _compare(want: dict[str, Any], got: dict[str, Any], rank: int) -> None:
    here = f"rank {rank}, {want['case']} on group {want['group']}: {got}"
    for name in ("message_size", "group_ranks"):
        assert got[name] == want[name], f"{name}: {here}"
    assert want["dtype"] in (None, got["dtype"]), here  # a barrier's means nothing
    for name in ("peer_rank", "root_rank"):
        assert got.get(name) == want.get(name), f"{name}: {here}"
    assert got["source_line"] == f"{tracecases.__file__}:{want['line']}", here
    assert got["duration_ms"] > 0, here
    if want["S"] is None:
        assert got["algbw_gbps"] is None, here
        assert got["busbw_gbps"] is None, here
    else:  # GB/s of 1e9 bytes, from this rank's own duration
        assert got["algbw_gbps"] * got["duration_ms"] * 1e6 == pytest.approx(want["S"]), here
        assert got["busbw_gbps"] == pytest.approx(got["algbw_gbps"] * want["f"]), here


def test_fields(told: Told) -> None:
    """The fields of the table and no others, of the right types; those that apply only there."""
    for rank in range(RANKS):
        for description in told.described[rank]:
            assert list(description) == [
                f for f in FIELDS if f not in WHERE_THEY_APPLY or f in description
            ]
            assert description["rank"] == rank
            assert description["device"] == "cpu"
            assert (description["gpu_serial"], description["vm_id"]) == ('a"b', "vm-7")
            assert type(description["timestamp"]) is int
            assert int(told.began) <= description["timestamp"] <= told.ended
            assert type(description["message_size"]) is int
            assert description["seq"] > 0
            assert description["step"] == 0


def test_correlation(told: Told) -> None:
    """Shared by the ops of one batch and the tensors of one coalesced op; others have none."""
    for rank in range(RANKS):
        expected, described = by_group(told.expected[rank]), by_group(told.described[rank])
        calls: dict[Any, set[int]] = defaultdict(set)
        for group, wanted in expected.items():
            for want, got in zip(wanted, described[group], strict=True):
                assert ("correlation_id" in got) == ("call" in want), got
                if "call" in want:
                    calls[group, want["case"], want["call"]].add(got["correlation_id"])
        assert all(len(ids) == 1 for ids in calls.values())
        assert len(set.union(*calls.values())) == len(calls) > 6


def test_who_prints(told: Told) -> None:
    """Point to point by the caller, with a root by the root, else by the group's first rank."""
    for rank in range(RANKS):
        expected, described = by_group(told.expected[rank]), by_group(told.described[rank])
        wanted = {
            group: [
                got for want, got in zip(wants, described[group], strict=True) if want["prints"]
            ]
            for group, wants in expected.items()
        }
        assert by_group(told.printed[rank]) == {k: v for k, v in wanted.items() if v}
    for group, ranks in {"0": [0, 1, 2, 3], "1": [1, 3], "2": [0, 2, 3]}.items():
        collectives = [
            (row["name"], row["seq"])
            for rank in range(RANKS)
            for row in told.printed[rank]
            if row["group"] == group and "peer_rank" not in row and "correlation_id" not in row
        ]
        assert len(collectives) == len(set(collectives)), f"printed twice in {ranks}"


@pytest.fixture
def marked(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """Return the run of the native capture, the one that makes marks."""
    return traced_run("native", tmp_path_factory)


def test_nvtx_marks(marked: Told) -> None:
    """Every description is an NVTX mark at issue, with null for fields that are not known yet."""
    times = ("duration_ms", "algbw_gbps", "busbw_gbps")
    for rank in range(RANKS):
        heard = marked.heard[rank]
        assert heard.domains == ["rankcall"]
        marks = by_group([mark for _, mark in heard.marks])
        for group, described in by_group(marked.described[rank]).items():
            assert len(marks[group]) == len(described)
            for mark, described_later in zip(marks[group], described, strict=True):
                later = {**described_later, **dict.fromkeys(times)}
                anywhere = later["name"] == "recv" and "peer_rank" not in mark
                assert list(mark) == [f for f in later if not (anywhere and f == "peer_rank")]
                if later["name"] == "recv" and "peer_rank" not in mark:  # from any source
                    later = {**later, "seq": 0}
                    del later["peer_rank"]
                assert abs(mark.pop("timestamp") - later.pop("timestamp")) <= 1
                later.pop("seq"), mark.pop("seq")  # a call's is that of another of its ops
                assert mark == later
        assert len({thread for thread, _ in heard.marks}) == 1  # the one that issued them all


def test_nvtx_ranges(marked: Told) -> None:
    """One over each op, which ends; its mark comes right before it."""
    for heard in marked.heard:
        assert heard.between == 0
        assert sorted(heard.ended) == sorted(heard.begun)
        names = {mark["name"] for _, mark in heard.marks}
        assert set(heard.begun.values()) == names
        assert len(heard.begun) < len(heard.marks)  # a coalesced op has several marks, one range


def test_the_ring_keeps_what_the_source_says(told: Told) -> None:
    """Of every line that issued an op, without its indentation."""
    source = Path(tracecases.__file__).read_text().splitlines()
    for ring in load(told.run_dir).rings:
        sites = {
            number: site
            for number, site in ring.tables.sites.items()
            if site.file == tracecases.__file__
        }
        assert len(sites) > 20
        for number, site in sites.items():
            assert ring.tables.lines[number] == source[site.line - 1].strip()


def test_a_run_is_described_as_it_was_live(told: Told) -> None:
    """The records that were left behind make the same descriptions, but for what is not in them."""
    for ring in load(told.run_dir).rings:
        unknown = {"gpu_serial": "unknown", "vm_id": "unknown"}
        live = [{**description, **unknown} for description in told.described[ring.header.rank]]
        later = list(describe(ring))
        assert len(later) == len(live)
        for group, descriptions in by_group(later).items():
            for was, now in zip(by_group(live)[group], descriptions, strict=True):
                assert abs(was.pop("timestamp") - now.pop("timestamp")) <= 1  # clocks read anew
                assert was == now
