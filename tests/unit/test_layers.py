"""The design's layers hold: a file imports from levels below its own, and inside its package.

Tests share code by helper modules, and the formatter lays out every line.
"""

from __future__ import annotations

import ast
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

import rankcall
from rankcall.capture.settings import Settings

ROOT = Path(rankcall.__file__).parent

# From the bottom up. Units of one level do not know each other; names in one string are one unit.
LEVELS = (
    # The ground, which everything may use.
    ("whole_numbers", "printable"),
    (
        *("errors", "background", "durations", "handles", "problems", "record", "drop_in", "ranks"),
        "_version",
    ),
    ("process", "interpreter", "budget", "secret", "packed_json"),
    ("files folders file_systems", "c10d"),
    ("ring", "_native _prebuilt"),
    ("imports",),  # other tools' evidence becomes rings, which a run loads
    ("run",),
    ("analysis", "capture"),
    ("events",),
    ("store",),  # a roll call says what each rank is doing
    ("report", "export"),
    ("job",),  # the ranks choose their run, send their records and agree on a verdict
    ("hooks", "trace", "watch", "join", "rpc", "recovery"),  # the last: why an attempt ended
    ("serve",),
    ("testing", "cli", "integrations"),
    ("__main__",),
)
UNIT = {name: unit for level in LEVELS for unit in level for name in unit.split()}
LEVEL = {unit: number for number, level in enumerate(LEVELS) for unit in level}

# A trace is read on a laptop, without torch.
# These modules are such adapters as a whole: no other module imports them before they are used.
ADAPTERS = {
    "serve/app.py": "rankcall.serve.app",
    "serve/connections.py": "rankcall.serve.connections",
    **{
        f"integrations/{name}.py": f"rankcall.integrations.{name}"
        for name in ("accelerate", "lightning", "nvrx", "ray_train", "transformers")
    },
}
TORCHLESS = (
    *("errors", "durations", "printable", "problems", "record", "drop_in", "ranks", "process"),
    *("budget", "secret", "packed_json", "files", "folders", "file_systems"),
    *("ring", "run"),
    "imports",
    *("analysis", "report", "export", "trace", "serve"),
)
LAZY = ("cli", "testing")  # torch only inside what needs it
# Each is an extra of its own: the adapter that needs it imports it when it is used.
OPTIONAL = (
    "jinja2",
    "prometheus_client",
    "opentelemetry",
    "nvtx",
    "zmq",
    "sklearn",
    "starlette",
    "uvicorn",
    "fsspec",
    "matplotlib",
    "pandas",
)


def unit_of(path: Path) -> str | None:
    """Name the unit a file belongs to; None for what stands outside the levels."""
    first = path.relative_to(ROOT).parts[0].removesuffix(".py")
    if first in ("__init__", "_boot"):
        return None  # the public names, loaded lazily; and the code that runs before all imports
    assert first in UNIT, f"{path}: give {first} a level in tests/unit/test_layers.py"
    return UNIT[first]


def type_checking_only(tree: ast.AST) -> set[ast.AST]:
    """Return the nodes that only a type checker reads."""
    return {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for part in node.body
        for inner in ast.walk(part)
    }


def imports(path: Path) -> Iterator[tuple[str, int, bool]]:
    """Yield each import of a file: dotted name, line, whether it runs when the file is imported."""
    tree = ast.parse(path.read_text())
    skipped = type_checking_only(tree)
    inside = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno, node not in inside
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno, node not in inside


FILES = sorted(ROOT.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down(path: Path) -> None:
    """Each import of rankcall's own names goes to a lower level or stays in its package."""
    mine = unit_of(path)
    for name, line, _ in imports(path):
        parts = name.split(".")
        if mine is None or parts[0] != "rankcall" or parts[1:] == ["__version__"]:
            continue
        theirs = UNIT.get(parts[1]) if len(parts) > 1 else None
        assert theirs, f"{path}:{line}: imports {name} from the top: import it where it is defined"
        ok = theirs == mine or LEVEL[theirs] < LEVEL[mine]
        assert ok, f"{path}:{line}: {mine} (level {LEVEL[mine]}) imports {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_optional_packages_stay_optional(path: Path) -> None:
    """Reading a run never imports torch; extras are imported inside what needs them."""
    mine = unit_of(path)
    for name, line, at_import in imports(path):
        top = name.split(".")[0]
        if top == "torch":
            lazy = mine in (*LAZY, None) and not at_import
            allowed = lazy or (mine and not set(mine.split()) & {*TORCHLESS, *LAZY})
            assert allowed, f"{path}:{line}: imports {name}"
        if str(path.relative_to(ROOT)) not in ADAPTERS:
            early = top in OPTIONAL or name.startswith(tuple(ADAPTERS.values()))
            assert not (at_import and early), f"{path}:{line}: imports {name} when imported"


def test_the_run_directory_of_enable_is_handed_down_only(tmp_path: Path) -> None:
    """No call from a module to one of a higher layer has an argument with ``enable``'s run_dir."""
    import torch.distributed as dist

    run_dir = tmp_path / "run"
    calls: set[tuple[str, str, str]] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        caller = frame.f_back
        if event != "call" or caller is None:
            return
        ends = [Path(code.co_filename) for code in (caller.f_code, frame.f_code)]
        if all(ROOT in end.parents for end in ends) and _is_given(frame, run_dir):
            units = [unit_of(end) for end in ends]
            if units[0] and units[1]:
                calls.add((units[0], units[1], frame.f_code.co_name))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        with rankcall.enable(run_dir, capture="python"):
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            dist.destroy_process_group()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    down = [call for call in calls if LEVEL[call[0]] > LEVEL[call[1]]]
    assert ("job", "capture", "claim") in down  # the test sees what it looks for
    assert [call for call in calls if LEVEL[call[0]] < LEVEL[call[1]]] == []


def _is_given(frame: FrameType, run_dir: Path) -> bool:
    """Return whether a call has the run directory among its arguments, as a path or in settings."""
    count = frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount
    given = [frame.f_locals.get(name) for name in frame.f_code.co_varnames[:count]]
    # Other objects that keep it, such as the recording, are passed for other reasons.
    paths = [value.run_dir if isinstance(value, Settings) else value for value in given]
    return any(isinstance(path, (str, Path)) and str(path) == str(run_dir) for path in paths)


TESTS = Path(__file__).parents[1]


def test_no_test_imports_from_another() -> None:
    """Code that several test modules need is in a helper module, not in one of them."""
    imported = [
        f"{path.relative_to(TESTS)}:{line}: {name}"
        for path in sorted(TESTS.rglob("*.py"))
        for name, line, _ in imports(path)
        if name.startswith("test_")  # helpers and tests are imported by their bare names
    ]
    assert imported == []


def test_the_formatter_lays_out_every_line() -> None:
    """No line of the package or the tests is excluded from the formatter."""
    excluded = [
        str(path)
        for path in [*FILES, *sorted(TESTS.rglob("*.py"))]
        if re.search(r"#\s*fmt:\s*(skip|off)", path.read_text())
    ]
    assert excluded == []
