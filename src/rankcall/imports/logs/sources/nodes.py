"""Messages of the node: its kernel, and the kubelet."""

from __future__ import annotations

import re

from rankcall.imports.logs.facts import DeviceFault, Fact, Fatal
from rankcall.imports.logs.prefixes import Line
from rankcall.imports.logs.sources.message import Message, Source, outside

__all__ = ["SOURCES"]

_OOM = re.compile(
    r"(?:Out of memory|Memory cgroup out of memory): Killed process (\d{1,10}) \(([^)]{1,64})\)"
    r"|oom-kill:.{0,300}?task=([\w./-]{1,64}),pid=(\d{1,10})"
)
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9A-Fa-f:.]{4,20})\): (\d{1,4}), (.{0,300})")
_XID_PID = re.compile(r"pid='?(\d{1,10})")
_EVICTED = re.compile(
    r"(The node (?:was low on resource: \S+|had condition: \[\w+\])|Evicted pod|OOMKilled"
    r"|Back-?[Oo]ff restarting failed container|NodeNotReady|Preempted by)"
)


def _oom(line: Line, match: re.Match[str]) -> Fact:
    pid, name = match[1] or match[4], match[2] or match[3]
    return Fatal(
        line,
        f"the kernel killed {name} (pid {pid}) because memory ran out",
        "own",
        line.writer.host,
        int(pid),
    )


def _xid(line: Line, match: re.Match[str]) -> Fact:
    pid = _XID_PID.search(match[3])
    what = f"Xid {match[2]} on {match[1]}: {match[3].strip()}"
    return DeviceFault(line, what, line.writer.host, int(pid[1]) if pid else -1)


SOURCES: tuple[Source, ...] = (
    Source(
        "the kernel, kubelet",
        "none; the host is the collector's",
        (
            Message(
                "the kernel killed a process because memory ran out",
                ("ut of memory: Killed process", "oom-kill:"),
                _OOM,
                _oom,
                "Mar 14 09:02:36 node-a kernel: Out of memory: Killed process 4711 (python) "
                "total-vm:91234kB, anon-rss:81234kB",
                "Linux 4.19 and newer",
            ),
            Message(
                "a device reports an error",
                ("NVRM: Xid",),
                _XID,
                _xid,
                "Mar 14 09:02:36 node-a kernel: NVRM: Xid (PCI:0000:c1:00): 79, pid=4711, GPU has "
                "fallen off the bus.",
                "NVIDIA's driver 450 and newer",
            ),
            Message(
                "the pod was evicted or restarted",
                ("was low on resource", "Evicted pod", "OOMKilled", "NodeNotReady", "Preempted by"),
                _EVICTED,
                outside,
                "The node was low on resource: memory. Threshold quantity: 100Mi.",
                "Kubernetes 1.20 and newer",
            ),
        ),
    ),
)
