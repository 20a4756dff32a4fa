"""Simulated CUDA devices and NCCL for an unmodified torch, on a machine without a GPU.

The libraries beneath torch (``libcudart``, ``libnccl`` and a few more) are replaced by ones that run on
the host, so that torch's own ``ProcessGroupNCCL`` runs: with streams, events, a watchdog, aborts, and
faults on order.
"""

from ._environment import environment
from ._errors import BuildError, DevicesError, TorchError
from ._faults import Fault, FaultFolder

__all__ = ["BuildError", "DevicesError", "Fault", "FaultFolder", "TorchError", "environment"]
__version__ = "0.1.0"
