"""The next step for a cause that a log shows in plain words."""

from __future__ import annotations

import re
from collections.abc import Sequence

_ADVICE = (
    (
        r"shm_open failed : Permission denied",
        "The process may not write to /dev/shm{on}: look at its owner and its mode (1777).",
    ),
    (
        r"system not yet initialized",
        "The devices{on} wait for NVIDIA's fabric manager: see that nvidia-fabricmanager runs "
        "there, and that its version is the driver's.",
    ),
    (
        r"last training process is running",
        "A process of an earlier job still has this device{on}: end it (`npu-smi info` shows it), "
        "and start again after 10 s.",
    ),
    (
        r"SIGBUS|[Bb]us error|shared memory segment|/dev/shm",
        "A container's /dev/shm is too small in most such cases: start it with --shm-size=16g or "
        "--ipc=host, or mount a larger emptyDir of medium Memory on Kubernetes.",
    ),
    (
        r"memory pressure|memory ran out|ran out of memory|OOMKilled|low on resource: memory",
        "The node's memory, or what the job may use of it, ran out{on}: give it more, or use less, "
        "for example with fewer data loaders.",
    ),
    (
        r"async event",
        "The network adapter{on} reports this: look at its link, its cable and its counters "
        "(ibstat, perfquery), and for its driver in dmesg.",
    ),
    (
        r"SIGKILL|Killed process|signal: Killed|oom",
        "If it used much memory, the kernel may have killed it: look for oom-kill in dmesg{on}.",
    ),
    (
        r"out of memory|OutOfMemory|c?alloc \d+ bytes",
        "The device had no memory left: use a smaller batch or less of it for other processes; "
        "`nvidia-smi` on that node shows who has it.",
    ),
    (
        r"Duplicate GPU detected",
        "Two ranks use one device: give each its own, with torch.cuda.set_device(local_rank) "
        "before "
        "init_process_group, and one that CUDA_VISIBLE_DEVICES does not hide.",
    ),
    (
        r"Memory access fault|HSA_STATUS_ERROR",
        "Run once with AMD_SERIALIZE_KERNEL=3 to see the kernel. If it is always the same node and "
        "never the same line, suspect the device: look for amdgpu in dmesg{on}.",
    ),
    (
        r"[Aa]ddress already in use|EADDRINUSE|EJ0003|bind the IP port|server socket has failed",
        "Another process has this port{on}: end what is left of an earlier job (`ss -ltnp` shows "
        "it), or choose another port.",
    ),
    (
        r"[Ll]ink (?:is )?(?:[Dd]own|DOWN)|network port is down|EJ0002",
        "A network port lost its link{on}: look at its cable, its switch port, and its counters "
        "(ethtool, ibstat).",
    ),
    (
        r"Xid|fallen off the bus|uncorrectable|NVLink error|GPU reset|hardware error|DEVICE_LOST",
        "The device itself reports this: drain the node{on}, and run its diagnostics (dcgmi diag) "
        "before it is used again.",
    ),
    (
        r"launch failure|illegal memory access|device-side assert",
        "Run once with CUDA_LAUNCH_BLOCKING=1 to see the kernel. If it is always the same node and "
        "never the same line, suspect the device: look for Xid in dmesg{on}.",
    ),
    (
        r"No space left|[Dd]isk quota",
        "A disk is full: make room, or write checkpoints and caches elsewhere.",
    ),
    (
        r"TIME LIMIT|RUNLIMIT|walltime",
        "The job ran for as long as it may: ask for more time, or save a checkpoint before.",
    ),
    (
        r"PREEMPTION|PREEMPT\b|[Pp]reempted",
        "The scheduler gave the nodes to another job: start this one again from its checkpoint.",
    ),
    (
        r"death signal|SIGTERM|CANCELLED|TIME LIMIT|[Pp]reempt|[Ee]vict|low on resource"
        r"|NodeNotReady",
        "Something outside the job ended it: look at the scheduler's and the launcher's own logs "
        "of that time.",
    ),
)
_PATTERNS = tuple((re.compile(words), text) for words, text in _ADVICE)
# Some advice says what to look for. A log that has it answers that, and what it says counts.
_ANSWERS = (
    (
        re.compile(r"oom-kill"),
        re.compile(r"memory (?:pressure|ran out)|ran out of memory|OOMKilled"),
    ),
    (re.compile(r"\bXid\b"), re.compile(r"Xid \d+")),
    (re.compile(r"amdgpu"), re.compile(r"amdgpu \S+: GPU reset")),
)


def advice_for(what: str, hosts: Sequence[str]) -> str:
    """Return the next step for a cause; empty if its words tell of none that is known here.

    Args:
        what: What the log says, or the name of a signal.
        hosts: Where it happened; empty if that is not known.
    """
    place = f" on {', '.join(hosts[:3])}" if hosts else ""
    for pattern, text in _PATTERNS:
        if pattern.search(what):
            return text.replace("{on}", place)
    return ""


def answer_to(advice: str, said: Sequence[str]) -> str:
    """Return which of the things that a log says is what an advice would have the user look for."""
    for asked, answered in _ANSWERS:
        if asked.search(advice):
            return next((what for what in said if answered.search(what)), "")
    return ""


def settings_in(advice: str) -> list[str]:
    """Return the options and variables that an advice asks for: a log may show them already."""
    return re.findall(r"--[a-z][a-z-]*|\b[A-Z][A-Z_]{5,}=\w+", advice)
