"""From a verdict to the next step: how long a job stands still after a hang was recognised.

One job of two ranks on Gloo. In the first attempt, rank 1 is stopped by SIGSTOP at a step, or
sleeps there (``--fault sleep``), so that SIGTERM ends it at once. The same job runs below three
launchers, each with the same threshold for a hang:

* ``rankcall run --on-hang recover --hang-after T``
* ``torchrun --max-restarts``, with the process group's timeout at T. Its verdict is the error that
  this timeout raises in the rank that waits. ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`` gives each
  attempt a store of its own: with torch's default, the new workers may meet the addresses of the
  old ones (``docs/design/recovery.md``).
* NVRx's ``ft_launcher``, if it is installed (``make setup-integrations``) or named by an option,
  with its heartbeat timeout at T. Its verdict is taken to come T after the fault, because it
  says nothing of the moment.

``verdict_to_step_ratio``: the time from the verdict to the first step of the new attempt, ours over
the best of the others. ``verdict_to_step_beyond_start_s``: ours, less what the same script takes
from the start of its processes to its first step when nothing has failed. The part of the time
from the verdict to the moment at which the first new process runs the script is printed as well
(``*_verdict_to_script_s``), and for ours the phases that ``rankcall report`` shows.

``--campaign SECONDS`` runs random faults against some jobs instead (``recovery_campaign.py``), and
prints ``faults`` and ``violations``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BIN = Path(sys.executable).parent
NVRX = Path(sys.prefix) / "nvrx"  # see the Makefile
FAULT_STEP = 20
JOB = """
import json, os, signal, sys, time
from datetime import timedelta

def note(event, **more):
    line = json.dumps({"event": event, "rank": rank, "attempt": attempt, "s": time.time(), **more})
    os.write(log, line.encode() + b"\\n")

