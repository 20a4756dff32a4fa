"""The scoreboard's table: faults that the benchmarks of MPI tools define, for torch.distributed.

``scoreboard_faults`` has the faulty rows, ``scoreboard_sound`` the correct ones, and
``scoreboard_case`` makes rows and their programs.
"""

from __future__ import annotations

from scoreboard_faults import FAULTY
from scoreboard_sound import SOUND

__all__ = ["CASES", "FAULTY", "SOUND"]

CASES = [*FAULTY, *SOUND]
