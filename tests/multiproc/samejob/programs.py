"""The programs of the same-job test: typical uses of torch.distributed.

Each is a function of a ``Job``. It tells its results with ``job.saw`` and names with ``job.watch``
the objects that must not outlive it. It calls ``job.middle`` at the place where recording is
switched on late or off early.
"""

from __future__ import annotations

import torch.distributed as dist

from samejob import backends, children, collectives, failures, groups, training
from samejob.job import Job
from samejob.registry import PROGRAMS, Program, program, random_tensor

__all__ = ["PROGRAMS", "Program", "warm_up"]
_LISTED = (backends, children, collectives, failures, groups, training)  # by being imported


def warm_up() -> None:
    """Import all modules of the programs and the recordings, so that forked ranks have them."""
    import torch._dynamo
    import torch.distributed._functional_collectives
    import torch.distributed.device_mesh
    import torch.distributed.elastic.agent.server.local_elastic_agent
    import torch.distributed.fsdp
    import torch.distributed.launcher.api
    import torch.distributed.pipelining
    import torch.distributed.tensor.parallel
    import torch.nn.parallel
    import torch.utils.data  # noqa: F401

    import rankcall.capture.fallback.capture
    import rankcall.capture.native
    import rankcall.capture.session  # noqa: F401


@program()
def probe(job: Job) -> None:
    """A little of everything that fake recordings break."""
    tensor = job.watch("tensor", random_tensor(job.rank, 3))
    dist.all_reduce(tensor)
    job.saw("sum", tensor)
    job.middle()
    work = job.watch("Work", dist.all_reduce(tensor, async_op=True))
    job.saw("wait", work.wait())
    job.saw("type of the Work", type(work).__qualname__)
    job.attempt("root", dist.broadcast, tensor, src=7)
    print("probed")
