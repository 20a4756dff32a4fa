"""How nodes were when they were last checked (``--health-check``), in a line for each finding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rankcall.printable import clean
from rankcall.report.formatting import plural
from rankcall.run.recoveries import ABSENT, FAILED, SUSPECT, NodeChecked


def lines_of(nodes: Sequence[NodeChecked]) -> list[str]:
    """Return a line for each node that is well, and one for each check that says otherwise."""
    return [clean(line) for node in nodes for line in _lines(node)]


def _lines(node: NodeChecked) -> Iterator[str]:
    bad = [check for check in node.checks if check.state in (FAILED, SUSPECT)]
    for check in bad:
        yield f"{node.node}: {check.state}: {check.name}: {check.text}"
    if not bad:
        absent = [check.name for check in node.checks if check.state == ABSENT]
        done = plural(len(node.checks) - len(absent), "check")
        without = f" (not here: {', '.join(absent)})" if absent else ""
        yield f"{node.node}: {done}, all well{without}"
