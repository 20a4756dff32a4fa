"""``rankcall`` commands in a process that has no torch."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

_CODE = """
import sys
sys.modules["torch"] = None
from rankcall.cli import main
status = main(sys.argv[1:])
{then}
sys.exit(status)
"""


def without_torch(
    *arguments: object, then: str = "", stdout: Any = subprocess.PIPE
) -> subprocess.CompletedProcess[bytes]:
    """Run a command, and the code ``then`` after it; its output may go elsewhere."""
    command = [sys.executable, "-c", _CODE.format(then=then), *map(str, arguments)]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, timeout=240, check=False)
