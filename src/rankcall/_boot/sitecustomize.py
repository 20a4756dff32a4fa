"""Load the hook in a process below ``rankcall run`` or ``rankcall exec``.

These commands put this folder on PYTHONPATH, so Python runs this file at start-up, before the
user's script. Then the sitecustomize that this one hides runs, if there is one.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, arg-type"
# (the types are in modules that this file must not import at every start)

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _load_hook() -> None:
    """Import the hook from beside the package, also in a Python that does not have rankcall."""
    beside = os.path.dirname(os.path.dirname(_HERE))
    sys.path.insert(0, beside)
    try:
        import _rankcall_hook
    finally:
        sys.path.remove(beside)
    _rankcall_hook.install()


def _chain() -> None:
    """Run the sitecustomize that this one hides, if there is one."""
    sys.path[:] = [entry for entry in sys.path if not entry or os.path.abspath(entry) != _HERE]
    ours = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401  # the next one
    except ImportError as error:
        if error.name != "sitecustomize":
            raise  # the user's own is broken: Python reports it as without rankcall
    finally:
        if ours is not None:
            sys.modules.setdefault("sitecustomize", ours)  # the import system requires one


try:
    _load_hook()
except Exception as failure:
    sys.stderr.write(f"rankcall: not recording: {type(failure).__name__}: {failure}\n")
_chain()
