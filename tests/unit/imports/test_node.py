"""What a node knows: its kernel's log from each source, and what is left out of it."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankcall.cli import main
from rankcall.imports import node
from rankcall.imports.node import KernelLine, NodeReport, ask_node, oom_kills

XID = "NVRM: Xid (PCI:0000:c1:00): 79, GPU has fallen off the bus."
OOM = "Out of memory: Killed process 4711 (python) total-vm:91234kB"
NOISE = "usb 1-1: new high-speed USB device number 2 using xhci_hcd"


def give(monkeypatch: pytest.MonkeyPatch, *lines: KernelLine) -> None:
    """Let the kernel's log have these lines."""

    def source() -> Iterator[KernelLine]:
        yield from lines

    monkeypatch.setattr(node, "_kmsg", source)


@pytest.fixture(autouse=True)
def _on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "_shares_process_ids", lambda: True)


def test_known_messages_of_the_time_in_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """Older lines and lines about other things are left out."""
    give(monkeypatch, (100.0, XID), (200.0, NOISE), (300.0, OOM))
    assert [line.partition(" ")[2][9:] for line in ask_node(0.0).lines] == [XID, OOM]
    assert [line.partition(" ")[2][9:] for line in ask_node(250.0).lines] == [OOM]
    assert ask_node(400.0).lines == []


def test_only_the_newest_lines_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device can report the same a thousand times: the report says how many are left out."""
    give(monkeypatch, *((float(n), f"{XID} {n}") for n in range(1000)))
    report = ask_node(0.0)
    assert [line.rpartition(" ")[2] for line in report.lines] == [str(n) for n in range(980, 1000)]
    assert report.problems == ["980 older lines of this kind"]


def test_processes_are_left_out_in_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    """Process 4711 of the kernel is not process 4711 of the container, and may be anybody's."""
    monkeypatch.setattr(node, "_shares_process_ids", lambda: False)
    give(monkeypatch, (100.0, XID), (300.0, OOM))
    report = ask_node(0.0)
    assert len(report.lines) == 1
    assert XID in report.lines[0]
    assert "container" in report.problems[0]


def test_a_forbidden_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """If no source may be read, the report says so, and nothing is called well."""

    def refuse(*_: object) -> Iterator[KernelLine]:
        raise PermissionError(1, "Operation not permitted")
        yield

    for name in ("_kmsg", "_dmesg", "_journal"):
        monkeypatch.setattr(node, name, refuse)
    report = ask_node(0.0)
    assert report.lines == []
    assert "may not read" in report.text()
    assert "nothing:" not in report.text()


def test_a_program_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """dmesg gets its time, and then the next source is asked."""
    program = tmp_path / "dmesg"
    program.write_text("#!/bin/sh\nexec sleep 100\n")
    program.chmod(0o755)
    monkeypatch.setattr(node, "_PROGRAM_S", 0.3)
    monkeypatch.setattr(node.shutil, "which", lambda name, path: str(program))
    with pytest.raises(subprocess.TimeoutExpired):
        list(node._dmesg())


def test_records_of_kmsg(monkeypatch: pytest.MonkeyPatch) -> None:
    """One read gives one record, with continuation lines; the time is that since the boot."""
    ours, kernels = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    ours.setblocking(False)
    moment = int((time.monotonic() - 5) * 1e6)
    kernels.send(f"6,1,{moment},-;{XID}\n SUBSYSTEM=pci\n".encode())
    kernels.send(b"damaged")
    kernels.send(b"4,2,77,-;\xff\xfe\n")
    monkeypatch.setattr(node, "_open_kmsg", ours.detach)
    (first, second) = node._kmsg()
    kernels.close()
    assert first == (pytest.approx(time.time() - 5, abs=1.0), XID)
    assert second[1] == "\ufffd\ufffd"


def test_what_programs_print(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of dmesg have seconds since the boot; those of journalctl since 1970."""
    printed = {
        "dmesg": [f"[   12.500000] {XID}", "no time"],
        "journalctl": [f"1795627567.250000 node-a kernel: {XID}", "-- No entries --"],
    }
    monkeypatch.setattr(node, "_output", lambda program, *_: printed[program])
    assert list(node._dmesg()) == [
        (pytest.approx(time.time() - time.monotonic() + 12.5, abs=1.0), XID)
    ]
    assert list(node._journal()) == [(1795627567.25, XID)]


@pytest.mark.parametrize(
    ("group", "name", "content", "count"),
    [
        ("0::/job.slice/a", "job.slice/a/memory.events", "low 0\noom 3\noom_kill 2\n", 2),
        ("0::/", "memory.events", "oom_kill 1\noom_group_kill 0\n", 1),
        ("4:memory:/a", "memory/a/memory.oom_control", "under_oom 0\noom_kill 7\n", 7),
        ("9:name=systemd:/", "memory.events", "oom_kill 7\n", -1),
    ],
)
def test_the_cgroup(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    group: str,
    name: str,
    content: str,
    count: int,
) -> None:
    """Both versions of cgroups count how often memory ran out."""
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(content)
    (tmp_path / "own").write_text(f"{group}\n")
    monkeypatch.setattr(node, "_OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(node, "_GROUPS", tmp_path)
    assert oom_kills() == count


def test_kills_since_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those since the job began are the job's."""
    give(monkeypatch)
    monkeypatch.setattr(node, "oom_kills", lambda: 5)
    assert ask_node(0.0, 3).oom_kills == 2
    assert "ran out 2 times" in ask_node(0.0, 3).text()
    assert ask_node(0.0, 5).oom_kills == 0
    monkeypatch.setattr(node, "oom_kills", lambda: -1)
    assert ask_node(0.0, -1).oom_kills == -1


def test_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``diagnose --node`` adds the report to the text and to JSON; the verdict stays."""
    now = time.time()
    give(monkeypatch, (now - 3600, f"\x1b[31m{XID}"), (now - 90_000, OOM))
    log = tmp_path / "job.log"
    log.write_text("step 1\n")
    assert main(["diagnose", "--log", str(log), "--node"]) == 0
    shown = capsys.readouterr().out
    assert "nothing_found" in shown
    assert XID in shown
    assert "\x1b" not in shown
    assert "4711" not in shown
    assert main(["diagnose", "--log", str(log), "--node", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["node"]["lines"][0].endswith("fallen off the bus.")
    assert main(["diagnose", "--log", str(log), "--json"]) == 0
    assert "node" not in json.loads(capsys.readouterr().out)


def test_a_node_without_news() -> None:
    """Nothing is claimed beyond what was read."""
    assert "no failed device, link or lack of memory" in NodeReport("node-a").text()
