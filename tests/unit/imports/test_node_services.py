"""What the services of a node say of failed processes, and what is left out of it."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from rankcall.imports import node, node_services
from rankcall.imports.node import NodeReport, ask_node
from rankcall.imports.node_services import lines_of_services

EVICTED = "The node was low on resource: memory. Threshold quantity: 100Mi."
KILLED = (
    "10 Workers (tasks / actors) killed due to memory pressure (OOM), 0 Workers crashed due to "
    "other reasons at node (ID: e5d9, IP: 10.0.62.231) over the last time period."
)
NOW = 1_795_600_000.0


@pytest.fixture(autouse=True)
def _no_raylet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_services, "_RAYLET", tmp_path)


def silent(*_: str) -> list[str]:
    """Answer as a node on which the program is not installed."""
    return []


def event(action: str, name: str, seconds: float, **attributes: str) -> str:
    """Return one event as docker prints it."""
    actor = {"ID": "5f0c", "Attributes": {"image": "train:1", "name": name, **attributes}}
    return json.dumps({"Type": "container", "Action": action, "Actor": actor, "time": int(seconds)})


def test_the_journal_of_the_kubelet() -> None:
    """Known messages of the time in question are told, with the service."""
    asked = []

    def journal(program: str, *options: str) -> list[str]:
        asked.append((program, "kubelet" in options))
        return [
            f"{NOW - 90:.6f} node-a kubelet[99]: {EVICTED}",
            f"{NOW + 2:.6f} node-a kubelet[99]: {EVICTED}",
            f"{NOW + 3:.6f} node-a kubelet[99]: Started container",
            f"{NOW + 4:.6f} node-a sshd[1]: {EVICTED}",
            f"999999999999.0 node-a kubelet[99]: {EVICTED}",
            "-- No entries --",
        ]

    lines = lines_of_services(NOW, journal, containers=False)
    assert lines == [(NOW + 2, f"kubelet: {EVICTED}")]
    assert asked == [("journalctl", True)]


def test_the_log_of_the_raylet(tmp_path: Path) -> None:
    """Its lines have times of this node's zone; only its end is read."""
    head = time.strftime("[%Y-%m-%d %H:%M:%S,445 E 395 395] (raylet) ", time.localtime(NOW + 5))
    old = head.replace(time.strftime("%Y", time.localtime(NOW)), "2001")
    place = "node_manager.cc:3049: "
    (tmp_path / "raylet.out").write_text(
        f"{head}{place}{KILLED}\n" + "x" * (1 << 20) + f"\n{old}{place}{KILLED}\n"
        f"{head}main.cc:1: started\n{head}{place}{KILLED}\n{KILLED}\n"
        f"[2026-99-99 25:61:61,445 E 395 395] {place}{KILLED}\n"
    )
    lines = lines_of_services(NOW, silent, containers=False)
    assert lines == [(NOW + 5, f"raylet: {place}{KILLED}")]


@pytest.mark.parametrize("what", ["a pipe", "another user's", "a folder"])
def test_a_log_that_may_be_anybodys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Any user can make the folder of Ray's logs: nobody waits for a pipe, or quotes a stranger."""
    path = tmp_path / "raylet.out"
    if what == "a pipe":
        os.mkfifo(path)
    elif what == "a folder":
        path.mkdir()
    else:
        head = time.strftime("[%Y-%m-%d %H:%M:%S,445 E 395 395] ", time.localtime(NOW + 5))
        path.write_text(f"{head}{KILLED}\n")
        os.chown(path, 12345, -1)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert lines_of_services(NOW, silent, containers=False) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_roots_log_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster's Ray may run as root."""
    head = time.strftime("[%Y-%m-%d %H:%M:%S,445 E 395 395] ", time.localtime(NOW + 5))
    (tmp_path / "raylet.err").write_text(f"{head}{KILLED}\n")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert len(lines_of_services(NOW, silent, containers=False)) == 1


def test_containers_that_ended_badly() -> None:
    """docker is asked for a time that is over, so it does not wait for news."""

    def docker(program: str, *options: str) -> list[str]:
        if program != "docker":
            return []
        assert f"--since={int(NOW)}" in options
        assert any(option.startswith("--until=") for option in options)
        return [
            event("oom", "train-0", NOW + 1),
            event("die", "train-0", NOW + 2, exitCode="137"),
            event("die", "train-0", NOW + 9, exitCode="137"),
            event("die", "web", NOW + 3, exitCode="0"),
            event("die", "old", NOW - 3, exitCode="1"),
            event("die", "\x1b[31mx", NOW + 4, exitCode="1"),
            "Cannot connect to the Docker daemon",
            "[" * 5000,
            "[]",
            '{"time": {}, "Actor": {"Attributes": {"name": "x", "exitCode": "1"}}}',
            '{"time": 1, "Actor": []}',
        ]

    assert [text for _, text in lines_of_services(NOW, docker, containers=True)] == [
        "docker: container train-0 ended with code 137, because its memory ran out",
        "docker: container \x1b[31mx ended with code 1",
        "docker: container train-0 ended with code 137",
    ]
    assert lines_of_services(NOW, docker, containers=False) == []


def test_a_service_that_does_not_answer() -> None:
    """The others are told all the same."""

    def output(program: str, *_: str) -> list[str]:
        if program == "docker":
            raise subprocess.TimeoutExpired(program, 2.0)
        return [f"{NOW + 2:.6f} node-a kubelet[99]: {EVICTED}"]

    assert len(lines_of_services(NOW, output, containers=True)) == 1


def test_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of services stand in it without control characters, and are news."""
    monkeypatch.setattr(node, "_kmsg", lambda: iter([(NOW, "usb 1-1: new device")]))
    monkeypatch.setattr(node, "ask_devices", lambda: ([], ""))
    lines = [(NOW + 2, f"kubelet: \x1b[31m{EVICTED}")]
    monkeypatch.setattr(node, "lines_of_services", lambda *_, **__: lines)
    report = ask_node(NOW)
    assert report.is_news
    assert EVICTED in report.text()
    assert "\x1b" not in report.text()
    assert not NodeReport("node-a").is_news
