"""What this node knows of a failure: its kernel, its services, its devices, its cgroup's memory.

It is read on request, or if a verdict is about a device. The kernel's log is often forbidden, above
all in containers; then it is absent, and the report says so. In a container, process ids are its
own, and the kernel's lines may be about another container's process: such lines are left out there.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rankcall.imports.logs.sources.nodes import SOURCES
from rankcall.imports.node_services import lines_of_services
from rankcall.imports.nvml import ask_devices
from rankcall.printable import clean
from rankcall.process import host_name

__all__ = ["NodeReport", "ask_node", "oom_kills"]

_PROGRAM_S = 2.0  # for dmesg, for example
_MOST_BYTES, _RECORD_BYTES = 1 << 24, 1 << 13  # of the kernel's log; of one record
_MOST_LINES, _LINE = 20, 300  # that are shown; characters
_OWN_GROUPS, _GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_INITIAL_PID_NAMESPACE = 0xEFFFFFFC  # its inode is the same on every Linux
_PATTERNS = [m.pattern for source in SOURCES for m in source.messages if m.pattern is not None]
_OF_PROCESS = re.compile(r"\bpid\b|Killed process", re.IGNORECASE)
_DMESG = re.compile(r"\[\s*(\d{1,12}\.\d{1,9})\] (.*)")

KernelLine = tuple[float, str]  # the time in seconds since 1970, and the text


@dataclass
class NodeReport:
    """What a node knows.

    Attributes:
        host: The node.
        lines: What its kernel reports, oldest first, with the time of each.
        services: What the kubelet, the raylet and docker report, oldest first, with the time of
            each; only those that are there and may be asked.
        devices: What NVML reports of devices in trouble, now.
        oom_kills: How often the kernel killed a process because the memory of this process's cgroup
            ran out, since the time that was asked for; -1: not known.
        problems: What cannot be read here, and why.
    """

    host: str
    lines: list[str] = field(default_factory=list)
    services: list[str] = field(default_factory=list)
    devices: list[str] = field(default_factory=list)
    oom_kills: int = -1
    problems: list[str] = field(default_factory=list)

    @property
    def is_news(self) -> bool:
        """Whether the node knows of a trouble."""
        return bool(self.lines or self.services or self.devices or self.oom_kills > 0)

    def text(self) -> str:
        """Return the report as lines of text."""
        lines = [f"What {self.host} knows", *(f"  kernel: {line}" for line in self.lines)]
        lines += [f"  {line}" for line in self.services]
        lines += [f"  NVML: {line}" for line in self.devices]
        if self.oom_kills > 0:
            times = "once" if self.oom_kills == 1 else f"{self.oom_kills} times"
            lines.append(f"  the memory of this cgroup ran out {times}, and a process was killed")
        if len(lines) == 1 and not self.problems:
            lines.append("  nothing: the kernel reports no failed device, link or lack of memory")
        return "\n".join([*lines, *(f"  not known: {problem}" for problem in self.problems)])


def ask_node(since: float, oom_kills_before: int = 0, *, containers: bool = False) -> NodeReport:
    """Return what this node knows of the time since then.

    It takes some 8 s at most, and some 20 s more if the driver of the devices does not answer.

    Args:
        since: Seconds since 1970; older lines are left out.
        oom_kills_before: What ``oom_kills`` returned at that time.
        containers: Tell of containers that ended badly, too. Most nodes have many of others.
    """
    report = NodeReport(host_name())
    count = oom_kills()
    report.oom_kills = max(count - max(oom_kills_before, 0), 0) if count >= 0 else -1
    _ask_kernel(report, since)
    services = lines_of_services(since, _output, containers=containers)
    report.services = [_shown(*line) for line in services[-_MOST_LINES:]]
    report.devices, why_unknown = ask_devices()
    report.problems += [why_unknown] if why_unknown else []
    return report


def oom_kills() -> int:
    """Return how often memory ran out in this process's cgroup since it was made; -1: unknown."""
    try:
        groups = _OWN_GROUPS.read_text().splitlines()
    except OSError:
        return -1
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            files = [f"memory{path}/memory.oom_control", "memory/memory.oom_control"]
        elif not controllers:
            files = [f"{path.lstrip('/')}/memory.events", "memory.events"]
        else:
            continue
        for name in files:
            count = _count_in(_GROUPS / name)
            if count >= 0:
                return count
    return -1


