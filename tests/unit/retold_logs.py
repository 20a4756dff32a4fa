"""Logs of public reports of failed jobs, told again, that were judged before the reader saw them.

As in ``incident_logs``, hosts, paths, times and names are invented. The ranks, the operations and
the order of the messages are those of the reports.
"""

from __future__ import annotations

from incident_logs import Incident, raised, torchrun

_WATCHDOG = (
    "{p}[Rank {r}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={s}, OpType={op}, "
    "NumelIn={n}, NumelOut={n}, Timeout(ms)=600000) ran for 600034 milliseconds before timing out."
)
_E = "[rank{r}]:[E607 21:52:16.2544944{r:02d} ProcessGroupNCCL.cpp:629] "
_STATE = (
    "{p}[PG ID {g} PG GUID {g}{d} Rank {r}]  failure detected by watchdog at work sequence id: {s} "
    "PG status: last enqueued work: {e}, last completed work: {c}"
)
_DUMP_SIGNAL = (
    "{p}[PG ID {g} PG GUID {g}(default_pg) Rank {r}] Received a dump signal due to a collective "
    "timeout from {who} and we will try our best to dump the debug info. Last enqueued NCCL work: "
    "{e}, last completed NCCL work: {e}.This is most likely caused by incorrect usages of "
    "collectives, e.g., wrong sizes used across ranks."
)
_FR_OFF = (
    "{p}Stack trace of the failed collective not found, potentially because FlightRecorder is "
    "disabled. You can enable it by setting TORCH_NCCL_TRACE_BUFFER_SIZE to a non-zero value."
)
_INIT = (
    "{h}:{pid}:{tid} [{d}] NCCL INFO ncclCommInitRank comm 0x55a{r} rank {r} nranks {n} cudaDev "
    "{d} nvmlDev {d} busId 1000 commId 0x4d5e - Init START"
)
_FFTS = (
    "The error from device(chipId:5, dieId:0), serial number is 3, hccl fftsplus task timeout "
    "occurred during task execution, stream_id:7, sq_id:7, task_id:5990, stuck notify num:1, "
    "timeout:1836.[FUNC:ProcessStarsHcclFftsPlusTimeoutErrorInfo][FILE:device_error_proc.cc]"
    "[LINE:1388]"
)
_DIED = (
    "Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a "
    "connection error code 2. End of file. There are some potential root causes. (1) The process "
    "is killed by SIGKILL by OOM killer due to high memory usage. (2) ray stop --force is called. "
    "(3) The worker is crashed unexpectedly due to SIGSEGV or other unexpected errors."
)
_RAYLET = (
    "(raylet) A worker died or was killed while executing a task by an unexpected system error. To "
    "troubleshoot the problem, check the logs for the dead worker. RayTask ID: ffff1b Worker ID: "
    "c119 Node ID: c841 Worker IP address: 10.4.1.10 Worker port: 32827 Worker PID: 93658 "
)


def _times_out(rank: int, seq: int, op: str, numel: int, *, group: int = 1) -> list[str]:
    """Return what a rank's watchdog writes, with a state in which nothing more was issued."""
    prefix = _E.format(r=rank)
    return [
        _WATCHDOG.format(p=prefix, r=rank, s=seq, op=op, n=numel),
        _STATE.format(p=prefix, g=group, d="", r=rank, s=seq, e=seq + 2, c=seq - 1),
        _FR_OFF.format(p=prefix),
    ]


def _in_process(lines: list[str], prefix: str) -> list[str]:
    return [f"{prefix}{line}" for line in lines]


