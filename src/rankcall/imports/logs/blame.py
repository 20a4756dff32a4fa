"""Whose fault a failure is, by its words: the rank's own, another rank's, or of something outside.

There is one classifier for exceptions, for what a C++ exception says, for asynchronous errors of a
device or of NCCL, and for exit codes. It errs towards ``victim``: a wrong rank is worse than none.
"""

from __future__ import annotations

import re

from rankcall.imports.logs.facts import Blame

__all__ = ["blame_of", "blame_of_code", "says_own", "signal_of"]

# What a process says when its own device, memory or program failed, whatever it was doing then.
_OWN = re.compile(
    r"CUDA error: (?!.{0,80}(?:remote|peer|network))|[Cc]uda failure|HIP failure|CUDA out of memory"
    r"|(?:HIP|XPU|MPS) error|(?:HIP|NPU|XPU|MPS) out of memory|OutOfMemoryError"
    r"|uncorrectable (?:ECC|NVLink)"
    r"|unspecified launch failure|illegal memory access|device-side assert|unhandled cuda error"
    r"|Call to CUDA function failed|Failed to (?:CUDA|Cuda) (?:host )?(?:m|c)alloc"
    r"|[Aa]ddress already in use|EADDRINUSE|Error while creating shared memory segment"
    r"|loss (?:is|became) nan|NaN (?:loss|detected)|heartbeat of the device|aicore|AI ?Core"
    r"|RESULT_ERROR_(?:DEVICE_LOST|OUT_OF)|found NaN in local grad norm"
    # CANN: an exception of a core, memory that failed or ran out. Most other codes are time-outs.
    r"|(?:NPU (?:function )?error|ACL stream synchronize failed).{0,200}"
    r"error code(?: is |:)(?:507015|507018|507035|50705[345]|207001)\b"
    r"|last training process is running|shm_open failed"
    # A worker of the rank's own data loader.
    r"|DataLoader worker .{0,60} killed by signal: (?!Terminated)"
)
# What a process says when something that is no rank ended it, or took its disk.
_OUTSIDE = re.compile(
    r"death signal|got signal: (?:15|2|1)\b|SIGTERM|SIGINT|KeyboardInterrupt|[Pp]reempt"
    r"|No space left on device|[Dd]isk quota exceeded|DUE TO|CANCELLED AT|Evicted|evicted"
    r"|node (?:failure|drain)"
)
# What a process says when another one is gone or late.
_VICTIM = re.compile(
    r"[Cc]onnection (?:closed|reset|refused|was likely closed|lost)|[Tt]imed out|[Tt]ime-?out"
    r"|Broken pipe|[Ss]ocket|NCCL|RCCL|HCCL|[Gg]loo|c10d|[Mm]onitored ?[Bb]arrier|remote process"
    r"|MPI_ERR_\w+|MPI error|[Cc]ollective call|DeepEP error"
    r"|pair closure|SignalException|Detected mismatch|expects same model|appears not to match"
    r"|killed by signal|got signal|process ?group|TCPStore|rendezvous|communicator"
    r"|across (?:all )?ranks|[Oo]ther ranks|NPU (?:function )?error|ACL stream"
    r"|worker(?:s)? (?:died|failed)|initialization failed|recv(?:Value|Bytes)? failed"
)
# Exceptions that follow from the end of another process; their message does not matter.
_FOLLOWS = re.compile(
    r"(?:^|\.)(?:Dist\w*Error|Connection\w*Error|BrokenPipeError|EOFError|TimeoutError"
    r"|SystemExit|ChildFailedError|ProcessRaisedException|ProcessExitedException|Rendezvous\w*"
    r"|MPI\.Exception"  # of what other processes have sent, too
    r"|CheckpointException"  # every rank raises it if one could not write
    r"|RayTaskError\w*|ActorDiedError|RayActorError|WorkerCrashedError|EngineDeadError)$"
)
_FROM_OUTSIDE = re.compile(r"(?:^|\.)(?:KeyboardInterrupt|SignalException)$")

# Signals that no failure of another rank sends.
OWN_SIGNALS = {4: "SIGILL", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 11: "SIGSEGV"}


def says_own(message: str, kind: str = "") -> bool:
    """Whether the words of a failure say that it is the rank's own, whatever its place."""
    return bool(_OWN.search(message) or _OWN.search(kind))


def blame_of(message: str, kind: str = "") -> Blame:
    """Return whose fault a failure is.

    Args:
        message: What the exception, the C++ library or the watchdog says.
        kind: The type of a Python exception; empty for everything else.
    """
    if _FROM_OUTSIDE.search(kind):
        return "outside"
    if says_own(message, kind):
        return "own"
    if _FOLLOWS.search(kind) or _VICTIM.search(message):
        return "victim"
    if _OUTSIDE.search(message):
        return "outside"
    return "own" if kind else "victim"


def signal_of(code: int) -> int:
    """Return the signal behind an exit code; a shell adds 128 to it. 0: it was no signal."""
    return -code if code < 0 else code - 128 if 128 < code < 160 else 0


def blame_of_code(code: int) -> Blame:
    """Return whose fault an exit code shows.

    An abort (6) follows a watchdog's time-out as well as an assertion, so it names nobody; SIGTERM
    (15), SIGINT and SIGHUP come from a launcher, a scheduler or a person.
    """
    number = signal_of(code)
    if number in OWN_SIGNALS:
        return "own"
    return "outside" if number in (1, 2, 15) else "victim"
