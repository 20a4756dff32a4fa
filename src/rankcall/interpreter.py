"""Start a Python of our own that imports nothing from the working directory.

``python -c`` and ``python -m`` put the working directory before everything else on the path. Users
diagnose runs in folders that others have written, so a file ``json.py`` there would be run. An
isolated interpreter (``-I``) leaves that out, and PYTHONPATH with it: what this process has on its
own path is added *behind* the standard library and the installed packages, so that it can shadow
neither.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

__all__ = ["run_command", "run_function"]

_PATHS = "import json, sys; sys.path += json.loads(sys.argv.pop(1)); "
_COMMAND = "from rankcall.cli import main; sys.exit(main(sys.argv[1:]))"
_FUNCTION = (
    "from importlib import import_module as load; "
    "getattr(load(sys.argv[1]), sys.argv[2])(*sys.argv[3:])"
)


def run_command(*arguments: str) -> list[str]:
    """Return the command line that runs ``rankcall`` with some arguments."""
    return [*_isolated(_COMMAND), *arguments]


def run_function(module: str, function: str, *arguments: str) -> list[str]:
    """Return the command line that calls one of our functions with some texts."""
    return [*_isolated(_FUNCTION), module, function, *arguments]


def _isolated(code: str) -> list[str]:
    options = ["-I", *(["-B"] if sys.dont_write_bytecode else [])]
    return [sys.executable, *options, "-c", _PATHS + code, json.dumps(_added_paths())]


def _added_paths() -> list[str]:
    """Return the folders of this process's path from which a child may import, ours last.

    The working directory is left out, also if it is there by its name. An interpreter knows the
    standard library and the installed packages by itself; named once more, they do no harm. If
    rankcall itself is imported from the working directory, because somebody works on it, the child
    finds it there, but nothing that an installed package or the standard library has.
    """
    here = os.path.realpath(os.curdir)
    paths = [path for path in sys.path if os.path.isabs(path) and os.path.realpath(path) != here]
    return [*paths, str(Path(__file__).resolve().parents[1])]
