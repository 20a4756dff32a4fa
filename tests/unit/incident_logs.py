"""Logs of kinds of failures that public issues show, told again, and logs that have no failure.

Hosts, paths, times and names are invented. The kinds that are right, and the ranks, are what a
person reads in the log. Of most logs they were decided before the reader saw it; those of
2026-11-26 were gone through again afterwards. No kinds: the log does not say which rank is at
fault, so that the answer is ``undecided``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Incident(NamedTuple):
    """A log and its right answer. ``says``: words that the summary or the advice must have."""

    lines: Sequence[str]
    kinds: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    says: str = ""


def raised(
    error: str, prefix: str = "", file: str = "/job/train.py", head: str = "Traceback"
) -> list[str]:
    """Return the lines of an exception, as Python writes them."""
    return [
        f"{prefix}{head} (most recent call last):",
        f'{prefix}  File "/job/main.py", line 12, in <module>',
        f"{prefix}    main()",
        f'{prefix}  File "{file}", line 88, in step',
        f"{prefix}    loss.backward()",
        *[f"{prefix}{line}" for line in error.split("\n")],
    ]


def torchrun(rank: int, code: int, others: Iterable[tuple[int, int]] = ()) -> list[str]:
    """Return torchrun's report."""

    def block(number: int, exitcode: int) -> list[str]:
        return [
            f"[{number}]:",
            f"  time      : 2026-04-02_11:02:{'07' if number == rank else '09'}",
            f"  host      : node-{number // 8}",
            f"  rank      : {number} (local_rank: {number % 8})",
            f"  exitcode  : {exitcode} (pid: {5000 + number})",
            "  error_file: <N/A>",
            "  traceback : To enable traceback see: "
            "https://pytorch.org/docs/stable/elastic/errors.html",
        ]

    line = "-" * 60
    return [
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:",
        "=" * 60,
        "train.py FAILED",
        line,
        "Failures:",
        *[text for number, exitcode in others for text in block(number, exitcode)],
        line,
        "Root Cause (first observed failure):",
        *block(rank, code),
        "=" * 60,
    ]


_STUCK = (
    "[rank{0}]:[E402 11:02:07.384372190 ProcessGroupNCCL.cpp:1743] [PG ID 0 PG GUID 0(default_pg) "
    "Rank {0}] ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress in "
    "monitoring enqueued collectives. This typically indicates a NCCL/CUDA API (e.g., "
    "CudaEventDestroy) hang blocking the watchdog."
)
_HEARTBEAT = (
    "[rank{0}]:[E ProcessGroupNCCL.cpp:1316] [PG 0 Rank {0}] Heartbeat monitor timed out! Process "
    "will be terminated after dumping debug info. workMetaList_.size()=103"
)
_FIRST_PG = (
    "[rank{0}]:[E1019 01:04:03.357615073 ProcessGroupNCCL.cpp:1375] [PG 3 Rank {0}] First PG on "
    "this rank that detected no heartbeat of its watchdog."
)
_REMOTE = (
    "torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/"
    "ProcessGroupNCCL.cpp:3690, remote process exited or there was a network error, NCCL version "
    "2.27.5\nncclRemoteError: A call failed possibly due to a network error or a remote process "
    "exiting prematurely."
)
_DEEPSPEED = (
    "[2026-04-02 11:02:09,620] [ERROR] [launch.py:325:sigkill_handler] ['/srv/venv/bin/python', "
    "'-u', 'train.py', '--local_rank=3', '--deepspeed', 'zero3.json'] exits with return code = {0}"
)
_KILLING = [
    f"[2026-04-02 11:02:07,45{n}] [INFO] [launch.py:319:sigkill_handler] Killing subprocess 702{n}"
    for n in range(4)
]
_SRUN_ENDS = "srun: Job step aborted: Waiting up to 32 seconds for job step to finish."
_VLLM = "(VllmWorker rank={0} pid=41{0}) ERROR 04-02 11:02:07 [multiproc_executor.py:487] "
_VLLM_FAILED = [
    "WorkerProc hit an exception.",
    *raised("RuntimeError: NCCL error: unhandled cuda error", file="/venv/vllm/executor.py"),
]
_DCP = [
    "torch.distributed.checkpoint.api.CheckpointException: CheckpointException "
    "ranks:dict_keys([3])",
    "Traceback (most recent call last): (RANK 3)",
    '  File "/venv/lib/python3.12/site-packages/torch/distributed/checkpoint/utils.py", line 192, '
    "in reduce_scatter",
    "    local_data = map_fun()",
    "OSError: [Errno 5] Input/output error: '/ckpt/step-400/__3_0.distcp'",
]
_NAN = (
    "found NaN in local grad norm for bucket #0 in backward pass before data-parallel "
    "communication collective"
)
_IB = (
    "node-c:{0}:{1} [3] transport/net_ib.cc:1297 NCCL WARN NET/IB : Got completion from peer "
    "10.0.0.5<41303> with status=12 opcode=32600 len=0 vendor err 129 (Recv)"
)
_FINISHED = (
    "RuntimeError: Expected to have finished reduction in the prior iteration before starting a "
    "new one. This error indicates that your module has parameters that were not used in producing "
    "loss."
)

