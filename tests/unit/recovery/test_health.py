"""The checks of a node before it takes part: each answers, whatever it meets."""

from __future__ import annotations

import os
import select
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from rankcall.recovery import health
from rankcall.recovery.health import why_not_well


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("true", ""),
        ("", ""),
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
    why = why_not_well(command, tmp_path)
    assert why == "" if not reason else reason in why


def test_a_command_that_never_ends(tmp_path: Path) -> None:
    """It has a deadline."""
    assert "has not ended after 0.2 s" in why_not_well("sleep 1000", tmp_path, seconds=0.2)


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
    why = why_not_well("", tmp_path)
    assert why == "" if not reason else reason in why


def test_a_place_that_is_gone(tmp_path: Path) -> None:
    """An error is a reason, too."""
    assert "No such file" in why_not_well("", tmp_path / "gone")


def test_a_file_system_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check gives up at its deadline."""
    import threading

    answer = threading.Event()
    monkeypatch.setattr(health, "_LOOK_S", 0.05)
    monkeypatch.setattr(health, "_why_full", lambda place: "" if answer.wait(30) else "late")
    assert "does not answer" in why_not_well("", tmp_path)
    answer.set()
