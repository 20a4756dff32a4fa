"""Messages of the node: its kernel, and the kubelet."""

from __future__ import annotations

import re

from rankcall.imports.logs.facts import DeviceFault, Fact, Fatal, WorkerExit
from rankcall.imports.logs.prefixes import Line
from rankcall.imports.logs.sources.message import Message, Source, failed, outside

__all__ = ["SOURCES"]

_OOM = re.compile(
    r"(?:Out of memory|Memory cgroup out of memory): Killed process (\d{1,10}) \(([^)]{1,64})\)"
    r"|oom-kill:.{0,300}?task=([\w./-]{1,64}),pid=(\d{1,10})"
)
_SEGFAULT = re.compile(
    r"\b((?:python|pt_main_thread|ray|torchrun)[\w.:-]{0,32})\[(\d{1,10})\]: segfault at "
)
_AMD_FAULT = re.compile(
    r"(Memory access fault by GPU node-\d{1,4}.{0,60}?on address 0x[\da-f]{1,16}.{0,120})"
)
_AMD_QUEUE = re.compile(r"(?:pid:(\d{1,10}) .{0,200}?)?(HSA_STATUS_ERROR\w{0,60}.{0,120})")
_AMD_HANG = re.compile(r"(HW Exception by GPU node-\d{1,4}.{0,60}?reason ?:.{1,80})")
# The kubelet starts containers of all kinds again. These are the names that jobs give theirs.
_NAMES = r"(?:pytorch|torch|train|worker|launcher|master|ray|vllm|sglang|mpi|gpu)"
_OF_A_JOB = re.compile(
    r"CrashLoopBackOff(?!.*container=)"
    rf"|(?:CrashLoopBackOff|[Bb]ack-off .{{0,20}}restarting failed container).*{_NAMES}"
    rf"|^[\w.-]{{0,253}}{_NAMES}[\w.-]{{0,253}}  +\d{{1,2}}/\d{{1,2}}  +"
    r"(?:CrashLoopBackOff|Error|OOMKilled|Evicted|ContainerStatusUnknown|UnexpectedAdmissionError"
    r"|OutOf[\w./-]{2,40}) "
)
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9A-Fa-f:.]{4,20})\): (\d{1,4}), (.{0,300})")
_XID_PID = re.compile(r"pid='?(\d{1,10})")
_AMD = re.compile(r"amdgpu (\S{4,20}): amdgpu: (GPU reset begin!.{0,80})")
_MCE = re.compile(
    r"mce: \[Hardware Error\]: (CPU \d{1,5}: Machine Check.{0,120}|.{0,80}[Uu]ncorrect.{0,120})"
)
_LINK_DOWN = re.compile(
    r"((?:mlx\d_core|mlx\d_ib|ice|bnxt_en|i40e|efa|irdma) .{0,80}?"
    r"[Ll]ink (?:is )?(?:[Dd]own|DOWN).{0,40})"
)
_EVICTED = re.compile(
    r"(The node (?:was low on resource: \S+|had condition: \[\w+\])|Evicted pod|OOMKilled"
    r"|imminent node shutdown|NodeNotReady|Preempted by|[Ii]nstance was preempted"
    r"|[Ii]nterruption notice|Spot ITN received\. Instance will be interrupted.{0,40}"
    r"|compute\.instances\.preempted|cluster is preempted or failed"
    r"|Shutdown manager detected new shutdown event|Marking for deletion Pod \S{1,300})"
)
_KUBEFLOW = re.compile(
    r"ReplicaType=\w{1,40} expected=\d{1,7}, running=\d{1,7}, failed=[1-9]"
    r"|is failed because \d{1,7} \w{1,40} replica\(s\) failed"
)
_POD_EXIT = re.compile(r"Pod: (\S{1,253}) exited with code ([1-9]\d{0,2})\b")


_EXIT_CODE = re.compile(r"^\s*Exit Code: {2,}([1-9]\d{0,2})\s*$")


def _container_exit(line: Line, match: re.Match[str]) -> Fact:
    return WorkerExit(line, -1, -1, int(match[1]))


def _pod_exit(line: Line, match: re.Match[str]) -> Fact:
    return WorkerExit(line, -1, -1, int(match[2]))


def _oom(line: Line, match: re.Match[str]) -> Fact:
    pid, name = match[1] or match[4], match[2] or match[3]
    return Fatal(
        line,
        f"the kernel killed {name} (pid {pid}) because memory ran out",
        "own",
        line.writer.host,
        int(pid),
    )


def _segfault(line: Line, match: re.Match[str]) -> Fact:
    what = f"a segmentation fault of {match[1]}"
    return Fatal(line, what, "own", line.writer.host, int(match[2]))


def _amd_fault(line: Line, match: re.Match[str]) -> Fact:
    return DeviceFault(line, match[1].strip())


def _amd_queue(line: Line, match: re.Match[str]) -> Fact:
    return DeviceFault(line, match[2].strip(), pid=int(match[1] or -1))


def _xid(line: Line, match: re.Match[str]) -> Fact:
    pid = _XID_PID.search(match[3])
    what = f"Xid {match[2]} on {match[1]}: {match[3].strip()}"
    return DeviceFault(line, what, line.writer.host, int(pid[1]) if pid else -1, by_kernel=True)


def _amd(line: Line, match: re.Match[str]) -> Fact:
    what = f"amdgpu {match[1]}: {match[2].strip()}"
    return DeviceFault(line, what, line.writer.host, by_kernel=True)


