"""Golden files: rendered reports, kept in tests/golden.

``RANKCALL_REGEN_GOLDEN=1 python -m pytest tests/unit`` writes them anew; look at the diff.
"""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "golden"


def check(name: str, text: str) -> None:
    """Compare with the golden file ``name``, or write it."""
    path = FOLDER / name
    if os.environ.get("RANKCALL_REGEN_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), f"{name} differs; see tests/unit/golden.py"
