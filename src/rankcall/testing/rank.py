"""One rank of ``spawn_ranks``: the program of its process, and the output for the parent."""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import importlib
import importlib.util
import json
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from rankcall.testing.faults import FaultPlan

_PR_SET_PDEATHSIG = 1


@dataclass
class Job:
    """The work of a rank's process. The parent pickles it."""

    target: Callable[..., Any] | Path | None
    args: tuple[Any, ...]
    init: bool
    timeout: float
    folder: str
    run_dir: str
    faults: FaultPlan | None
    watch: dict[str, Any] | None
    file: str = field(init=False)  # the file with the function, or the script
    name: str = field(init=False)  # the function's name; "" for a script
    module: str = field(init=False)

    def __post_init__(self) -> None:
        """Replace the target by its file and name: pickle cannot import a test file by name."""
        target, self.target = self.target, None
        if isinstance(target, Path):
            self.file, self.name, self.module = str(target), "", ""
        else:
            assert target is not None
            if "." in target.__qualname__ or not Path(target.__code__.co_filename).exists():
                raise ValueError(f"{target.__qualname__} is not a function of a module in a file")
            self.file, self.name = target.__code__.co_filename, target.__name__
            self.module = target.__module__


class RankOutput(NamedTuple):
    """The output of a rank."""

    value: Any
    error: str | None
    stdout: str
    stderr: str


def read_output(folder: Path, rank: int) -> RankOutput:
    """Return the output that a rank left in the folder of its job."""

    def read(name: str) -> str:
        file = folder / f"{name}.{rank}"
        return file.read_text(errors="replace") if file.exists() else ""

    result = json.loads(read("result") or '{"error": null, "value": null}')
    return RankOutput(result["value"], result["error"], read("stdout"), read("stderr"))


def be_rank(
    job: Job, rank: int, world_size: int, env: dict[str, str | None], path: tuple[str, ...]
) -> None:
    """Run as one rank, in its own process.

    Args:
        job: The work.
        rank: The rank.
        world_size: The number of ranks.
        env: Environment variables to set; None removes one.
        path: The parent's ``sys.path``.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # end with the parent
    folder = Path(job.folder)
    for fd, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(folder / f"{name}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, fd)
        os.close(file)
    faulthandler.enable(file=2, all_threads=True)
    _set_environment(rank, world_size, env)
    sys.path[:] = path
    try:
        text = json.dumps({"value": _call(job, rank, world_size), "error": None})
    except SystemExit as left:
        text = json.dumps({"value": None, "error": traceback.format_exc() if left.code else None})
        raise
    except BaseException:
        text = json.dumps({"value": None, "error": traceback.format_exc()})
        raise
    finally:
        (folder / f"result.{rank}").write_text(text)
        atexit._run_exitfuncs()  # multiprocessing ends its children with os._exit


def _set_environment(rank: int, world_size: int, env: dict[str, str | None]) -> None:
    ours = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    for key, value in {**ours, **env}.items():
        if value is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = value


def _call(job: Job, rank: int, world_size: int) -> Any:
    if job.run_dir:
        os.environ["RANKCALL_RUN_DIR"] = job.run_dir
    if job.faults is not None:
        os.environ["RANKCALL_CAPTURE"] = "python"
        job.faults.arm(rank)
    if job.run_dir:
        from rankcall.job.attach import enable

        enable()
    if job.watch is not None:
        from rankcall import watch

        watch.start(**job.watch)
    if not job.name:
        sys.argv = [job.file, *map(str, job.args)]
        runpy.run_path(job.file, run_name="__main__")
        return None
    function = getattr(_module(job), job.name)
    if not job.init:
        return function(rank, world_size, *job.args)
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=job.timeout))
    value = function(rank, world_size, *job.args)
    if dist.is_initialized():
        dist.destroy_process_group()
    return value


def _module(job: Job) -> Any:
    """Import a function's module by name, or by path if it is a test file without a name."""
    if job.module != "__main__":
        try:
            module = importlib.import_module(job.module)
            if getattr(module, "__file__", None) == job.file:
                return module
        except ImportError:
            pass
    name = Path(job.file).stem
    spec = importlib.util.spec_from_file_location(name, job.file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
