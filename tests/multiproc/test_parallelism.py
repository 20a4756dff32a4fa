"""What DDP, FSDP, DTensor, pipelines, compiled code and threads issue below Python is recorded."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

import programs
import pytest
import witness
from once import once
from ranks import run_ranks
from world import plain

from rankcall import Run, load

pytestmark = pytest.mark.multiproc
RANKS = 4
CAPTURES = ("native", pytest.param("python", marks=pytest.mark.slow))
PARAMETERS = 3 * (16 * 16 + 16)  # of the model that DDP and FSDP2 train


@dataclass
class Told:
    """The value that a program returned on each rank, and its records."""

    values: list[Any]
    rows: list[list[dict[str, Any]]]
    torch_saw: list[list[dict[str, Any]]]
    run: Run

    def sites(self, rank: int) -> Counter[tuple[str, int]]:
        """Count a rank's records by op and line of the program."""
        rows = self.rows[rank]
        assert all(row["call_site"].startswith(f"{programs.__file__}:") for row in rows[:-1])
        return Counter((row["op"], int(row["call_site"].rpartition(":")[2])) for row in rows[:-1])


@once
def outcomes(capture: str, factory: pytest.TempPathFactory) -> dict[str, Told]:
    """Return each program's outcome; all ran within one set of ranks."""
    folder = factory.mktemp(capture)
    env = {"RANKCALL_CAPTURE": capture, **witness.ARMED}
    names = list(programs.PROGRAMS)
    results = run_ranks(
        programs.run_programs, RANKS, str(folder), names, True, env=env, timeout=240
    )
    by_program = {}
    for name in names:
        run = load(folder / name)
        rows = [plain(row) for row in run.records.to_dicts()]
        by_program[name] = Told(
            [result[name]["value"] for result in results],
            [[row for row in rows if row["rank"] == rank] for rank in range(RANKS)],
            [result[name]["torch_saw"] for result in results],
            run,
        )
    return by_program


