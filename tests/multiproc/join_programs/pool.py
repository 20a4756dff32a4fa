"""Ranks that stay up and train one case after the other, so that a case costs milliseconds."""

from __future__ import annotations

import json
import os
import time
import traceback
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from join_programs.models import sweep
from rankcall.testing import start_ranks

_DAY = timedelta(days=1)
_CASE_S = 120.0  # also on a busy machine


class Pool:
    """Some ranks. One that fails a case ends all of them; the next case gets new ones."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._ranks: Any = None
        self._store: Any = None
        self._number = 0

    def run(self, case: dict[str, Any]) -> list[str]:
        """Train a case on all ranks; return what went wrong."""
        if self._ranks is None:
            self._ranks = start_ranks(serve, self.world_size, init=False)
            self._store = dist.TCPStore("127.0.0.1", self._ranks.port)
            self._number = 0
        self._store.set(f"case/{self._number}", json.dumps(case))
        keys = [f"results/{self._number}/{rank}" for rank in range(self.world_size)]
        self._number += 1
        deadline = time.monotonic() + _CASE_S
        while not self._store.check(keys):
            if self._ranks.wait(0) or time.monotonic() > deadline:
                return [f"{case}: ranks ended, or were not done after {_CASE_S:g} s", *self.end()]
            time.sleep(0.001)
        results = [json.loads(self._store.get(key)) for key in keys]
        if any(result["failed"] for result in results):
            self.end()
        return [f"rank {r}: {line}" for r, result in enumerate(results) for line in result["wrong"]]

    def end(self) -> list[str]:
        """End the ranks; return what they wrote to stderr."""
        ranks, self._ranks, self._store = self._ranks, None, None
        if ranks is None:
            return []
        ranks.stop()
        return [f"rank {result.rank}: {result.stderr[-4000:]}" for result in ranks.results]


def serve(rank: int, world_size: int) -> None:
    """Train the cases that come until one fails."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    own = dist.PrefixStore("group", store)
    dist.init_process_group("gloo", store=own, rank=rank, world_size=world_size)
    number, failed = 0, False
    while not failed:
        store.wait([f"case/{number}"], _DAY)
        wrong = []
        try:
            wrong = sweep(rank, world_size, [json.loads(store.get(f"case/{number}"))])
        except Exception:
            wrong, failed = [traceback.format_exc()], True
        store.set(f"results/{number}/{rank}", json.dumps({"wrong": wrong, "failed": failed}))
        number += 1
