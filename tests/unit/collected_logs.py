"""Logs with known verdicts, and what 24 collectors and launchers put before each line of a log."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from nccl_logs import WORDINGS, Call, log_of

REAL = Path(__file__).parents[1] / "logs"
TIME = "2026-03-14T09:02:36.123456Z"


def _json(**fields: object) -> Callable[[int, str], str]:
    def wrap(number: int, text: str) -> str:
        filled = {key: text if value is Ellipsis else value for key, value in fields.items()}
        return json.dumps(filled)

    return wrap


COLLECTORS: dict[str, Callable[[int, str], str]] = {
    "json log": _json(log=..., stream="stderr", time=TIME),
    "json message": _json(level="info", message=..., host="node-a"),
    "json msg": _json(msg=..., ts=TIME),
    "textPayload": _json(
        textPayload=..., resource={"labels": {"pod_name": "train-0"}}, timestamp=TIME
    ),
    "jsonPayload": _json(jsonPayload={"message": "x"}, message=...),
    "journald json": _json(MESSAGE=..., _HOSTNAME="node-a", _PID="4711"),
    "cri": lambda number, text: f"{TIME} stderr F {text}",
    "docker json-file": _json(log=..., stream="stdout", time=TIME),
    "compose": lambda number, text: f"trainer-1  | {text}",
    "kubectl --prefix": lambda number, text: f"[pod/train-worker-0/pytorch] {text}",
    "kubectl --timestamps": lambda number, text: f"{TIME} {text}",
    "kubectl with both": lambda number, text: f"[pod/train-worker-0/pytorch] {TIME} {text}",
    "journald": lambda number, text: f"Mar 14 09:02:36 node-a python[4711]: {text}",
    "pdsh with addresses": lambda number, text: f"10.1.12.21: {text}",
    "pdsh with names": lambda number, text: f"gpu-node-07: {text}",
    "srun --label": lambda number, text: f"0: {text}",
    "mpirun": lambda number, text: f"[1,0]<stderr>:{text}",
    "torchrun --tee": lambda number, text: f"[default0]:{text}",
    "ray": lambda number, text: f"\x1b[36m(TrainWorker pid=812, ip=10.0.0.4)\x1b[0m {text}",
    "ray, repeated": lambda number, text: (
        f"(TrainWorker pid=812) {text} [repeated 4x across cluster]"
    ),
    "colours": lambda number, text: f"\x1b[31m{text}\x1b[0m",
    "progress bars": lambda number, text: f"Train:  41%|####  | 41/100\r{text}",
    "crlf": lambda number, text: f"{text}\r",
    "a time": lambda number, text: f"2026-03-14 09:02:36,123 {text}",
}

# Logs with a known verdict: those that torch wrote on Gloo, and the forms of NCCL's watchdogs.
_LATE = {rank: Call(51) for rank in (0, 1, 3)}
LOGS: dict[str, tuple[list[str], str, tuple[int, ...]]] = {
    "gloo-raise": ((REAL / "gloo-raise.log").read_text().splitlines(), "dead", (2,)),
    "gloo-kill": ((REAL / "gloo-kill.log").read_text().splitlines(), "dead", (2,)),
    "gloo-shape": ((REAL / "gloo-detail-shape.log").read_text().splitlines(), "mismatch", (2,)),
    "gloo-op": ((REAL / "gloo-detail-op.log").read_text().splitlines(), "desync", (2,)),
    "gloo-barrier": (
        (REAL / "gloo-monitored-barrier.log").read_text().splitlines(),
        "missing",
        (2,),
    ),
    "gloo-timeout": ((REAL / "gloo-timeout.log").read_text().splitlines(), "undecided", ()),
    "nccl-missing": (log_of(WORDINGS[-1], _LATE, {2: (50, 50)}), "missing", (2,)),
    "nccl-old-missing": (log_of(WORDINGS[0], _LATE, {2: (50, 50)}), "missing", (2,)),
    "nccl-desync": (
        log_of(WORDINGS[-1], {r: Call(9, "BROADCAST" if r == 2 else "REDUCE") for r in range(4)}),
        "desync",
        (2,),
    ),
    "nccl-2.14-raise": ((REAL / "nccl-2.14-raise.log").read_text().splitlines(), "dead", (1,)),
    "nccl-2.14-oom": ((REAL / "nccl-2.14-oom.log").read_text().splitlines(), "dead", (1,)),
    "nccl-2.14-missing": (
        (REAL / "nccl-2.14-missing.log").read_text().splitlines(),
        "undecided",  # the rank that did not come wrote nothing
        (),
    ),
    "healthy": ([f"step {step} loss 0.{step}" for step in range(60)], "nothing_found", ()),
}
