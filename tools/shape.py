#!/usr/bin/env python3
"""Measure the shape of a Python package: modules, lines, imports between modules, import circles.

An import is one module that names another module of the package, counted once for the pair. Imports
inside functions and under ``TYPE_CHECKING`` count: a reader has to follow them like all others. A
circle is a set of modules that import one another, directly or through others of the set.

A vague name is a parameter or a local variable whose name does not say what it holds: ``each``,
``found``, ``told``, ``one`` or ``who``.

Two figures can have a limit: ``--max-in-circles`` and ``--max-vague``. The others are a report.
A limit on the number of modules, on their length or on their imports is met by merging modules
that tell different stories. The exit status is 1 if a figure is above its limit, and 2 if there is
no such package.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

Graph = Mapping[str, frozenset[str]]

NATIVE_SUFFIXES = (".h", ".cpp", ".cc")
SHORT_MODULE = 60
VAGUE = frozenset({"each", "found", "told", "one", "who"})


@dataclass(frozen=True)
class Shape:
    """The figures of one package.

    ``circles`` holds one entry for each circle: its modules in alphabetical order.
    ``repeated_names`` holds the module names that stand in more than one place of the package; a
    leading underscore is ignored. ``vague_names`` are written as ``module:line name``.
    """

    modules: int
    python_lines: int
    native_lines: int
    imports: int
    imports_per_1000_lines: float
    short_modules: int
    longest_module: int
    circles: list[list[str]]
    repeated_names: list[str]
    vague_names: list[str]

    @property
    def modules_in_circles(self) -> int:
        """How many modules are part of some circle."""
        return sum(map(len, self.circles))


def modules_of(root: Path) -> dict[str, Path]:
    """Return the path of every module below a package directory, by its dotted name."""
    paths: dict[str, Path] = {}
    for path in sorted(root.rglob("*.py")):
        parts = [root.name, *path.relative_to(root).with_suffix("").parts]
        if parts[-1] == "__init__":
            parts.pop()
        paths[".".join(parts)] = path
    return paths


def imports_of(name: str, path: Path, known: Mapping[str, Path]) -> frozenset[str]:
    """Return the modules of the package that a module imports.

    Args:
        name: The importing module's dotted name.
        path: The importing module's file.
        known: Every module of the package, as ``modules_of`` returns them.

    Returns:
        Dotted names. ``from package import name`` counts as the module ``package.name`` if there is
        one, else as ``package``.

    Raises:
        SyntaxError: The file is not valid Python.
    """
    imported: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            imported.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = _origin(node, name, is_package=path.name == "__init__.py")
            for alias in node.names:
                inner = f"{origin}.{alias.name}"
                imported.add(inner if inner in known else origin)
    return frozenset(imported & known.keys()) - {name}


def _origin(node: ast.ImportFrom, name: str, is_package: bool) -> str:
    """Return the absolute name of the module after ``from``."""
    if not node.level:
        return node.module or ""
    package = name.split(".") if is_package else name.split(".")[:-1]
    package = package[: len(package) - node.level + 1]
    return ".".join([*package, node.module] if node.module else package)


def circles_of(graph: Graph) -> list[list[str]]:
    """Return the strongly connected components of more than one module, the largest first.

    Tarjan's algorithm with a stack of its own, so that a long chain of imports meets no recursion
    limit.
    """
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    on_stack: set[str] = set()
    circles: list[list[str]] = []
    for start in graph:
        if start in index:
            continue
        work = [(start, iter(sorted(graph[start])))]
        while work:
            module, successors = work[-1]
            if module not in index:
                index[module] = lowest[module] = len(index)
                stack.append(module)
                on_stack.add(module)
            following = next(successors, None)
            if following is None:
                work.pop()
                if work:
                    parent = work[-1][0]
                    lowest[parent] = min(lowest[parent], lowest[module])
                if lowest[module] == index[module]:
                    component = stack[stack.index(module) :]
                    del stack[-len(component) :]
                    on_stack.difference_update(component)
                    if len(component) > 1:
                        circles.append(sorted(component))
            elif following not in index:
                work.append((following, iter(sorted(graph[following]))))
            elif following in on_stack:
                lowest[module] = min(lowest[module], index[following])
    return sorted(circles, key=lambda circle: (-len(circle), circle))


def shortest_way_round(graph: Graph, circle: list[str]) -> list[str]:
    """Return a shortest chain of imports inside a circle; it ends with the module it began with."""
    members = set(circle)
    shortest: list[str] = []
    for start in circle:
        came_from: dict[str, str] = {}
        queue = deque([start])
        while queue and start not in came_from:
            module = queue.popleft()
            for following in sorted(graph[module] & members):
                if following not in came_from:
                    came_from[following] = module
                    queue.append(following)
        chain = [start]
        while len(chain) == 1 or chain[-1] != start:
            chain.append(came_from[chain[-1]])
        if not shortest or len(chain) < len(shortest):
            shortest = chain[::-1]
    return shortest


def measure(root: Path) -> tuple[Shape, Graph]:
    """Return the figures of the package in a directory, and the imports they come from."""
    known = modules_of(root)
    lines = {name: _line_count(path) for name, path in known.items()}
    graph = {name: imports_of(name, path, known) for name, path in known.items()}
    imports = sum(map(len, graph.values()))
    total = sum(lines.values())
    repeated = Counter(name.rpartition(".")[2].lstrip("_") for name in known)
    shape = Shape(
        modules=len(known),
        python_lines=total,
        native_lines=sum(
            _line_count(path) for path in root.rglob("*") if path.suffix in NATIVE_SUFFIXES
        ),
        imports=imports,
        imports_per_1000_lines=round(1000 * imports / max(1, total), 1),
        short_modules=sum(
            lines[name] < SHORT_MODULE and path.name != "__init__.py"
            for name, path in known.items()
        ),
        longest_module=max(lines.values(), default=0),
        circles=circles_of(graph),
        repeated_names=sorted(name for name, count in repeated.items() if count > 1),
        vague_names=[f"{name}:{vague}" for name in known for vague in vague_names(known[name])],
    )
    return shape, graph


def vague_names(path: Path) -> list[str]:
    """Return the parameters and variables of a module that have a vague name, as ``line name``.

    A class may have a field of such a name: an attribute is read beside its object's name.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    fields = {
        statement.target
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for statement in node.body
        if isinstance(statement, ast.AnnAssign)
    }
    names = [
        (node.lineno, node.id if isinstance(node, ast.Name) else node.arg)
        for node in ast.walk(tree)
        if isinstance(node, ast.arg)
        or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node not in fields)
    ]
    return [f"{line} {name}" for line, name in sorted(names) if name in VAGUE]


