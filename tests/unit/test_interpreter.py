"""No interpreter that we start runs a file of the working directory."""

from __future__ import annotations

import ast
import json
import os
import pickle
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import rankcall
from rankcall.interpreter import run_command, run_function
from rankcall.testing.synthetic import synthetic_run

PACKAGE = Path(rankcall.__file__).parent
TRAP = "import pathlib; pathlib.Path({marker!r}).write_text('run'); raise SystemExit(99)\n"
# Modules that a child imports early, from the standard library, from packages and our own.
NAMES = ("json", "sys", "numpy", "polars", "typer", "rankcall", "importlib", "runpy", "encodings")


@pytest.fixture
def hostile(tmp_path: Path) -> tuple[Path, Path]:
    """Return a folder with traps for imports, and the file that appears if one of them is run."""
    folder, marker = tmp_path / "hostile", tmp_path / "ran"
    folder.mkdir()
    for name in NAMES:
        (folder / f"{name}.py").write_text(TRAP.format(marker=str(marker)))
    for name in ("rankcall", "numpy"):
        (folder / name).mkdir()
        for file in ("__init__.py", "__main__.py"):
            (folder / name / file).write_text(TRAP.format(marker=str(marker)))
    return folder, marker


def run_there(command: list[str], folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the hostile folder."""
    return subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, **env},
    )


def test_our_command(hostile: tuple[Path, Path]) -> None:
    """``rankcall --version`` runs, whatever lies in the working directory, also on PYTHONPATH."""
    folder, marker = hostile
    for env in ({}, {"PYTHONPATH": "."}, {"PYTHONPATH": ""}, {"PYTHONSTARTUP": "json.py"}):
        done = run_there(run_command("--version"), folder, **env)
        assert (done.returncode, marker.exists()) == (0, False), done.stderr


def test_a_function_of_ours(hostile: tuple[Path, Path]) -> None:
    """A function is called with texts as they are."""
    folder, marker = hostile
    done = run_there(run_function("rankcall.process", "host_name"), folder)
    assert (done.returncode, marker.exists()) == (0, False), done.stderr


def test_the_path_of_this_process_comes_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child finds what this process finds, but a folder of PYTHONPATH shadows no package."""
    (tmp_path / "json.py").write_text("raise SystemExit(99)\n")
    (tmp_path / "mine.py").write_text("def write(text):\n    print(text, end='')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    done = subprocess.run(
        run_function("mine", "write", "a b\nc"), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "a b\nc"), done.stderr


def test_diagnose_in_a_folder_of_dumps(hostile: tuple[Path, Path]) -> None:
    """Dumps of more than 2 MiB are read by processes of our own: they run no file beside them."""
    folder, marker = hostile
    entry = {
        "record_id": 0,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": 1,
        "p2p_seq_id": 0,
        "op_id": 1,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": 1_700_000_000_000_000_000,
        "input_sizes": [[4]],
        "output_sizes": [[4]],
        "state": "completed",
        "is_p2p": False,
        "frames": [],
    }
    for rank in range(2):
        entries = [{**entry, "record_id": at, "collective_seq_id": at + 1} for at in range(24_000)]
        dump = {
            "version": "2.5",
            "entries": entries,
            "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}},
            "pg_status": {},
        }
        (folder / f"dump_rank_{rank}").write_bytes(pickle.dumps(dump))
    assert sum(path.stat().st_size for path in folder.glob("dump_rank_*")) > 2 << 20
    done = run_there(run_command("diagnose", ".", "--json"), folder)
    assert not marker.exists()
    assert done.returncode in (0, 1), done.stderr
    assert json.loads(done.stdout)["run"]


def test_the_page_makes_its_files_there(hostile: tuple[Path, Path], tmp_path: Path) -> None:
    """The report that a viewer asks for is made by a process of our own."""
    from rankcall.serve.app import KINDS
    from rankcall.serve.downloads import Downloads

    folder, marker = hostile
    run = synthetic_run(tmp_path / "run", 2, 5).path
    before = Path.cwd()
    os.chdir(folder)
    downloads = Downloads()
    try:
        made = downloads._run(KINDS["summary"], run)
        assert json.loads(made.read_text())
    finally:
        downloads.close()
        os.chdir(before)
    assert not marker.exists()


# What starts a process or runs a file, and why nothing of the working directory is imported there.
# Those that begin with ``run_command`` or ``run_function`` need no reason.
STARTS = {
    ("_native.py", "command"): "the compiler",
    ("cli/doctor.py", "[*command, sys.executable, 'trial.py']"): "a program in its own folder",
    ("cli/environment.py", "str(_HOOK)"): "a file of ours, by its absolute path",
    ("cli/exec.py", "args"): "the user's command",
    ("imports/node.py", "[path, *options]"): "a program of the system, found on a fixed path",
    ("recovery/health.py", "command"): (
        "the user's command; or a file of ours by its path with -I, which imports nothing from here"
    ),
    ("run/profiles.py", "command"): "py-spy, which is no Python program",
    ("run/stacks.py", "[spy, 'dump', *options, '--pid', str(header.pid)]"): "py-spy",
    ("serve/downloads.py", "['nice', '-n', '10', *command] if shutil.which('nice') else command"): (
        "``run_command``, tried in test_the_page_makes_its_files_there"
    ),
    ("testing/rank.py", "job.file"): "the user's program",
    ("testing/spawn.py", "'forkserver'"): "the user's tests, in the user's folder",
}
_STARTING = {
    "subprocess": {"run", "Popen", "call", "check_call", "check_output", "getoutput"},
    "multiprocessing": {"Process", "Pool", "get_context", "Manager"},
    "runpy": {"run_path", "run_module"},
    "os": {"system", "popen", "posix_spawn", "posix_spawnp"},
    "asyncio": {"create_subprocess_exec", "create_subprocess_shell"},
    "pty": {"spawn"},
}


def starts_of(source: str) -> Iterator[str]:
    """Return the first argument of each call that starts a process or runs a file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            module, _, name = ast.unparse(node.func).rpartition(".")
            is_exec = module == "os" and name.startswith(("exec", "spawn"))
            if is_exec or name in _STARTING.get(module, ()) or name == "ProcessPoolExecutor":
                yield ast.unparse(node.args[0]) if node.args else ""


def test_every_interpreter_is_started_here() -> None:
    """A process that is started anywhere else is no Python of ours, or is the user's own."""
    found = {
        (str(path.relative_to(PACKAGE)), argument)
        for path in PACKAGE.rglob("*.py")
        for argument in starts_of(path.read_text())
        if not argument.startswith(("run_command(", "run_function("))
    }
    assert found == STARTS.keys()


def test_modules_that_start_processes_keep_their_names() -> None:
    """Under another name, a call that starts a process would not be found."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = {alias.name for alias in node.names if alias.asname}
                assert names.isdisjoint(_STARTING), path
            elif isinstance(node, ast.ImportFrom) and node.module in _STARTING:
                starting = _STARTING[node.module] & {alias.name for alias in node.names}
                assert not starting, (path, starting)
