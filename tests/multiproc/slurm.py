"""A Slurm cluster of one node, as root: munged, slurmctld and slurmd on loopback only."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ports import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sinfo")
SEARCH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"  # for the daemons
_START_S = 120.0
_CONFIG = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={control_port}
SlurmdPort={node_port}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire={credentials_s}
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=5
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
NodeName=localhost NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=localhost Default=YES MaxTime=INFINITE State=UP
"""


@contextmanager
def cluster(credentials_s: int = 120) -> Iterator[dict[str, str]]:
    """Start a cluster; yield what ``srun`` needs in its environment; end every daemon.

    Credentials are valid for so many seconds, and so long a job waits that was put back into the
    queue. 120 is Slurm's default.
    """
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # the path of a socket must be short
    folder.chmod(0o755)
    daemons: list[subprocess.Popen[bytes]] = []
    env = {**os.environ, "PATH": SEARCH, "SLURM_CONF": str(folder / "slurm.conf")}
    try:
        for name in ("state", "spool"):
            (folder / name).mkdir()
        (folder / "slurm.conf").write_text(
            _CONFIG.format(
                folder=folder,
                control_port=free_port(),
                node_port=free_port(),
                cpus=os.cpu_count(),
                credentials_s=credentials_s,
            )
        )
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        munge = [
            *("munged", "--foreground", "--force", f"--socket={folder}/munge.socket"),
            *(f"--key-file={key}", f"--pid-file={folder}/munged.pid"),
            *(f"--log-file={folder}/munged.log", f"--seed-file={folder}/munged.seed"),
        ]
        for command in (munge, ["slurmctld", "-D"], ["slurmd", "-D", "-N", "localhost"]):
            log = (folder / f"{command[0]}.out").open("wb")
            daemons.append(
                subprocess.Popen(
                    command,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )
            log.close()
            if command is munge:
                _wait(lambda: (folder / "munge.socket").exists(), folder)
        _wait(lambda: _is_idle(env), folder)
        yield {"SLURM_CONF": env["SLURM_CONF"]}
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            with suppress(subprocess.TimeoutExpired):
                daemon.wait(30)
            daemon.kill()
            daemon.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _is_idle(env: dict[str, str]) -> bool:
    asked = subprocess.run(
        ["sinfo", "-h", "-o", "%T"], env=env, capture_output=True, text=True, timeout=60
    )
    return asked.stdout.strip() == "idle"


def _wait(is_ready: Callable[[], bool], folder: Path) -> None:
    """Wait until a daemon is ready; raise with all logs after two minutes."""
    deadline = time.monotonic() + _START_S
    while not is_ready():
        if time.monotonic() > deadline:
            logs = "\n".join(f"{log}\n{log.read_text()[-3000:]}" for log in folder.glob("*.[lo]*"))
            raise AssertionError(f"the Slurm cluster does not start\n{logs}")
        time.sleep(0.1)
