"""Ranks that stand at the same Python frames share one row: the classes of equal stacks."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from rankcall.run.frames import (
    Frame,
    all_training_frames,
    awaited_frames,
    code_place,
    frames_in_calls,
    training_frames,
)


@dataclass(frozen=True)
class StackClass:
    """Ranks whose training threads stand at the same Python frames.

    ``frames``: of the first rank, the newest first, with its native frames if they are known.
    ``in_calls``: the same of its other threads that wait in a call.
    ``awaited``: the same of another thread, which issued its calls in a group that waits for it.
    ``text``: the whole stack of the first rank, as it was dumped.
    """

    ranks: tuple[int, ...]
    frames: tuple[Frame, ...]
    text: str
    in_calls: tuple[tuple[Frame, ...], ...] = ()
    awaited: tuple[Frame, ...] = ()

    @property
    def line(self) -> str:
        """The user's line at which the ranks stand, as ``file:line``; empty if it is not known."""
        return code_place(self.text).line


def stack_classes(stacks: Mapping[int, str]) -> list[StackClass]:
    """Put ranks with equal stacks together: the smallest class first, then by the lowest rank.

    Other threads count only if they wait in a call, or are waited for: in a healthy process they
    are at a different line each time. A text without any frame is compared as it is.
    """
    alike: dict[object, list[int]] = {}
    for rank in sorted(stacks):
        alike.setdefault(_key(stacks[rank]), []).append(rank)
    classes = [
        StackClass(
            tuple(ranks),
            tuple(all_training_frames(stacks[ranks[0]])),
            stacks[ranks[0]],
            tuple(map(tuple, frames_in_calls(stacks[ranks[0]]))),
            tuple(awaited_frames(stacks[ranks[0]])),
        )
        for ranks in alike.values()
    ]
    return sorted(classes, key=lambda stack_class: (len(stack_class.ranks), stack_class.ranks))


def _key(stack: str) -> object:
    """Return what equal stacks share, whether the rank itself or py-spy has dumped them.

    py-spy shortens the names of files, and writes a method with its class.
    """
    frames = training_frames(stack)
    if not frames:
        return stack.strip()
    others = [awaited_frames(stack), *frames_in_calls(stack)]
    return tuple(
        (PurePath(frame.file).name, frame.line, frame.name.rpartition(".")[2])
        for frame in (*frames, *itertools.chain(*others))
    )


def telling_frames(frames: Sequence[Frame], most: int) -> list[Frame]:
    """Return at most ``most`` frames in their order: the newest one, then those of the user's code.

    If there is room, the newest of the others follow.
    """
    if len(frames) <= most:
        return list(frames)
    own = [n for n, frame in enumerate(frames) if frame.line and frame.is_users]
    outer = [n for n, frame in enumerate(frames) if frame.line and not frame.is_internal]
    order = dict.fromkeys([0, *own, *outer, *range(len(frames))])
    return [frames[n] for n in sorted(list(order)[:most])]
