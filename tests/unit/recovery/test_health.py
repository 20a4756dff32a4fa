"""The checks of a node before it takes part: each answers, whatever it meets."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from world import wait_until

from rankcall.recovery import health, leftovers
from rankcall.recovery.health import examine
from rankcall.run.recoveries import FILE_VARIABLE, Check, file_of
from rankcall.run.settle import settle


def checked(name: str, run_dir: Path, command: str = "true", seconds: float = 60.0) -> Check:
    """Return what one of the checks found."""
    file = file_of(run_dir, "node-a", os.getpid())
    (check,) = [
        check for check in examine(command, run_dir, "node-a", file, seconds) if check.name == name
    ]
    return check


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("true", ""),
        ('test "$RANKCALL" = 0', ""),  # it is not recorded into the run of the job
        ("echo first; echo 'fan is broken' >&2; exit 3", "exit status 3: fan is broken"),
        ("exit 4", "exit status 4"),
        ("kill -9 $$", "signal 9"),
        ("no-such-program-here", "exit status 127"),
        ("yes | head -c 1000000; exit 1", "exit status 1: y"),
    ],
)
def test_the_users_command(command: str, reason: str, tmp_path: Path) -> None:
    """Its status decides, and its last line says why."""
    check = checked("command", tmp_path, command)
    assert check.state == ("failed" if reason else "well")
    assert reason in check.text


def test_a_command_that_never_ends(tmp_path: Path) -> None:
    """It has a deadline."""
    check = checked("command", tmp_path, "sleep 1000", seconds=0.2)
    assert check.state == "failed"
    assert "has not ended after 0.2 s" in check.text


def test_nothing_is_left_of_a_command() -> None:
    """All that it has started ends with it, also what ignores SIGTERM."""
    command = "trap '' TERM; sleep 1000 & echo $!; sleep 1000"
    with subprocess.Popen(
        ["/bin/sh", "-c", command], stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        child = os.pidfd_open(int(process.stdout.readline()))
        health._end(process)
        waiting = select.poll()
        waiting.register(child, select.POLLIN)
        assert waiting.poll(30_000)
        os.close(child)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({}, ""),
        ({"f_bavail": 1}, "0 MiB of free space"),
        ({"f_favail": 0}, "no free inode"),
        ({"f_files": 0, "f_favail": 0}, ""),  # a file system that does not count them
        ({"f_blocks": 0, "f_bavail": 0}, ""),  # one that has no size
    ],
)
def test_space(
    values: dict[str, int], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system without space or inodes is not well."""
    usual = {"f_blocks": 9, "f_bavail": 1 << 20, "f_frsize": 4096, "f_files": 9, "f_favail": 9}
    monkeypatch.setattr(os, "statvfs", lambda place: SimpleNamespace(**{**usual, **values}))
    for name in ("disk", "memory"):
        check = checked(name, tmp_path)
        assert check.state == ("failed" if reason else "well")
        assert reason in check.text


def test_a_place_that_is_gone(tmp_path: Path) -> None:
    """An error is a reason, too."""
    check = checked("disk", tmp_path / "gone")
    assert check.state == "failed"
    assert "No such file" in check.text


def test_a_file_system_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check gives up at its deadline."""
    answer = threading.Event()
    monkeypatch.setattr(health, "_LOOK_S", 0.05)
    monkeypatch.setattr(health, "_why_full", lambda place: "" if answer.wait(30) else "late")
    assert "does not answer" in checked("disk", tmp_path).text
    answer.set()


def test_no_place_for_a_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be checked is not said to have failed."""

    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(health.tempfile, "TemporaryFile", fail)
    for name in ("command", "device"):
        check = checked(name, tmp_path)
        assert (check.state, check.text) == (
            "absent",
            "this cannot be checked: No space left on device",
        )


RANK = """
import os, sys, time
os.environ.update(RANK="3", WORLD_SIZE="4", RANKCALL_HOST="node-a")
import rankcall
import torch.distributed as dist
with rankcall.enable(sys.argv[1], capture="python"):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    print("ready", flush=True)
    time.sleep(1000)
"""


