"""``rankcall run`` with real workers: the records, their place, and the output."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest
from launch import Ended, Launch, launch
from launchers import hang_of

from rankcall.analysis.verdicts import diagnose
from rankcall.run.exits import LAUNCHER, read_exits
from rankcall.run.load import Run, load
from rankcall.run.paths import live_dir

pytestmark = pytest.mark.multiproc

ALL_REDUCE = """
import os, signal, sys, time
from pathlib import Path
import torch
import torch.distributed as dist

def main():
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(4))
    # one write: the ranks share a pipe
    os.write(1, f"{dist.get_rank()} {__name__} {sys.argv[1:]}\\n".encode())
"""


def job(folder: Path, rest: str = "", name: str = "job.py") -> Path:
    """Write a script: one all_reduce, then ``rest`` inside ``main``, then a clean end."""
    lines = [f"    {line}" for line in [*rest.splitlines(), "dist.destroy_process_group()"]]
    script = folder / name
    script.write_text("\n".join([ALL_REDUCE, *lines, "if __name__ == '__main__':", "    main()\n"]))
    return script


def run(folder: Path, *args: str | Path, **options: object) -> Ended:
    """Run a job with the Python capture, which needs no compiler."""
    return launch("run", "--capture", "python", *args, cwd=folder, **options)  # type: ignore[arg-type]


def ops(run: Run) -> list[tuple[int, int, str]]:
    """Return (attempt, rank, op) of every record."""
    from rankcall.record import OPS

    return [
        (ring.header.attempt, ring.header.rank, OPS[code])
        for ring in run.rings
        for code in ring.records["op"]
    ]


def test_a_script_on_two_ranks(tmp_path: Path) -> None:
    """Nothing changes for the script; both ranks are recorded; the run can be found and read."""
    job(tmp_path)
    ended = run(tmp_path, "--nproc-per-node=2", "job.py", "--run-dir", "mine", "-x", "--", "--help")
    assert ended.status == 0, ended.err
    arguments = ["--run-dir", "mine", "-x", "--", "--help"]
    assert sorted(ended.out.splitlines()) == [f"{rank} __main__ {arguments}" for rank in (0, 1)]
    (latest,) = [path for path in (tmp_path / "rankcall-runs").iterdir() if path.is_symlink()]
    place = latest.resolve()
    assert latest.name == "latest"
    assert place.name.endswith("-job")
    facts = json.loads((place / "run.json").read_text())
    assert facts["command"][:2] == ["--nproc-per-node=2", "job.py"]
    assert facts["hang_after_s"] == 60.0
    recorded = load(place)
    assert recorded.problems == []
    assert ops(recorded) == [(0, 0, "all_reduce"), (0, 1, "all_reduce")]
    where = f"rankcall-runs/{place.name}"
    pointed_out, summary = ended.ours
    assert pointed_out.startswith("rankcall: --run-dir goes to the script")
    assert (
        summary == f"rankcall: recorded ranks 0-1 in {where}; read it with: rankcall report {where}"
    )


def test_a_module_with_data_loaders(tmp_path: Path) -> None:
    """``-m`` works, under PYTHONSAFEPATH and in a world of one; loader processes do not record."""
    (tmp_path / "pkg").mkdir()
    loaders = """
from torch.utils.data import DataLoader
for how in ("fork", "spawn"):
    loader = DataLoader(range(2), num_workers=1, multiprocessing_context=how)
    assert [int(batch) for batch in loader] == [0, 1]
"""
    job(tmp_path / "pkg", loaders, "train.py")
    env = {"PYTHONSAFEPATH": "1", "PYTHONPATH": str(tmp_path)}
    ended = run(tmp_path, "--run-dir", "here", "-m", "pkg.train", "a", env=env)
    assert ended.status == 0, ended.err
    assert ended.out == "0 __main__ ['a']\n"
    assert ops(load(tmp_path / "here")) == [(0, 0, "all_reduce")]


@pytest.mark.slow
def test_a_program_that_is_no_python(tmp_path: Path) -> None:
    """``--no-python bash -c``: of the Pythons that bash starts, those that import torch record."""
    job(tmp_path)
    line = f"{sys.executable} -c 'import json' && {sys.executable} job.py; true"
    ended = run(tmp_path, "--run-dir", "here", "--no-python", "bash", "-c", line)
    assert ended.status == 0, ended.err
    assert ops(load(tmp_path / "here")) == [(0, 0, "all_reduce")]


def test_workers_that_cannot_be_armed(tmp_path: Path) -> None:
    """``python -I`` ignores PYTHONPATH: the launcher notices that no ring is there and says so.

    Where the wheel is installed, ``RANKCALL`` is enough; a job may remove that as well.
    """
    job(tmp_path)
    ended = run(tmp_path, "--no-python", "env", "-u", "RANKCALL", sys.executable, "-I", "job.py")
    assert ended.status == 0, ended.err
    (line,) = ended.ours
    assert line.startswith("rankcall: no records of rank 0: ")
    assert "python -I, -E or -S" in line


def test_a_rank_that_is_killed(tmp_path: Path) -> None:
    """SIGKILL on one rank: our verdict, torchrun's status, no traceback, both rings kept."""
    job(tmp_path, "if dist.get_rank(): os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(600)")
    ended = run(tmp_path, "--run-dir", "here", "--nproc-per-node=2", "job.py")
    assert ended.status == 1
    assert "dead: Rank 1 (" in ended.err
    assert "SIGKILL" in ended.err
    assert "FAILED" not in ended.err  # torchrun's own table
    assert "Traceback" not in ended.err
    recorded = load(tmp_path / "here")
    assert ops(recorded) == [(0, 0, "all_reduce"), (0, 1, "all_reduce")]
    assert recorded.rings[1].header.closed_ns == 0
    assert not live_dir(tmp_path / "here").exists()


