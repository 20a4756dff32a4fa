"""``rankcall exec`` before real launchers: all ranks are recorded, and nothing else changes."""

from __future__ import annotations

import importlib.util
import json
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from attach_programs import ACCELERATE, CHILDREN, CRASHING, ELASTIC, LATE, LIGHTNING, PLAIN, REINIT
from launch import RANKCALL, Ended, Launch, launch, run_program
from launchers import Launcher, both, digests, hang_of, run_of
from ports import free_port

from rankcall.analysis.verdicts import diagnose
from rankcall.cli.environment import BOOT
from rankcall.run.exits import read_exits
from rankcall.run.load import load

SLOW = pytest.mark.slow
pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(550)]
BIN = RANKCALL.parent
PYTHON = sys.executable

LAUNCHERS = {
    "python": Launcher(PLAIN, both(f"{PYTHON} train.py"), "train"),
    "python -m": Launcher(PLAIN, both(f"{PYTHON} -m train"), "train"),
    "stdin": Launcher(PLAIN, both(f"{PYTHON} < train.py"), "python"),
    "spawn": Launcher(CHILDREN, (PYTHON, "children.py", "spawn", "{meet}"), "children", status=1),
    "fork": Launcher(CHILDREN, (PYTHON, "children.py", "fork", "{meet}"), "children", status=1),
    "torchrun": Launcher(
        PLAIN,
        (str(BIN / "torchrun"), "--standalone", "--nproc-per-node=2", "train.py"),
        "train",
        status=1,
    ),
    "accelerate": Launcher(
        ACCELERATE,
        (
            *(str(BIN / "accelerate"), "launch", "--multi_gpu", "--num_processes=2"),
            *("--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"),
            *("--main_process_port=0", "accelerated.py"),
        ),
        "accelerated",
        "accelerate",
        status=1,
    ),
    "lightning": Launcher(LIGHTNING, (PYTHON, "light.py"), "light", "lightning"),
}
FILES = {
    "train.py": PLAIN,
    "children.py": CHILDREN,
    "accelerated.py": ACCELERATE,
    "light.py": LIGHTNING,
    "elastic.py": ELASTIC,
    "reinit.py": REINIT,
    "late.py": LATE,
}


@pytest.fixture(
    params=[
        pytest.param(name, marks=[] if name == "torchrun" else [pytest.mark.slow])
        for name in LAUNCHERS
    ]
)
def launcher(request: pytest.FixtureRequest) -> Launcher:
    """Return each launcher; skip those whose package is not installed."""
    requested = LAUNCHERS[request.param]
    if importlib.util.find_spec(requested.package) is None:
        pytest.skip(f"{requested.package} is not installed")
    return requested


def prepare(folder: Path, launcher: Launcher) -> tuple[list[str], dict[str, str]]:
    """Write the scripts; return the launcher's command, and what it needs in the environment."""
    folder.mkdir(exist_ok=True)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    meet = folder / "meet"
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    if launcher.program not in ("train", "python") or "torchrun" in launcher.command[0]:
        env = {"PYTHONPATH": str(folder)}
    return [part.format(meet=meet) for part in launcher.command], env