def _count_in(path: Path) -> int:
    try:
        match = re.search(r"^oom_kill (\d{1,18})$", path.read_text()[:4096], re.MULTILINE)
    except OSError:
        return -1
    return int(match[1]) if match else -1


def _ask_kernel(report: NodeReport, since: float) -> None:
    lines = _first_that_works((_kmsg, _dmesg, _journal))
    if lines is None:
        report.problems.append("the kernel's log (dmesg), which this user may not read")
        return
    known = [line for line in lines if line[0] >= since and _is_known(line[1])]
    if not _shares_process_ids():
        of_processes = [line for line in known if _OF_PROCESS.search(line[1])]
        known = [line for line in known if line not in of_processes]
        if of_processes:
            report.problems.append(
                "what the kernel says of processes: this is a container, with process ids of its "
                "own; look at dmesg on the node"
            )
    report.lines = [_shown(*line) for line in known[-_MOST_LINES:]]
    if len(known) > _MOST_LINES:
        report.problems.append(f"{len(known) - _MOST_LINES:,} older lines of this kind")


def _is_known(text: str) -> bool:
    return any(pattern.search(text) for pattern in _PATTERNS)


def _shown(moment: float, text: str) -> str:
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(moment))} {clean(text)[:_LINE]}"


def _shares_process_ids() -> bool:
    try:
        return os.stat("/proc/self/ns/pid").st_ino == _INITIAL_PID_NAMESPACE
    except OSError:
        return False


def _first_that_works(
    sources: tuple[Callable[[], Iterator[KernelLine]], ...],
) -> list[KernelLine] | None:
    for source in sources:
        try:
            lines = list(source())
        except (OSError, subprocess.SubprocessError):
            continue
        if lines:
            return lines
    return None


def _kmsg() -> Iterator[KernelLine]:
    """Yield the records of /dev/kmsg: ``priority,number,microseconds,flags;text``."""
    began = time.time() - time.monotonic()
    descriptor = _open_kmsg()
    left = _MOST_BYTES
    try:
        while left > 0:
            try:
                record = os.read(descriptor, _RECORD_BYTES).decode("utf-8", "replace")
            except BlockingIOError:
                return  # that was the newest
            except BrokenPipeError:
                continue  # the record was overwritten: the next read goes on behind it
            left -= len(record)
            head, _, text = record.partition(";")
            fields = head.split(",")
            if len(fields) > 2 and fields[2].isdigit():
                yield began + int(fields[2]) / 1e6, text.split("\n", 1)[0]
    finally:
        os.close(descriptor)


def _open_kmsg() -> int:
    return os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


def _dmesg() -> Iterator[KernelLine]:
    began = time.time() - time.monotonic()
    for line in _output("dmesg"):
        match = _DMESG.match(line)
        if match:
            yield began + float(match[1]), match[2]


def _journal() -> Iterator[KernelLine]:
    options = ("-k", "-o", "short-unix", "--no-pager", "-n", "10000", "-q")
    for line in _output("journalctl", *options):
        moment, _, text = line.partition(" ")
        if re.fullmatch(r"\d{1,12}\.\d{1,9}", moment):
            yield float(moment), text.partition(": ")[2]


def _output(program: str, *options: str) -> list[str]:
    path = shutil.which(program, path="/usr/bin:/bin:/usr/sbin:/sbin")
    if path is None:
        return []
    done = subprocess.run(
        [path, *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        timeout=_PROGRAM_S,
        check=True,
        env={"LC_ALL": "C", "PATH": "/usr/bin:/bin"},
    )
    return done.stdout[-_MOST_BYTES:].decode("utf-8", "replace").splitlines()