RETOLD: dict[str, Incident] = {
    # --- launchers ---
    "accelerate, torchrun's messages in columns": Incident(
        [
            "Loading checkpoint shards: 100%|██████████| 61/61 [05:45<00:00,  5.66s/it]",
            " WARNING  Sending process 14 closing signal SIGTERM         api.py:699",
            " WARNING  Sending process 15 closing signal SIGTERM         api.py:699",
            " WARNING  Sending process 16 closing signal SIGTERM         api.py:699",
            " ERROR    failed (exitcode: -9) local_rank: 5 (pid: 22) of  api.py:673",
            " binary: /opt/conda/bin/python",
            "╭───────────────────── Traceback (most recent call last) ──────────────────────╮",
            "│ /opt/conda/bin/accelerate:8 in <module>                                      │",
            "╰──────────────────────────────────────────────────────────────────────────────╯",
        ],
        says="ocal rank 5",
    ),
    "the old launcher, a crash": Incident(
        [
            *raised(
                "subprocess.CalledProcessError: Command '['/venv/bin/python3', '-u', "
                "'train.py', '--local_rank=7', '--epochs', '180']' died with <Signals.SIGSEGV: "
                "11>.",
                file="/venv/lib/python3.7/site-packages/torch/distributed/launch.py",
            ),
        ],
        says="SIGSEGV",
    ),
    "torchrun, a crash of the only failure": Incident(torchrun(0, -11), ("dead",), (0,)),
    "torchrun, an abort at the end": Incident(
        [
            "[rank0]:[W1019 08:16:22.397556647 ProcessGroupNCCL.cpp:1477] Warning: WARNING: "
            "destroy_process_group() was not called before program exit, which can leak resources.",
            "pure virtual method called",
            "terminate called without an active exception",
            "E1019 08:21:39.599000 3036 torch/distributed/elastic/multiprocessing/api.py:874] "
            "failed (exitcode: -6) local_rank: 0 (pid: 3042) of binary: /usr/bin/python",
            *torchrun(0, -6),
        ],
    ),
    "deepspeed, no ssh to a node": Incident(
        [
            *raised(
                "subprocess.CalledProcessError: Command 'ssh -o PasswordAuthentication=no "
                "192.168.3.100 hostname' returned non-zero exit status 255.",
                file="/venv/lib/python3.9/site-packages/deepspeed/launcher/runner.py",
            ),
            "",
            "During handling of the above exception, another exception occurred:",
            "",
            *raised(
                "RuntimeError: Using hostfile at /job/hostfile but host=192.168.3.100 was not "
                "reachable via ssh. If you are running with a single node please remove "
                "/job/hostfile or setup passwordless ssh.",
                file="/venv/lib/python3.9/site-packages/deepspeed/launcher/runner.py",
            ),
        ],
        says="192.168.3.100",
    ),
    "slurm, a batch step whose memory ran out": Incident(
        [
            "Epoch: [0][511/1736]\t Loss 0.5117 MAE 0.6075 RMSE 0.7153",
            "/var/spool/slurmd/job00191/slurm_script: line 28:  8156 Killed                  "
            "python3 main.py --epochs 400",
            "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=191.batch cgroup. Some of "
            "your processes may have been killed by the cgroup out-of-memory handler.",
        ],
        says="ran out of memory",
    ),
    "sagemaker, rank 3 has no memory": Incident(
        [
            *[
                line
                for step in range(4)
                for rank in range(4)
                for line in [f"[1,mpirank:{rank},algo-1]<stdout>:step {step} loss 2.1{rank}"]
            ],
            *raised(
                "RuntimeError: CUDA out of memory. Tried to allocate 1.20 GiB (GPU 3; 15.78 GiB "
                "total capacity; 13.92 GiB already allocated)",
                "[1,mpirank:3,algo-1]<stderr>:",
            ),
            "--------------------------------------------------------------------------",
            "MPI_ABORT was invoked on rank 3 in communicator MPI_COMM_WORLD",
            "with errorcode 1.",
        ],
        ("dead", "exhausted"),
        (3,),
    ),
    "the store's port is taken, twice": Incident(
        [
            "INFO:torch.distributed.elastic.agent.server.api:[default] Rendezvous'ing worker group",
            "[W socket.cpp:426] [c10d] The server socket has failed to bind to [::]:29500 (errno: "
            "98 - Address already in use).",
            "[W socket.cpp:426] [c10d] The server socket has failed to bind to 0.0.0.0:29500 "
            "(errno: 98 - Address already in use).",
            "[E socket.cpp:462] [c10d] The server socket has failed to listen on any local network "
            "address.",
        ],
        says="port",
    ),
    "the master's name is not known": Incident(
        [
            "2026-01-11 05:43:30,310 INFO     init_distribution",
            *raised(
                "ValueError: host not found: Name or service not known",
                file="/venv/lib/python3.7/site-packages/torch/distributed/rendezvous.py",
            ),
        ],
    ),
    # --- torch ---
    "rank 6 had not issued what the others timed out in": Incident(
        [
            line
            for rank in (1, 3, 5, 7, 0, 2, 4)
            for line in [
                _STATE.format(
                    p=_E.format(r=rank), g=0, d="(default_pg)", r=rank, s=120049, e=120051, c=120048
                ),
                _FR_OFF.format(p=_E.format(r=rank)),
            ]
        ]
        + [
            _DUMP_SIGNAL.format(p=_E.format(r=6), g=0, r=6, who=" rank 3", e=120048),
            *[
                _WATCHDOG.format(p=_E.format(r=rank), r=rank, s=120049, op="ALLREDUCE", n=1)
                for rank in (0, 1, 2, 3, 4, 5, 7)
            ],
        ],
        ("missing",),
        (6,),
    ),
    "two ranks time out in the same call": Incident(
        _times_out(4, 3106, "ALLREDUCE", 16666624) + _times_out(2, 3106, "ALLREDUCE", 16666624),
        says="2,4",
    ),
    "numbered lines, and the world's group is idle": Incident(
        [
            f"[{number}] {line}"
            for number, line in enumerate(
                [
                    line
                    for rank in (0, 1, 2, 4, 5, 6, 7)
                    for line in [
                        *_times_out(rank, 42300, "ALLREDUCE", 67108864),
                        _DUMP_SIGNAL.format(
                            p=_E.format(r=rank), g=0, r=rank, who="this local rank", e=6
                        ),
                    ]
                ]
                + [_DUMP_SIGNAL.format(p=_E.format(r=3), g=0, r=3, who="this local rank", e=6)],
                1803,
            )
        ],
    ),
    "sixteen ranks of an older torch": Incident(
        [
            line
            for rank in (14, 3, 1, 4, 9, 12)
            for line in [
                f"[E ProcessGroupNCCL.cpp:587] [Rank {rank}] Watchdog caught collective operation "
                "timeout: WorkNCCL(OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1800834 "
                "milliseconds before timing out.",
                "[E ProcessGroupNCCL.cpp:341] Some NCCL operations have failed or timed out. Due "
                "to the asynchronous nature of CUDA kernels, subsequent GPU operations might run "
                "on corrupted/incomplete data.",
                "terminate called after throwing an instance of 'std::runtime_error'",
                f"  what():  [Rank {rank}] Watchdog caught collective operation timeout: "
                "WorkNCCL(OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1800834 milliseconds "
                "before timing out.",
            ]
        ],
    ),
    "a batch of messages that was not met": Incident(
        [
            "[rank1]:[E1103 07:34:57.460801783 ProcessGroupNCCL.cpp:1834] [PG ID 0 PG GUID "
            "0(default_pg) Rank 1] Timeout at NCCL work: 1, last enqueued NCCL work: 1, last "
            "completed NCCL work: -1.",
            "[rank1]:[E1103 07:34:57.462234381 ProcessGroupNCCL.cpp:1595] [PG ID 0 PG GUID "
            "0(default_pg) Rank 1] Process group watchdog thread terminated with exception: [Rank "
            "1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=COALESCED, "
            "NumelIn=18446744073709551615, NumelOut=18446744073709551615, Timeout(ms)=1800000) ran "
            "for 1800014 milliseconds before timing out.",
        ],
    ),
    "lightning on slurm, rank 3 waits for the others": Incident(
        [
            _INIT.format(h="babel-31", pid=2324239, tid=2324522, d=3, r=3, n=4),
            "[rank3]:[E1119 13:21:12.512781555 ProcessGroupNCCL.cpp:616] [Rank 3] Watchdog caught "
            "collective operation timeout: WorkNCCL(SeqNum=1, OpType=BROADCAST, NumelIn=1, "
            "NumelOut=1, Timeout(ms)=1800000) ran for 1800000 milliseconds before timing out.",
            "babel-31:2324238:2324238 [2] NCCL INFO cudaDriverVersion 12060",
            "babel-31:2324238:2324238 [2] NCCL INFO Bootstrap : Using ibs8:172.16.1.17<0>",
        ],
    ),
    "fsdp, two ranks with another device": Incident(
        [
            line
            for rank in (4, 5)
            for line in raised(
                f"ValueError: Inconsistent compute device and `device_id` on rank {rank}: "
                "cuda:1 vs cuda:0",
                f"[rank{rank}]: ",
                file="/venv/lib/python3.8/site-packages/torch/distributed/fsdp/_init_utils.py",
            )
        ],
        ("dead",),
        (4, 5),
    ),
    "fsdp, a module of rank 3 is not on its device": Incident(
        [
            "[rank3]: Traceback (most recent call last):",
            '[rank3]:   File "/job/train.py", line 140, in step',
            "[rank3]:     loss = model(batch)",
            '[rank3]:   File "/venv/lib/python3.11/site-packages/torch/distributed/fsdp/'
            '_runtime_utils.py", line 585, in _lazy_init',
            "[rank3]:     _check_flat_params_on_expected_device(state, root_module)",
            '[rank3]:   File "/venv/lib/python3.11/site-packages/torch/distributed/fsdp/'
            '_runtime_utils.py", line 187, in _check_flat_params_on_expected_device',
            "[rank3]:     raise RuntimeError(",
            "[rank3]: RuntimeError: An FSDP-managed module unexpectedly has parameters on cpu. "
            "Make sure to move the module to cuda:3 before training.",
        ],
        ("dead",),
        (3,),
    ),
    "fsdp, ranks gather other parameters": Incident(
        [
            line
            for rank in range(2)
            for line in raised(
                "RuntimeError: Forward order differs across ranks: rank 0 is all-gathering 3 "
                "parameters while rank 1 is all-gathering 2 parameters",
                f"[rank{rank}]: ",
                file="/venv/lib/python3.11/site-packages/torch/distributed/fsdp/"
                "_exec_order_utils.py",
            )
        ],
        ("mismatch",),
        says="rank 1 called all_gather of 2 parameters",
    ),
    "a label beyond the classes, in tracebacks without ranks": Incident(
        [
            *[
                "/opt/pytorch/aten/src/ATen/native/cuda/Loss.cu:240: nll_loss_forward_reduce_cuda_"
                f"kernel_2d: block: [0,0,0], thread: [{n},0,0] Assertion `t >= 0 && t < n_classes` "
                "failed."
                for n in (17, 19, 12, 13)
            ],
            *raised(
                "RuntimeError: CUDA error: device-side assert triggered",
                file="/venv/megatron/training.py",
            ),
            *torchrun(1, 1, [(0, 1)]),
        ],
        says="CUDA_LAUNCH_BLOCKING",
    ),
    # --- NCCL, RCCL ---
    "nccl, no shared memory in a pod": Incident(
        [
            *[
                _INIT.format(h="runner-4", pid=202016 + r, tid=202235 + r, d=r, r=r, n=4)
                for r in range(4)
            ],
            "[2026-04-22 21:34:20] runner-4:202016:202235 [0] misc/shmutils.cc:88 NCCL WARN Error: "
            "failed to extend /dev/shm/nccl-WU88OE to 9637892 bytes, error: No space left on "
            "device (28)",
            "[2026-04-22 21:34:20] runner-4:202016:202235 [0] misc/shmutils.cc:132 NCCL WARN Error "
            "while creating shared memory segment /dev/shm/nccl-WU88OE (size 9637888), error: No "
            "space left on device (28)",
            "runner-4:202016:202235 [0] NCCL INFO transport/shm.cc:551 -> 2",
            "[2026-04-22 21:34:20] runner-4:202018:202238 [2] proxy.cc:1326 NCCL WARN Socket recv "
            "failed while polling for opId=0x7f41d0041a90",
        ],
        ("dead", "exhausted"),
        (0,),
        says="--shm-size",
    ),
    "nccl, shared memory that it may not open": Incident(
        [
            "node-8:27106:27302 [0] include/shm.h:27 NCCL WARN Call to shm_open failed : "
            "Permission denied",
            "node-8:27106:27302 [0] NCCL INFO include/shm.h:41 -> 2",
            "node-8:27106:27302 [0] include/shm.h:48 NCCL WARN Error while creating shared memory "
            "segment nccl-shm-recv-b7948f403864987a-0-3-0 (size 4460544)",
        ],
        says="27106",
    ),
    "nccl, the adapter of a host fails": Incident(
        [
            line
            for rank, pid in ((12, 815), (14, 814), (13, 812))
            for line in [
                f"2026-06-02T16:13:44.88{pid % 10}Z: [1,{rank}]<stdout>:job-e275:{pid}:{pid + 50} "
                "[0] transport/net_ib.cu:80 NCCL WARN NET/IB : Got async event : local "
                "catastrophic error",
                f"2026-06-02T16:13:44.88{pid % 10}Z: [1,{rank}]<stdout>:",
                f"2026-06-02T16:13:44.88{pid % 10}Z: [1,{rank}]<stdout>:job-e275:{pid}:{pid + 50} "
                "[0] misc/ibvwrap.cu:220 NCCL WARN Call to ibv_get_async_event failed",
            ]
        ],
        says="job-e275",
    ),
    "nccl, a queue pair that does not connect": Incident(
        [
            "[2026-03-13 22:26:02] host-01.example.com:4711:4800 [5] ibvwrap.c:262 NCCL WARN Call "
            "to ibv_modify_qp failed with 110 Connection timed out, on dev mlx5_2:1, curr state "
            "INIT, next state RTR, local GID index 3, local GID ::ffff:10.0.7.3, remote GID "
            "::ffff:10.0.9.4",
        ],
        says="10.0.9.4",
    ),
    "nccl, a rank that is not there": Incident(
        [
            "2026-02-05 05:32:39 [job-worker-1, unknown_ip] job-worker-1:25:25 [0] init.cc:981 "
            "NCCL WARN Invalid rank requested : 2/2",
        ],
    ),
    "rccl, a path that is not there": Incident(
        [
            "node-0:188802:188813 [0] /src/rccl/build/hipify/src/graph/paths.cc:97 NCCL WARN "
            "Failed to find reverse path from remNode 0/200000 nlinks 3 to node 0/700000",
            "node-0:188802:188813 [0] NCCL INFO init.cc:1902 -> 3",
            "node-0: Test NCCL failure common.cu.cpp:1291 'internal error - please report this "
            "issue to the NCCL developers / '",
        ],
    ),
    "nccl, workers of a job that cannot reach the master": Incident(
        [
            *[
                "train-worker-0:16:63 [0] NCCL INFO Call to connect returned Connection refused, "
                "retrying"
            ]
            * 12,
            "train-worker-0:16:63 [0] include/socket.h:390 NCCL WARN Connect to 10.2.0.7<42513> "
            "failed : Connection refused",
            "-- Process 0 terminated with the following error:",
            *raised(
                "RuntimeError: NCCL error in: /pytorch/torch/lib/c10d/ProcessGroupNCCL.cpp:272, "
                "unhandled system error"
            ),
        ],
        says="10.2.0.7",
    ),
    # --- HCCL ---
    "hccl, notify of rank 3 did not come": Incident(
        [
            "(train pid=8464) RuntimeError: npuSynchronizeDevice:torch_npu.dir/compiler_depend.ts:"
            "479 NPU function error: AclrtSynchronizeDeviceWithTimeout, error code is 507048",
            "(train pid=8464) [ERROR] 2026-06-25-10:45:23 (PID:13075, Device:0, RankID:8) ERR00100 "
            "PTA call acl api failed",
            "(train pid=8464) [Error]: The execution of the internal task times out. ",
            "(train pid=8464) EI0002: [PID: 13075] 2026-06-25-10:45:23.586.187 The wait execution "
            "of the Notify register times out. Reason: The Notify register has not received the "
            "Notify record from remote rank: [3]. base information: [streamID:[1], "
            "taskID[8318285], tag[AllReduce_group_name_710]",
        ],
        says="rank 3 of its group",
    ),
    "hccl, tasks of rank 16 and others time out": Incident(
        [
            *_in_process(
                raised(
                    "RuntimeError: npuSynchronizeDevice:torch_npu/csrc/core/npu/NPUStream.cpp:363 "
                    "NPU error, error code is 107020",
                    file="/venv/lib/python3.10/site-packages/torch/distributed/distributed_c10d.py",
                ),
                "worker-1: ",
            ),
            "worker-1: [ERROR] 2026-07-03-11:28:40 (PID:639, Device:0, RankID:16) ERR00100 PTA "
            "call acl api failed.",
            "worker-1: EI9999: Inner Error!",
            f"worker-1: EI9999: 2026-07-03-11:28:40.419.527  {_FFTS}",
            "worker-1: \tTraceBack (most recent call last):",
            "worker-1: [W NPUStream.cpp:365] Warning: NPU warning, error code is 107020[Error]: .",
        ],
    ),
    "hccl, a wait of rank 5 in deepspeed": Incident(
        [
            *raised(
                "RuntimeError: Sync:torch_npu/csrc/framework/OpCommand.cpp:190 NPU error, error "
                "code is 107020",
                "[rank5]: ",
            ),
            "[rank5]: [ERROR] 2026-09-04-02:46:04 (PID:52416, Device:5, RankID:5) ERR00100 PTA "
            "call acl api failed.",
            "[rank5]: EI9999: Inner Error!",
            f"[rank5]: EI9999  {_FFTS}",
        ],
    ),
    "hccl, what is left of an earlier job on device 3": Incident(
        [
            *raised(
                "RuntimeError: [ERROR] HCCL error in: torch_npu/csrc/distributed/"
                "ProcessGroupHCCL.cpp:64\n"
                "[ERROR] 2026-05-21-11:57:54 (PID:927000, Device:3, RankID:3) ERR02200 DIST call "
                "hccl api failed.\n"
                "EJ0001: 2026-05-21-11:57:54.167.645 Failed to initialize the HCCP process. "
                "Reason: Maybe the last training process is running.",
                file="/venv/lib/python3.10/site-packages/torch/distributed/distributed_c10d.py",
            ),
        ],
        ("dead",),
        (3,),
        says="earlier job",
    ),
    "lmdeploy on npu, rank 2 waited": Incident(
        [
            "2026-10-21 10:42:00,218 - lmdeploy - ERROR - model_agent.py:489 - Rank[2] failed.",
            *raised(
                "RuntimeError: ACL stream synchronize failed.",
                file="/venv/lib/python3.10/site-packages/torch/distributed/distributed_c10d.py",
            ),
            "EI9999: Inner Error!",
            f"EI9999: 2026-10-21-10:42:00.358.410  {_FFTS}",
        ],
    ),
    # --- vLLM, SGLang, Ray ---
    "vllm with ray, two ranks time out": Incident(
        [
            line
            for rank, pid in ((1, 409241), (0, 409240))
            for line in [
                f"(RayWorkerVllm pid={pid}) [E ProcessGroupNCCL.cpp:474] [Rank {rank}] Watchdog "
                "caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=ALLREDUCE, "
                "NumelIn=1, NumelOut=1, Timeout(ms)=1800000) ran for 1800762 milliseconds before "
                "timing out.",
                f"(RayWorkerVllm pid={pid}) [E ProcessGroupNCCL.cpp:488] Some NCCL operations have "
                "failed or timed out. Due to the asynchronous nature of CUDA kernels, subsequent "
                "GPU operations might run on corrupted/incomplete data.",
            ]
        ],
    ),
    "vllm with ray, the device of rank 7": Incident(
        [
            "(RayWorkerVllm pid=5304) [E ProcessGroupNCCL.cpp:916] [Rank 7] NCCL watchdog thread "
            "terminated with exception: CUDA error: unknown error",
            "(RayWorkerVllm pid=5304) CUDA kernel errors might be asynchronously reported at some "
            "other API call, so the stacktrace below might be incorrect.",
            "(RayWorkerVllm pid=5304) For debugging consider passing CUDA_LAUNCH_BLOCKING=1.",
            "(RayWorkerVllm pid=5304) Exception raised from c10_cuda_check_implementation at "
            "../c10/cuda/CUDAException.cpp:44 (most recent call first):",
        ],
        says="Process 5304",  # the 7 is its number in a group
    ),
    "vllm in ray data, an engine without an answer": Incident(
        _in_process(
            [
                "INFO 03-08 17:27:28 [shm_broadcast.py:548] No available shared memory broadcast "
                "block found in 60 seconds. This typically happens when some processes are hanging "
                "or doing some time-consuming work (e.g. compilation).",
                "ERROR 03-08 17:31:28 [core.py:1138] EngineCore encountered a fatal error.",
                *_in_process(
                    raised(
                        "TimeoutError: RPC call to sample_tokens timed out.",
                        file="/venv/lib/python3.12/site-packages/vllm/v1/executor/"
                        "multiproc_executor.py",
                    ),
                    "ERROR 03-08 17:31:28 [core.py:1138] ",
                ),
            ],
            "2026-03-09 01:27:30.122744672 (MapWorker(MapBatches(vLLMEngineActor)) pid=1202, "
            "ip=10.53.120.118) (EngineCore_DP0 pid=32080) ",
        ),
    ),
    "sglang on two nodes, four ranks time out": Incident(
        [
            f"[2026-02-27T16:30:43.48675097Z] [rank{rank}]:[E227 16:30:43.526290891 "
            f"ProcessGroupNCCL.cpp:1785] [PG ID 2 PG GUID 3 Rank {rank}] Exception (either an "
            "error or timeout) detected by watchdog at work: 32, last enqueued NCCL work: 32, last "
            "completed NCCL work: 31."
            for rank in range(4)
        ],
    ),
    "sglang, a kernel of TP2 does not compile": Incident(
        [
            "[2026-04-23 21:30:02] server_args=ServerArgs(model_path='m', tp_size=4, mem=0.8)",
            "[2026-04-23 21:31:41 TP2] Scheduler hit an exception: Traceback (most recent call "
            "last):",
            '  File "/venv/lib/python3.10/site-packages/sglang/srt/managers/scheduler.py", line '
            "2015, in run_scheduler_process",
            "    scheduler.event_loop_normal()",
            '  File "/venv/lib/python3.10/site-packages/triton/runtime/jit.py", line 345, in '
            "<lambda>",
            "    return lambda *args, **kwargs: self.run(grid=grid, warmup=False, *args, **kwargs)",
            "FileNotFoundError: [Errno 2] No such file or directory: '/root/.triton/cache/x/"
            "kernel.json.tmp'",
            "",
            "[2026-04-23 21:31:41] Received sigquit from a child process. It usually means the "
            "child failed.",
        ],
        ("dead",),
        (2,),
    ),
    "verl, an illegal access of one worker": Incident(
        [
            "(WorkerDict pid=93663) INFO 02-21 04:32:47 model_runner_base.py:120] Writing input of "
            "failed execution to /tmp/err_execute_model_input.pkl...",
            "(WorkerDict pid=93663) WARNING 02-21 04:32:47 model_runner_base.py:143] Failed to "
            "pickle inputs of failed execution: CUDA error: an illegal memory access was "
            "encountered",
            _RAYLET + _DIED,
        ],
        says="93658",
    ),
    "ray, an actor died": Incident(
        [
            *raised(
                "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this "
                "task.",
                file="/venv/lib/python3.10/site-packages/ray/_private/worker.py",
            ),
            "\tclass_name: ActorModelRayActorBOX",
            "\tactor_id: f20da4dcf474d8bb05e952bb03000000",
            "\tpid: 5226",
            "\tnamespace: aa07eaa0",
            "\tip: 10.7.34.138",
            "The actor is dead because its worker process has died. " + _DIED,
        ],
        says="10.7.34.138",
    ),
    "verl, workers abort": Incident(
        [
            _RAYLET + _DIED + " [repeated 4x across cluster]",
            "(WorkerDict pid=23189) *** SIGABRT received at time=1773825404 on cpu 49 *** "
            "[repeated 7x across cluster]",
            "(WorkerDict pid=23189) PC: @     0x7fc0d04969fc  (unknown)  pthread_kill [repeated 7x "
            "across cluster]",
        ],
    ),
    # --- the node ---
    "a pod whose device has a memory error": Incident(
        [
            "[pod/train-worker-1/pytorch] [rank8]: Traceback (most recent call last):",
            '[pod/train-worker-1/pytorch] [rank8]:   File "/job/train.py", line 88, in step',
            "[pod/train-worker-1/pytorch] [rank8]:     loss.backward()",
            "[pod/train-worker-1/pytorch] [rank8]: RuntimeError: CUDA error: uncorrectable ECC "
            "error encountered",
            "[pod/train-worker-0/pytorch] [rank0]:[E402 11:02:07.384372190 ProcessGroupNCCL.cpp:"
            "683] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=77, "
            "OpType=ALLREDUCE, NumelIn=4, NumelOut=4, Timeout(ms)=600000) ran for 600012 "
            "milliseconds before timing out.",
            "Apr  2 10:52:07 node-b kernel: NVRM: Xid (PCI:0000:1b:00): 94, pid=4711, "
            "name=python, Contained: SM (0x1). RST: No, D-RST: No",
        ],
        ("dead",),
        (8,),
        says="drain",
    ),
}
# They have warnings that do no harm, and end well.
HARMLESS: dict[str, list[str]] = {
    "rccl misses kernel options": [
        'g64:11143:11143 [0] /src/rccl/build/src/init.cpp:120 NCCL WARN Missing "amd_iommu=on" '
        "from kernel command line which can lead to system instablity or hang!",
        "g64:11143:11143 [0] /src/rccl/build/src/init.cpp:126 NCCL WARN Missing "
        '"HSA_FORCE_FINE_GRAIN_PCIE=1" from environment which can lead to low RCCL performance, '
        "system instablity or hang!",
        "g64:11143:11143 [0] NCCL INFO comm 0x55 rank 0 nranks 8 cudaDev 0 busId 1000 - Init "
        "COMPLETE",
        "step 100 loss 2.1",
    ],
    "no InfiniBand": [
        "node-0:78244:78244 [0] misc/ibvwrap.cc:63 NCCL WARN Failed to open libibverbs.so[.1]",
        "node-0:78244:78244 [0] NCCL INFO Using network Socket",
        "step 100 loss 2.1",
    ],
    "no plugin of EFA": [
        "(RayTrainWorker pid=954, ip=10.67.132.202) ray-worker-p5:954:3133 [6] "
        "nccl_net_ofi_create_plugin:1067 NCCL WARN NET/OFI aws-ofi-nccl initialization failed "
        "[repeated 15x across cluster]",
        "(RayTrainWorker pid=954, ip=10.67.132.202) ray-worker-p5:954:3133 [6] NCCL INFO net.cc:56 "
        "-> 2 [repeated 15x across cluster]",
        "(RayTrainWorker pid=954, ip=10.67.132.202) ray-worker-p5:954:3133 [6] NCCL INFO Using "
        "network Socket [repeated 15x across cluster]",
        "(RayTrainWorker pid=954, ip=10.67.132.202) step 100 loss 2.1",
    ],
    "vllm compiles for a while": [
        "(EngineCore_DP0 pid=32080) INFO 03-08 17:27:28 [shm_broadcast.py:548] No available shared "
        "memory broadcast block found in 60 seconds. This typically happens when some processes "
        "are hanging or doing some time-consuming work (e.g. compilation).",
        '(APIServer pid=1) INFO:     10.0.0.9:51234 - "POST /v1/completions HTTP/1.1" 200 OK',
    ],
    "oneCCL guesses": [
        "2026:07:27-12:04:20:(555537) |CCL_WARN| did not find MPI-launcher specific variables, "
        "switch to ATL/OFI, to force enable ATL/MPI set CCL_ATL_TRANSPORT=mpi",
        "2026:07:27-12:04:20:(555537) |CCL_WARN| could not get local_idx/count from environment "
        "variables, trying to get them from ATL",
        "step 100 loss 2.1",
    ],
}
