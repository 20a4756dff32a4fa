"""Messages from one member to another: round the ring of members, and back and forth."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

# Imported before recording is switched on, as a user's script does.
from torch.distributed import P2POp, irecv, isend
from world import Members, World, here

from op_cases.building import Cases, check, filled, pickled

CASES = Cases()
case = CASES.add


@case
def isend_irecv(w: World, g: Members) -> None:
    """Two tags, three messages: the sequence counts for each tag."""
    to, source = g.after(1), g.after(-1)
    for tag, size in ((0, 3), (7, 5), (0, 2)):
        send, take = filled((size,), w.rank), torch.empty(size)
        line = here() + 1
        works = [
            dist.isend(send, dst=to, group=g.pg, tag=tag),
            dist.irecv(take, src=source, group=g.pg, tag=tag),
        ]
        for work in works:
            work.wait()
        w.sent(g, to, 4 * size, api="isend", line=line, tag=tag, shape=[size])
        w.received(g, source, 4 * size, api="irecv", line=line + 1, tag=tag, shape=[size])
        check(take, source)


@case
def send_recv(w: World, g: Members) -> None:
    """From the first member to the last and back, the peer given both ways."""
    first, last = g.ranks[0], g.ranks[-1]
    tensor = filled((2, 3), w.rank)
    if w.rank == first:
        line = here()
        dist.send(tensor, dst=last, group=g.pg)
        dist.recv(tensor, group_src=g.n - 1, group=g.pg)
        w.sent(g, last, 24, api="send", line=line, shape=[2, 3])
        w.received(g, last, 24, api="recv", line=line + 1, shape=[2, 3])
        check(tensor, last)
    elif w.rank == last:
        back = filled((2, 3), w.rank)
        line = here()
        dist.recv(tensor, src=first, group=g.pg)
        dist.send(back, group_dst=0, group=g.pg)
        w.received(g, first, 24, api="recv", line=line, shape=[2, 3])
        w.sent(g, first, 24, api="send", line=line + 1, shape=[2, 3])
        check(tensor, first)


@case
def recv_any_source(w: World, g: Members) -> None:
    """The sender is only known at the end, and so is the sequence number."""
    root = g.ranks[1]
    for source in (rank for rank in g.ranks if rank != root):
        tensor = filled((3,), w.rank)
        if w.rank == source:
            line = here()
            dist.send(tensor, dst=root, group=g.pg, tag=3)
            w.sent(g, root, 12, api="send", line=line, tag=3, shape=[3])
        elif w.rank == root:
            line = here()
            sender = dist.recv(tensor, group=g.pg, tag=3)
            assert sender == source
            w.received(
                g, source, 12, api="recv", line=line, tag=3, shape=[3], variant="recv_any_source_"
            )
        line = here()
        dist.barrier(group=g.pg)
        w.saw(
            g,
            "barrier",
            "barrier",
            api="barrier",
            line=line,
            message_bytes=1,
            tensors=0,
            dtype="uint8",
        )


@case
def batch_isend_irecv(w: World, g: Members) -> None:
    """The ops of one batch share a correlation, those of the next have another."""
    to, source = g.after(1), g.after(-1)
    for size in (3, 4):
        send, take = filled((size,), w.rank), torch.empty(size)
        ops = [P2POp(isend, send, to, g.pg), P2POp(irecv, take, source, g.pg)]
        line, call = here(), w.new_call()
        works = dist.batch_isend_irecv(ops)
        for work in works:
            work.wait()
        w.sent(g, to, 4 * size, api="batch_isend_irecv", line=line, call=call, shape=[size])
        w.received(g, source, 4 * size, api="batch_isend_irecv", line=line, call=call, shape=[size])
        check(take, source)


@case
def send_recv_object_list(w: World, g: Members) -> None:
    """Sizes, then pickles."""
    first, last, sent = g.ranks[0], g.ranks[-1], ["hello", {"n": g.n}]
    total = sum(map(pickled, sent))
    call = w.new_call()
    if w.rank == first:
        line = here()
        dist.send_object_list(sent, dst=last, group=g.pg)
        known: dict[str, Any] = {"api": "send_object_list", "line": line, "call": call}
        w.sent(g, last, 16, dtype="int64", shape=[2], **known)
        w.sent(g, last, total, dtype="uint8", shape=[total], **known)
    elif w.rank == last:
        got: list[Any] = [None, None]
        line = here()
        dist.recv_object_list(got, src=first, group=g.pg)
        known = {"api": "recv_object_list", "line": line, "call": call}
        w.received(g, first, 16, dtype="int64", shape=[2], **known)
        w.received(g, first, total, dtype="uint8", shape=[total], **known)
        assert got == sent