def test_all_ranks_are_recorded_and_nothing_changes(tmp_path: Path, launcher: Launcher) -> None:
    """One run with the rings of both ranks, and of no loader; the same bits; the same status."""
    command, env = prepare(tmp_path / "without", launcher)
    without = run_program(*command, cwd=tmp_path / "without", env={**env, "STATUS": "3"})
    command, env = prepare(tmp_path / "with", launcher)
    options = ["exec", "--capture=python", "--"]
    ended = launch(
        *options,
        *command,
        cwd=tmp_path / "with",
        env={**env, "STATUS": "3"},
        timeout=240,
        linger=60,
    )
    assert len(digests(without)) == 2, without.err
    assert digests(ended) == digests(without), ended.err
    assert ended.status == without.status == launcher.status
    run = run_of(ended)
    assert run.parent == tmp_path / "with/rankcall-runs"
    assert run.name.endswith(f"-{launcher.program}")
    recorded = load(run)
    headers = [head.header for head in recorded.heads]
    assert sorted((header.rank, header.attempt) for header in headers) == [(0, 0), (1, 0)]
    assert {header.world_size for header in headers} == {2}
    assert all("all_reduce" in set(recorded.frame(ring)["op"]) for ring in recorded.rings)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("spawn", marks=pytest.mark.slow),
        "torchrun",
        pytest.param("lightning", marks=pytest.mark.slow),
        pytest.param("accelerate", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_hangs_is_named(tmp_path: Path, name: str) -> None:
    """The verdict names rank 1, and the line of the user's script at which it stands."""
    launcher = LAUNCHERS[name]
    command, env = prepare(tmp_path, launcher)
    options = ["exec", "--capture=python", "--hang-after=2", "--on-hang=abort", "--"]
    ended = launch(
        *options, *command, cwd=tmp_path, env={**env, "HANG": "1"}, timeout=300, linger=60
    )
    assert ended.status != 0
    assert "missing: Rank 1 (" in ended.err, ended.err
    stack = hang_of(run_of(ended)) / "stacks/rank-00001.txt"
    script = {"spawn": "train.py", "torchrun": "train.py"}.get(name, command[-1])
    line = 1 + FILES[script].splitlines().index(
        next(
            source_line
            for source_line in FILES[script].splitlines()
            if "time.sleep(600)" in source_line
        )
    )
    assert f'{script}", line {line}' in stack.read_text()
    assert f"{script}:{line}" in ended.err


@pytest.mark.parametrize("how", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_child_that_crashes(tmp_path: Path, how: str) -> None:
    """torch.multiprocessing catches a rank's exception, and ends the others; it is quoted."""
    (tmp_path / "crashing.py").write_text(CRASHING)
    program = [PYTHON, "crashing.py", how, str(tmp_path / "meet")]
    ended = launch("exec", "--capture=python", "--", *program, cwd=tmp_path, timeout=240)
    assert ended.status == 1
    judged = launch("diagnose", "--json", run_of(ended), cwd=tmp_path, timeout=120)
    (finding,) = json.loads(judged.out)["findings"]
    assert (finding["kind"], finding["ranks"]) == ("dead", [1])
    assert "failed with ValueError: sample 17 has no label" in finding["summary"]


@pytest.mark.slow
def test_a_rank_that_is_late_to_init(tmp_path: Path) -> None:
    """A rank that waits inside init_process_group is recorded, and names the rank that is not."""
    prepare(tmp_path, LAUNCHERS["torchrun"])
    torchrun = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node=2", "late.py"]
    options = ["exec", "--capture=python", "--run-dir=mine", "--hang-after=2", "--"]
    started = Launch(*options, *torchrun, cwd=tmp_path)
    verdict = tmp_path / "mine/hangs/0001/verdict.json"
    started.wait_for(verdict, 150)
    (finding,) = json.loads(verdict.read_text())["findings"]
    started.process.terminate()
    ended = started.finish()
    assert (finding["kind"], finding["ranks"]) == ("no_progress", [1])
    assert f"in init_process_group at {tmp_path / 'late.py'}:5" in finding["summary"]
    assert ended.status != 0


def test_restarts_are_attempts_of_one_run(tmp_path: Path) -> None:
    """Both attempts of an elastic job are in one run, and can be read apart.

    With one rank: if two fail at once, the restarted ones do not get connected on every second try,
    without rankcall as well (torch 2.13, Gloo).
    """
    prepare(tmp_path, LAUNCHERS["torchrun"])
    torchrun = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node=1", "--max-restarts=1"]
    ended = launch(
        "exec", "--capture=python", "--", *torchrun, "elastic.py", cwd=tmp_path, timeout=240
    )
    assert ended.status == 0, ended.err
    run = run_of(ended)
    counted = sorted(
        (ring.header.attempt, ring.header.rank, len(ring.records)) for ring in load(run).rings
    )
    assert counted == [(0, 0, 1), (1, 0, 2)]
    first = launch("report", "--attempt=0", run, cwd=tmp_path)
    assert first.status == 0, first.err
    assert "2 attempts" not in first.out
    assert "2 attempts" in launch("report", run, cwd=tmp_path).out
    none = launch("report", "--attempt=7", run, cwd=tmp_path)
    assert none.status == 2
    assert "attempt 7" in none.err
    assert "0-1" in none.err


@SLOW
def test_a_second_init_continues_the_run(tmp_path: Path) -> None:
    """The groups of a second init_process_group are in the same rings."""
    prepare(tmp_path, LAUNCHERS["python"])
    env = {"MEET": str(tmp_path / "meet")}
    command = both(f"{PYTHON} reinit.py")
    ended = launch("exec", "--capture=python", "--", *command, cwd=tmp_path, env=env, timeout=120)
    assert ended.status == 0, ended.err
    rings = load(run_of(ended)).rings
    assert [(ring.header.rank, ring.header.attempt, len(ring.records)) for ring in rings] == [
        (0, 0, 2),
        (1, 0, 2),
    ]


@pytest.mark.slow
def test_jobs_with_one_directory_are_attempts(tmp_path: Path) -> None:
    """A second job that is given the first one's directory becomes its second attempt."""
    launcher = LAUNCHERS["python"]
    for attempt in range(2):
        command, env = prepare(tmp_path, launcher)
        options = ["exec", "--capture=python", "--run-dir=mine", "--"]
        ended = launch(*options, *command, cwd=tmp_path, env=env, timeout=120)
        assert ended.status == 0, ended.err
        recorded = sorted((h.header.attempt, h.header.rank) for h in load(tmp_path / "mine").heads)
        assert recorded == [(number, rank) for number in range(attempt + 1) for rank in (0, 1)]


@pytest.mark.slow
def test_jobs_of_one_second_do_not_mix(tmp_path: Path) -> None:
    """Two jobs that start at once, in one directory and with one name, write two runs."""
    launcher = LAUNCHERS["python"]
    jobs = []
    for _ in range(2):
        command, env = prepare(tmp_path, launcher)
        jobs.append(Launch("exec", "--capture=python", "--", *command, cwd=tmp_path, env=env))
    places = set()
    for job in jobs:
        ended = job.finish(120)
        assert ended.status == 0, ended.err
        places.add(run_of(ended))
    assert len(places) == 2
    for place in places:
        assert sorted(head.header.rank for head in load(place).heads) == [0, 1]


@SLOW
def test_a_job_inside_a_rank_is_a_run_of_its_own(tmp_path: Path) -> None:
    """What a recorded rank starts does not write into that rank's run."""
    prepare(tmp_path, LAUNCHERS["python"])
    (tmp_path / "outer.py").write_text(
        "import subprocess, sys, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "dist.all_reduce(torch.ones(4))\n"
        "dist.destroy_process_group()\n"
        "sys.exit(subprocess.call([sys.executable, 'inner.py']))\n"
    )
    (tmp_path / "inner.py").write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "for _ in range(3): dist.all_reduce(torch.ones(4))\n"
        "dist.destroy_process_group()\n"
    )
    options = ["exec", "--capture=python", "--run-dir=mine", "--", PYTHON, "outer.py"]
    ended = launch(*options, cwd=tmp_path, timeout=120)
    assert ended.status == 0, ended.err
    assert [len(ring.records) for ring in load(tmp_path / "mine").rings] == [1]
    assert [len(ring.records) for ring in load(tmp_path / "mine-inner").rings] == [3]


@SLOW
def test_a_rank_that_is_not_recorded(tmp_path: Path) -> None:
    """If rank 0 is not, the others choose the run without it, and the job is not held up."""
    prepare(tmp_path, LAUNCHERS["python"])
    (tmp_path / "some.py").write_text(
        "import os\nif os.environ['RANK'] == '0': os.environ['RANKCALL'] = '0'\n"
        "from train import train\ntrain()\n"
    )
    _, env = prepare(tmp_path, LAUNCHERS["python"])
    command = both(f"{PYTHON} some.py")
    ended = launch("exec", "--capture=python", "--", *command, cwd=tmp_path, env=env, timeout=200)
    assert ended.status == 0, ended.err
    assert len(digests(ended)) == 2
    assert [head.header.rank for head in load(run_of(ended)).heads] == [1]


def test_forked_ranks_without_a_launcher_of_ours(tmp_path: Path) -> None:
    """multiprocessing ends forked children without atexit; their records are in the run anyway."""
    command, env = prepare(tmp_path, LAUNCHERS["fork"])
    env["PYTHONPATH"] = f"{BOOT}:{tmp_path}"
    env |= {"RANKCALL": "1", "RANKCALL_CAPTURE": "python"}
    ended = run_program(*command, cwd=tmp_path, env=env)
    assert ended.status == 0, ended.err
    (line,) = ended.ours
    (run,) = [path for path in (tmp_path / "rankcall-runs").iterdir() if not path.is_symlink()]
    assert line == f"rankcall: recording in {run}"
    names = sorted(path.name for path in (run / "rings").iterdir())
    assert [name[:10] for name in names] == ["rank-00000", "rank-00001"]


@pytest.mark.slow
def test_a_program_that_enables_by_name(tmp_path: Path) -> None:
    """``enable("my-run")`` in three jobs, one after the other, makes three attempts of a run."""
    (tmp_path / "named.py").write_text(
        "import sys, torch, torch.distributed as dist, rankcall\n"
        "rankcall.enable('my-run', capture='python')\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "for _ in range(int(sys.argv[1])): dist.all_reduce(torch.ones(4))\n"
        "dist.destroy_process_group()\n"
    )
    for times in (1, 2, 3):
        ended = run_program(PYTHON, "named.py", str(times), cwd=tmp_path)
        assert ended.status == 0, ended.err
    run = load(tmp_path / "my-run")
    assert [(ring.header.attempt, len(ring.records)) for ring in run.rings] == [
        (0, 1),
        (1, 2),
        (2, 3),
    ]


LEAVES = """
import os, sys, torch, torch.distributed as dist
rank, store = int(os.environ["RANK"]), dist.FileStore(os.environ["MEET"], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
dist.all_reduce(torch.ones(4))
dist.destroy_process_group()
if rank == 1:
    sys.exit(int(os.environ["STATUS"]))
"""


def leave(folder: Path, status: int, *command: str, **more: str) -> tuple[list[Ended], Path]:
    """Start two ranks of a program, of which rank 1 ends with a status; return how they ended."""
    (folder / "leaves.py").write_text(LEAVES)
    env = {"MEET": str(folder / "meet"), "STATUS": str(status), **more}
    env["RANKCALL_RUN_DIR"] = str(folder / "run")
    started = [
        Launch(*command, "leaves.py", cwd=folder, env={**env, "RANK": rank}, program=())
        for rank in "01"
    ]
    return [launched.finish(240) for launched in started], folder / "run"


@pytest.mark.parametrize(
    "status", [-1, *(pytest.param(status, marks=SLOW) for status in (3, 0, 260))]
)
def test_the_exit_status_of_a_rank_that_nothing_started(tmp_path: Path, status: int) -> None:
    """With ``RANKCALL=1`` alone, a status other than 0 is in the run, as a shell would see it."""
    env = {"PYTHONPATH": str(BOOT), "RANKCALL": "1", "RANKCALL_CAPTURE": "native"}
    ended, run = leave(tmp_path, status, PYTHON, **env)
    seen = status & 0xFF
    assert [end.status for end in ended] == [0, seen]
    if "CaptureUnavailableError" in ended[1].err or "not recording" in ended[1].err:
        pytest.skip("the native recorder cannot be built here")
    exits = {noted.rank: noted for noted in read_exits(run)}
    assert {rank: noted.code for rank, noted in exits.items()} == ({1: seen} if seen else {})
    findings = diagnose(load(run)).findings
    assert [finding.ranks for finding in findings] == ([(1,)] if seen else [])
    for finding in findings:
        assert (finding.kind, finding.confidence) == ("dead", "certain")
        assert f"exited with code {seen}" in finding.summary
        assert 0 < time.time() - exits[1].epoch_ns / 1e9 < 600


@pytest.mark.parametrize("status", [3, pytest.param(0, marks=SLOW)])
def test_exec_notes_how_a_rank_ended(tmp_path: Path, status: int) -> None:
    """If the command is a rank itself, as below srun, its status is in the run, in any capture."""
    command = (str(RANKCALL), "exec", "--capture=python", "--run-dir", str(tmp_path / "run"), "--")
    ended, run = leave(tmp_path, status, *command, PYTHON)
    assert [end.status for end in ended] == [0, status]
    assert {noted.rank: noted.code for noted in read_exits(run)} == {0: 0, 1: status}
    assert [finding.kind for finding in diagnose(load(run)).findings] == ["dead"] * bool(status)


@pytest.mark.skipif(importlib.util.find_spec("uvicorn") is None, reason="rankcall[serve]")
def test_exec_has_the_options_of_run(tmp_path: Path) -> None:
    """It traces the job, keeps its history, and shows it on a page that ends with it."""
    program = (
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "dist.all_reduce(torch.ones(1))\n"
        "dist.destroy_process_group()\n"
    )
    (tmp_path / "one.py").write_text(program)
    options = ("--capture=python", "--trace=all", "--history", "--serve=0")
    ended = launch("exec", *options, "--", PYTHON, "one.py", cwd=tmp_path, timeout=240)
    assert ended.status == 0, ended.err
    (run,) = (path for path in (tmp_path / "rankcall-runs").iterdir() if path.name != "latest")
    assert run.name.endswith("-one")
    (described,) = run.glob("trace/*.jsonl")
    assert '"all_reduce"' in described.read_text()
    assert len(list(run.glob("history/*.parquet"))) == 1
    assert load(run).records["op"].to_list() == ["all_reduce"]


@pytest.mark.parametrize(
    ("line", "status"), [("exit 7", 7), ("kill -TERM $$", -15), ("kill -KILL $$", -9)]
)
def test_the_status_is_the_commands(tmp_path: Path, line: str, status: int) -> None:
    """An exit code comes through, and so does the signal that ended the command."""
    ended = launch("exec", "--capture=python", "--", "bash", "-c", line, cwd=tmp_path)
    assert ended.status == status
    assert "nothing was recorded" in ended.err


def test_a_command_that_is_not_there(tmp_path: Path) -> None:
    """As in a shell: one line, and 127 or 126."""
    ended = launch("exec", "--", "no-such-command", cwd=tmp_path)
    assert (ended.status, ended.err) == (127, "rankcall: no-such-command: command not found\n")
    (tmp_path / "file").touch()
    assert launch("exec", "--", "./file", cwd=tmp_path).status == 126


def test_stdin_and_signals_reach_the_command(tmp_path: Path) -> None:
    """SIGTERM and SIGUSR1 are passed on; the command decides what they do."""
    line = "trap 'echo usr' USR1; trap 'exit 5' TERM; touch ready; while :; do sleep 0.1; done"
    started = Launch("exec", "--capture=python", "--", "bash", "-c", line, cwd=tmp_path)
    started.wait_for(tmp_path / "ready")
    started.process.send_signal(signal.SIGUSR1)
    started.process.terminate()
    ended = started.finish()
    assert ended.status == 5
    assert ended.out == "usr\n"


def test_a_python_without_rankcall(tmp_path: Path) -> None:
    """Below exec, a Python whose environment lacks rankcall says so once, and runs."""
    (tmp_path / "torch/distributed").mkdir(parents=True)
    (tmp_path / "torch/__init__.py").touch()
    (tmp_path / "torch/distributed/__init__.py").touch()
    (tmp_path / "torch/distributed/distributed_c10d.py").write_text(
        "def init_process_group(): print('made')\n"
    )
    code = "import torch.distributed.distributed_c10d as c; c.init_process_group()"
    # -S leaves out site, and with it sitecustomize: it is run by hand, without site-packages.
    boot = "import sys; sys.path.insert(0, sys.argv[1]); import sitecustomize; sys.path.pop(0)"
    paths = f"sys.path = [p for p in sys.path if not p.endswith(('-packages', '/src'))]; {code}"
    program = [
        PYTHON,
        "-S",
        "-c",
        f"{boot}; {paths}",
        str(BOOT),
    ]
    env: Mapping[str, str] = {"PYTHONPATH": str(tmp_path)}
    ended = launch("exec", "--capture=python", "--", *program, cwd=tmp_path, env=env)
    assert (ended.status, ended.out) == (0, "made\n")
    assert "not recording: ModuleNotFoundError: No module named 'rankcall'" in ended.err
