"""The last barrier of a job: the process that hosts the store ends as soon as its call returns."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import PrefixStore, Store, TCPStore

from rankcall import store

pytestmark = pytest.mark.multiproc

RANKS = 4
LIMIT_S = 120.0
POLLED, WAITED = 10, 60  # timeouts in which ranks ask again and again, or wait at the store
CALLS: dict[str, Callable[[Store, int], Any]] = {
    "barrier, polled": lambda tcp, rank: store.barrier(tcp, RANKS, "exit", POLLED, rank),
    "barrier, waited": lambda tcp, rank: store.barrier(tcp, RANKS, "exit", WAITED, rank),
    "barrier without ranks, polled": lambda tcp, _: store.barrier(tcp, RANKS, "exit", POLLED),
    "barrier without ranks, waited": lambda tcp, _: store.barrier(tcp, RANKS, "exit", WAITED),
    "barrier of a PrefixStore": lambda tcp, rank: store.barrier(
        PrefixStore("below", tcp), RANKS, "exit", WAITED, rank
    ),
    "three barriers": lambda tcp, rank: [
        store.barrier(tcp, RANKS, "exit", WAITED, rank) for _ in range(3)
    ],
    "synchronize": lambda tcp, rank: store.synchronize(tcp, b"x", rank, RANKS, "exit", POLLED),
    "synchronize, another host": lambda tcp, rank: store.synchronize(
        tcp, b"x", (rank + 1) % RANKS, RANKS, "exit", WAITED
    ),
}


def _member(rank: int, name: str, is_last: bool, pipes: Any, errors: Path) -> None:
    """Make one call. Rank 0 hosts the store, and ends without waiting for anything."""
    status = 1
    try:
        if rank == 0:
            tcp = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            for _, ours in pipes[1:]:
                ours.send(tcp.port)
            if is_last:  # the others have made their connections, and are about to wait
                for _, ours in pipes[1:]:
                    assert ours.poll(LIMIT_S)
                    ours.recv()
        else:
            assert pipes[rank][0].poll(LIMIT_S)
            port = pipes[rank][0].recv()
            tcp = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
            pipes[rank][0].send("connected")
        CALLS[name](tcp, rank)
        status = 0
    except BaseException:
        (errors / f"{rank}.txt").write_text(traceback.format_exc())
    finally:
        os._exit(status)


def _round(name: str, is_last: bool, errors: Path) -> None:
    """Let all ranks make one call; fail with the first error of one of them."""
    context = get_context("fork")
    pipes = [context.Pipe() for _ in range(RANKS)]
    arguments = [(rank, name, is_last, pipes, errors) for rank in range(RANKS)]
    members = [context.Process(target=_member, args=each, daemon=True) for each in arguments]
    for member in members:
        member.start()
    for member in members:
        member.join(LIMIT_S)
    for member in members:
        if member.exitcode is None:
            member.kill()
            member.join(LIMIT_S)
    for pair in pipes:
        for end in pair:
            end.close()
    texts = [path.read_text() for path in sorted(errors.glob("*.txt"))]
    assert not texts, texts[0]
    assert [member.exitcode for member in members] == [0] * RANKS


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CALLS)
def test_the_host_leaves_last(name: str, tmp_path: Path) -> None:
    """All ranks have come, so all pass, although the store ends with the first that can."""
    for turn in range(4):
        _round(name, turn % 2 == 0, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_host_leaves_last_500_times(tmp_path: Path) -> None:
    """The same in 500 rounds."""
    names = list(CALLS)
    for turn in range(500):
        _round(names[turn % len(names)], turn // len(names) % 2 == 0, tmp_path)
