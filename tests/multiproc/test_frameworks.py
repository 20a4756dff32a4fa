"""Frameworks, schedulers and notebooks, with the real packages. ``make setup-integrations``.

Each is compared with the same job without rankcall. Then rank 1 gets a fault, and the verdict has
to name it, however the job was started.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import slurm
from framework_programs import (
    DEEPSPEED,
    RAY_ACTORS,
    RAY_CALLBACK,
    RAY_HANGS,
    RAY_TRAIN,
    SCHEDULED,
    TRANSFORMERS,
)
from launch import RANKCALL, Ended, launch, run_program
from launchers import digests, hang_of, line_of, run_of
from ports import free_port

from rankcall.cli.environment import BOOT
from rankcall.run.load import load

pytestmark = [pytest.mark.multiproc, pytest.mark.slow, pytest.mark.timeout(1200)]
BIN = RANKCALL.parent
PYTHON = sys.executable
TIMEOUT_S = 500
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "DS_ACCELERATOR": "cpu",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # this makes Ray listen on loopback only
    "OMPI_MCA_oob_tcp_if_include": "lo",
    "OMPI_MCA_btl_tcp_if_include": "lo",
    "PMIX_MCA_ptl_tcp_if_include": "lo",
    "PATH": f"{BIN}:{os.environ['PATH']}",  # DeepSpeed starts ninja
}


@dataclass(frozen=True)
class Job:
    """A script and its launcher. ``{exec}`` is where ``rankcall exec`` and its options go."""

    script: str
    command: tuple[str, ...]
    package: str = ""
    programs: tuple[str, ...] = ()
    status: int = 3  # of the launcher, if the script ends with 3
    env: Mapping[str, str] = field(default_factory=dict)


MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2")
SRUN = ("srun", "-n", "2")
JOBS = {
    "transformers": Job(
        TRANSFORMERS,
        ("{exec}", "torchrun", "--standalone", "--nproc-per-node=2", "job.py"),
        package="transformers",
        status=1,
    ),
    "deepspeed": Job(
        DEEPSPEED,
        (
            *("{exec}", "deepspeed", "--num_gpus=2", "--master_addr=127.0.0.1"),
            *("--master_port={port}", "job.py"),
        ),
        package="deepspeed",
    ),
    "ray train": Job(RAY_TRAIN, ("{exec}", PYTHON, "job.py"), package="ray"),
    "ray actors": Job(RAY_ACTORS, ("{exec}", PYTHON, "job.py"), package="ray"),
    "mpirun": Job(SCHEDULED, (*MPIRUN, "{exec}", PYTHON, "job.py"), programs=("mpirun",)),
    "exec mpirun": Job(SCHEDULED, ("{exec}", *MPIRUN, PYTHON, "job.py"), programs=("mpirun",)),
    "srun": Job(SCHEDULED, (*SRUN, "{exec}", PYTHON, "job.py"), programs=slurm.PROGRAMS),
    "exec srun": Job(SCHEDULED, ("{exec}", *SRUN, PYTHON, "job.py"), programs=slurm.PROGRAMS),
}
RECORDED = (*JOBS,)
WATCHED = ("transformers", "deepspeed", "ray train", "ray actors", "mpirun", "srun")
FRAMEWORKS = ("transformers", "deepspeed", "ray train")


def needs(job: Job) -> None:
    """Skip the test if the job's package is not installed here."""
    if job.package and importlib.util.find_spec(job.package) is None:
        pytest.skip(f"{job.package} is not installed: make setup-integrations")
    absent = [name for name in job.programs if shutil.which(name, path=slurm.SEARCH) is None]
    if absent:
        pytest.skip(f"{', '.join(absent)} is not installed: make setup-integrations")
    if job.programs == slurm.PROGRAMS and os.geteuid():
        pytest.skip("Slurm's daemons need root")


@dataclass
class Place:
    """Folders and the environment of the jobs of one test."""

    folder: Path
    stack: ExitStack
    env: dict[str, str] = field(default_factory=dict)

    def start(self, job: Job, *options: str, name: str = "job", **env: str) -> Ended:
        """Run a job to its end, below ``rankcall exec`` with options, or without if none."""
        folder = self.folder / name
        folder.mkdir()
        (folder / "job.py").write_text(job.script)
        port = str(free_port())
        short = self.stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-"))
        before = (str(RANKCALL), "exec", "--capture=python", *options, "--") if options else ()
        command: list[str] = []
        for part in job.command:
            command += before if part == "{exec}" else [part.format(port=port)]
        if job.programs == slurm.PROGRAMS and not self.env:
            self.env = self.stack.enter_context(slurm.cluster())
        self.stack.callback(_remove_buffers, port)
        environment = {
            **OFFLINE,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "RAY_FOLDER": short,
            **self.env,
            **job.env,
            **env,
        }
        return run_program(*command, cwd=folder, env=environment, timeout=TIMEOUT_S)


