"""Arm recording in a worker that ``rankcall run`` started, once torch has been imported.

This folder is on PYTHONPATH of everything below the launcher, so Python runs this file at start-up,
before the user's script. It must cost almost nothing if torch is never imported, must run on any
Python that a job starts, and must not let an exception out.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, arg-type"
# (the types are in modules that this file must not import at every start)

import os
import sys

# Importing torch imports distributed_c10d half way through, so one alone is not enough: recording
# needs both to be complete.
_WAITING = {"torch", "torch.distributed.distributed_c10d"}
_HERE = os.path.dirname(os.path.abspath(__file__))


def _say(error: BaseException) -> None:
    try:
        text = " ".join(str(error).split())
        sys.stderr.write(f"rankcall: not recording: {type(error).__name__}: {text}\n")
    except Exception:
        pass  # there is no stderr to write to


def _is_worker() -> bool:
    """Return whether this process records. Its children inherit RANKCALL_WORKER, and do not."""
    if os.environ.get("RANKCALL_ARM") != "1":
        return False
    me = str(os.getpid())
    return os.environ.setdefault("RANKCALL_WORKER", me) == me


class _Finder:
    """Finds the awaited modules by the other finders, and runs ``_complete`` after their import."""

    def find_spec(self, name, path=None, target=None):
        if name not in _WAITING:
            return None
        for finder in [each for each in sys.meta_path if each is not self]:
            spec = finder.find_spec(name, path, target) if hasattr(finder, "find_spec") else None
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    self._watch(name, spec.loader)
                return spec
        return None

    def _watch(self, name, loader):
        execute = loader.exec_module

        def exec_module(module):
            loader.__dict__.pop("exec_module", None)  # restore the loader
            execute(module)
            self._complete(name)

        loader.exec_module = exec_module

    def _complete(self, name: str) -> None:
        _WAITING.discard(name)
        if _WAITING:
            return
        try:
            sys.meta_path.remove(self)
            # Check again: this may be a child that was forked before its parent imported torch,
            # or a launcher inside a worker, which removes RANKCALL_ARM from its environment.
            if _is_worker():
                from rankcall.watch import arm

                if arm() and (
                    os.environ.get("RANKCALL_TRACE") or os.environ.get("RANKCALL_HISTORY")
                ):
                    from rankcall import trace

                    trace.arm()
        except Exception as error:
            _say(error)


def _chain() -> None:
    """Run the sitecustomize that this one hides, if there is one."""
    sys.path[:] = [each for each in sys.path if not each or os.path.abspath(each) != _HERE]
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
    if _is_worker():
        sys.meta_path.insert(0, _Finder())
except Exception as failure:
    _say(failure)
_chain()
