"""``rankcall unbar``: let a node into a job again."""

from __future__ import annotations

from rankcall.cli.bar import Node, note
from rankcall.cli.common import RunPath
from rankcall.run.bars import bar_of

__all__ = ["command"]


def command(node: Node, run: RunPath = None) -> None:
    """Let a node into a job again that was barred, by the job itself or by rankcall bar.

    Its launcher has ended: start it again. Its launcher must see this run directory.
    """
    note(bar_of(node, "a person let it in again", 0.0, barred=False), run)