def _remove_buffers(port: str) -> None:
    """Remove what DeepSpeed leaves in shared memory."""
    for path in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
        path.unlink(missing_ok=True)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """Return where the jobs of one test run; end every daemon afterwards."""
    with ExitStack() as stack:
        yield Place(tmp_path, stack)


def judged(run: Path) -> list[dict[str, Any]]:
    """Return the findings of ``rankcall diagnose``."""
    ended = launch("diagnose", "--json", run, cwd=run, timeout=120)
    assert ended.status in (0, 1), ended.err
    findings: list[dict[str, Any]] = json.loads(ended.out)["findings"]
    return findings


def reported(run: Path) -> dict[str, Any]:
    """Return what ``rankcall report`` says."""
    ended = launch("report", "--json", run, cwd=run, timeout=120)
    assert ended.status == 0, ended.err
    report: dict[str, Any] = json.loads(ended.out)
    return report


@pytest.mark.parametrize("name", RECORDED)
def test_all_ranks_are_recorded_and_nothing_changes(place: Place, name: str) -> None:
    """One run with the rings of both ranks, and of no loader; the same bits; the same status."""
    job = JOBS[name]
    needs(job)
    without = place.start(job, name="without", STATUS="3")
    ended = place.start(job, "--hang-after=120", name="with", STATUS="3")
    assert len(digests(without)) == 2, without.err
    assert digests(ended) == digests(without), ended.err
    assert ended.status == without.status == job.status, ended.err
    run = run_of(ended)
    assert run.parent == place.folder / "with/rankcall-runs"
    recorded = load(run)
    headers = [head.header for head in recorded.heads]
    assert sorted((header.rank, header.attempt) for header in headers) == [(0, 0), (1, 0)]
    assert {header.world_size for header in headers} == {2}
    assert all("all_reduce" in set(recorded.frame(ring)["op"]) for ring in recorded.rings)


def test_ray_actors_with_a_variable(place: Place) -> None:
    """``RANKCALL=1`` in Ray's ``runtime_env`` records the ranks, without ``rankcall exec``."""
    job = JOBS["ray actors"]
    needs(job)
    without = place.start(job, name="without")
    # The folder is the one that the line in the wheel loads; a checkout has no such line.
    workers = {"RANKCALL": "1", "RANKCALL_CAPTURE": "python", "PYTHONPATH": str(BOOT)}
    ended = place.start(job, name="with", WORKERS=json.dumps(workers))
    assert ended.status == 0, ended.err
    assert digests(ended) == digests(without)
    assert len(digests(ended)) == 2
    runs = (place.folder / "with/rankcall-runs").iterdir()
    (run,) = [path for path in runs if not path.is_symlink()]
    facts = reported(run)["run"]
    assert (facts["world_size"], facts["missing_ranks"], facts["attempts"]) == (2, [], 1)
    assert judged(run) == []