HANGS = """
weight = torch.nn.Parameter(torch.ones(1))
weight.grad = torch.ones(1)
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range(4):
    dist.all_reduce(torch.ones(4))
    optimizer.step()
if dist.get_rank() == 1:
    time.sleep(600)
dist.all_reduce(torch.ones(4))
"""


def test_a_job_that_hangs_is_ended(tmp_path: Path) -> None:
    """``--on-hang abort``: one verdict while it hangs, then the job ends; both in the run."""
    job(tmp_path, HANGS)
    options = ["--run-dir=here", "--hang-after=1", "--on-hang=abort", "--nproc-per-node=2"]
    ended = run(tmp_path, *options, "job.py")
    assert ended.status == 1
    assert ended.err.count("missing: Rank 1 (") == 2  # while it hung, and by the launcher
    assert "the watcher ended the job" in ended.err
    place = hang_of(tmp_path / "here")
    assert ended.err.count(f"kept with all stacks in {place}\n") == 1
    verdict = json.loads((place / "verdict.json").read_text())
    assert [(finding["kind"], finding["ranks"]) for finding in verdict["findings"]] == [
        ("missing", [1])
    ]
    assert "job.py" in (place / "stacks/rank-00001.txt").read_text()


def test_a_rank_that_does_not_get_out_of_its_exit(tmp_path: Path) -> None:
    """It left its loop while the others go on; that its process is still there is no excuse."""
    leaves = "import atexit\n    atexit.register(time.sleep, 600)\n    return"
    job(tmp_path, HANGS.replace("time.sleep(600)", leaves))
    options = ["--run-dir=here", "--hang-after=2", "--on-hang=abort", "--nproc-per-node=2"]
    ended = run(tmp_path, *options, "job.py")
    assert "exhausted (likely): Rank 1 (" in ended.err, ended.err
    assert "left the loop: it is closing down" in ended.err


def test_restarts_keep_each_attempt(tmp_path: Path) -> None:
    """A script that raises is restarted by torchrun; the records of both attempts are there."""
    job(tmp_path, "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': raise ValueError('once')")
    ended = run(tmp_path, "--run-dir", "here", "--max-restarts=1", "job.py")
    assert ended.status == 0, ended.err
    assert "ValueError: once" in ended.err
    assert ops(load(tmp_path / "here")) == [(0, 0, "all_reduce"), (1, 0, "all_reduce")]