folder, timeout, heartbeats = sys.argv[1], float(sys.argv[2]), len(sys.argv) > 3
rank = int(os.environ["RANK"])
log = os.open(os.path.join(folder, "events"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
marker = os.path.join(folder, f"started.{rank}")
attempt = 1 if os.path.exists(marker) else 0
open(marker, "w").close()
note("start")
import torch
import torch.distributed as dist
dist.init_process_group("gloo", timeout=timedelta(seconds=timeout) if timeout else None)
client = None
if heartbeats:
    import nvidia_resiliency_ext.fault_tolerance as fault_tolerance
    client = fault_tolerance.RankMonitorClient()
    client.init_workload_monitoring()
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(FAULT_STEP + 10):
    if attempt == 0 and rank == 1 and step == FAULT_STEP:
        note("fault")
        if os.environ["BENCHMARK_FAULT"] == "sleep":
            time.sleep(10_000)
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        dist.all_reduce(torch.ones(8))
    except RuntimeError:
        note("verdict")
        raise
    optimizer.step()
    if client is not None:
        client.send_heartbeat()
    if step == 0:
        note("step")
    time.sleep(0.02)
note("done")
dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Restart:
    """What followed a verdict, in s: until the script ran again, and until its first step."""

    to_script_s: float
    to_step_s: float
    own_start_s: float
    phases_s: Mapping[str, float | None] = field(default_factory=dict)


def restart_after(verdict_s: float, events: Sequence[Any], **phases_s: float | None) -> Restart:
    """Return how a job was restarted after a verdict at a time in s since the epoch."""
    return Restart(
        first(events, "start", 1) - verdict_s,
        first(events, "step", 1) - verdict_s,
        first(events, "step", 0) - first(events, "start", 0),
        phases_s,
    )


def run_job(
    command: Sequence[str], folder: Path, timeout_s: float, *more: str, **variables: str
) -> list[Any]:
    """Run the job below a launcher, and return its events."""
    script = folder / "job.py"
    script.write_text(JOB.replace("FAULT_STEP", str(FAULT_STEP)))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **variables}
    env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with (folder / "output").open("wb") as output:
        subprocess.run(
            [*command, str(script), str(folder), f"{timeout_s:g}", *more],
            cwd=folder,
            env=env,
            stdout=output,
            stderr=output,
            timeout=500,
            check=False,
        )
    events = [json.loads(line) for line in (folder / "events").read_text().splitlines()]
    if sum(event["event"] == "done" for event in events) != 2:
        tail = (folder / "output").read_text(errors="replace")[-3000:]
        raise SystemExit(f"the job did not finish below {command[0]}:\n{tail}")
    return events


def first(events: Sequence[Any], name: str, attempt: int) -> float:
    """Return when an event came first in an attempt, in s since the epoch."""
    return min(
        float(event["s"])
        for event in events
        if (event["event"], event["attempt"]) == (name, attempt)
    )


def ours(hang_after: float) -> Restart:
    """Return how the job is restarted below ``rankcall run``."""
    from rankcall.analysis.recoveries import PHASES, FirstMoments
    from rankcall.run.recoveries import read_recoveries

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [str(BIN / "rankcall"), "run", "--on-hang", "recover", "--run-dir", "run"]
        command += ["--hang-after", f"{hang_after:g}", "--nproc-per-node", "2"]
        events = run_job(command, folder, 0.0)
        (recovery,) = FirstMoments(read_recoveries(folder / "run")).finish().recoveries
        phases_s = dict(zip(PHASES, recovery.phases_s, strict=True))
        return restart_after(recovery.end.verdict_ns / 1e9, events, **phases_s)


def torchruns(hang_after: float) -> Restart:
    """Return the same below torchrun, whose verdict is the timeout of the process group."""
    with tempfile.TemporaryDirectory() as name:
        command = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2"]
        command += ["--max-restarts", "3"]
        events = run_job(command, Path(name), hang_after)
        return restart_after(first(events, "verdict", 0), events)


def ft_launchers(program: Path, hang_after: float) -> Restart:
    """Return the same below NVRx's launcher, whose verdict is that heartbeats are late."""
    with tempfile.TemporaryDirectory() as name:
        command = [str(program), "--standalone", "--nproc-per-node", "2", "--max-restarts", "3"]
        command += ["--ft-param-initial_rank_heartbeat_timeout=300"]
        command += [f"--ft-param-rank_heartbeat_timeout={hang_after:g}"]
        command += ["--ft-param-workload_check_interval=0.5"]
        # It is in a folder that no other program looks into.
        paths = str(program.parents[1]), os.environ.get("PYTHONPATH", "")
        path = os.pathsep.join(filter(None, paths))
        events = run_job(command, Path(name), 0.0, "heartbeats", PYTHONPATH=path)
        return restart_after(first(events, "fault", 0) + hang_after, events)


def main() -> None:
    """Run the job below each launcher in turns, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hang-after", type=float, default=5.0, help="seconds")
    parser.add_argument("--fault", choices=("stop", "sleep"), default="stop")
    installed = NVRX / "bin/ft_launcher"
    parser.add_argument(
        "--ft-launcher",
        type=Path,
        default=installed if installed.exists() else None,
        help="NVRx's program, in any environment",
    )
    parser.add_argument("--json", action="store_true", help="print JSON (it always does)")
    parser.add_argument("--campaign", type=float, metavar="SECONDS", help="strike at random")
    parser.add_argument("--jobs", type=int, default=3, help="of the campaign, at the same time")
    parser.add_argument("--kinds", default="", help="of the campaign's faults; default: all")
    parser.add_argument("--seed", type=int, help="of the campaign; without it, a new one")
    options = parser.parse_args()
    if options.campaign is not None:
        import recovery_campaign

        seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6)
        kinds = options.kinds.split(",") if options.kinds else ()
        figures = recovery_campaign.run(
            options.jobs, options.campaign, seed, options.hang_after, kinds
        )
        print(json.dumps(figures))
        raise SystemExit(figures["violations"] > 0)
    os.environ["BENCHMARK_FAULT"] = options.fault  # for the job
    restarts: dict[str, list[Restart]] = {"rankcall": [], "torchrun": [], "ft_launcher": []}
    for _ in range(options.rounds):
        restarts["rankcall"].append(ours(options.hang_after))
        restarts["torchrun"].append(torchruns(options.hang_after))
        if options.ft_launcher:
            program = options.ft_launcher.absolute()
            restarts["ft_launcher"].append(ft_launchers(program, options.hang_after))
    to_step_s = {
        name: statistics.median(one.to_step_s for one in some)
        for name, some in restarts.items()
        if some
    }
    mine, start_s = (
        to_step_s["rankcall"],
        statistics.median(one.own_start_s for one in restarts["rankcall"]),
    )
    figures = {
        **{f"{name}_verdict_to_step_s": round(value, 3) for name, value in to_step_s.items()},
        **{
            f"{name}_verdict_to_script_s": round(
                statistics.median(one.to_script_s for one in some), 3
            )
            for name, some in restarts.items()
            if some
        },
        "own_start_s": round(start_s, 3),
        "verdict_to_step_ratio": round(
            mine / min(value for name, value in to_step_s.items() if name != "rankcall"), 3
        ),
        "verdict_to_step_beyond_start_s": round(mine - start_s, 3),
        "phases_s": [
            {name: seconds and round(seconds, 3) for name, seconds in one.phases_s.items()}
            for one in restarts["rankcall"]
        ],
        "fault": options.fault,
        "rounds": options.rounds,
        "hang_after_s": options.hang_after,
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
