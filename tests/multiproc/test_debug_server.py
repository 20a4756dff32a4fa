"""The page of torch's debug server shows the verdict on the running job."""

from __future__ import annotations

import html
import os
import pickle
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from ports import free_port

from rankcall.errors import RunNotFound
from rankcall.watch import DebugPage

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]

PROGRAM = Path(__file__).with_name("debug_server_program.py")
SECONDS = 120.0


@pytest.fixture
def debug_server() -> None:
    """Skip the test if torch has no debug server that takes pages."""
    for needed in ("jinja2", "tabulate"):  # by the server itself
        pytest.importorskip(needed)
    module = pytest.importorskip("torch.distributed.debug._frontend")
    if not hasattr(module, "DebugHandler"):
        pytest.skip("the debug server of this torch takes no pages")


@contextmanager
def running_job(folder: Path, page_port: int, method: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run two ranks, the second of which does not come, and yield the process of the first."""
    env = {
        **os.environ,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "RANKCALL_HANG_AFTER": "0.5",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(PROGRAM), str(folder / "run"), str(page_port), method]
    with ExitStack() as stack, (folder / "stderr").open("wb") as errors:
        ranks = []
        for rank in range(2):
            process = subprocess.Popen(
                command,
                env={**env, "RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            ranks.append(process)
        yield ranks[0]
        assert [process.wait(SECONDS) for process in ranks] == [0, 0]


def page_with(url: str, text: str) -> str:
    """Return the page once it contains ``text``."""
    until = time.monotonic() + SECONDS
    page = ""
    while time.monotonic() < until:
        try:
            with urllib.request.urlopen(url, timeout=SECONDS) as response:
                page = html.unescape(response.read().decode())
        except urllib.error.URLError as error:
            page = str(error)  # the server may not listen yet
        if text in page:
            return page
        time.sleep(0.2)
    raise AssertionError(page)


@pytest.mark.usefixtures("debug_server")
@pytest.mark.parametrize("method", ["spawn", pytest.param("fork", marks=pytest.mark.slow)])
def test_the_real_server_shows_the_verdict(tmp_path: Path, method: str) -> None:
    """The page names the rank that does not come, and where both ranks stand."""
    port = free_port() + 1
    with running_job(tmp_path, port, method) as rank_0:
        assert rank_0.stdout is not None
        assert rank_0.stdin is not None
        assert rank_0.stdout.readline() == b"issued\n", (tmp_path / "stderr").read_text()
        page = page_with(f"http://127.0.0.1:{port}/rankcall", "missing")
        rank_0.stdin.write(b"read\n")
        rank_0.stdin.flush()
    assert "Rank 1" in page
    assert "debug_server_program.py" in page
    assert re.search(r"\n +0 +alive +in all_reduce #2", page), page
    assert re.search(r"\n +1 +alive +left all_reduce #1", page), page
    assert '<a href="/rankcall">rankcall</a>' in page  # the server's own frame of all pages


def test_a_page_without_a_run_is_refused() -> None:
    """The error says when to create the page."""
    with pytest.raises(RunNotFound, match="after init_process_group"):
        DebugPage()


def test_a_copy_of_the_page_shows_the_same_run(tmp_path: Path) -> None:
    """The server's process gets a copy by pickle. The page says if a run cannot be read."""
    page = DebugPage(tmp_path / "absent")
    copy = pickle.loads(pickle.dumps(page))
    assert copy.run == page.run
    assert "no such run" in copy.text()
    assert copy.dump_filename() == "rankcall"
    assert copy.dump() == copy.text()
    assert [route.path for route in copy.routes()] == [link.path for link in copy.nav_links()]
