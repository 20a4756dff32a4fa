"""A case for each row of the table in docs/guides/trace.md: its calls and their descriptions.

The sizes are calculated by hand: a float32 has 4 bytes, an int64 has 8. ``S`` (in bytes) and ``f``
are those of nccl-tests, for the bandwidths. Ranks are global. Each call is on the line after
``here()``.
"""

from __future__ import annotations

import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from op_cases.building import Cases, pickled

# Imported before tracing is armed, as a user's script does.
from torch.distributed import P2POp, all_reduce, irecv, isend
from torch.distributed.distributed_c10d import (
    _coalescing_manager,
    all_gather_coalesced,
    all_reduce_coalesced,
)
from world import Members, World, here

CASES = Cases()
case = CASES.add


class Expectations:
    """One rank's view of a group, and the descriptions that it expects."""

    def __init__(self, rank: int, group: Members) -> None:
        self.rank, self.g = rank, group
        self.pg, self.ranks, self.n, self.me = group.pg, group.ranks, group.n, group.me
        self.expected: list[dict[str, Any]] = []
        self.calls = 0

    @property
    def is_first(self) -> bool:
        return self.me == 0

    def __call__(
        self, name: str, size: int, line: int, S: float | None = None, f: float = 1, **more: Any
    ) -> None:
        """Expect a description. Descriptions that share a correlation id have the same ``call``."""
        prints = more.pop("prints", self.is_first)
        root = more.get("root_rank")
        self.expected.append(
            {
                "name": name,
                "message_size": size,
                "line": line,
                "S": S,
                "f": f,
                "group": self.g.label,
                "group_ranks": self.ranks,
                "dtype": "float32",
                "prints": prints if root is None else root == self.rank,
                **more,
            }
        )

    def p2p(self, name: str, size: int, line: int, peer: int, **more: Any) -> None:
        self(name, size, line, S=size, f=1, peer_rank=peer, prints=True, **more)

    def one_call(self) -> int:
        self.calls += 1
        return self.calls


def _ones(*size: int) -> torch.Tensor:
    return torch.ones(size)


@case
def barrier(t: Expectations) -> None:
    """A barrier is one byte without a bandwidth, described by all members."""
    line = here()
    dist.barrier(group=t.pg)
    t("barrier", 1, line, dtype=None)


@case
def monitored_barrier(t: Expectations) -> None:
    """A monitored barrier has a name of its own."""
    line = here()
    dist.monitored_barrier(group=t.pg, timeout=timedelta(seconds=30))
    t("monitored_barrier", 1, line, dtype=None)


@case
def broadcast(t: Expectations) -> None:
    """All members describe it and the source prints it, for a global rank and for a group rank."""
    root = t.ranks[-1]
    line = here()
    dist.broadcast(_ones(3, 5), src=root, group=t.pg)
    t("broadcast", 60, line, S=60, root_rank=root)
    line = here()
    dist.broadcast(_ones(7), group_src=1, group=t.pg, async_op=True).wait()
    t("broadcast", 28, line, S=28, root_rank=t.ranks[1])


@case
def broadcast_object_list(t: Expectations) -> None:
    """The lengths and the pickles have one description together."""
    root, sent = t.ranks[-1], [{"from": t.ranks[-1]}, "x" * 100]
    objects: list[Any] = list(sent) if t.rank == root else [None, None]
    line = here()
    dist.broadcast_object_list(objects, src=root, group=t.pg)
    size = sum(map(pickled, sent))
    t("broadcast_object_list", size, line, S=size, root_rank=root, dtype="uint8")


@case
def gather(t: Expectations) -> None:
    """Only the destination describes it, with the bytes that the others send."""
    root = t.ranks[1]
    into = [torch.empty(2, 3) for _ in t.ranks] if t.rank == root else None
    line = here()
    dist.gather(_ones(2, 3), into, dst=root, group=t.pg)
    if t.rank == root:
        t("gather", 24 * (t.n - 1), line, S=24 * t.n, f=(t.n - 1) / t.n, root_rank=root)


@case
def gather_object(t: Expectations) -> None:
    """It is described as a gather of pickles, each padded to the longest."""
    root = t.ranks[-1]
    into: list[Any] | None = [None] * t.n if t.rank == root else None
    line = here()
    dist.gather_object("x" * (10 * t.me), into, dst=root, group=t.pg)
    most = pickled("x" * (10 * (t.n - 1)))
    if t.rank == root:
        t(
            "gather_object",
            most * (t.n - 1),
            line,
            S=most * t.n,
            f=(t.n - 1) / t.n,
            root_rank=root,
            dtype="uint8",
        )


@case
def scatter(t: Expectations) -> None:
    """Only the source describes it, with the bytes that it sends to others."""
    root = t.ranks[1]
    parts = [_ones(4) for _ in t.ranks] if t.rank == root else None
    line = here()
    dist.scatter(torch.empty(4), parts, src=root, group=t.pg)
    if t.rank == root:
        t("scatter", 16 * (t.n - 1), line, S=16 * t.n, f=(t.n - 1) / t.n, root_rank=root)


