"""Start the ranks of a test on simulated devices, and leave nothing of them behind."""

from .jobs import PRELUDE, Job, Jobs, Rank, Zygote

__all__ = ["PRELUDE", "Job", "Jobs", "Rank", "Zygote"]
