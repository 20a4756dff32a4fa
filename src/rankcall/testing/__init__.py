"""What rankcall is tested with, for its users' tests too."""

from rankcall.testing.synthetic import Op, Pace, Synthetic, synthetic_run

__all__ = ["Op", "Pace", "Synthetic", "synthetic_run"]
