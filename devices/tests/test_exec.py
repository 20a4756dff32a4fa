"""The command ``devices exec`` and the environment, with a job under torchrun as users start it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from simulated_devices import environment

DEVICES = [sys.executable, "-m", "simulated_devices"]


def run(*arguments: str, timeout: float = 120, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*DEVICES, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env=os.environ | variables,
    )


def test_torchrun_gives_right_numbers(tmp_path: Path) -> None:
    """`devices exec -- torchrun ...` runs an all_reduce of torch's own ProcessGroupNCCL."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, torch, torch.distributed as dist\n"
        "torch.cuda.set_device(int(os.environ['LOCAL_RANK']))\n"
        "dist.init_process_group('nccl')\n"
        "x = torch.full((3,), dist.get_rank() + 1.0, device='cuda')\n"
        "dist.all_reduce(x)\n"
        "assert x.tolist() == [3.0] * 3, x\n"
        "os.write(1, f'backend {dist.get_backend()}\\n'.encode())\n"
        "dist.destroy_process_group()\n"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = run("exec", "--gpus", "2", "--", *torchrun, str(program))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("backend nccl") == 2


def test_status_is_the_commands() -> None:
    """The exit status of `devices exec` is that of the command."""
    assert run("exec", "--", sys.executable, "-c", "raise SystemExit(7)").returncode == 7


def test_signals_reach_the_command() -> None:
    """The command takes the place of `devices exec`, so a signal ends it as if it had been started alone."""
    code = "import os; print(os.getpid(), flush=True); import signal; signal.pause()"
    process = subprocess.Popen([*DEVICES, "exec", "--", sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        assert int(process.stdout.readline()) == process.pid
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == -signal.SIGTERM
    finally:
        process.kill()
        process.wait()


def test_environment_function() -> None:
    """`environment()` is what `devices exec` sets: devices with the memory that was asked for."""
    code = "import torch; print(torch.cuda.device_count(), torch.cuda.mem_get_info(0)[1])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(gpus=3, memory="512MiB"),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == ["3", str(512 << 20)]


def test_no_command() -> None:
    """Without a command there is one sentence on stderr and status 2."""
    done = run("exec", "--")
    assert done.returncode == 2
    assert done.stderr.startswith("devices: there is no command to run")


def test_unknown_command() -> None:
    done = run("exec", "--", "no-such-program")
    assert done.returncode == 2
    assert "no-such-program was not found" in done.stderr


def test_bad_sizes() -> None:
    assert run("exec", "--memory", "much", "--", "true").returncode == 2
    assert run("exec", "--gpus", "65", "--", "true").returncode == 2