def _line_count(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def report(shape: Shape, graph: Graph) -> str:
    """Return the figures as text, one a line, with a shortest way round each circle."""
    rows = [
        ("modules", f"{shape.modules}"),
        (f"  below {SHORT_MODULE} lines", f"{shape.short_modules}"),
        ("  longest, lines", f"{shape.longest_module}"),
        ("  repeated names", f"{len(shape.repeated_names)}  {', '.join(shape.repeated_names)}"),
        ("lines of Python", f"{shape.python_lines:,}"),
        ("lines of C++", f"{shape.native_lines:,}"),
        ("imports", f"{shape.imports}"),
        ("  per 1,000 lines", f"{shape.imports_per_1000_lines}"),
        ("modules in circles", f"{shape.modules_in_circles}"),
        ("vague names", f"{len(shape.vague_names)}  {', '.join(shape.vague_names[:5])}"),
    ]
    text = [f"{name:22s}{value}".rstrip() for name, value in rows]
    for circle in shape.circles:
        chain = " -> ".join(shortest_way_round(graph, circle))
        text.append(f"  {len(circle)} modules, for example {chain}")
    return "\n".join(text)


def exceeded(shape: Shape, limits: Mapping[str, int | None]) -> list[str]:
    """Return one sentence for each figure of a shape that is above its limit.

    Args:
        shape: What was measured.
        limits: The limit of each figure, by the name of the ``Shape`` attribute. None: no limit.
    """
    sentences = []
    for name, limit in limits.items():
        figure = getattr(shape, name)
        if isinstance(figure, list):
            figure = len(figure)
        if limit is not None and figure > limit:
            sentences.append(f"{name.replace('_', ' ')}: {figure} is above the limit {limit}")
    return sentences


LIMITS = {"in-circles": "modules_in_circles", "vague": "vague_names"}


def main(arguments: list[str] | None = None) -> int:
    """Measure a package, print its figures, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="shape.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("package", type=Path, help="the package's directory, as in src/rankcall")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object")
    for option, attribute in LIMITS.items():
        parser.add_argument(
            f"--max-{option}",
            dest=attribute,
            type=int,
            metavar="N",
            help=f"the limit of {attribute.replace('_', ' ')}",
        )
    options = parser.parse_args(arguments)
    if not options.package.is_dir():
        print(f"shape.py: no such directory: {options.package}", file=sys.stderr)
        return 2
    shape, graph = measure(options.package)
    if not shape.modules:
        print(f"shape.py: no Python module below {options.package}", file=sys.stderr)
        return 2
    print(json.dumps(asdict(shape)) if options.json else report(shape, graph))
    sentences = exceeded(shape, {name: getattr(options, name) for name in LIMITS.values()})
    for sentence in sentences:
        print(f"shape.py: {options.package}: {sentence}", file=sys.stderr)
    return int(bool(sentences))


if __name__ == "__main__":
    sys.exit(main())
