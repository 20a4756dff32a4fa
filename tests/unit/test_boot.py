"""The boot folder's sitecustomize: whom it arms, when, and that it stays out of the way.

A stand-in torch and a stand-in rankcall are put on the path, so that a case takes milliseconds;
tests/multiproc/test_launcher.py does the same with the real ones.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import rankcall

BOOT = Path(rankcall.__file__).parent / "_boot"

TORCH = {
    # As in torch: distributed_c10d is complete long before torch is.
    "torch/__init__.py": "import torch.distributed\ncomplete = True\n",
    "torch/distributed/__init__.py": "from torch.distributed import distributed_c10d\n",
    "torch/distributed/distributed_c10d.py": "value = 42\n",
}
RANKCALL = {
    "rankcall/__init__.py": "",
    "rankcall/watch.py": (
        "import os, sys\n"
        "def arm():\n"
        "    torch = sys.modules['torch']\n"
        "    c10d = sys.modules['torch.distributed.distributed_c10d']\n"
        "    print('armed', os.getpid(), torch.complete, c10d.value, flush=True)\n"
    ),
}


def write(folder: Path, files: dict[str, str]) -> Path:
    """Write files below a folder and return it."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


class Python:
    """Starts Pythons as workers below ``rankcall run`` are started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = [BOOT, write(folder / "stand-ins", {**TORCH, **RANKCALL})]
        self.env = {"RANKCALL_ARM": "1", "PATH": os.environ["PATH"]}

    def run(self, *args: str | Path, program: str = sys.executable) -> tuple[list[str], str]:
        """Return stdout's lines, with the program's own pid as ``me``, and stderr."""
        joined = os.pathsep.join(map(str, self.path))
        process = subprocess.Popen(
            [program, *map(str, args)],
            env={**self.env, "PYTHONPATH": joined},
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            out, err = process.communicate(timeout=30)
        finally:
            process.kill()
            process.wait()
        return [line.replace(str(process.pid), "me") for line in out.splitlines()], err

    def code(self, text: str) -> tuple[list[str], str]:
        """Run a script with this text."""
        (self.folder / "script.py").write_text(text)
        return self.run("script.py")


@pytest.fixture
def python(tmp_path: Path) -> Python:
    """Give a Python with stand-ins on its path."""
    return Python(tmp_path)


def test_arms_once_torch_is_complete(python: Python) -> None:
    """Recording begins after both torch and distributed_c10d, and once."""
    out, err = python.code("import torch, torch.distributed\nimport torch\nprint(__name__)")
    assert (out, err) == (["armed me True 42", "__main__"], "")


def test_does_nothing_without_torch(python: Python) -> None:
    """A process that never imports torch imports nothing of ours either."""
    out, err = python.code(
        "import sys; print([m for m in sys.modules if m.startswith(('rankcall', 'numpy'))])"
    )
    assert (out, err) == (["[]"], "")


def test_does_nothing_unasked(python: Python) -> None:
    """Without RANKCALL_ARM the folder on the path changes nothing."""
    del python.env["RANKCALL_ARM"]
    out, err = python.code("import torch, os; print('RANKCALL_WORKER' in os.environ)")
    assert (out, err) == (["False"], "")


def test_leaves_no_trace_on_the_path(python: Python) -> None:
    """The boot folder leaves sys.path, the finder leaves sys.meta_path, loaders are unchanged."""
    out, err = python.code(
        "import sys, torch\n"
        "print([p for p in sys.path if p.endswith('_boot')])\n"
        "print([f for f in sys.meta_path if '_Finder' in repr(f)])\n"
        "print('exec_module' in vars(torch.__spec__.loader), torch.__loader__.name)\n"
    )
    assert (out, err) == (["armed me True 42", "[]", "[]", "False torch"], "")


def test_module_and_safe_path(python: Python) -> None:
    """python -m works, under PYTHONSAFEPATH too."""
    write(python.folder / "stand-ins", {"job.py": "import torch; print(__name__)"})
    python.env["PYTHONSAFEPATH"] = "1"
    assert python.run("-m", "job") == (["armed me True 42", "__main__"], "")


def test_chains_to_another_sitecustomize(python: Python) -> None:
    """The sitecustomize that ours hides runs, under its own name and with its own file."""
    other = write(python.folder / "other", {"sitecustomize.py": "print('other', __name__)\n"})
    python.path.append(other)
    out, err = python.code("import sys; print(sys.modules['sitecustomize'].__file__)\nimport torch")
    assert out == ["other sitecustomize", str(other / "sitecustomize.py"), "armed me True 42"]
    assert err == ""


def test_another_sitecustomize_that_imports_torch(python: Python) -> None:
    """Recording is armed even where the hidden sitecustomize imports torch."""
    python.path.append(write(python.folder / "other", {"sitecustomize.py": "import torch\n"}))
    assert python.code("") == (["armed me True 42"], "")


def test_another_sitecustomize_that_is_broken(python: Python) -> None:
    """A broken one is reported by Python as without us, and the script runs, recorded."""
    python.path.append(write(python.folder / "other", {"sitecustomize.py": "import not_there\n"}))
    out, err = python.code("import torch; print('ran')")
    assert out == ["armed me True 42", "ran"]
    assert "not_there" in err


def test_children_do_not_record(python: Python) -> None:
    """Forked, spawned, fork-served and started children of a worker are not workers."""
    out, err = python.code(
        "import multiprocessing as mp, subprocess, sys\n"
        "def child(): import torch\n"
        "if __name__ == '__main__':\n"
        "    for how in ('fork', 'spawn', 'forkserver'):\n"
        "        process = mp.get_context(how).Process(target=child)\n"
        "        process.start(); process.join(); print(how, process.exitcode, flush=True)\n"
        "    subprocess.run([sys.executable, '-c', 'import torch'], check=True)\n"
        "    import torch\n"
    )
    assert (out, err) == (["fork 0", "spawn 0", "forkserver 0", "armed me True 42"], "")


def test_a_forked_child_of_a_waiting_worker(python: Python) -> None:
    """A child forked before torch was imported does not take its parent's place."""
    out, err = python.code("import os\npid = os.fork()\nimport torch\nif pid: os.waitpid(pid, 0)\n")
    assert (out, err) == (["armed me True 42"], "")