@case
def scatter_object_list(t: Expectations) -> None:
    """The source gives one description of the three ops."""
    root, parts = t.ranks[-1], ["x" * (5 * place) for place in range(t.n)]
    line = here()
    dist.scatter_object_list([None], parts if t.rank == root else None, src=root, group=t.pg)
    most = pickled(parts[-1])
    if t.rank == root:
        t(
            "scatter_object_list",
            most * (t.n - 1),
            line,
            S=most * t.n,
            f=(t.n - 1) / t.n,
            root_rank=root,
            dtype="uint8",
        )


@case
def reduce(t: Expectations) -> None:
    """All members describe it, and the destination prints it."""
    for root in (t.ranks[-1], t.ranks[0]):
        line = here()
        dist.reduce(_ones(6), dst=root, group=t.pg)
        t("reduce", 24, line, S=24, root_rank=root)


@case
def reduce_scatter(t: Expectations) -> None:
    """The size is that of the output, and S is n times that, for both functions."""
    n = t.n
    line = here()
    dist.reduce_scatter(torch.empty(4), [_ones(4) for _ in t.ranks], group=t.pg)
    t("reduce_scatter", 16, line, S=16 * n, f=(n - 1) / n)
    line = here()
    dist.reduce_scatter_tensor(torch.empty(4), _ones(4 * n), group=t.pg, async_op=True).wait()
    t("reduce_scatter", 16, line, S=16 * n, f=(n - 1) / n)


@case
def all_reduce_all_ways(t: Expectations) -> None:
    """It is described if called by its module, by an early import and in inference mode."""
    f = 2 * (t.n - 1) / t.n
    line = here()
    dist.all_reduce(_ones(10), group=t.pg)
    t("all_reduce", 40, line, S=40, f=f)
    line = here()
    all_reduce(_ones(5), group=t.pg)
    t("all_reduce", 20, line, S=20, f=f)
    with torch.inference_mode():
        line = here()
        dist.all_reduce(torch.ones(3, dtype=torch.float64), group=t.pg)
    t("all_reduce", 24, line, S=24, f=f, dtype="float64")


@case
def all_reduce_in_flight_together(t: Expectations) -> None:
    """Descriptions come in the order of issue, even if a small op ends before a large one."""
    f = 2 * (t.n - 1) / t.n
    sizes = (1 << 16, 1, 1)
    line = here()
    works = [dist.all_reduce(_ones(size), group=t.pg, async_op=True) for size in sizes]
    for work in works:
        work.wait()
    for size in sizes:
        t("all_reduce", 4 * size, line, S=4 * size, f=f)


@case
def all_gather(t: Expectations) -> None:
    """The size is that of the whole output, for both functions."""
    n = t.n
    line = here()
    dist.all_gather([torch.empty(3, 2) for _ in t.ranks], _ones(3, 2), group=t.pg)
    t("all_gather", 24 * n, line, S=24 * n, f=(n - 1) / n)
    line = here()
    dist.all_gather_into_tensor(torch.empty(3 * n), _ones(3), group=t.pg)
    t("all_gather", 12 * n, line, S=12 * n, f=(n - 1) / n)


@case
def all_gather_object(t: Expectations) -> None:
    """There is one description; all pickles are padded to the longest."""
    n = t.n
    line = here()
    dist.all_gather_object([None] * n, "x" * (3 * t.me), group=t.pg)
    most = pickled("x" * (3 * (n - 1)))
    t("all_gather_object", most * n, line, S=most * n, f=(n - 1) / n, dtype="uint8")


@case
def all_to_all(t: Expectations) -> None:
    """A rank's own slice is not in the size, but it is in the bandwidth."""
    n = t.n
    line = here()
    dist.all_to_all([torch.empty(6) for _ in t.ranks], [_ones(6) for _ in t.ranks], group=t.pg)
    t("all_to_all", 24 * (n - 1), line, S=24 * n, f=(n - 1) / n)


@case
def all_to_all_single(t: Expectations) -> None:
    """It is described for equal splits, and for splits that differ between any two members."""
    n = t.n
    line = here()
    dist.all_to_all_single(torch.empty(2 * n, 3), _ones(2 * n, 3), group=t.pg)
    t("all_to_all_single", 24 * (n - 1), line, S=24 * n, f=(n - 1) / n)
    gives = [t.me + 2 * to + 1 for to in range(n)]
    takes = [source + 2 * t.me + 1 for source in range(n)]
    line = here()
    dist.all_to_all_single(
        torch.empty(sum(takes), 3), _ones(sum(gives), 3), takes, gives, group=t.pg
    )
    t(
        "all_to_all_single",
        12 * (sum(gives) - gives[t.me]),
        line,
        S=12 * max(sum(gives), sum(takes)),
        f=(n - 1) / n,
    )