@pytest.mark.parametrize("name", WATCHED)
def test_a_rank_that_hangs_is_named(place: Place, name: str) -> None:
    """The verdict names rank 1, and the line of the user's script at which it stands."""
    job = JOBS[name]
    needs(job)
    ended = place.start(job, "--hang-after=10", "--on-hang=abort", FAULT="hang")
    assert ended.status != 0
    run = run_of(ended)
    hang = hang_of(run)
    (finding,) = json.loads((hang / "verdict.json").read_text())["findings"]
    assert (finding["kind"], finding["ranks"], finding["victims"]) == ("missing", [1], [0])
    assert finding["confidence"] == "certain"
    line = line_of(job.script, "# the hang")  # with Ray Train, in a thread
    assert f"job.py:{line} in work" in finding["summary"]
    assert f'job.py", line {line}' in (hang / "stacks/rank-00001.txt").read_text()
    assert "missing: Rank 1 (" in ended.err + ended.out
    after = judged(run)
    assert [(cause["kind"], cause["ranks"]) for cause in after] == [("missing", [1])], after


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_healthy_job(place: Place, name: str) -> None:
    """Both ranks take as long for each step: there is no finding, and the report gives no alarm."""
    job = JOBS[name]
    needs(job)
    ended = place.start(job, "--hang-after=120", FAULT="even", STEPS="30")
    assert ended.status == 0, ended.err
    run = run_of(ended)
    assert judged(run) == []
    assert not reported(run)["headline"].startswith("Rank")
    assert "healthy: " in launch("diagnose", run, cwd=run, timeout=120).out


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_straggler(place: Place, name: str) -> None:
    """Rank 1 takes 40 ms longer for each step: the report and the diagnosis name it alike."""
    job = JOBS[name]
    needs(job)
    ended = place.start(job, "--hang-after=120", FAULT="slow", STEPS="40")
    assert ended.status == 0, ended.err
    run = run_of(ended)
    (finding,) = judged(run)
    assert (finding["kind"], finding["ranks"], finding["victims"]) == ("straggler", [1], [0])
    assert finding["op"] == "all_reduce"
    (late,) = [float(text) for text in re.findall(r"by (\d+) ms at the median", finding["summary"])]
    assert late > 30, "most of the 40 ms that rank 1 sleeps"
    assert reported(run)["headline"].startswith("Rank 1 (")


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_rank_that_crashes(place: Place, name: str) -> None:
    """The exception of rank 1 is quoted, and the advice is not about batches."""
    job = JOBS[name]
    needs(job)
    ended = place.start(job, "--hang-after=120", FAULT="crash")
    assert ended.status != 0
    (finding,) = judged(run_of(ended))
    assert "batches" not in finding["advice"]
    if name == "ray train":
        # Ray catches the exception, and kills all workers: at once, or on a slow machine only
        # after rank 0 has waited for rank 1. The callback of rankcall notes the exception.
        if finding["kind"] == "dead":
            assert finding["ranks"] == [0, 1]
            assert "Ray, for example, catches a rank's exception" in finding["advice"]
        else:
            assert (finding["kind"], finding["ranks"]) == ("missing", [1])
        return
    assert finding["kind"] == "dead"
    assert finding["ranks"] == [1]
    assert "failed with ValueError: sample 17 has no label" in finding["summary"]


CALLBACK = Job(RAY_CALLBACK, ("{exec}", PYTHON, "job.py"), package="ray", env={"CALLBACK": "1"})


def test_rays_callback_reports(place: Place) -> None:
    """Rank 0 logs figures with Ray's logger; a checkpoint is declared; the weights are the same."""
    needs(CALLBACK)
    without = place.start(CALLBACK, "--hang-after=120", name="without", CALLBACK="")
    ended = place.start(CALLBACK, "--hang-after=120", name="with")
    assert ended.status == without.status == 0, ended.err
    assert len(digests(ended)) == 2
    assert digests(ended) == digests(without)
    folder = place.folder / "with"
    shares = re.findall(r"rankcall/waiting_share=(\S+)", (folder / "log-0").read_text())
    assert shares
    assert all(0 <= float(share) <= 1 for share in shares)
    assert (folder / "log-1").read_text() == ""
    for rank in (0, 1):
        phases = set((folder / f"phases-{rank}").read_text().splitlines())
        assert phases == {"a report or checkpoint", "after: nothing"}


def test_ray_takes_a_hang_for_a_failure(place: Place) -> None:
    """``fit`` raises the verdict if Ray may not try again, and else ends well with new workers."""
    job = Job(RAY_HANGS, ("{exec}", PYTHON, "job.py"), package="ray")
    needs(job)
    ended = place.start(job, "--hang-after=10", FAULT="hang")
    assert ended.status == 0, ended.err
    (hang,) = re.findall(r"^hang (.*)$", ended.out, re.MULTILINE)
    kind, ranks, summary, failed = ast.literal_eval(hang)
    assert (kind, ranks, failed) == ("missing", (1,), [1])
    assert f"job.py:{line_of(RAY_HANGS, '# the hang')} in work" in summary
    assert len(digests(ended)) == 2, ended.err


def test_rays_callback_says_who_is_slow(place: Place) -> None:
    """The verdict on rank 1 goes through Ray's logger, once."""
    needs(CALLBACK)
    ended = place.start(CALLBACK, "--hang-after=120", FAULT="slow", STEPS="40")
    assert ended.status == 0, ended.err
    log = (place.folder / "job/log-0").read_text()
    assert log.count("rankcall: straggler: Rank 1 (") == 1


def test_rays_callback_records_an_exception(place: Place) -> None:
    """Ray catches the exception of rank 1; the callback notes it, and the verdict quotes it."""
    needs(CALLBACK)
    ended = place.start(CALLBACK, "--hang-after=120", FAULT="crash")
    assert ended.status != 0
    (finding,) = judged(run_of(ended))
    assert (finding["kind"], finding["ranks"], finding["confidence"]) == ("dead", [1], "likely")
    assert "failed with ValueError: sample 17 has no label" in finding["summary"]
