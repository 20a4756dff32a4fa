"""Dumped stacks as a page shows them: ranks with equal stacks share one row."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import PurePath
from typing import Any

from rankcall.printable import clean
from rankcall.report.formatting import plural
from rankcall.report.standing import shortened_ranks
from rankcall.run.stack_classes import StackClass, stack_classes

_MOST_CLASSES = 12


def stack_rows(stacks: Mapping[int, str]) -> dict[str, Any]:
    """Return the classes of equal stacks, the fewest ranks first, and what is left out."""
    classes = stack_classes(stacks)
    rest = sum(len(stack_class.ranks) for stack_class in classes[_MOST_CLASSES:])
    return {
        "classes": [_class(stack_class) for stack_class in classes[:_MOST_CLASSES]],
        "more": f"and {plural(rest, 'more rank')} with other stacks" if rest else "",
    }


def clock(epoch_s: float) -> str:
    """Write a moment, in UTC."""
    return f"{datetime.fromtimestamp(epoch_s, timezone.utc):%Y-%m-%d %H:%M:%S} UTC"


def _class(alike: StackClass) -> dict[str, Any]:
    line = alike.line
    return {
        "count": plural(len(alike.ranks), "rank"),
        "ranks": shortened_ranks(alike.ranks),
        "line": clean(f"{PurePath(line).name}") if line else "",
        "frames": [
            {
                "name": clean(frame.name),
                "where": clean(f"{frame.file}:{frame.line}" if frame.line else frame.file),
                "own": bool(frame.line) and not frame.is_installed,
            }
            for frame in alike.frames
        ],
        "text": "" if alike.frames else clean(alike.text[:2000]),
    }