@pytest.fixture(params=CAPTURES)
def told(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function from a program's name to its outcome."""
    return outcomes(request.param, tmp_path_factory).__getitem__


@pytest.mark.parametrize("name", list(programs.PROGRAMS))
def test_every_program(told: Any, name: str) -> None:
    """Nothing is dropped or unfinished, members agree, and the Flight Recorder saw the same."""
    outcome: Told = told(name)
    assert outcome.run.problems == []
    assert set(outcome.run.dropped.values()) == {0}
    seen: dict[Any, list[Any]] = defaultdict(list)
    for rank, rows in enumerate(outcome.rows):
        assert rows
        assert rows[-1]["op"] == "barrier"  # the harness's own
        for row in rows:
            assert row["status"] == "completed", row
            assert rank in row["group_ranks"]
            if row["kind"] == "collective":
                key = (row["group"], tuple(row["group_ranks"]), row["seq"])
                rooted = row["op"] in ("gather", "scatter")  # the root's message is larger
                size = None if rooted else row["message_bytes"]
                seen[key].append((row["variant"], size, row["dtype"]))
        assert witness.differences(rows, witness.by_group(outcome.torch_saw[rank])) == []
    for (_, ranks, _), calls in seen.items():
        assert len(calls) == len(ranks)
        assert len(set(calls)) == 1, calls


def test_ddp(told: Any) -> None:
    """Each step reduces every gradient, in several buckets, called from the backward() line."""
    outcome = told("ddp")
    for rank, value in enumerate(outcome.values):
        buckets = [row for row in outcome.rows[rank] if row["op"] == "all_reduce"]
        buckets = [row for row in buckets if row["call_site"].endswith(f":{value['backward']}")]
        assert sum(row["step"] == 1 for row in buckets) > 1  # it makes small buckets after a step
        assert sum(row["message_bytes"] for row in buckets) == 4 * PARAMETERS * programs.STEPS
        assert {row["api"] for row in buckets} == {"backward"}
        assert {row["step"] for row in buckets} == set(range(programs.STEPS))


def test_fsdp2(told: Any) -> None:
    """Parameters are gathered forward and backward, gradients scattered by the backward() line."""
    outcome = told("fsdp2")
    for rank, value in enumerate(outcome.values):
        sites = outcome.sites(rank)
        assert sites["all_gather", value["forward"]] == 3 * programs.STEPS
        assert sites["all_gather", value["backward"]] >= programs.STEPS
        assert sites["reduce_scatter", value["backward"]] == 3 * programs.STEPS
        scattered = [row for row in outcome.rows[rank] if row["op"] == "reduce_scatter"]
        assert sum(row["in_bytes"] for row in scattered) == 4 * PARAMETERS * programs.STEPS
        assert sum(row["out_bytes"] for row in scattered) == PARAMETERS * programs.STEPS


def test_hsdp(told: Any) -> None:
    """Shards within a pair, replicas across pairs: each op on its own group."""
    outcome = told("hsdp")
    for rank in range(RANKS):
        ranks = {(row["op"], tuple(row["group_ranks"])) for row in outcome.rows[rank][:-1]}
        pair = (0, 1) if rank < 2 else (2, 3)
        across = (rank % 2, rank % 2 + 2)
        assert ranks == {("all_gather", pair), ("reduce_scatter", pair), ("all_reduce", across)}


def test_tensor_parallel(told: Any) -> None:
    """A row-wise layer sums its outputs forward, a column-wise one its input's gradient back."""
    outcome = told("tensor_parallel")
    for rank, value in enumerate(outcome.values):
        reduced = [row for row in outcome.rows[rank] if row["op"] == "all_reduce"]
        lines = [int(row["call_site"].rpartition(":")[2]) for row in reduced]
        assert lines == [value["forward"], value["backward"]]
        assert [row["message_bytes"] for row in reduced] == [4 * 4 * 16] * 2


def test_dtensor(told: Any) -> None:
    """Shard to replica gathers, shard to shard too (on a CPU), partial to replica sums."""
    outcome = told("dtensor")
    for rank, value in enumerate(outcome.values):
        rows, line = outcome.rows[rank][:-1], value["line"]
        calls = [
            (row["op"], int(row["call_site"].rpartition(":")[2]), row["message_bytes"])
            for row in rows
        ]
        assert calls == [
            ("all_gather", line, 256),
            ("all_gather", line + 1, 256),
            ("all_reduce", line + 2, 256),
        ]


def test_pipeline(told: Any) -> None:
    """Four activations forward over each edge and four gradients back, numbered at both ends."""
    outcome = told("pipeline")
    ends: dict[Any, Counter[str]] = defaultdict(Counter)
    for rank, rows in enumerate(outcome.rows):
        for row in (row for row in rows if row["kind"] == "p2p" and row["dtype"] == "float32"):
            pair = (rank, row["peer"]) if row["op"] == "send" else (row["peer"], rank)
            ends[(*pair, row["tag"], row["seq"], row["message_bytes"])][row["op"]] += 1
    assert all(end == {"send": 1, "recv": 1} for end in ends.values()), ends
    edges = Counter((source, target) for source, target, *_ in ends)
    assert edges == dict.fromkeys(((0, 1), (1, 2), (2, 3), (1, 0), (2, 1), (3, 2)), 4)


def test_compiled(told: Any) -> None:
    """One record a run, none for the trace; the line is where the compiled function begins."""
    outcome = told("compiled")
    for rank, value in enumerate(outcome.values):
        rows = outcome.rows[rank][:-1]
        assert [row["message_bytes"] for row in rows] == [20] * 3
        assert outcome.sites(rank) == {("all_reduce", value["line"]): 3}


def test_zero(told: Any) -> None:
    """The optimizer's broadcasts come from every owner, and its steps count once."""
    outcome = told("zero")
    for rank in range(RANKS):
        sent = [row for row in outcome.rows[rank] if row["op"] == "broadcast" and row["step"]]
        roots = {row["root"] for row in outcome.rows[rank] if row["op"] == "broadcast"}
        assert roots == set(range(RANKS))
        assert sent
        assert outcome.rows[rank][-1]["step"] == programs.STEPS
    assert outcome.run.ranks["steps"].to_list() == [programs.STEPS] * RANKS


def test_threads(told: Any) -> None:
    """Each group counts for itself; lines and threads are the issuer's own."""
    outcome = told("threads")
    for rank, value in enumerate(outcome.values):
        kernel_threads = []
        for which, group in enumerate(value["groups"]):
            rows = [row for row in outcome.rows[rank] if row["group"] == group]
            assert [row["seq"] for row in rows] == list(range(1, 101))
            assert {row["message_bytes"] for row in rows} == {4 * (which + 1)}
            assert {row["call_site"] for row in rows} == {f"{programs.__file__}:{value['line']}"}
            kernel_threads.append({row["thread"] for row in rows})
        assert [len(thread_ids) for thread_ids in kernel_threads] == [1, 1]
        assert kernel_threads[0] != kernel_threads[1]


def test_groups(told: Any) -> None:
    """However a group is made, the table has its ranks in their order, on every member."""
    outcome = told("groups")
    table = {row["group"]: row for row in outcome.run.groups.to_dicts()}
    for rank, value in enumerate(outcome.values):
        assert len(value) == (5 if rank in (0, 2) else 4)
        rows = {tuple(row["group_ranks"]) for row in outcome.rows[rank]}
        for made in value.values():
            assert tuple(sorted(made["ranks"])) in rows
            known = [
                row
                for label, row in table.items()
                if row["name"] == made["label"] and row["ranks"] == made["ranks"]
            ]
            assert len(known) == 1, (made, table)
            assert known[0]["backend"] == "gloo"
            assert known[0]["size"] == len(made["ranks"])


def test_not_run(told: Any) -> None:
    """What only a compiler or a meta device sees is no collective."""
    outcome = told("not_run")
    for rank, value in enumerate(outcome.values):
        assert outcome.sites(rank) == {("all_reduce", value["line"]): 1}


@pytest.mark.parametrize("name", ["fork", "data_loader"])
def test_forked_children(told: Any, name: str) -> None:
    """A child neither records nor breaks its parent's ring."""
    outcome = told(name)
    for rank in range(RANKS):
        ops = [row["op"] for row in outcome.rows[rank]]
        assert ops == ["all_reduce"] * (2 if name == "fork" else 4) + ["barrier"]
        assert [row["index"] for row in outcome.rows[rank]] == list(range(len(ops)))
    assert outcome.run.ranks["closed"].to_list() == [True] * RANKS


@pytest.fixture(scope="module")
def unrecorded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the results of DDP and FSDP2 without recording."""
    folder = str(tmp_path_factory.mktemp("unrecorded"))
    return run_ranks(programs.run_programs, RANKS, folder, ["ddp", "fsdp2"], False)


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_numerics_are_the_same(told: Any, unrecorded: Any, name: str) -> None:
    """Training ends with the same bits, recorded or not."""
    bare = [result[name]["value"]["digest"] for result in unrecorded]
    assert [value["digest"] for value in told(name).values] == bare
    assert len(set(bare)) == (1 if name == "ddp" else RANKS)
