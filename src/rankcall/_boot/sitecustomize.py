"""Load the hook in a process below ``rankcall run`` or ``rankcall exec``.

These commands put this folder on PYTHONPATH, so Python runs this file at start-up, before the
user's script. Then the sitecustomize that this one hides runs, if there is one.

Every Python below the job runs it, from 2.7 on, also one whose stderr is closed. An exception here
would end some of them at once, and a line on stderr would come from each of them. So if the hook
cannot be loaded, nothing is said here: the command has said so before it started the job.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, arg-type"
# (the types are in modules that this file must not import at every start)

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _load_hook():
    """Import the hook from beside the package, also in a Python that does not have rankcall."""
    beside = os.path.dirname(os.path.dirname(_HERE))
    sys.path.insert(0, beside)
    try:
        import _rankcall_hook
    finally:
        sys.path.remove(beside)
    _rankcall_hook.install()


def _chain():
    """Run the sitecustomize that this one hides, if there is one."""
    sys.path[:] = [entry for entry in sys.path if not entry or os.path.abspath(entry) != _HERE]
    ours = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401  # the next one
    except ImportError as error:
        # Python 2 gives no name, and says nothing of an ImportError in a sitecustomize.
        if getattr(error, "name", "sitecustomize") != "sitecustomize":
            raise  # the user's own is broken: Python reports it as without rankcall
    finally:
        if ours is not None:
            sys.modules.setdefault("sitecustomize", ours)  # the import system requires one


try:
    _load_hook()
except Exception:
    pass
_chain()
