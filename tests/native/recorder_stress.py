"""Drive the native recorder from many threads; run under a sanitizer by test_recorder_sanitized.py.

Threads issue collectives on a fake group and on Gloo groups of one, some of which fail and some of
whose Works are dropped. Meanwhile recording is switched on and off, groups come and go, hooks are
registered, and children are forked.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the fake back end

import rankcall
from rankcall import hooks

THREADS = 4
TOGGLES = 10
FORKS = (
    "--no-fork" not in sys.argv
)  # ThreadSanitizer cannot follow a process with threads that forks
ROUNDS_A_TOGGLE = 20  # that each thread completes before recording is toggled again


class Issuing(threading.Thread):
    """A thread that issues ops until it is stopped, and counts its rounds."""

    def __init__(self, gloo: Any) -> None:
        super().__init__(daemon=True)
        self.gloo = gloo
        self.rounds = threading.Semaphore(0)
        self.over = False
        self.error: BaseException | None = None

    def run(self) -> None:
        """Issue ops; keep the first unexpected error."""
        kept: list[Any] = []
        try:
            while not self.over:
                self.fake_round()
                self.gloo_round(kept)
                self.rounds.release()
            for work in kept:
                work.wait()
        except BaseException as error:
            self.error = error
            self.rounds.release(1_000_000)

    def complete(self, rounds: int) -> None:
        """Wait until the thread has begun and completed that many rounds."""
        while self.rounds.acquire(blocking=False):
            pass
        for _ in range(rounds + 1):  # one may be under way
            assert self.rounds.acquire(timeout=60)

    def fake_round(self) -> None:
        """Issue ops that end at once."""
        tensor, outputs = torch.ones(4), torch.zeros(8)
        dist.all_reduce(tensor)
        dist.broadcast(tensor, 0)
        dist.all_gather_single(outputs, tensor)
        dist.all_to_all_single(outputs, outputs.clone())
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, tensor, 1), dist.P2POp(dist.irecv, tensor, 1)]
        ):
            work.wait()

    def gloo_round(self, kept: list[Any]) -> None:
        """Issue ops that end on other threads, that fail, and that are waited for late or never."""
        tensor = torch.ones(16)
        work = dist.all_reduce(tensor, group=self.gloo, async_op=True)
        dist.reduce_scatter_single(torch.zeros(16), tensor, group=self.gloo, async_op=True)
        late = torch.zeros(16)
        kept.append(dist.reduce_scatter_single(late, tensor, group=self.gloo, async_op=True))
        if len(kept) > 5:
            kept.pop(0).wait()
        with contextlib.suppress(RuntimeError, ValueError):
            dist.all_reduce(torch.ones(4).to_sparse(), dist.ReduceOp.MAX, group=self.gloo)
            raise AssertionError("Gloo did not refuse the op")
        assert work is not None
        work.wait()


def fork_child(work: Any) -> None:
    """Fork a child that drops its copy of a Work."""
    child = os.fork()
    if child == 0:
        del work
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def main() -> None:
    """Toggle recording while the threads run, and check that the last recording is complete."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=2, store=dist.HashStore())
    groups = [dist.new_group([0], backend="gloo") for _ in range(THREADS)]
    threads = [Issuing(group) for group in groups]
    for thread in threads:
        thread.start()
    seen = [0]

    def count(status: hooks.CollectiveStatus) -> None:
        seen[0] += 1

    with tempfile.TemporaryDirectory() as folder:
        for number in range(TOGGLES):
            run_dir = f"{folder}/{number}"
            with rankcall.enable(run_dir, capture="native", capacity=64) as recording:
                handle = hooks.register_collective_end_hook(count) if number % 2 else None
                for thread in threads:
                    thread.complete(ROUNDS_A_TOGGLE)
                group = dist.new_group([0])
                dist.all_reduce(torch.ones(1), group=group)
                dist.destroy_process_group(group)
                if FORKS and number % 5 == 4:
                    fork_child(
                        dist.reduce_scatter_single(
                            torch.zeros(4), torch.ones(4), group=groups[0], async_op=True
                        )
                    )
                if handle is not None:
                    handle.remove()
                assert recording.capture.counts()[0] > THREADS * ROUNDS_A_TOGGLE
        for thread in threads:
            thread.over = True
        for thread in threads:
            thread.join(timeout=60)
            assert not thread.is_alive()
            if thread.error is not None:
                raise thread.error
        assert seen[0] > 0
    dist.destroy_process_group()
    print("ok")


main()