INCIDENTS: dict[str, Incident] = {
    # --- launchers ---
    "deepspeed, a worker was killed": Incident(
        [*_KILLING, _DEEPSPEED.format(-9)], says="A worker ended with code -9"
    ),
    "deepspeed, rank 1 has no memory": Incident(
        [
            *raised(
                "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "[rank1]: "
            ),
            *_KILLING,
            _DEEPSPEED.format(1),
        ],
        ("dead", "exhausted"),
        (1,),
    ),
    "slurm, the cgroup of task 5": Incident(
        [
            "slurmstepd: error: Detected 1 oom_kill event in StepId=8841.0. Some of the step tasks "
            "have been OOM Killed.",
            "srun: error: node-2: task 5: Out Of Memory",
            _SRUN_ENDS,
            "srun: error: node-1: tasks 0-3: Terminated",
            "srun: error: node-2: tasks 4,6-7: Exited with exit code 1",
        ],
        ("dead", "exhausted"),
        (5,),
    ),
    "slurm, time limit": Incident(
        [
            "12: step 4000 loss 2.31",
            "slurmstepd: error: *** STEP 8841.0 ON node-1 CANCELLED AT 2026-04-02T11:02:07 DUE TO "
            "TIME LIMIT ***",
            _SRUN_ENDS,
        ],
        says="TIME LIMIT",
    ),
    "slurm, a crash by UCX": Incident(
        [
            "5: [node-1:4711 :0:4711] Caught signal 11 (Segmentation fault: address not mapped to "
            "object at address (nil))",
            "5: ==== backtrace (tid:   4711) ====",
            "5:  0 0x0000000000042520 __sigaction()  ???:0",
            "srun: error: node-1: task 5: Segmentation fault (core dumped)",
            _SRUN_ENDS,
        ],
        ("dead",),
        (5,),
    ),
    "mpirun, an exit code": Incident(
        [
            "--------------------------------------------------------------------------",
            "mpirun detected that one or more processes exited with non-zero status, thus causing",
            "the job to be terminated. The first process to do so was:",
            "",
            "  Process name: [[12167,1],10]",
            "  Exit code:    3",
            "--------------------------------------------------------------------------",
        ],
    ),
    "open mpi, a signal": Incident(
        [
            "[node-1:04711] *** Process received signal ***",
            "[node-1:04711] Signal: Segmentation fault (11)",
            "[node-1:04711] Signal code: Address not mapped (1)",
            "[node-1:04711] *** End of error message ***",
        ],
    ),
    "hydra, a process was killed": Incident(
        [
            "===================================================================================",
            "=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES",
            "=   RANK 3 PID 4711 RUNNING AT node-1",
            "=   KILLED BY SIGNAL: 9 (Killed)",
            "===================================================================================",
        ],
    ),
    "lightning, a process ended": Incident(
        [
            "Epoch 0:  12%|█▏        | 120/1000 [01:20<09:50,  1.49it/s, v_num=0]",
            "[rank: 3] Child process with PID 4711 terminated with code 1. Forcefully terminating "
            "all "
            "other processes to avoid zombies 🧟",
        ],
    ),
    "bash says Killed": Incident(
        ["run.sh: line 14:  4711 Killed                  python train.py --tp 2"],
    ),
    "compose, an exit code": Incident(
        ["trainer-2  | step 100 loss 2.1", "trainer-2 exited with code 137"],
    ),
    "accelerate, rank 1 has no memory": Incident(
        [
            *raised(
                "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 5 GiB", "[rank1]: "
            ),
            *torchrun(1, 1, [(0, 1)]),
            "subprocess.CalledProcessError: Command '['/venv/bin/python', 'train.py']' returned "
            "non-zero exit status 1.",
        ],
        ("dead", "exhausted"),
        (1,),
    ),
    "spawn, an exception": Incident(
        [
            "torch.multiprocessing.spawn.ProcessRaisedException: ",
            "",
            "-- Process 1 terminated with the following error:",
            *raised("KeyError: 'image'", file="/job/data.py"),
        ],
        says="Process 1",
    ),
    "rendezvous, nobody came": Incident(
        raised(
            "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError",
            file="/venv/lib/python3.11/site-packages/torch/distributed/elastic/rendezvous/dynamic.py",
        )
    ),
    "lsf, memory": Incident(
        [
            "TERM_MEMLIMIT: job killed after reaching LSF memory usage limit.",
            "Exited with signal termination: 9.",
        ],
    ),
    "pbs, wall time": Incident(["=>> PBS: job killed: walltime 86435 exceeded limit 86400"]),
    # --- torch ---
    "four watchdogs are stuck": Incident([_STUCK.format(rank) for rank in range(4)]),
    "four heartbeats": Incident([_HEARTBEAT.format(rank) for rank in range(4)]),
    "no heartbeat": Incident([_FIRST_PG.format(rank) for rank in range(4)]),
    "the store's host does not answer": Incident(
        [
            "[W socket.cpp:663] [c10d] The client socket has failed to connect to [node-a]:29500 "
            "(errno: 111 - Connection refused).",
            "[E socket.cpp:922] [c10d] The client socket has timed out after 60000ms while trying "
            "to "
            "connect to (10.0.0.1, 29500).",
        ],
        says="10.0.0.1",
    ),
    "the port is taken": Incident(
        raised(
            "torch.distributed.DistNetworkError: The server socket has failed to listen on any "
            "local "
            "network address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: "
            "address already in use",
            file="/venv/lib/python3.11/site-packages/torch/distributed/rendezvous.py",
        ),
        says="port",
    ),
    "clients that did not join": Incident(
        raised(
            "torch.distributed.DistStoreError: Timed out after 1801 seconds waiting for clients. "
            "3/4 "
            "clients joined.",
            file="/venv/lib/python3.11/site-packages/torch/distributed/rendezvous.py",
        )
    ),
    "a key that nobody set": Incident(
        raised(
            "torch.distributed.DistStoreError: wait timeout after 600000ms, keys: "
            "/default_pg/0//cuda",
            "[rank3]: ",
            file="/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py",
        )
    ),
    "a checkpoint that rank 3 could not write": Incident(
        [
            f"[rank{rank}]: {line}"
            for rank in range(4)
            for line in [
                *raised(_DCP[0], file="/venv/torch/distributed/checkpoint/utils.py"),
                *_DCP[1:],
            ]
        ],
        ("dead",),
        (3,),
    ),
    "a worker of rank 1's data loader, SIGBUS": Incident(
        [
            "ERROR: Unexpected bus error encountered in worker. This might be caused by "
            "insufficient "
            "shared memory (shm).",
            *raised(
                "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Bus error. It is "
                "possible that dataloader's workers are out of shared memory. Please try to raise "
                "your shared memory limit.",
                "[rank1]: ",
            ),
        ],
        ("dead",),
        (1,),
        says="--shm-size",
    ),
    "a worker of rank 6's data loader, SIGKILL": Incident(
        raised(
            "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed. ", "[rank6]: "
        ),
        ("dead",),
        (6,),
    ),
    "a worker of a data loader, SIGTERM": Incident(
        raised(
            "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Terminated. ",
            "[rank6]: ",
        )
    ),
    "gloo does not connect": Incident(
        [
            line
            for rank in range(4)
            for line in raised(
                "RuntimeError: Gloo connectFullMesh failed with [/pytorch/third_party/gloo/gloo/"
                "transport/tcp/pair.cc:144] no error",
                f"[rank{rank}]: ",
                file="/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py",
            )
        ]
    ),
    "gloo, other sizes": Incident(
        raised(
            "RuntimeError: [enforce fail at "
            "/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:456] "
            "op.preamble.length <= op.nbytes. 4000 vs 400",
            "[rank0]: ",
            file="/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py",
        )
    ),
    "unused parameters on all ranks": Incident(
        [
            line
            for rank in range(4)
            for line in raised(
                _FINISHED, f"[rank{rank}]: ", file="/venv/torch/nn/parallel/distributed.py"
            )
        ],
        ("dead",),
        (0, 1, 2, 3),
    ),
    "rank 5's device, and its victims": Incident(
        [
            *[
                line
                for rank in (0, 3, 7)
                for line in raised(
                    _REMOTE, f"[rank{rank}]: ", file="/venv/torch/distributed/distributed_c10d.py"
                )
            ],
            *raised(
                "RuntimeError: CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors "
                "might be asynchronously reported at some other API call",
                "[rank5]: ",
            ),
            *torchrun(0, 1, [(5, 1), (3, 1)]),
        ],
        ("dead",),
        (5,),
    ),
    "python crashed, in the file of rank 4": Incident(
        [
            "step 10",
            "Fatal Python error: Segmentation fault",
            "",
            "Current thread 0x00007f2c (most recent call first):",
            '  File "/job/kernels.py", line 40 in fused',
        ],
        ("dead",),
        (4,),
    ),
    # --- frameworks ---
    "megatron, NaN on rank 2": Incident(
        raised(
            f"RuntimeError: Rank 2, node node-1, device 2, iteration 30: Unexpected result nan "
            f"(message='{_NAN}')",
            "[default2]:[rank2]: ",
            file="/job/megatron/core/rerun_state_machine.py",
        ),
        ("dead",),
        (2,),
    ),
    "megatron, NaN on rank 11 without a prefix": Incident(
        raised(
            "AssertionError: Rank 11: found NaN in local grad norm in backward pass before "
            "data-parallel communication collective. Device: 3, node: node-1",
            file="/job/megatron/core/distributed/param_and_grad_buffer.py",
        ),
        ("dead",),
        (11,),
    ),
    "vllm, the device of rank 7": Incident(
        [_VLLM.format(7) + line for line in _VLLM_FAILED]
        + [
            "ERROR 04-02 11:02:11 [core.py:586] EngineCore failed to start.",
            *[
                f"ERROR 04-02 11:02:11 [core.py:586] {line}"
                for line in raised(
                    "Exception: WorkerProc initialization failed due to an exception in a "
                    "background "
                    "process. See stack trace for root cause.",
                    file="/venv/vllm/v1/engine/core.py",
                )
            ],
        ],
        ("dead",),
        (7,),
    ),
    "vllm, a worker died": Incident(
        [
            "(EngineCore_DP0 pid=88) ERROR 04-02 11:02:11 [multiproc_executor.py:154] Worker proc "
            "VllmWorker-3 died unexpectedly, shutting down executor.",
        ],
    ),
    "sglang, TP3 has no memory": Incident(
        [
            "[2026-04-02 11:00:00] server_args=ServerArgs(model_path='m', tp_size=8, mem=0.9)",
            "[2026-04-02 11:02:07 TP3] Scheduler hit an exception: Traceback (most recent call "
            "last):",
            '  File "/venv/sglang/srt/managers/scheduler.py", line 2400, in run_scheduler_process',
            "    scheduler.event_loop_overlap()",
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
            "",
            "[2026-04-02 11:02:08] Received sigquit from a child process. It usually means the "
            "child "
            "failed.",
        ],
        ("dead", "exhausted"),
        (3,),
    ),
    "sglang, a watchdog": Incident(
        ["[2026-04-02 11:02:07 TP0] Watchdog timeout (self.watchdog_timeout=300)"] * 2,
    ),
    "ray, memory of a node": Incident(
        [
            "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on "
            "memory.",
            "Memory on the node (IP: 10.0.3.4, ID: 5a1) where the task was running was 61.2GB / "
            "64GB",
        ],
    ),
    "ray, a task without memory on its device": Incident(
        [
            "ray.exceptions.RayTaskError(OutOfMemoryError): \x1b[36mray::Worker.step()\x1b[39m "
            "(pid=4711, ip=10.0.0.4, actor_id=5a, repr=<ray.train>)",
            '  File "/job/train.py", line 88, in step',
            "    loss.backward()",
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        ],
        says="no memory left",
    ),
    "ray, a node is gone": Incident(
        [
            "(raylet) The node with node id: 5a1f and address: 10.0.3.4 and node name: 10.0.3.4 "
            "has "
            "been marked dead because the detector has missed too many heartbeats from it."
        ],
        says="10.0.3.4",
    ),
    "horovod stalls": Incident(
        [
            "[1,0]<stderr>:[2026-04-02 11:02:07.1: W horovod/common/stall_inspector.cc:107] One or "
            "more tensors were submitted to be reduced, gathered or broadcasted by subset of ranks "
            "and are waiting for remainder of ranks for more than 60 seconds. ",
            "[1,0]<stderr>:Missing ranks:",
            "[1,0]<stderr>:3: [allreduce.loss]",
        ],
    ),
    # --- libraries and nodes ---
    "nccl, one device for two ranks": Incident(
        [
            line
            for rank in (0, 1)
            for line in raised(
                "torch.distributed.DistBackendError: NCCL error in: "
                "/pytorch/torch/csrc/distributed/"
                "c10d/NCCLUtils.cpp:94, invalid usage (run with NCCL_DEBUG=WARN for details), NCCL "
                "version 2.27.5\nncclInvalidUsage: This usually reflects invalid usage of NCCL "
                "library.\nLast error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA "
                "device 50000",
                f"[rank{rank}]: ",
                file="/venv/torch/distributed/distributed_c10d.py",
            )
        ],
        says="one device",
    ),
    "nccl, a link of InfiniBand": Incident(
        [_IB.format(306305, 306615), _IB.format(306306, 306616)], says="10.0.0.5<41303>"
    ),
    "rocm, a memory fault": Incident(
        [
            "Memory access fault by GPU node-3 (Agent handle: 0x5581) on address 0x7f3c00000000. "
            "Reason: Page not present or supervisor privilege.",
            *torchrun(3, -6, [(0, -15)]),
        ],
        says="Memory access fault",
    ),
    "rocm, an exception of the queue": Incident(
        [
            ":0:rocdevice.cpp            :2984: 112233us: [pid:4711  tid:0x7f12] Callback: Queue "
            "0x7f1100000000 Aborting with error : HSA_STATUS_ERROR_EXCEPTION: An HSAIL operation "
            "resulted in a hardware exception. code: 0x1016"
        ],
        says="4711",
    ),
    "the kernel reports a crash": Incident(
        [
            "Apr  2 11:02:07 node-a kernel: python[4711]: segfault at 0 ip 00007f2c sp 00007ffd "
            "error 4 in libtorch_cuda.so[7f2c+1000]"
        ],
        says="4711",
    ),
    "kubectl describe": Incident(
        [
            "    Last State:     Terminated",
            "      Reason:       OOMKilled",
            "      Exit Code:    137",
        ],
    ),
    "a crash of the allocator": Incident(
        ["double free or corruption (!prev)", *torchrun(2, -6)],
    ),
    "ranks of an older torch that timed out in different calls": Incident(
        [
            "[E ProcessGroupNCCL.cpp:475] [Rank 1] Watchdog caught collective operation "
            "timeout: WorkNCCL(SeqNum=1420, OpType=BROADCAST, NumelIn=1, NumelOut=1, "
            "Timeout(ms)=1800000) ran for 1800114 milliseconds before timing out.",
            "[E ProcessGroupNCCL.cpp:475] [Rank 2] Watchdog caught collective operation "
            "timeout: WorkNCCL(SeqNum=1420, OpType=ALLREDUCE, NumelIn=4096, NumelOut=4096, "
            "Timeout(ms)=1800000) ran for 1800300 milliseconds before timing out.",
            "[E ProcessGroupNCCL.cpp:475] [Rank 3] Watchdog caught collective operation "
            "timeout: WorkNCCL(SeqNum=1420, OpType=BROADCAST, NumelIn=1, NumelOut=1, "
            "Timeout(ms)=1800000) ran for 1800114 milliseconds before timing out.",
        ],
        ("desync",),
        (1, 2, 3),
        "#1420 of one group: rank 2 in all_reduce",
    ),
    "composer repeats what each rank wrote": Incident(
        [
            "ERROR:composer.cli.launcher:Rank 5 crashed with exit code 1.",
            "Waiting up to 30 seconds for all training processes to terminate. Press "
            "Ctrl-C to exit immediately.",
            "Global rank 5 (PID 1201) exited with code 1",
            "----------Begin global rank 5 STDERR----------",
            "Traceback (most recent call last):",
            '  File "/job/train.py", line 91, in <module>',
            "    main(cfg)",
            '  File "/job/train.py", line 60, in main',
            "    trainer.fit()",
            "ValueError: Expected labels in [0, 32000)",
            "----------End global rank 5 STDERR----------",
        ],
        ("dead",),
        (5,),
        "Expected labels",
    ),
    "an exception of DDP without its traceback": Incident(
        [
            "[rank1]: RuntimeError: Expected to have finished reduction in the prior "
            "iteration before starting a new one. This error indicates that your module "
            "has parameters that were not used in producing loss. Parameter indices which "
            "did not receive grad for rank 1: 5 6",
        ],
        (),
        (),
        "does not say which rank",
    ),
    "a model with more parameters on one of two ranks": Incident(
        [
            "[rank0]: Traceback (most recent call last):",
            '[rank0]:   File "/job/train.py", line 9, in <module>',
            "[rank0]:     model = FSDP(model)",
            "[rank0]:   File "
            '"/venv/lib/python3.11/site-packages/torch/distributed/utils.py", line 274, in '
            "_verify_param_shape_across_processes",
            "[rank0]:     return dist._verify_params_across_processes(process_group, "
            "tensors, logger)",
            "[rank0]: RuntimeError: DDP expects same model across all ranks, but Rank 0 "
            "has 160 params, while rank 1 has inconsistent 162 params.",
        ],
        ("mismatch",),
        (),
        "162 parameters",
    ),
    "a container that starts again and again": Incident(
        [
            'I0311 10:11:12.123456    1201 kubelet.go:2117] "SyncLoop (PLEG): event for '
            'pod" pod="train/job-worker-2"',
            'E0311 10:11:13.113456    1201 pod_workers.go:1301] "Error syncing pod, '
            'skipping" err="failed to \\"StartContainer\\" for \\"pytorch\\" with '
            'CrashLoopBackOff: \\"back-off 5m0s restarting failed container=pytorch '
            'pod=job-worker-2_train(aa)\\"" pod="train/job-worker-2"',
        ],
        (),
        (),
        "does not say which rank",
    ),
    "how kubectl describe shows a container's end": Incident(
        [
            "    State:          Terminated",
            "      Reason:       Error",
            "      Exit Code:    137",
            "      Started:      Tue, 04 Mar 2025 10:00:00 +0000",
        ],
        (),
        (),
        "code 137",
    ),
    "a worker of Ray that a signal ended": Incident(
        [
            "(RayTrainWorker pid=991, ip=10.1.2.3) *** SIGSEGV received at time=1731572112 "
            "on cpu 33 ***",
            "(RayTrainWorker pid=991, ip=10.1.2.3) PC: @     0x7f12  (unknown)  ncclProxyService",
            "(raylet, ip=10.1.2.3) A worker died or was killed while executing a task by "
            "an unexpected system error. To troubleshoot the problem, check the logs for "
            "the dead worker. RayTask ID: ffff Worker ID: aa Node ID: bb Worker IP "
            "address: 10.1.2.3 Worker port: 10123 Worker PID: 991 Worker exit type: "
            "SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a connection "
            "error code 2. End of file.",
        ],
        (),
        (),
        "Process 991 on 10.1.2.3 failed with SIGSEGV",
    ),
    "a child process of SGLang that was killed": Incident(
        [
            "[2025-05-02 12:10:11 TP0] Watchdog timeout (self.watchdog_timeout=300)",
            "[2025-05-02 12:10:11 TP0] Pyspy failed to dump PID 991.",
            "[2025-05-02 12:10:16] Child process unexpectedly failed with exitcode=-9. pid=1021",
        ],
        (),
        (),
        "code -9",
    ),
    "a link of RCCL that failed": Incident(
        [
            "gpu-07:30121:30455 [3] /long_pathname/src/transport/net_ib.cc:1295 NCCL WARN "
            "NET/IB : Got completion from peer 10.2.0.14<45022> with status=12 opcode=0 "
            "len=0 vendor err 129 (Recv) localGid fe80::1 remoteGids fe80::2",
            "gpu-07:30121:30455 [3] NCCL INFO transport/net.cc:1298 -> 6",
            "[rank11]:[E1114 08:12:33.120331 ProcessGroupNCCL.cpp:1595] [PG ID 0 PG GUID "
            "0(default_pg) Rank 11] Process group watchdog thread terminated with "
            "exception: NCCL error: remote process exited or there was a network error, "
            "NCCL version 2.18.3",
        ],
        (),
        (),
        "gpu-07 and 10.2.0.14<45022>",
    ),
    "a wait of HCCL for a rank that did not answer": Incident(
        [
            "EI0002: [PID: 3310] 2024-11-14-08:12:34.221.334 The wait execution of the "
            "Notify register times out. Reason: The Notify register has not received the "
            "Notify record from remote rank [5]. base information: [streamID:[17], "
            "taskID[3], taskType[Notify Wait], tag[AllReduce_10.0.3.4%eth0_60000_0_1]]",
            "        Possible Cause: 1. An exception occurs during the execution on some "
            "NPUs in the cluster. As a result, collective communication operation "
            "failed.2. The execution speed on some NPU in the cluster is too slow to "
            "complete a communication operation within the timeout interval.",
            "        TraceBack (most recent call last):",
            "        rtStreamSynchronizeWithTimeout execute failed, reason=[the model "
            "stream execute "
            "failed][FUNC:FuncErrorReason][FILE:error_message_manage.cc][LINE:53]",
        ],
        (),
        (),
        "does not say which rank",
    ),
    "watchdogs of HCCL": Incident(
        [
            "[rank0]:[E1114 08:12:33.120331 ProcessGroupHCCL.cpp:512] [Rank 0] Watchdog "
            "caught collective operation timeout: WorkHCCL(SeqNum=118, OpType=ALLREDUCE, "
            "Timeout(ms)=1800000) ran for 1800421 milliseconds before timing out.",
            "[rank1]:[E1114 08:12:33.120331 ProcessGroupHCCL.cpp:512] [Rank 1] Watchdog "
            "caught collective operation timeout: WorkHCCL(SeqNum=118, OpType=ALLREDUCE, "
            "Timeout(ms)=1800000) ran for 1800421 milliseconds before timing out.",
            "[ERROR] 2024-11-14-08:12:34 (PID:2231, Device:0, RankID:0) ERR02200 DIST call "
            "hccl api failed.",
            "[rank0]: RuntimeError: HCCL function error: HcclAllReduce(inputDataPtr, "
            "outputDataPtr, numel, hcclType, hcclReduceOp, hcclComm->getHcclComm(), "
            "stream.stream(false)), error code is 9",
        ],
        (),
        (),
        "Ranks 0-1 timed out",
    ),
    "a step of Slurm whose memory ran out": Incident(
        [
            "slurmstepd: error: Detected 1 oom_kill event in StepId=88213.0. Some of the "
            "step tasks have been OOM Killed.",
            "srun: error: node-c: task 2: Out Of Memory",
            "srun: Terminating StepId=88213.0",
            "slurmstepd: error: *** STEP 88213.0 ON node-a CANCELLED AT 2025-03-04T10:11:12 ***",
            "0: Traceback (most recent call last):",
            '0:   File "/job/train.py", line 4, in <module>',
            "0: torch.distributed.DistBackendError: "
            "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by "
            "peer [10.0.0.3]:33121",
        ],
        ("dead",),
        (2,),
        "SIGKILL",
    ),
    "a worker of Ray without device memory": Incident(
        [
            "(TrainWorker pid=4711, ip=10.0.0.4) torch.OutOfMemoryError: CUDA out of "
            "memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB "
            "of which 1.10 GiB is free.",
            "2025-02-11 10:22:31,221 ERROR tune_controller.py:1331 -- Trial task failed "
            "for trial TorchTrainer_3f2a1_00000",
            "Traceback (most recent call last):",
            "  File "
            '"/usr/lib/python3/site-packages/ray/air/execution/_internal/event_manager.py",'
            " line 110, in resolve_future",
            "    result = ray.get(future)",
            "ray.exceptions.RayTaskError(OutOfMemoryError): ray::_Inner.train() (pid=4700, "
            "ip=10.0.0.4, actor_id=12ab)",
        ],
        (),
        (),
        "device had no memory left",
    ),
    "an engine of vLLM that got no answer": Incident(
        [
            "INFO 06-11 02:33:10 [parallel_state.py:1065] rank 1 in world size 2 is "
            "assigned as DP rank 0, PP rank 0, TP rank 1, EP rank 1",
            "INFO 06-11 02:33:10 [parallel_state.py:1065] rank 0 in world size 2 is "
            "assigned as DP rank 0, PP rank 0, TP rank 0, EP rank 0",
            "(EngineCore_0 pid=210) ERROR 06-11 02:43:11 [dump_input.py:69] Dumping input "
            "data for V1 LLM engine (v0.9.1)",
            "(EngineCore_0 pid=210) ERROR 06-11 02:43:11 [core.py:634] EngineCore "
            "encountered a fatal error.",
            "(EngineCore_0 pid=210) ERROR 06-11 02:43:11 [core.py:634] Traceback (most "
            "recent call last):",
            "(EngineCore_0 pid=210) ERROR 06-11 02:43:11 [core.py:634]   File "
            '"/opt/venv/lib/python3.12/site-packages/vllm/v1/executor/multiproc_executor.py'
            '", line 237, in collective_rpc',
            "(EngineCore_0 pid=210) ERROR 06-11 02:43:11 [core.py:634]     result = "
            "get_response(w, dequeue_timeout)",
            "(EngineCore_0 pid=210) ERROR 06-11 02:43:11 [core.py:634] TimeoutError: RPC "
            "call to execute_model timed out.",
            "(APIServer pid=1) ERROR 06-11 02:43:11 [async_llm.py:420] "
            "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. "
            "See stack trace (above) for the root cause.",
        ],
        (),
        (),
        "does not say which rank",
    ),
}

