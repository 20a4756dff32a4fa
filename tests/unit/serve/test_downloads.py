"""The page on a host on which files cannot be made or read: an answer says why, in plain text."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="needs rankcall[serve]")
pytest.importorskip("uvicorn", reason="needs rankcall[serve]")

from serving_in_process import ask

from rankcall.serve import downloads
from rankcall.serve.access import Access
from rankcall.serve.app import make_app
from rankcall.serve.live_run import LiveRun
from rankcall.testing.synthetic import synthetic_run


async def asked(run: Path, *paths: str, remove: bool = False) -> list[tuple[int, str]]:
    """Return the answers to some requests; ``remove``: each download is gone when it is sent."""
    access = Access("127.0.0.1", 1)
    app, page = make_app(LiveRun(run), access)
    make = page.downloads.make

    async def make_and_remove(kind: Any, where: Path) -> Path:
        path = await make(kind, where)
        path.unlink()
        return path

    if remove:
        page.downloads.make = make_and_remove  # type: ignore[method-assign]
    try:
        return [await ask(app, page, access, "GET", path) for path in paths]
    finally:
        page.downloads.close()


def test_no_room_for_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page needs none; a download says that there is no room."""

    def full(*arguments: Any, **options: Any) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run = synthetic_run(tmp_path / "job", 2, 5).path
    monkeypatch.setattr(downloads.tempfile, "mkdtemp", full)
    assert [status for status, _ in asyncio.run(asked(run, "/", "/report", "/"))] == [200, 503, 200]
    assert "report.html cannot be made: [Errno 28] No space left" in capsys.readouterr().err


def test_a_file_that_is_gone_when_it_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The answer is status 503 and a reason, and the page goes on."""
    run = synthetic_run(tmp_path / "job", 2, 5).path
    made: Any = lambda *arguments: ["sh", "-c", 'echo made > "$0"', arguments[-1]]  # noqa: E731
    monkeypatch.setattr(downloads, "run_command", made)
    answers = asyncio.run(asked(run, "/report", "/", remove=True))
    assert [status for status, _ in answers] == [503, 200]
    assert "report.html does not exist" in capsys.readouterr().err
