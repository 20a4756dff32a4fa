"""What the tests of launchers share: how a user starts a script, and what it left behind."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from launch import Ended

# A shell that starts two ranks, and ends with the status of one that failed.
_BOTH = """
for rank in 1 0; do RANK=$rank {} & pids="$pids $!"; done
for pid in $pids; do wait $pid || status=$?; done
exit $status
"""


@dataclass(frozen=True)
class Launcher:
    """How a user starts a script, and what it is called in the report."""

    script: str
    command: tuple[str, ...]
    program: str  # in the name of the run
    package: str = "torch"
    status: int = 3  # of the launcher, if the script ends with 3


def both(command: str) -> tuple[str, ...]:
    """Return a command that starts two ranks and waits for both."""
    return ("bash", "-c", _BOTH.format(command))


def digests(ended: Ended) -> list[str]:
    """Return the lines in which the ranks printed the digests of their weights."""
    return sorted(line for line in ended.out.splitlines() if line.startswith("rank "))


def run_of(ended: Ended) -> Path:
    """Return the run directory that the command, or each of several, named at its end."""
    (place,) = set(re.findall(r"recorded ranks? \S+ in (\S+); read it with", ended.err))
    return Path(place)


def hang_of(run: Path) -> Path:
    """Return where a run keeps its only hang.

    A test's threshold is short. If the ranks take five times as long to their first call, as on a
    busy machine, the watcher says that nothing goes on yet: true, and not what the test is about.
    """
    kept = {
        place: [
            finding["kind"]
            for finding in json.loads((place / "verdict.json").read_text())["findings"]
        ]
        for place in (run / "hangs").iterdir()
    }
    (place,) = (place for place, kinds in kept.items() if kinds != ["no_progress"])
    return place


def line_of(script: str, text: str) -> int:
    """Return the number of the only line of a script that has a text."""
    (number,) = [n for n, line in enumerate(script.splitlines(), 1) if text in line]
    return number
