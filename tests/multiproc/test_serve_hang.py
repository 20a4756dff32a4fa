"""A hang of the digits example on the page of ``rankcall run --serve``, and the page's end."""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="needs rankcall[serve]")
pytest.importorskip("uvicorn", reason="needs rankcall[serve]")
if importlib.util.find_spec("sklearn") is None:  # an import would take a second
    pytest.skip("needs rankcall[examples]", allow_module_level=True)

ROOT = Path(__file__).parents[2]
RANKCALL = Path(sys.executable).with_name("rankcall")
DEADLINE_S = 240.0


def ask(port: int, token: str, path: str) -> Any:
    """Return a page's JSON, or None if it is not there yet."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        text = answer.read()
        return json.loads(text) if answer.status == 200 else None
    finally:
        connection.close()


@pytest.mark.multiproc
@pytest.mark.timeout(500)
def test_a_hang_is_on_the_page_with_line_and_stacks(tmp_path: Path) -> None:
    """The page names the rank and its line, and its stack stands in a row of its own.

    The page ends with the launcher.
    """
    log = tmp_path / "err"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with log.open("w") as err:
        job = subprocess.Popen(
            [
                *(str(RANKCALL), "run", "--serve", "0", "--run-dir", str(tmp_path / "run")),
                *("--hang-after", "1", "--nproc-per-node", "2"),
                *(str(ROOT / "examples/train_digits.py"), "--slow-rank", "1"),
                *("--slow-ms", "3600000"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=err,
            env=env,
        )
    try:
        deadline = time.monotonic() + DEADLINE_S
        port, token, diagnosis = 0, "", None
        while not (diagnosis and diagnosis["findings"] and diagnosis["stack_classes"]):
            assert time.monotonic() < deadline, log.read_text()
            assert job.poll() is None, log.read_text()
            link = r"the live page: http://127\.0\.0\.1:(\d+)/#token=(\S+)\n"
            match = re.search(link, log.read_text())
            if match:
                port, token = int(match[1]), match[2]
                diagnosis = ask(port, token, "/api/diagnosis")
            time.sleep(0.2)
        first = diagnosis["findings"][0]
        assert (first["kind"], first["ranks"]) == ("missing", [1])
        assert "train_digits.py:" in first["call_site"]
        rows = [stack_class["ranks"] for stack_class in diagnosis["stack_classes"]]
        assert [1] in rows
        names = [frame["name"] for frame in diagnosis["stack_classes"][rows.index([1])]["frames"]]
        assert "train_epoch" in names
    finally:
        job.send_signal(signal.SIGTERM)
        try:
            job.wait(120)
        except subprocess.TimeoutExpired:
            job.kill()
            job.wait(120)
    with pytest.raises(OSError, match=r"refused|reset"):
        ask(port, token, "/api/diagnosis")


@pytest.mark.slow
@pytest.mark.multiproc
def test_a_page_that_cannot_start_does_not_stop_the_job(tmp_path: Path) -> None:
    """If the port is taken, the job runs without a page, and exits with its own status."""
    script = tmp_path / "job.py"
    script.write_text("import torch, sys; sys.exit(0)\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = subprocess.run(
            [
                *(str(RANKCALL), "run", "--serve", str(taken.getsockname()[1])),
                *("--run-dir", str(tmp_path / "run"), "--nproc-per-node", "1", str(script)),
            ],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    assert done.returncode == 0, done.stderr


@pytest.mark.multiproc
def test_an_address_that_is_none(tmp_path: Path) -> None:
    """A wrong address is an error of usage, before the job starts."""
    script = tmp_path / "job.py"
    script.write_text("open('ran', 'w')\n")
    done = subprocess.run(
        [str(RANKCALL), "run", "--serve", "here", "--nproc-per-node", "1", str(script)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 2
    assert "neither a port nor HOST:PORT" in done.stderr
    assert not (tmp_path / "ran").exists()