@case
def isend_irecv(t: Expectations) -> None:
    """They are described as send and recv, in the order of issue."""
    to, source = t.g.after(1), t.g.after(-1)
    line = here() + 1
    works = [
        dist.irecv(torch.empty(5), src=source, group=t.pg, tag=7),
        dist.isend(_ones(5), dst=to, group=t.pg, tag=7),
    ]
    for work in works:
        work.wait()
    t.p2p("recv", 20, line, source)
    t.p2p("send", 20, line + 1, to)


@case
def send_recv(t: Expectations) -> None:
    """The peer is described by its global rank, even if the call gives its group rank."""
    first, last = t.ranks[0], t.ranks[-1]
    if t.rank == first:
        line = here()
        dist.send(_ones(2, 3), dst=last, group=t.pg)
        t.p2p("send", 24, line, last)
    elif t.rank == last:
        line = here()
        dist.recv(torch.empty(2, 3), group_src=0, group=t.pg)
        t.p2p("recv", 24, line, first)


@case
def recv_from_any_source(t: Expectations) -> None:
    """The sender is filled in at completion."""
    root, source = t.ranks[1], t.ranks[0]
    if t.rank == source:
        line = here()
        dist.send(_ones(3), dst=root, group=t.pg, tag=3)
        t.p2p("send", 12, line, root)
    elif t.rank == root:
        line = here()
        assert dist.recv(torch.empty(3), group=t.pg, tag=3) == source
        t.p2p("recv", 12, line, source)


@case
def batch_isend_irecv(t: Expectations) -> None:
    """Each op has a description; those of one batch share a correlation id."""
    to, source = t.g.after(1), t.g.after(-1)
    for size in (3, 4):
        call = t.one_call()
        ops = [P2POp(isend, _ones(size), to, t.pg), P2POp(irecv, torch.empty(size), source, t.pg)]
        line = here()
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        t.p2p("send", 4 * size, line, to, call=call)
        t.p2p("recv", 4 * size, line, source, call=call)


@case
def send_recv_object_list(t: Expectations) -> None:
    """The lengths and the pickles have one description together."""
    first, last, sent = t.ranks[0], t.ranks[-1], ["hello", {"n": t.n}]
    size = sum(map(pickled, sent))
    if t.rank == first:
        line = here()
        dist.send_object_list(sent, dst=last, group=t.pg)
        t.p2p("send_object_list", size, line, last, dtype="uint8")
    elif t.rank == last:
        line = here()
        dist.recv_object_list([None, None], src=first, group=t.pg)
        t.p2p("recv_object_list", size, line, first, dtype="uint8")


@case
def coalesced(t: Expectations) -> None:
    """Each tensor has a description, with a shared correlation id and the S of the batch."""
    n, call = t.n, t.one_call()
    line = here()
    all_reduce_coalesced([_ones(3), _ones(2, 2), _ones(1)], group=t.pg)
    for size in (12, 16, 4):
        t("all_reduce", size, line, S=32, f=2 * (n - 1) / n, call=call)
    call = t.one_call()
    ins = [_ones(2), _ones(3)]
    outs = [[torch.empty_like(tensor) for tensor in ins] for _ in t.ranks]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        line = here()
        all_gather_coalesced(outs, ins, group=t.pg)
    for size in (8 * n, 12 * n):
        t("all_gather", size, line, S=20 * n, f=(n - 1) / n, call=call)


@case
def coalescing_manager(t: Expectations) -> None:
    """Merged calls are described as one coalesced call, at the line of the with statement."""
    n, call = t.n, t.one_call()
    line = here()
    with _coalescing_manager(group=t.pg, async_ops=True) as manager:
        for size in (2, 3):
            dist.reduce_scatter_tensor(torch.empty(size), _ones(size * n), group=t.pg)
    manager.wait()
    for size in (8, 12):
        t("reduce_scatter", size, line, S=20 * n, f=(n - 1) / n, call=call)


@case
def functional(t: Expectations) -> None:
    """Functional collectives are described; a coalesced call of one tensor is no batch."""
    n = t.n
    line = here()
    funcol.wait_tensor(funcol.all_reduce(_ones(4), "sum", t.pg))
    t("all_reduce", 16, line, S=16, f=2 * (n - 1) / n)
    line = here()
    funcol.wait_tensor(funcol.all_gather_tensor(_ones(4), 0, t.pg))
    t("all_gather", 16 * n, line, S=16 * n, f=(n - 1) / n)


def not_a_member(world: World, groups: dict[str, Any]) -> None:
    """Call on groups this rank is not in: torch warns, and nothing is described."""
    mine = {group.label for group in world.groups}
    for label, group in groups.items():
        if label not in mine:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                dist.all_reduce(_ones(1), group=group)
                dist.barrier(group=group)
