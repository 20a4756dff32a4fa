"""The frames of a dumped stack, and the user's line at which a rank stands.

A rank can wait in torch without a record: while it makes a process group, or in its data loader.
Its Python stack shows that (``code_place``). Stacks come from ``faulthandler`` (a rank's own
watcher) or from py-spy.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from rankcall.run.stack_text import THREADS, is_awaited, is_in_call, is_training
from rankcall.whole_numbers import whole_number

# Functions of torch.distributed that return only after other ranks have called them as well, and
# that leave no record before they return.
SETUP = frozenset(
    {
        "init_process_group",
        "new_group",
        "split_group",
        "shrink_group",
        "new_subgroups",
        "new_subgroups_by_enumeration",
        "init_device_mesh",
        "rendezvous",
        "init_rpc",
        "synchronize",
        "store_barrier",
    }
)
LOADER = "its data loader"
_OWN_FOLDER = f"{Path(__file__).parents[1]}/"
_HOOK = "_rankcall_hook.py"  # calls init_process_group; it is not in the package
_MAIN_THREAD = re.compile(r"<module>|\"MainThread\"")
_FAULTHANDLER = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)$')
_PY_SPY = re.compile(r"^\s+(?P<name>\S.*) \((?P<file>[^()]+):(?P<line>\d+)\)$")
_NATIVE = re.compile(r"^\s+(?P<name>\S.*) \((?P<file>[^():]+)\)$")  # py-spy: name (library)
_WAITS = re.compile(r"(^|/)(threading|queue)\.py$")
_WRAPPERS = ("wrapper", "inner")  # functions of torch's decorators


@dataclass(frozen=True)
class CodePlace:
    """The user's line at which a rank stands; empty without a stack.

    ``inside``: the function of torch that the line called and that has not returned, or ``LOADER``.
    """

    line: str = ""
    function: str = ""
    inside: str = ""

    @property
    def is_setup(self) -> bool:
        """Whether the rank waits for other ranks in a function that leaves no record."""
        return self.inside in SETUP


@dataclass(frozen=True)
class Frame:
    """One call of a stack. ``line`` is 0 for a native frame, whose ``file`` is a library."""

    file: str
    line: int
    name: str

    @property
    def is_torch(self) -> bool:
        """Whether the file is torch's."""
        return bool(re.search(r"(^|/)torch/", self.file))

    @property
    def is_hook(self) -> bool:
        """Whether the file is the one that rankcall attaches with."""
        return self.file == _HOOK or self.file.endswith(f"/{_HOOK}")

    @property
    def is_ray_loop(self) -> bool:
        """Whether this is the loop in which a Ray worker waits for tasks."""
        return self.name == "main_loop" and self.file.endswith("ray/_private/worker.py")

    @property
    def is_installed(self) -> bool:
        """Whether the file belongs to Python or to an installed package."""
        # py-spy leaves out the folders of Python's own modules and of installed packages.
        first = self.file.split("/")[0].removesuffix(".py")
        short = first in sys.stdlib_module_names or first in ("torch", "rankcall")
        return (
            short
            or self.is_hook
            or bool(re.search(r"(site|dist)-packages/|lib/python3|^<frozen", self.file))
        )

    @property
    def is_internal(self) -> bool:
        """Whether the file is torch's, rankcall's or Python's own."""
        of_python = self.is_installed and "-packages/" not in self.file
        ours = self.is_hook or self.file.startswith((_OWN_FOLDER, "rankcall/"))
        return self.is_torch or of_python or ours

    @property
    def is_users(self) -> bool:
        """Whether the file is the user's own."""
        return not (self.is_installed or self.is_internal)


@lru_cache(maxsize=4096)
def code_place(stack: str) -> CodePlace:
    """Return where the rank of a dumped stack stands.

    That is where its training thread stands: the main thread, unless the stack marks another one.
    But if other ranks wait in a group whose calls another thread issues, such as one that saves
    checkpoints, then it is where that thread stands, unless no code of the user's runs there. If
    only the main thread of a Ray worker is known, and it waits for tasks, then nothing is known:
    Ray Train trains in a thread.
    """
    awaited = [frame for frame in awaited_frames(stack) if frame.line]
    frames = awaited if any(frame.is_users for frame in awaited) else training_frames(stack)
    if not frames or frames[0].is_ray_loop:
        return CodePlace()
    outer = next((n for n, frame in enumerate(frames) if not frame.is_internal), None)
    own = next((n for n, frame in enumerate(frames) if frame.is_users), outer)
    place = frames[outer if own is None else own] if outer is not None else frames[-1]
    above = frames[:outer]  # newest first: what the user's code, or a framework, has called
    return CodePlace(f"{place.file}:{place.line}", place.name, _inside(above))


def stands_still(stack: str) -> bool:
    """Return whether the training thread sleeps in the user's code, or waits for another thread.

    Otherwise it may wait for something outside the job: another program, a connection, a file. A
    function of C that the user's code calls, such as ``time.sleep``, has no frame.
    """
    frames = training_frames(stack)
    if not frames or frames[0].is_ray_loop:
        return False
    newest = frames[0]
    return (
        newest.is_users or bool(_WAITS.search(newest.file)) or "torch/distributed/" in newest.file
    )


def _inside(above: Sequence[Frame]) -> str:
    """Name the function of torch that was called, by the frames above the caller's."""
    if any("torch/utils/data/" in frame.file for frame in above):
        return LOADER
    public = [
        frame.name
        for frame in above
        if "torch/distributed/" in frame.file
        and frame.name[:1] not in ("_", "<")
        and frame.name not in _WRAPPERS
    ]
    return next((name for name in public if name in SETUP), public[-1] if public else "")


def training_frames(stack: str) -> list[Frame]:
    """Return the Python frames of the training thread, the newest first."""
    return [frame for frame in all_training_frames(stack) if frame.line]


def all_training_frames(stack: str) -> list[Frame]:
    """Return the training thread's frames, native ones too, the newest first."""
    threads = THREADS.split(stack)
    main = next((thread for thread in threads if _MAIN_THREAD.search(thread)), threads[0])
    return _frames(next(filter(is_training, threads), main))


def frames_in_calls(stack: str) -> list[list[Frame]]:
    """Return the frames of each other thread that waits in a call, the newest first."""
    return [
        frames
        for thread in THREADS.split(stack)
        if is_in_call(thread) and (frames := _frames(thread))
    ]


def awaited_frames(stack: str) -> list[Frame]:
    """Return the frames of the other thread for whose call other ranks wait, the newest first."""
    return next((_frames(thread) for thread in THREADS.split(stack) if is_awaited(thread)), [])


def _frames(thread: str) -> list[Frame]:
    frames = []
    for text in thread.splitlines():
        match = _FAULTHANDLER.match(text) or _PY_SPY.match(text)
        if match and not _is_native(match["file"]):
            line = whole_number(match["line"]) or 0  # 0: not known
            frames.append(Frame(match["file"], line, match["name"].strip()))
        elif match or (match := _NATIVE.match(text)):
            frames.append(Frame(match["file"], 0, match["name"].strip()))
    return frames


def _is_native(file: str) -> bool:
    """Return whether a source file that py-spy names is a compiled one."""
    return file.endswith((".c", ".cc", ".cpp", ".cu", ".cxx", ".h", ".hpp", ".pyx", ".rs", ".S"))
