"""NVIDIA's Resiliency Extension: have ``ft_launcher`` leave out a node that holds the job up."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from rankcall.analysis.verdicts.finding import Finding
from rankcall.process import host_name
from rankcall.recovery.policy import PROGRAM, family_of

try:
    from nvidia_resiliency_ext.fault_tolerance import (
        RankMonitorClient,
        WorkloadAction,
        WorkloadControlRequest,
    )
except ImportError as error:  # pragma: no cover
    raise ImportError(
        "this needs NVIDIA's Resiliency Extension: pip install nvidia-resiliency-ext"
    ) from error

_logger = logging.getLogger("rankcall")


class ExcludeThisNode:
    """Ask ``ft_launcher`` to leave this node out, if one of its ranks holds the job up.

    Give it to ``rankcall.watch.start(on_hang=ExcludeThisNode(client))`` on all ranks. The ranks of
    the culprit's node send the request, from their watchers' threads; a rank that is stopped
    cannot, so its node needs another one that can. The launcher heeds it when it next restarts the
    job, which its own time-outs bring about, or ranks that end: it leaves, and the others go on
    without the node if ``--nnodes MIN:MAX`` lets them. A failure of the program excludes nobody.

    Args:
        client: NVRx's client of this rank, after ``init_workload_monitoring``.
    """

    def __init__(self, client: RankMonitorClient) -> None:
        self._client = client

    def __call__(self, findings: Sequence[Finding]) -> None:
        """Send the request, if the likeliest cause is a rank of this node. Logs if that fails."""
        cause = findings[0] if findings else None
        if cause is None or not cause.stops or host_name() not in cause.hosts:
            return
        if family_of(cause.kind, None, "", certain=cause.confidence == "certain") == PROGRAM:
            return
        request = WorkloadControlRequest(WorkloadAction.ExcludeThisNode, cause.summary)
        try:
            self._client.send_workload_control_request(request)
        except Exception as error:  # of many kinds, for example without ft_launcher
            _logger.warning("ft_launcher cannot be asked to leave this node out: %r", error)
