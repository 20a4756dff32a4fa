"""Jobs of several ranks for the benchmarks, and the example that they train."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist

_EXAMPLE = Path(__file__).parents[1] / "examples" / "train_digits.py"
_TIMEOUT_S = 1800


def example() -> ModuleType:
    """Import the example: the benchmarks train what users see."""
    spec = importlib.util.spec_from_file_location("train_digits", _EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def told_by_ranks(
    script: str, arguments: Sequence[str], ranks: int, env: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """Run a script as one job over Gloo; return the JSON object that each rank prints."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(ranks),
        **(env or {}),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, script, *arguments],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        return [json.loads(process.communicate(timeout=_TIMEOUT_S)[0]) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