@pytest.mark.parametrize(
    "sig", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_a_launcher_that_is_told_to_end(tmp_path: Path, sig: signal.Signals) -> None:
    """Ctrl-C or SIGTERM: the workers end, their records are kept, the status is torchrun's."""
    job(tmp_path, "Path('ready').touch()\ntime.sleep(600)")
    launched = Launch("run", "--capture=python", "--run-dir=here", "job.py", cwd=tmp_path)
    launched.wait_for(tmp_path / "ready")
    launched.process.send_signal(sig)
    ended = launched.finish()
    assert ended.status == 1
    assert f"rankcall: the job was ended by {sig.name}" in ended.ours
    assert "rankcall report here" in ended.err
    assert ops(load(tmp_path / "here")) == [(0, 0, "all_reduce")]
    launcher, worker = sorted(read_exits(tmp_path / "here"), key=lambda ended: ended.rank)
    assert (launcher.rank, launcher.code) == (LAUNCHER, -sig)
    assert worker.rank == 0
    # torchrun may reap the worker before its exit status is read. The status is then unknown.
    assert worker.code is None or worker.code in (-sig, -signal.SIGTERM)
    assert diagnose(load(tmp_path / "here")).kind == "healthy"


def test_ctrl_c_on_a_hang(tmp_path: Path) -> None:
    """Who ends a job that hangs reads at once why it hung."""
    job(
        tmp_path,
        "if dist.get_rank() == 0: Path('there').touch(); dist.all_reduce(torch.ones(1))\n"
        "while not Path('there').exists(): time.sleep(0.01)\n"
        "time.sleep(4); Path('ready').touch(); time.sleep(600)",  # a wait that is no step's
    )
    launched = Launch(
        "run", "--capture=python", "--run-dir=here", "--nproc-per-node=2", "job.py", cwd=tmp_path
    )
    launched.wait_for(tmp_path / "ready")
    launched.process.send_signal(signal.SIGINT)
    ended = launched.finish(90)
    assert "rankcall: the job was ended by SIGINT" in ended.ours
    assert "\nmissing: Rank 1 " in ended.err
    (finding,) = diagnose(load(tmp_path / "here")).findings
    assert (finding.kind, finding.ranks) == ("missing", (1,))


def test_two_nodes(tmp_path: Path) -> None:
    """Two agents with one --rdzv-id make one run; --local-addr tells them apart as hosts."""
    from torch.distributed import TCPStore

    job(tmp_path)
    # The rendezvous is held here, so that its port can be one the kernel chose.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    options = [
        "run",
        "--capture",
        "python",
        "--nnodes=2",
        "--rdzv-backend=c10d",
        "--rdzv-id=job 7",
        f"--rdzv-endpoint=127.0.0.1:{store.port}",
        "--rdzv-conf=is_host=0",
    ]
    agents = [
        Launch(*options, f"--local-addr={host}", "job.py", cwd=tmp_path)
        for host in ("127.0.0.1", "127.0.0.2")
    ]
    for agent in agents:
        ended = agent.finish(90)
        assert ended.status == 0, ended.err
        assert "rankcall report rankcall-runs/job_7-job" in ended.err
    recorded = load(tmp_path / "rankcall-runs/job_7-job")
    assert sorted(recorded.hosts) == [0, 1]
    assert sorted(recorded.hosts.values()) == ["127.0.0.1", "127.0.0.2"]
    assert [group.cross_host for group in recorded.run_groups.values()] == [True]


@pytest.mark.slow
def test_a_run_directory_that_cannot_be_written(tmp_path: Path) -> None:
    """The job runs, the records stay in memory, and the launcher says where to read them."""
    job(tmp_path)
    ended = run(tmp_path, "--run-dir", "/proc/none/run", "job.py")
    assert ended.status == 0, ended.err
    live = live_dir(Path("/proc/none/run"))
    try:
        assert f"read it with: rankcall report {live}" in ended.err
        assert ops(load(live)) == [(0, 0, "all_reduce")]
    finally:
        for ring in live.iterdir():
            ring.unlink()


def test_a_script_that_does_not_exist(tmp_path: Path) -> None:
    """One line, exit 2, nothing started and nothing made."""
    ended = run(tmp_path, "--nproc-per-node=2", "none.py")
    assert (ended.status, ended.out) == (2, "")
    (line,) = ended.err.splitlines()
    assert line.startswith("rankcall: no such script: none.py")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_no_compiler(tmp_path: Path) -> None:
    """Without one the Python capture records, said once; ``rankcall build`` says why and fails."""
    job(tmp_path)
    empty = tmp_path / "bin"
    empty.mkdir()
    env = {"PATH": str(empty), "CXX": "", "RANKCALL_CACHE": str(tmp_path / "cache")}
    ended = launch("run", "--run-dir=here", "--nproc-per-node=2", "job.py", cwd=tmp_path, env=env)
    assert ended.status == 0, ended.err
    assert sum("no C++ compiler" in line for line in ended.err.splitlines()) == 1
    assert {ring.header.capture for ring in load(tmp_path / "here").rings} == {"python"}
    built = launch("build", cwd=tmp_path, env=env)
    assert (built.status, built.out) == (1, "")
    assert "no C++ compiler" in built.err


def test_a_torch_that_is_too_old(tmp_path: Path) -> None:
    """One line that names the version there is and the one that is needed."""
    job(tmp_path)
    old = tmp_path / "old"
    old.mkdir()
    (old / "torch.py").write_text("__version__ = '2.4.1'\n")
    ended = run(tmp_path, "job.py", env={"PYTHONPATH": str(old)})
    assert ended.status != 0
    (line,) = ended.err.splitlines()
    assert "2.4.1" in line
    assert "2.11" in line


@pytest.mark.slow
def test_the_environment_of_a_launcher_inside_a_job(tmp_path: Path) -> None:
    """A launcher that a worker starts records its own workers into its own run."""
    job(tmp_path)
    outer = tmp_path / "outer.py"
    outer.write_text(
        "import subprocess, sys\n"
        f"sys.exit(subprocess.call([{str(Path(sys.executable).with_name('rankcall'))!r}, 'run',"
        " '--run-dir', 'inner', 'job.py']))\n"
    )
    ended = run(tmp_path, "--run-dir", "outer", "outer.py")
    assert ended.status == 0, ended.err
    assert ops(load(tmp_path / "inner")) == [(0, 0, "all_reduce")]
    assert not list((tmp_path / "outer" / "rings").iterdir())
