"""Switch recording on in a process that creates a process group, whatever started the process.

Python imports this file at start-up: by ``rankcall.pth`` (by ``rankcall.start`` from Python 3.15
on) if ``RANKCALL`` is set, and by the sitecustomize that ``rankcall run`` and ``rankcall exec`` put
on PYTHONPATH. Where Python reads no ``.pth`` files (``pip install --target``, a zip file), torch
calls ``install`` at the end of its own import, as a back end's entry point. The file must cost
almost nothing in a process that never creates a group, and let no exception out. Below a job run
Pythons of any age, for example those of command-line tools, so this file is written in what Python
2.7 and each later version can read: without annotations and f-strings. In a Python that is too old
for rankcall, it says so if a process creates a group, and does nothing else.

A process becomes a rank by its first call of ``init_process_group`` or ``init_rpc``. Launchers,
data loaders and compile workers import torch as well, but never call these.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, arg-type"
# (the types are in modules that this file must not import at every start)

import os
import sys

# The module that defines each function, which is replaced before any other module can import it.
_FUNCTIONS = {
    "torch.distributed.distributed_c10d": "init_process_group",
    "torch.distributed.rpc": "init_rpc",
}
# torchrun starts its agent by this function. A process of torchrun's is no rank.
_LAUNCHER = "torch.distributed.launcher.api", "launch_agent"
_attached = [0]  # the process that was attached; a forked child is another one


def install():
    """Wait for torch.distributed in this process, if ``RANKCALL`` says so."""
    if sys.version_info < (3, 4):  # noqa: UP036  # such a Python cannot import by our finder
        return
    try:
        _share_stderr()
        _end_with_agent()
        if is_wanted() and not any(type(finder) is _Finder for finder in sys.meta_path):
            if is_to_carry_on():
                _FUNCTIONS.update([_LAUNCHER])
            for name in list(_FUNCTIONS):
                if name in sys.modules:
                    _wrap(sys.modules[name], _FUNCTIONS.pop(name))
            if _FUNCTIONS:
                sys.meta_path.insert(0, _Finder())
    except Exception as error:
        _say(error)


def _share_stderr():
    """If the launcher reads stderr from a file in memory, write only at its end.

    Programs that open /dev/stderr themselves, as shell scripts do, have a position of their own in
    that file. Without O_APPEND, this process would write over their lines.
    """
    name = os.environ.get("RANKCALL_STDERR_FILE")
    if not name:
        return
    try:
        status = os.fstat(2)
        if name == "{}:{}".format(status.st_dev, status.st_ino):  # noqa: UP032
            import fcntl

            fcntl.fcntl(2, fcntl.F_SETFL, fcntl.fcntl(2, fcntl.F_GETFL) | os.O_APPEND)
    except OSError:  # stderr is closed: this process is recorded all the same
        return


def _end_with_agent():
    """If torchrun's agent carries a job on, have the kernel end its worker together with it.

    A worker that outlives an agent that was killed would run beside the next attempt. The agent
    names itself by its file in the run. Only the agent's own child can be tied to it: the kernel
    knows no other relation.
    """
    agent = os.environ.get("RANKCALL_RECOVERIES", "").rpartition(".jsonl")[0].rpartition(".")[2]
    if agent != str(os.getppid()):
        return
    import signal

    set_death_signal = 1  # PR_SET_PDEATHSIG, since Linux 2.1; it holds after an exec, too
    try:
        import ctypes

        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL, 0, 0, 0)
    except (ImportError, OSError, AttributeError):  # recording does not depend on it
        return
    if agent != str(os.getppid()):  # it was killed a moment ago
        os.kill(os.getpid(), signal.SIGKILL)


def is_wanted():
    """Return whether the environment asks for recording."""
    return os.environ.get("RANKCALL", "0") not in ("", "0")


def is_to_carry_on():
    """Return whether the job is to be restarted after a hang, and this process is no worker."""
    environ = os.environ
    return environ.get("RANKCALL_ON_HANG") == "recover" and "TORCHELASTIC_RUN_ID" not in environ


def _say(error):
    try:
        text = " ".join(str(error).split())
        line = "rankcall: not recording: {}: {}\n".format(type(error).__name__, text)  # noqa: UP032
        sys.stderr.write(line)
    except Exception:
        pass  # stderr was closed when the process started, or is full


class _Finder:
    """Finds the awaited modules by the other finders, and replaces a function in each."""

    def find_spec(self, name, path=None, target=None):
        if name not in _FUNCTIONS:
            return None
        for finder in [entry for entry in sys.meta_path if entry is not self]:
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
            try:
                _wrap(module, _FUNCTIONS.pop(name))
                if not _FUNCTIONS:
                    sys.meta_path.remove(self)
            except Exception as error:
                _say(error)

        loader.exec_module = exec_module


def _wrap(module, name):
    """Put a function in the place of one of torch's that attaches, and then calls torch's."""
    import functools

    original = getattr(module, name, None)
    if original is None:
        return  # torch was built without it

    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        try:
            if name == _LAUNCHER[1]:
                supervise()
            else:
                attach(original, args, kwargs)
        except Exception as error:
            _say(error)
        try:
            return original(*args, **kwargs)
        except BaseException as error:
            # Without this frame, the traceback is the same as without rankcall.
            error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
            raise

    # Other modules of torch that were imported earlier have taken the function over.
    for other in [sys.modules[key] for key in list(sys.modules) if key.startswith("torch.")]:
        if getattr(other, "__dict__", {}).get(name) is original:
            setattr(other, name, wrapper)


def supervise():
    """Have the agent that torchrun starts now decide about restarts."""
    if sys.version_info >= (3, 10):  # noqa: UP036
        from rankcall.recovery.agent import install as install_agent

        install_agent()


def attach(function, args, kwargs):
    """Record this process from now on, unless that was done before or is no longer wanted."""
    if _attached == [os.getpid()] or not is_wanted():
        return
    _attached[:] = [os.getpid()]
    if sys.version_info < (3, 10):  # noqa: UP036
        version = ".".join(map(str, sys.version_info[:3]))
        raise RuntimeError("rankcall needs Python 3.10 or newer; this is Python " + version)
    import inspect

    from rankcall.watch import arm

    try:
        arguments = inspect.signature(function).bind_partial(*args, **kwargs).arguments
    except TypeError:
        return  # torch's function raises it, too
    # Both functions call these two arguments so, and -1 or None stands for the environment's.
    rank, world_size = (arguments.get(name) for name in ("rank", "world_size"))
    if arm(_number(rank), _number(world_size)) and (
        os.environ.get("RANKCALL_TRACE") or os.environ.get("RANKCALL_HISTORY")
    ):
        from rankcall import trace

        trace.arm()


def _number(argument):
    return argument if isinstance(argument, int) and not isinstance(argument, bool) else -1
