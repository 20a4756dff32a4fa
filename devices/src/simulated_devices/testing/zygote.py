"""A process with torch imported on simulated devices, which forks the ranks of the tests.

Importing torch takes seconds of a core, and a test has two ranks or more. A process may be forked before
it has used CUDA, so torch is imported once, and each rank begins as a fork with an environment of its own.

Requests come as lines of JSON on stdin, answers go to stdout:
    {"id": 1, "code": "...", "environment": {...}, "output": "path", "timeout": 60} -> {"id": 1, "pid": 123}
    and, when the rank has ended, {"id": 1, "status": 0}; a negative status is a signal.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import select
import sys
import traceback
from typing import Any


def serve() -> dict[str, Any] | None:
    """Answer requests until stdin ends; in a forked rank, return its request."""
    running: dict[int, int] = {}
    buffered = b""
    while True:
        readable, _, _ = select.select([0], [], [], 0.01 if running else None)
        if readable:
            data = os.read(0, 1 << 20)
            if not data:
                return None
            buffered += data
            *lines, buffered = buffered.split(b"\n")
            for line in lines:
                request: dict[str, Any] = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    return request
                running[pid] = request["id"]
                say({"id": request["id"], "pid": pid})
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                say({"id": running.pop(pid), "status": os.waitstatus_to_exitcode(status)})


def say(answer: dict[str, Any]) -> None:
    """Write an answer."""
    os.write(1, (json.dumps(answer) + "\n").encode())


def become(request: dict[str, Any]) -> None:
    """Take over the environment and the output of a rank."""
    os.environ.update(request["environment"])
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    # A rank that crashes prints the stack of the thread that did. To read the frames of other threads
    # while they run can crash it once more: a rank that torch's watchdog has aborted died by SIGSEGV.
    faulthandler.enable(all_threads=False)
    # A rank that hangs says where, and does not outlive its test.
    faulthandler.dump_traceback_later(request["timeout"], exit=True)


if __name__ == "__main__":
    import torch
    import torch._dynamo  # noqa: F401  (imported at the first all_gather_object and optimizer step)

    gc.freeze()  # each collection of a rank, and the one as it ends, would visit and copy the heap of torch
    say({"ready": True})
    rank_request = serve()
    if rank_request is not None:
        become(rank_request)
        try:
            exec(compile(rank_request["code"], "<rank>", "exec"), {"__name__": "__main__"})
        except SystemExit:
            raise
        except BaseException:
            traceback.print_exc()
            sys.exit(1)
        finally:
            sys.stdout.flush()