def test_a_rank_that_cannot_be_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of the attempt before is ended; one that no signal ends keeps the node out."""
    file = file_of(tmp_path, "node-a", os.getpid())
    with subprocess.Popen(
        [sys.executable, "-c", RANK, str(tmp_path)],
        env={**os.environ, FILE_VARIABLE: str(file)},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            with monkeypatch.context() as patch:  # as in uninterruptible sleep
                patch.setattr(leftovers.signal, "pidfd_send_signal", lambda *_: None)
                patch.setattr(leftovers, "_ENDS_IN_S", 0.0)
                check = checked("leftovers", tmp_path)
            assert check.state == "failed"
            assert f"cannot be ended (pid {process.pid})" in check.text
            assert checked("leftovers", tmp_path).state == "well"
            assert process.wait(60) == -9
        finally:
            process.kill()
    settle(tmp_path)


# A driver of NVIDIA's with as many devices as the environment says. Device 1 is as it says, too.
DRIVER = r"""
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static const char* how(void) { const char* text = getenv("FAKE_DEVICE"); return text ? text : ""; }
static int current;
static void hang(void) {
    close(open(getenv("FAKE_HUNG"), O_WRONLY | O_CREAT, 0600));
    sleep(1000);
}
#ifdef CUDA
static uint32_t memory[1024];
int cuInit(unsigned flags) {
    if (!strcmp(how(), "driver")) return 999;
    if (!strcmp(how(), "hangs at once")) hang();
    return getenv("FAKE_DEVICES") ? 0 : 100;
}
int cuGetErrorName(int code, const char** name) { *name = "CUDA_ERROR_SOMETHING"; return 0; }
int cuDeviceGetCount(int* count) { *count = atoi(getenv("FAKE_DEVICES")); return 0; }
int cuDeviceGet(int* device, int number) { *device = number; return 0; }
int cuDeviceGetPCIBusId(char* id, int size, int device) {
    id[0] = '0' + device;
    id[1] = 0;
    return 0;
}
int cuCtxCreate_v2(void** context, unsigned flags, int device) {
    current = device;
    if (device == 1 && !strcmp(how(), "hangs")) hang();
    return device == 1 && !strcmp(how(), "context") ? 2 : 0;
}
int cuCtxDestroy_v2(void* context) { return 0; }
int cuMemAlloc_v2(uint64_t* place, size_t size) { *place = (uint64_t)memory; return 0; }
int cuMemsetD32_v2(uint64_t place, uint32_t word, size_t count) {
    for (size_t at = 0; at < count; ++at) ((uint32_t*)place)[at] = word;
    return 0;
}
int cuMemcpyDtoH_v2(void* to, uint64_t from, size_t size) {
    memcpy(to, (void*)from, size);
    if (current == 1 && !strcmp(how(), "flips")) ((char*)to)[77] ^= 4;
    return 0;
}
#else
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned* count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char* id, void** handle) {
    current = id[0] - '0';
    return 0;
}
int nvmlDeviceGetMemoryInfo(void* handle, void* memory) {
    if (current == 1 && !strcmp(how(), "may not ask")) return 4;
    return current == 1 && !strcmp(how(), "lost") ? 15 : 0;
}
const char* nvmlErrorString(int code) { return "GPU is lost"; }
#endif
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a driver."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER)
    for name, flags in (("libcuda.so.1", ["-DCUDA"]), ("libnvidia-ml.so.1", [])):
        command = [compiler, "-shared", "-fPIC", *flags, "-o", name, "driver.c"]
        subprocess.run(command, cwd=folder, check=True, timeout=120)
    return folder


@pytest.mark.parametrize(
    ("variables", "state", "words"),
    [
        ({"FAKE_DEVICES": "2"}, "well", "2 answered"),
        ({"FAKE_DEVICES": "0"}, "well", "0 answered"),
        ({"FAKE_DEVICES": "1", "FAKE_DEVICE": "flips"}, "well", "1 answered"),
        ({"FAKE_DEVICES": "2", "FAKE_DEVICE": "may not ask"}, "well", "2 answered"),
        (
            {"FAKE_DEVICES": "3", "FAKE_DEVICE": "lost"},
            "failed",
            "device 1: NVML: GPU is lost (15)",
        ),
        (
            {"FAKE_DEVICES": "2", "FAKE_DEVICE": "context"},
            "failed",
            "device 1: cuCtxCreate: CUDA_ERROR_SOMETHING (2)",
        ),
        (
            {"FAKE_DEVICES": "2", "FAKE_DEVICE": "flips"},
            "failed",
            "device 1: its memory does not keep",
        ),
        (
            {"FAKE_DEVICES": "2", "FAKE_DEVICE": "driver"},
            "failed",
            "cuInit: CUDA_ERROR_SOMETHING (999)",
        ),
        ({}, "failed", "CUDA finds none of the 2 devices"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "absent", "no device"),
    ],
)
def test_devices(
    variables: dict[str, str],
    state: str,
    words: str,
    driver: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each is asked for its state, and its memory is written and read."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in {"LD_LIBRARY_PATH": str(driver), **variables}.items():
        monkeypatch.setenv(name, value)
    check = checked("device", tmp_path)
    assert (check.state, words in check.text) == (state, True), check


@pytest.mark.parametrize(
    ("how", "named"), [("hangs", "device 1: "), ("hangs at once", "the driver of the devices: ")]
)
def test_a_device_that_does_not_answer(
    how: str, named: str, driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its check is ended at the deadline, and the device is named."""
    hung, ends = tmp_path / "hung", subprocess.Popen.wait
    variables = {"LD_LIBRARY_PATH": driver, "FAKE_DEVICES": "2", "FAKE_DEVICE": how}
    for name, value in {**variables, "FAKE_HUNG": hung}.items():
        monkeypatch.setenv(name, str(value))

    def wait(process: subprocess.Popen[bytes], timeout: float) -> int:
        """Let the deadline expire once the device hangs, however slow this machine is."""
        if timeout == health._END_S:
            return ends(process, timeout)
        wait_until(hung.exists)
        raise subprocess.TimeoutExpired(process.args, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait)
    check = checked("device", tmp_path)
    assert (check.state, check.text) == ("failed", f"{named}the check has not ended after 60 s")


def test_a_machine_without_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not said to have failed."""
    from rankcall.recovery import device_check

    if device_check._library("libcuda.so.1") is not None:
        pytest.skip("this machine has devices")
    check = checked("device", tmp_path)
    assert (check.state, check.text) == ("absent", "this node has no CUDA driver")