def _machine_check(line: Line, match: re.Match[str]) -> Fact:
    what = f"hardware error: {match[1].strip()}"
    return DeviceFault(line, what, line.writer.host, by_kernel=True)


def _link_down(line: Line, match: re.Match[str]) -> Fact:
    return DeviceFault(line, " ".join(match[1].split()), line.writer.host, by_kernel=True)


SOURCES: tuple[Source, ...] = (
    Source(
        "the kernel, kubelet",
        "none; the host is the collector's",
        (
            Message(
                "the kernel killed a process because memory ran out",
                ("ut of memory: Killed process", "oom-kill"),
                _OOM,
                _oom,
                "Mar 14 09:02:36 node-a kernel: Out of memory: Killed process 4711 (python) "
                "total-vm:91234kB, anon-rss:81234kB",
                "Linux 4.19 and newer",
            ),
            Message(
                "a program of the job crashed",
                ("]: segfault at",),
                _SEGFAULT,
                _segfault,
                "Apr  2 11:02:07 node-a kernel: python[4711]: segfault at 0 ip 00007f2c sp "
                "00007ffd "
                "error 4 in libtorch_cuda.so[7f2c+1000]",
                "Linux 4 and newer",
            ),
            Message(
                "an AMD device met a bad address",
                ("Memory access fault by GPU",),
                _AMD_FAULT,
                _amd_fault,
                "Memory access fault by GPU node-3 (Agent handle: 0x5581) on address "
                "0x7f3c00000000. Reason: Page not present or supervisor privilege.",
                "ROCm 4 and newer",
            ),
            Message(
                "an AMD device hangs",
                ("HW Exception by GPU",),
                _AMD_HANG,
                _amd_fault,
                "HW Exception by GPU node-9 (Agent handle: 0x631351bb5a20) reason :GPU Hang",
                "ROCm 5 and newer",
            ),
            Message(
                "an AMD device stopped a queue",
                ("HSA_STATUS_ERROR",),
                _AMD_QUEUE,
                _amd_queue,
                ":0:rocdevice.cpp            :2984: 112233us: [pid:4711  tid:0x7f12] Callback: "
                "Queue 0x7f1100000000 Aborting with error : HSA_STATUS_ERROR_EXCEPTION: An HSAIL "
                "operation resulted in a hardware exception. code: 0x1016",
                "ROCm 5 and newer",
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
                "an AMD device is reset",
                ("GPU reset begin!",),
                _AMD,
                _amd,
                "[  950.818179] amdgpu 0000:c5:00.0: amdgpu: GPU reset begin!. Source:  3",
                "Linux 6",
            ),
            Message(
                "the processor or its memory has an error that cannot be corrected",
                ("mce: [Hardware Error]",),
                _MCE,
                _machine_check,
                "Mar 14 09:02:36 node-a kernel: mce: [Hardware Error]: CPU 12: Machine Check "
                "Exception: 5 Bank 7: be00000000800400",
                "Linux 4 and newer",
            ),
            Message(
                "a network port lost its link",
                ("ink down", "ink D", "ink is "),
                _LINK_DOWN,
                _link_down,
                "Mar 14 09:02:36 node-a kernel: mlx5_core 0000:5e:00.0 ens1f0np0: Link down",
                "Linux 4 and newer",
            ),
            Message(
                "the pod was evicted or restarted",
                (
                    *("was low on resource", "Evicted pod", "OOMKilled", "NodeNotReady"),
                    *("Preempted by", "imminent node shutdown"),
                    *("preempted", "nterruption notice", "Spot ITN received"),
                    *("Shutdown manager detected", "Marking for deletion Pod"),
                ),
                _EVICTED,
                outside,
                "The node was low on resource: memory. Threshold quantity: 100Mi.",
                "Kubernetes 1.20 and newer",
            ),
            Message(
                "the kubelet starts a container again and again",
                (
                    *("CrashLoopBackOff", "restarting failed container", "  Error  "),
                    *("ContainerStatusUnknown", "UnexpectedAdmissionError", "  OutOf"),
                ),
                _OF_A_JOB,
                failed,
                'E0311 10:11:13.113456 1201 pod_workers.go:1301] "Error syncing pod, skipping" '
                'err="failed to \\"StartContainer\\" for \\"pytorch\\" with CrashLoopBackOff: '
                '\\"back-off 5m0s restarting failed container=pytorch pod=job-worker-2\\""',
                "Kubernetes 1.20 and newer",
            ),
            Message(
                "Kubeflow: how many workers failed",
                (", failed=", "replica(s) failed"),
                _KUBEFLOW,
                failed,
                'time="2024-05-20T21:12:02Z" level=info msg="PyTorchJob=train/llama, '
                'ReplicaType=Worker expected=70, running=69, failed=1" job=train.llama',
                "kubeflow/trainer#2124, #999",
            ),
            Message(
                "Kubeflow: how a pod ended",
                (" exited with code ",),
                _POD_EXIT,
                _pod_exit,
                'time="2024-02-21T09:32:29Z" level=info msg="Pod: jobs.train-worker-0 exited with '
                'code 1" job=jobs.train replica-type=worker',
                "Kubeflow's training operator 1",
            ),
            Message(
                "`kubectl describe` shows how a container ended",
                ("Exit Code:  ",),
                _EXIT_CODE,
                _container_exit,
                "      Exit Code:    137",
                "Kubernetes 1.20 and newer",
            ),
        ),
    ),
)
