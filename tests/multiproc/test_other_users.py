"""What another user of the host can reach of a job's files, if the job has no umask."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from launch import Launch
from world import wait_until

DEADLINE_S = 240.0
JOB = """
import os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
for _ in range(3):
    dist.all_reduce(torch.ones(4))
deadline = time.monotonic() + 200
while dist.get_rank() == 0 and not os.path.exists("go") and time.monotonic() < deadline:
    time.sleep(0.05)
dist.all_reduce(torch.ones(4))
dist.destroy_process_group()
"""
# Gives up root's rights, then tries to open, to change and to add to everything below some folders.
OTHER_USER = """
import json, os, sys
from pathlib import Path
os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
reached = []
for top in sys.argv[1:]:
    for folder, folders, files in os.walk(top):
        if folder != top and os.access(folder, os.W_OK):
            reached.append(f"{folder} can be written")
        for name in files:
            path = os.path.join(folder, name)
            for mode, what in ((os.O_RDONLY, "read"), (os.O_WRONLY, "written")):
                try:
                    os.close(os.open(path, mode | os.O_NONBLOCK))
                    reached.append(f"{path} can be {what}")
                except OSError:
                    pass
print(json.dumps([os.getuid(), reached]))
"""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Return a folder that every user can enter; pytest's own can be entered by its user only."""
    folder = Path(tempfile.mkdtemp(prefix="rankcall-open-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.multiproc
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("named", [True, False], ids=["--run-dir", "default"])
def test_another_user_reaches_no_file_of_a_job(open_folder: Path, named: bool) -> None:
    """With umask 0, no file of a hung job can be read or written, and none of its folders.

    The run directory may be one that everybody can enter, and that was there before.
    """
    memory, scratch, work = (open_folder / name for name in ("memory", "scratch", "work"))
    for folder in (memory, scratch, work):
        folder.mkdir()
        folder.chmod(0o777)
    (work / "job.py").write_text(JOB)
    (work / "job.py").chmod(0o600)
    runs = work / "rankcall-runs"
    if named:
        runs = work / "run"
        runs.mkdir(mode=0o755)
    options = "--run-dir run " if named else ""
    options += "--capture=python --history --trace=all --hang-after 1 --serve 0 --nproc-per-node 2"
    command = f'umask 0; exec "$0" -m rankcall run {options} job.py'
    env = {"RANKCALL_SHM": str(memory), "TMPDIR": str(scratch)}
    job = Launch(*("bash", "-c", command, sys.executable), cwd=work, env=env, program=())
    try:
        # No "**": it would go through a hidden folder that gets its name in hangs/ meanwhile.
        kept = "hangs/*/stacks/*" if named else "*/hangs/*/stacks/*"
        wait_until(lambda: any(runs.glob(kept)), DEADLINE_S)
        during = reached(memory, scratch, work)
    finally:
        (work / "go").touch()
        (work / "go").chmod(0o600)
        ended = job.finish(DEADLINE_S)
    assert ended.status == 0, ended.err
    assert list(runs.glob("**/history/*.parquet")), "the job left no history"
    after = reached(memory, scratch, work)
    assert [line for line in (*during, *after) if "torchelastic" not in line] == []


def reached(*folders: Path) -> list[str]:
    """Return what another user can reach below some folders."""
    done = subprocess.run(
        [sys.executable, "-c", OTHER_USER, *folders],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    uid, lines = json.loads(done.stdout)
    assert uid == 65534
    return [str(line) for line in lines]