def test_a_python_that_bash_started(python: Python) -> None:
    """--no-python bash -c 'python ...': the shell's first Python is the worker, exec or fork."""
    code = f"{sys.executable} -c 'import torch, os; print(os.getpid())'"
    armed, pid = python.run("-c", f"{code}; true", program="bash")[0]
    assert armed == f"armed {pid} True 42"
    assert python.run("-c", f"exec {code}", program="bash")[0] == ["armed me True 42", "me"]


def test_reexec_keeps_the_claim(python: Python) -> None:
    """A worker that replaces itself (same pid) is still the worker."""
    out, err = python.code(
        "import os, sys\n"
        "if 'again' not in sys.argv:\n"
        "    os.execv(sys.executable, [sys.executable, __file__, 'again'])\n"
        "import torch\n"
    )
    assert (out, err) == (["armed me True 42"], "")


def test_a_launcher_inside_a_worker(python: Python) -> None:
    """A process that takes RANKCALL_ARM away before importing torch is not armed."""
    out, err = python.code("import os; del os.environ['RANKCALL_ARM']; import torch")
    assert (out, err) == ([], "")


@pytest.mark.parametrize(
    ("session", "message"),
    [
        ("def arm(): raise OSError('no room\\nat all')", "OSError: no room at all"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        (None, "ModuleNotFoundError: No module named 'rankcall"),
    ],
)
def test_a_failure_is_one_line(python: Python, session: str | None, message: str) -> None:
    """Every error while arming is one line on stderr, and the script runs."""
    file = python.folder / "stand-ins/rankcall/watch.py"
    if session is None:
        file.unlink()
    else:
        file.write_text(session)
    out, err = python.code("import torch; print(torch.complete)")
    assert out == ["True"]
    assert err.startswith(f"rankcall: not recording: {message}")
    assert err.count("\n") == 1


def test_a_torch_that_fails_once(python: Python) -> None:
    """An import that fails and is tried again arms at the second try."""
    write(
        python.folder / "stand-ins",
        {"torch/__init__.py": "import torch.distributed, sys\nsys.flag\ncomplete = True\n"},
    )
    out, err = python.code(
        "import sys\n"
        "try:\n    import torch\nexcept AttributeError: print('failed')\n"
        "sys.flag = 1\n"
        "import torch\n"
    )
    assert (out, err) == (["failed", "armed me True 42"], "")
