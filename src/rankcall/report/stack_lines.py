"""Dumped stacks for a terminal: ranks with equal stacks together, in at most 20 lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath

from rankcall.printable import clean
from rankcall.report.formatting import INDENT, plural
from rankcall.report.standing import shortened_ranks
from rankcall.run.frames import Frame
from rankcall.run.stack_classes import StackClass, stack_classes, telling_frames

# All stacks together take less than a screen, because a verdict stands above them.
_STACK_LINES, _MOST_CLASSES, _LEAST_FRAMES = 20, 6, 2


def stack_lines(stacks: Mapping[int, str]) -> list[str]:
    """Return the stacks as lines: a title, then the ranks with equal stacks, fewest ranks first.

    Of three classes there are at most 20 lines. Each class has the newest calls first, and as many
    of them as fit; the user's own calls are kept longest.
    """
    classes = stack_classes(stacks)
    shown = classes[:_MOST_CLASSES]
    parts = sum(1 + len(alike.in_calls) + bool(alike.awaited) for alike in shown)
    most = max(_LEAST_FRAMES, (_STACK_LINES - 1 - 2 * parts) // max(1, parts))
    lines = [f"Stacks of {plural(len(stacks), 'rank')}, equal ones together"]
    for stack_class in shown:
        lines += _class_lines(stack_class, most)
    if classes[_MOST_CLASSES:]:
        left = sum(len(stack_class.ranks) for stack_class in classes[_MOST_CLASSES:])
        more = plural(len(classes) - _MOST_CLASSES, "other stack")
        lines.append(f"and {plural(left, 'more rank')} with {more} (--json has all)")
    return [clean(line) for line in lines]


def _class_lines(alike: StackClass, most: int) -> Iterator[str]:
    count = plural(len(alike.ranks), "rank")
    name = (
        f"rank {alike.ranks[0]}"
        if len(alike.ranks) == 1
        else f"{count}: {shortened_ranks(alike.ranks)}"
    )
    yield f"{' ' * INDENT}{name}"
    if not alike.frames:
        yield f"{' ' * 2 * INDENT}{' '.join(alike.text.split())}"
    yield from _frame_lines(alike.frames, most)
    if alike.awaited:
        yield f"{' ' * INDENT}another thread there, which made the calls of that group before"
        yield from _frame_lines(alike.awaited, most)
    for frames in alike.in_calls:
        yield f"{' ' * INDENT}another thread there, in a call"
        yield from _frame_lines(frames, most)


def _frame_lines(frames: Sequence[Frame], most: int) -> Iterator[str]:
    shown = telling_frames(frames, most)
    for frame in shown:
        where = f"{PurePath(frame.file).name}:{frame.line}" if frame.line else frame.file
        yield f"{' ' * 2 * INDENT}{frame.name}  {where}"
    if len(frames) > len(shown):
        yield f"{' ' * 2 * INDENT}and {plural(len(frames) - len(shown), 'more call')}"
