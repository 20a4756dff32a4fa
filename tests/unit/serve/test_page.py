"""``rankcall serve``: what the page and its JSON say, and what happens to the run meanwhile."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from liveruns import into_shared_memory, live_run
from serving import DEADLINE_S, RANKCALL, Served

from rankcall.analysis.recent_figures import Figures
from rankcall.serve import ranks_section, shared_look
from rankcall.serve.history import History
from rankcall.serve.live_run import ENDED, LIVE, LOST, WAITING, LiveRun, Look
from rankcall.serve.shared_look import SharedLook
from rankcall.serve.view import ranks
from rankcall.testing.model import Op, Planted
from rankcall.testing.synthetic import PROGRAM, synthetic_run

pytest.importorskip("starlette", reason="needs rankcall[serve]")
pytest.importorskip("uvicorn", reason="needs rankcall[serve]")


@pytest.fixture
def someone() -> Iterator[subprocess.Popen[bytes]]:
    """Return a process that is there, until the test is over."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait(DEADLINE_S)


def until(true: Callable[[], bool]) -> None:
    """Wait until something is true."""
    deadline = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def diagnosed(run: Path) -> dict[str, object]:
    """Return what ``rankcall diagnose --json`` prints."""
    done = subprocess.run(
        [str(RANKCALL), "diagnose", "--json", str(run)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    return dict(json.loads(done.stdout))


def causes(found: dict[str, object]) -> list[object]:
    """Return the findings without the times, which go on."""
    findings = found["findings"]
    assert isinstance(findings, list)
    keys = ("kind", "ranks", "victims", "op", "seq", "call_site", "confidence")
    return [[finding[key] for key in keys] for finding in findings]


def test_the_verdict_is_that_of_diagnose(tmp_path: Path, someone: subprocess.Popen[bytes]) -> None:
    """Page and JSON name the same rank, op and line as ``rankcall diagnose``, with its schema."""
    run = live_run(tmp_path, 8, someone.pid)
    with Served(run) as served:
        page, diagnosis = served.ask(), served.ask("/api/diagnosis").json
        expected = diagnosed(run)
        assert served.end() == 0
    assert page.status == 200
    assert "Rank 2 did not come" in page.text
    assert "train.py:10" in page.text
    assert set(expected) <= set(diagnosis)
    assert causes(diagnosis) == causes(expected) != []
    assert diagnosis["state"] == "live"


def test_the_page_fetches_nothing_from_elsewhere(tmp_path: Path) -> None:
    """No address of another server is in it, and its policy lets nothing else be loaded."""
    synthetic_run(tmp_path / "run", 4, 50)
    with Served(tmp_path / "run") as served:
        page = served.ask()
    assert "http://" not in page.text.replace("http://www.w3.org", "")
    assert "https://" not in page.text
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "'unsafe-inline'" not in policy.partition("script-src")[2]
    assert page.headers["x-content-type-options"] == "nosniff"
    assert page.headers["cache-control"] == "no-store"


def test_no_other_file_is_served(tmp_path: Path) -> None:
    """Addresses that are not the page's own are not found, however they are written."""
    synthetic_run(tmp_path / "run", 2, 20)
    with Served(tmp_path / "run") as served:
        for path in ("/rings", "/../run.json", "/%2e%2e/etc/passwd", "//etc/passwd", "/docs"):
            assert served.ask(path).status == 404
        assert served.ask("/", "DELETE").status == 405
        assert served.ask("/api/diagnosis", "POST", Origin=served.url[:-1]).status == 405


def test_a_run_that_comes_and_goes(tmp_path: Path, someone: subprocess.Popen[bytes]) -> None:
    """Before the first record the page waits; if the run disappears, it keeps the last verdict."""
    run = tmp_path / "run"
    run.mkdir()
    looked = LiveRun(run)
    first = looked.look()
    assert (first.state, first.diagnosis) == (WAITING, None)
    assert "nothing was recorded yet" in first.problem
    run.rmdir()
    live_run(tmp_path, 4, someone.pid)
    assert (looked.look().state, looked.look().hangs) == (LIVE, True)
    shutil.rmtree(run)
    lost = looked.look()
    assert (lost.state, lost.hangs) == (LOST, True)
    assert "no such run" in lost.problem
    live_run(tmp_path, 4, someone.pid)
    assert looked.look().state == LIVE


def test_a_job_that_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a run's name, the page follows ``latest``; nothing of the old run is left."""
    monkeypatch.chdir(tmp_path)
    runs = tmp_path / "rankcall-runs"
    synthetic_run(runs / "first", 4, 40, planted=Planted("dead", (1,), 20))
    looked = LiveRun()
    assert (looked.look().state, looked.look().hangs) == (ENDED, True)
    synthetic_run(runs / "second", 4, 40)
    look = looked.look()
    assert (look.state, look.hangs, Path(look.run).name) == (ENDED, False, "second")


def test_the_page_of_a_live_job_stays_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, someone: subprocess.Popen[bytes]
) -> None:
    """When the job that it took from elsewhere ends, an older run here does not take its place."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANKCALL_SHM", str(tmp_path / "memory"))
    (tmp_path / "memory").mkdir()
    synthetic_run(tmp_path / "rankcall-runs/old", 2, 20)
    run = into_shared_memory(live_run(tmp_path / "elsewhere", 4, someone.pid))
    looked = LiveRun()
    assert (looked.look().state, looked.look().run) == (LIVE, str(run))
    someone.kill()
    someone.wait(DEADLINE_S)
    assert looked.look().run == str(run)
    synthetic_run(tmp_path / "rankcall-runs/new", 2, 20)
    assert Path(looked.look().run).name == "new"


def test_a_run_that_is_over_is_read_once(tmp_path: Path) -> None:
    """Its diagnosis is kept until a file of the run changes."""
    run = tmp_path / "run"
    synthetic_run(run, 4, 40, planted=Planted("dead", (1,), 20))
    looked = LiveRun(run)
    first = looked.look().diagnosis
    assert looked.look().diagnosis is first
    next((run / "rings").iterdir()).unlink()
    assert looked.look().diagnosis is not first


def test_only_stacks_of_this_hang_are_evidence(
    tmp_path: Path, someone: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stacks that were taken during the hang name the rank's line; older ones are only shown."""
    at = 'Current thread 0x1:\n  File "/home/ada/data.py", line 7 in read'
    monkeypatch.setattr("rankcall.serve.live_run.request_stacks", lambda headers: {2: at})
    run, now = live_run(tmp_path, 8, someone.pid), [1e9]
    looked = LiveRun(run, clock=lambda: now[0])
    assert looked.take_stacks().by_rank == {2: at}
    during = looked.look()
    now[0] += 3600.0
    after = looked.look()
    for look in (during, after):
        assert look.stacks is not None
        assert look.stacks.by_rank == {2: at}
        assert look.diagnosis is not None
    assert "data.py:7 in read" in during.diagnosis.findings[0].summary
    assert "data.py" not in after.diagnosis.findings[0].summary


def test_an_archive(tmp_path: Path) -> None:
    """An archive of a run is shown like the run."""
    synthetic_run(tmp_path / "run", 4, 40, planted=Planted("dead", (1,), 20))
    archive = tmp_path / "run.tar.zst"
    subprocess.run(
        [str(RANKCALL), "collect", str(tmp_path / "run"), "-o", str(archive)],
        check=True,
        timeout=DEADLINE_S,
        capture_output=True,
    )
    looked = LiveRun(archive)
    first = looked.look()
    assert (first.state, first.hangs) == (ENDED, True)
    assert looked.look().diagnosis is first.diagnosis


def test_damaged_rings_do_not_end_the_page(tmp_path: Path) -> None:
    """A run of which nothing can be read is named as such."""
    rings = tmp_path / "run" / "rings"
    rings.mkdir(parents=True)
    (rings / "rank-00000.ring").write_bytes(b"RANKCALL" + b"\xff" * 5000)
    with Served(tmp_path / "run") as served:
        page = served.ask()
        assert served.ask("/api/diagnosis").status == 503
    assert page.status == 200
    assert "No data yet" in page.text
    assert "ring schema" in page.text


class CountedRun(LiveRun):
    """A run whose looks are counted. ``gate`` holds a look up."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = 0
        self.gate = threading.Event()

    def look(self) -> Look:
        """Count."""
        self.gate.wait(DEADLINE_S)
        self.looks += 1
        return Look(WAITING, 0.0, problem=f"look {self.looks}")


def test_one_look_serves_all_viewers() -> None:
    """200 viewers at the same moment cost one look; it is reused until it is too old."""
    run, now = CountedRun(), [0.0]

    async def many() -> None:
        shared = SharedLook(run, clock=lambda: now[0])
        asking = [asyncio.create_task(shared.newest()) for _ in range(200)]
        await asyncio.sleep(0)
        run.gate.set()
        assert {update.number for update in await asyncio.gather(*asking)} == {1}
        assert (await shared.newest()).number == 1
        now[0] += shared.pause + 0.1
        assert (await shared.newest()).number == 2

    asyncio.run(many())
    assert run.looks == 2


def test_a_viewer_that_leaves_does_not_stop_the_look() -> None:
    """The others get the look that a viewer who has left began."""
    run = CountedRun()

    async def leave() -> None:
        shared = SharedLook(run)
        first, other = (asyncio.create_task(shared.newest()) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.sleep(0)
        run.gate.set()
        assert (await other).number == 1

    asyncio.run(leave())
    assert run.looks == 1


def test_files_that_do_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a look hangs, the page says so instead of hanging as well."""
    monkeypatch.setattr(shared_look, "LOOK_S", 0.05)
    run = CountedRun()

    async def ask() -> None:
        shared = SharedLook(run)
        update = await shared.newest()
        assert "have not answered" in update.sections["verdict"]
        run.gate.set()

    asyncio.run(ask())


def test_only_what_has_changed_is_sent() -> None:
    """An event has the sections that a viewer does not know yet; equal viewers share it."""
    run = CountedRun()
    run.gate.set()

    async def first() -> None:
        update = await SharedLook(run).newest()
        whole = json.loads(update.event({}).partition(b"data: ")[2])
        assert set(whole) == set(update.sections)
        known = {**update.digests, "verdict": "another"}
        assert set(json.loads(update.event(known).partition(b"data: ")[2])) == {"verdict"}
        assert update.event(known) is update.event(dict(known))

    asyncio.run(first())


def test_rows_that_nobody_has(tmp_path: Path) -> None:
    """Viewers who ask for rows that are none see hosts, and cannot fill the memory with names."""
    synthetic_run(tmp_path / "run", 4, 20, hosts=2)

    async def ask() -> None:
        shared = SharedLook(LiveRun(tmp_path / "run"), clock=lambda: 0.0)
        by_host = await shared.folded("")
        asked = {id(await shared.folded(f"tp{number}")) for number in range(100)}
        assert len(asked) < 20
        assert (await shared.folded("tp1")).digests == by_host.digests

    asyncio.run(ask())


def test_a_row_of_a_large_job_is_a_square(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If ranks are too many, a square is a row of them, as the worst stands; also for those left.

    Rank 5 does not come: it is the second member of the second group of its dimension.
    """
    monkeypatch.setattr(ranks_section, "_MOST_CELLS", 4)
    groups = {"mesh_tp": [[0, 1], [4, 5]]}
    program = (Op("all_gather", 1 << 16, family="mesh_tp"), *PROGRAM)
    fault = Planted("missing", (5,), 41)
    synthetic_run(tmp_path / "run", 8, 60, planted=fault, groups=groups, program=program)
    look = LiveRun(tmp_path / "run").look()
    assert 'data-r="node-0: 1 of 8 ranks named by the verdict"' in ranks(look)
    by_place = ranks(look, "tp: places in the groups")
    labels = re.findall(r'<i class="cell (\w+)" data-r="([^"]+)"', by_place)
    assert labels == [
        ("call", "tp 0: 2 of 2 ranks in a call"),
        ("culprit", "tp 1: 1 of 2 ranks named by the verdict"),
        ("call", "in none of them: 4 of 4 ranks in a call"),
    ]


def test_the_last_minutes_are_kept() -> None:
    """Samples older than five minutes are dropped, and those of another run."""
    history = History()
    for second in range(0, 400, 10):
        history.add("a", 1000.0 + second, Figures(1.0, 0.5, None, None))
    assert history.samples[0].epoch_s >= 1390 - 300
    assert len(history.samples) == 31
    history.add("b", 1400.0, Figures(1.0, 0.1, None, None))
    assert [sample.waiting for sample in history.samples] == [0.1]


def test_two_hundred_viewers_that_vanish(tmp_path: Path) -> None:
    """200 streams get the first event; half of them read no more, all close; the page goes on."""
    synthetic_run(tmp_path / "run", 4, 50)
    with Served(tmp_path / "run") as served:
        viewers = [
            socket.create_connection(("127.0.0.1", served.port), DEADLINE_S) for _ in range(200)
        ]
        for viewer in viewers:
            viewer.sendall(served.stream_request())
        for viewer in viewers:
            text = b""
            while b"data: " not in text:
                part = viewer.recv(1 << 16)
                assert part
                text += part
        assert served.ask().status == 200
        for viewer in viewers:
            viewer.close()
        assert served.ask("/api/diagnosis").status == 200
        assert served.end() == 0
    assert "Traceback" not in served.err


def test_a_viewer_that_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream ends if its viewer takes no byte for long."""
    from rankcall.serve import app
    from rankcall.serve.access import Access

    monkeypatch.setattr(app, "_SEND_S", 0.05)
    run = CountedRun()
    run.gate.set()

    async def watch() -> None:
        page = app.Page(run, Access("127.0.0.1", 8088))
        stream = app._EventStream(page._changes())
        sent: list[object] = []

        async def send(message: object) -> None:
            sent.append(message)
            if len(sent) == 3:  # the start, the first line, and then the first event
                await asyncio.Event().wait()

        await asyncio.wait_for(stream.stream_response(send), DEADLINE_S)
        assert len(sent) == 3
        page.downloads.close()

    asyncio.run(watch())


def test_ctrl_c_ends_open_streams(tmp_path: Path) -> None:
    """The command exits with 0 though a viewer is still connected."""
    synthetic_run(tmp_path / "run", 4, 50)
    with Served(tmp_path / "run") as served:
        with socket.create_connection(("127.0.0.1", served.port), DEADLINE_S) as viewer:
            viewer.sendall(served.stream_request())
            assert b"200 OK" in viewer.recv(1 << 16)
            assert served.end() == 0
    assert "Traceback" not in served.err


def test_report_timeline_and_archive(tmp_path: Path) -> None:
    """Each link gives the file that rankcall's own command makes."""
    synthetic_run(tmp_path / "run", 4, 50)
    with Served(tmp_path / "run") as served:
        report = served.ask("/report")
        assert report.status == 200
        assert report.text.startswith("<!doctype html>")
        assert len(served.ask("/api/report").json["ranks"]) == 4
        for path in ("/timeline", "/archive"):
            connection = socket.create_connection(("127.0.0.1", served.port), DEADLINE_S)
            with connection:
                connection.sendall(served.stream_request(path))
                head = connection.recv(1 << 16)
            assert b"200 OK" in head
            assert b'attachment; filename="run.' in head
        assert served.end() == 0


def test_an_address_that_is_taken(tmp_path: Path) -> None:
    """The command says in one line what it could not do."""
    synthetic_run(tmp_path / "run", 2, 20)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = subprocess.run(
            [str(RANKCALL), "serve", str(tmp_path / "run"), "--port", str(taken.getsockname()[1])],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
    assert done.returncode == 2
    assert "cannot listen on 127.0.0.1 port" in done.stderr
    assert len(done.stderr.splitlines()) == 1