_STARTS = [
    "W0402 11:00:00.120000 4100 torch/distributed/run.py:792] ",
    "W0402 11:00:00.120000 4100 torch/distributed/run.py:792] " + "*" * 41,
    "W0402 11:00:00.120000 4100 torch/distributed/run.py:792] Setting OMP_NUM_THREADS environment "
    "variable for each process to be 1 in default, to avoid your system being overloaded",
]
# Nothing in them is about the failure of a job of several ranks.
NO_FAILURE: dict[str, Sequence[str]] = {
    "nginx": [
        "2026/04/02 11:02:07 [error] 31#31: *840 connect() failed (111: Connection refused) while "
        'connecting to upstream, client: 10.0.0.9, server: _, request: "GET / HTTP/1.1"',
        "2026/04/02 11:02:08 [error] 31#31: *841 upstream timed out (110: Connection timed out) "
        "while "
        "reading response header from upstream",
        "2026/04/02 11:02:09 [alert] 1#1: worker process 31 exited on signal 9",
    ],
    "pip": [
        "ERROR: Could not find a version that satisfies the requirement torch==9.9 (from versions: "
        "2.13.0)",
        "ERROR: No matching distribution found for torch==9.9",
        "Traceback (most recent call last):",
        '  File "/usr/lib/python3.11/site-packages/pip/_vendor/urllib3/connection.py", line 174',
        "pip._vendor.urllib3.exceptions.ReadTimeoutError: HTTPSConnectionPool(host='pypi.org'): "
        "Read "
        "timed out.",
    ],
    "pytest": [
        "tests/test_queue.py::test_retry FAILED                                    [ 12%]",
        "Traceback (most recent call last):",
        '  File "/app/tests/test_queue.py", line 40, in test_retry',
        "    queue.get(timeout=1)",
        "queue.Empty",
        "E   ConnectionResetError: [Errno 104] Connection reset by peer",
        "1 failed, 7 passed in 2.10s",
    ],
    "a web application": [
        "[2026-04-02 11:02:07 +0000] [8] [CRITICAL] WORKER TIMEOUT (pid:12)",
        "[2026-04-02 11:02:08 +0000] [8] [ERROR] Worker (pid:12) was sent SIGKILL! Perhaps out of "
        "memory?",
        "Traceback (most recent call last):",
        '  File "/app/views.py", line 9, in index',
        "    return render(db.get(key))",
        "BrokenPipeError: [Errno 32] Broken pipe",
    ],
    "postgres": [
        "2026-04-02 11:02:07.120 UTC [31] LOG:  could not receive data from client: Connection "
        "reset "
        "by peer",
        "2026-04-02 11:02:08.120 UTC [31] FATAL:  terminating connection due to administrator "
        "command",
    ],
    "redis": [
        "31:M 02 Apr 2026 11:02:07.120 # Connection with replica client id #5 lost. Broken pipe"
    ],
    "java": [
        'Exception in thread "main" java.net.SocketTimeoutException: connect timed out',
        "\tat java.base/java.net.PlainSocketImpl.socketConnect(Native Method)",
    ],
    "go": [
        "panic: runtime error: invalid memory address or nil pointer dereference",
        "[signal SIGSEGV: segmentation violation code=0x1 addr=0x0 pc=0x4a2b10]",
        "goroutine 1 [running]:",
    ],
    "npm": ["npm ERR! code ELIFECYCLE", "npm ERR! errno 137", "npm ERR! Exit status 137"],
    "docker build": [
        '#9 ERROR: process "/bin/sh -c make" did not complete successfully: exit code: 2',
        "ERROR: failed to solve: process did not complete successfully",
    ],
    "systemd": [
        "Apr  2 11:02:07 node-a systemd[1]: nginx.service: Main process exited, code=exited, "
        "status=1",
        "Apr  2 11:02:07 node-a systemd[1]: nginx.service: Failed with result 'exit-code'.",
        "Apr  2 11:02:08 node-a kernel: eth0: renamed from veth1",
    ],
    "an api server": [
        'E0402 11:02:07.120456       1 controller.go:114] loading OpenAPI spec for "v1" failed '
        "with: "
        "failed to retrieve openAPI spec, http error: ResponseCode: 503, Body: service unavailable",
        "W0402 11:02:08.120456       1 reflector.go:324] watch of *v1.Pod ended with: context "
        "canceled",
    ],
    "a training that ended well": [
        *_STARTS,
        *[f"[rank{rank}]: step {step} loss 2.{step}" for step in range(20) for rank in range(4)],
        "[rank0]:[W402 12:00:00.785450177 ProcessGroupNCCL.cpp:1476] Warning: WARNING: "
        "destroy_process_group() was not called before program exit, which can leak resources.",
        "saved checkpoint to /ckpt/final",
    ],
    "a training with NCCL_DEBUG=INFO": [
        *[
            f"node-a:{4000 + rank}:{4100 + rank} [{rank}] NCCL INFO ncclCommInitRankConfig comm "
            f"0x55a{rank} rank {rank} nranks 4 cudaDev {rank} nvmlDev {rank} busId 1000 commId "
            f"0x4d "
            "- Init COMPLETE"
            for rank in range(4)
        ],
        "node-a:4000:4300 [0] NCCL INFO comm 0x55a0 rank 0 nranks 4 cudaDev 0 busId 1000 - Destroy "
        "COMPLETE",
        "step 100 loss 2.1",
    ],
    "a training with lightning": [
        "GPU available: True (cuda), used: True",
        "Initializing distributed: GLOBAL_RANK: 0, MEMBER: 1/2",
        "distributed_backend=nccl",
        "Epoch 9: 100%|██████████| 100/100 [00:10<00:00,  9.83it/s, v_num=0, loss=0.12]",
        "`Trainer.fit` stopped: `max_epochs=10` reached.",
    ],
    "a training with deepspeed": [
        "[2026-04-02 11:00:00,100] [INFO] [launch.py:256:main] process 4711 spawned with command: "
        "['/venv/bin/python', '-u', 'train.py', '--local_rank=0', '--timeout', '1800']",
        "[2026-04-02 11:00:09,100] [INFO] [comm.py:652:init_distributed] cdb=None",
        "[2026-04-02 12:00:00,100] [INFO] [launch.py:351:main] Process 4711 exits successfully.",
    ],
    "a server that answers": [
        "(EngineCore_DP0 pid=88) INFO 04-02 11:00:18 [parallel_state.py:1408] rank 0 in world "
        "size 2 "
        "is assigned as DP rank 0, PP rank 0, TP rank 0, EP rank N/A",
        "(APIServer pid=1) INFO:     Application startup complete.",
        '(APIServer pid=1) INFO:     10.0.0.9:51234 - "POST /v1/completions HTTP/1.1" 200 OK',
    ],
}
