"""Python stacks of ranks: read from another process, and the user's line at which a rank stands.

A rank that the watcher observes has a memory file. On ``STACK_SIGNAL``, ``faulthandler`` writes the
stack of the thread that gets the signal into it. A process that may read the rank's memory may read
this file, through /proc. The signal goes to the main thread, and to the thread that trains if that
is another one. The signal handler is C code, so a rank that holds the GIL or waits in a collective
answers, too. A stopped rank does not. py-spy, if it is installed, needs no such answer.

The stack of the thread that trains comes first and has ``TRAINS`` in its first line, if it is not
the main thread.
"""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import mmap
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePath

from rankcall.ring import Header
from rankcall.ring.writer import put
from rankcall.run.load import load

# The number is fixed: a ring file, which any user may have written, does not choose the signal. It
# is in the middle of the real-time signals, because glibc uses the first ones. Schedulers use
# SIGUSR1 and SIGUSR2 to announce the end of a job.
STACK_SIGNAL = signal.SIGRTMIN + 16
WITHOUT_STACKS = -1  # in a ring's stack_fd: the process is watched, but cannot dump its stacks
TRAINS = "(trains, "
WAIT_S = 3.0  # on a machine with more processes than cores, some answer late
_POLL_S = 0.01
_MOST_BYTES = 1 << 18
_MOST_KEPT = 1 << 22
_PY_SPY_TIMEOUT_S = 30.0
_MOST_SPIED = 8
_MOST_PY_SPY_CHARS = 1 << 16
_THREADS = re.compile(r"\n(?=Thread |Current thread )")
_MAIN = re.compile(r"<module>|^Thread .*\"MainThread\"$", re.MULTILINE)
_WHOLE = re.compile(r"Stack \(most recent call first\):\n +File ")
# The files whose functions are the outermost of rankcall's own threads, which only observe.
OWN_FILES = (
    "watch/__init__",
    "capture/session",
    "capture/own_ring",
    "dispatch",
    "cli/_workers",
)
_OURS = re.compile(rf"rankcall/({'|'.join(OWN_FILES)})\.py")

_fd = 0


def register_stack_dump(ring: mmap.mmap) -> None:
    """Make this process dump its stacks on ``STACK_SIGNAL``, and write where into its ring.

    The handler stays until the process ends: without it, a late signal would kill the process.
    """
    global _fd
    if not _fd:
        try:
            _fd = os.memfd_create("rankcall-stacks")
            fcntl.fcntl(_fd, fcntl.F_SETFL, os.O_APPEND)
            # Only the stack of the thread that gets the signal: walking the frames of a running
            # thread can crash.
            faulthandler.register(STACK_SIGNAL, _fd, all_threads=False, chain=False)
        except (OSError, RuntimeError, AttributeError):
            _fd = WITHOUT_STACKS
    put(ring, "stack_fd", _fd)


def unregister_stack_dump(ring: mmap.mmap) -> None:
    """Write into the ring that the process answers no more requests."""
    put(ring, "stack_fd", 0)


def request_stacks(headers: Iterable[Header]) -> dict[int, str]:
    """Return the stacks of the ranks of this host that dump them, by rank.

    The call takes at most ``WAIT_S`` seconds. A rank that does not answer in time is left out.
    """
    files: dict[int, _Dump] = {}
    for header in headers:
        if header.stack_fd > 0 and _answers(header):
            dump = _Dump(header)
            if dump.ask():
                files[header.rank] = dump
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline and not _all_over(files.values()):
        time.sleep(_POLL_S)
    return {rank: text for rank, dump in files.items() if (text := dump.text())}


def _answers(header: Header) -> bool:
    """Return whether the ring's process runs, belongs to this user, and handles the signal."""
    if header.process_state() != "alive":
        return False  # a stopped process would answer only after it continues
    try:
        if Path(f"/proc/{header.pid}").stat().st_uid != os.getuid():
            return False
        for line in Path(f"/proc/{header.pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (STACK_SIGNAL - 1) & 1)
    except (OSError, ValueError):
        pass
    return False


def _all_over(dumps: Iterable[_Dump]) -> bool:
    return min([dump.is_over() for dump in dumps], default=True)  # a list: is_over signals threads


class _Dump:
    """The parts of a process's memory file that its threads write after the signal.

    They get the signal one after another: ``faulthandler`` writes line by line, and the lines of
    two stacks would mix. They share ``WAIT_S`` evenly.
    """

    def __init__(self, header: Header) -> None:
        self._pid = header.pid
        self._path = f"/proc/{header.pid}/fd/{header.stack_fd}"
        self._trains = _training_thread(header)
        self._left = [self._pid]  # the threads without the signal so far
        if self._trains and self._pid != os.getpid():
            self._left.append(self._trains)
        self._share_s = WAIT_S / len(self._left)
        self._texts: list[str] = []
        self._from = self._last = 0
        self._steady, self._until = 0, 0.0

    def ask(self) -> bool:
        """Signal the next thread. Return False if it is gone, or the file is not its own."""
        thread = self._left.pop(0)
        self._steady, self._until = 0, time.monotonic() + self._share_s
        try:
            if not os.readlink(self._path).startswith("/memfd:rankcall-stacks"):
                return False
            if self._size() > _MOST_KEPT:
                os.truncate(self._path, 0)
            self._from = self._last = self._size()
            if self._pid == os.getpid():
                # This thread holds the GIL, so no other thread's frames change meanwhile.
                faulthandler.dump_traceback(_fd, all_threads=True)
            elif thread == self._pid:
                os.kill(self._pid, STACK_SIGNAL)
            else:
                _tgkill(self._pid, thread, STACK_SIGNAL)
            return True
        except OSError:
            return False

    def is_over(self) -> bool:
        """Return whether every thread has answered, or has had its time; ask the next one."""
        if self._until == 0.0:
            return True
        if not self._has_answered() and time.monotonic() < self._until:
            return False
        self._texts.append(self._read())
        if self._left and self.ask():
            return False
        self._until = 0.0
        return True

    def _has_answered(self) -> bool:
        """Return whether the thread has written something, and has stopped writing."""
        size = self._size()
        self._steady = self._steady + 1 if size == self._last and size > self._from else 0
        self._last = size
        return self._steady >= 2

    def text(self) -> str:
        """Return the stacks that were written, the training thread's first."""
        texts = [*self._texts, self._read()] if self._until else self._texts
        main, *others = texts
        if self._pid == os.getpid():
            return mark_training_thread(main, _pthread_id(self._trains))
        # An answer does not name its thread. If the main thread was late, this may be its answer.
        trains = next((text for text in others if main and _WHOLE.match(text)), "")
        if not trains:
            return main
        named = (
            (trains, f"Thread {self._trains} {TRAINS}most recent call first):"),
            (main, f'Thread {self._pid} (most recent call first): "MainThread"'),
        )
        return "\n\n".join(f"{name}\n{text.partition(chr(10))[2]}" for text, name in named if text)

    def _read(self) -> str:
        try:
            with open(self._path, "rb") as file:
                file.seek(self._from)
                return file.read(_MOST_BYTES).decode("utf-8", "replace").strip()
        except OSError:
            return ""

    def _size(self) -> int:
        try:
            return os.stat(self._path).st_size
        except OSError:
            return self._last


def _training_thread(header: Header) -> int:
    """Return the thread that trains, if it is not the main thread and still runs; else 0."""
    thread = header.train_thread
    is_other = thread not in (0, header.pid) and Path(f"/proc/{header.pid}/task/{thread}").exists()
    return thread if is_other else 0


def _tgkill(pid: int, thread: int, number: int) -> None:
    """Send a signal to one thread of a process. Raises ``OSError``."""
    try:
        send = ctypes.CDLL(None, use_errno=True).tgkill
    except AttributeError:
        raise OSError("this C library has no tgkill") from None
    if send(pid, thread, number):
        raise OSError(ctypes.get_errno(), "tgkill")


def is_training(stack: str) -> bool:
    """Return whether the stack of one thread is marked as that of the training thread."""
    return TRAINS in stack.partition("\n")[0]


def _pthread_id(thread: int) -> str:
    """Return how ``faulthandler`` writes a thread of this process; empty if it is not known."""
    idents = (
        python_thread.ident
        for python_thread in threading.enumerate()
        if python_thread.native_id == thread
    )
    return next((f"{ident:#018x}" for ident in idents if thread and ident), "")


def mark_training_thread(text: str, thread: str) -> str:
    """Write ``TRAINS`` into the first line of a thread's stack; ``thread`` is its name there."""
    if not thread:
        return text
    return re.sub(
        rf"^((?:Current t|T)hread {thread}) \(", rf"\1 {TRAINS}", text, count=1, flags=re.M
    )


# --- from py-spy, or else from the rank itself ---


def stacks_of(where: Path, ranks: Sequence[int]) -> dict[int, str]:
    """Return the stacks of those of the ranks that run on this host and can be inspected.

    py-spy, if it is installed, inspects the first ranks; it takes a second for each. The others
    dump their stacks themselves.
    """
    if not where.is_dir():
        return {}
    wanted = set(ranks)
    headers = [head.header for head in load(where).heads if head.header.rank in wanted]
    here = [header for header in headers if header.process_state() in ("alive", "stopped")]
    stacks: dict[int, str] = {}
    spy = _py_spy()
    if spy is not None and here:
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(4) as pool:
            first = sorted(here, key=lambda header: ranks.index(header.rank))[:_MOST_SPIED]
            texts = pool.map(lambda header: _spied(spy, header), first)
            for header, text in zip(first, texts, strict=True):
                if text:
                    thread = _training_thread(header)
                    stacks[header.rank] = mark_training_thread(text, str(thread or ""))
    stacks.update(request_stacks([header for header in here if header.rank not in stacks]))
    return {rank: tidy(stacks[rank]) for rank in ranks if rank in stacks}


def tidy(text: str) -> str:
    """Put the training and the main thread first; leave out rankcall's, which only watch."""
    threads = [stack.rstrip() for stack in _THREADS.split(text) if not _only_watches(stack)]
    threads.sort(key=lambda stack: (not is_training(stack), _MAIN.search(stack) is None))
    return "\n\n".join(threads) or text


def _only_watches(stack: str) -> bool:
    """Whether a thread is one of rankcall's own. The main thread never is, also in these files."""
    return bool(_OURS.search(stack)) and not _MAIN.search(stack)


def _py_spy() -> str | None:
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def _spied(spy: str, header: Header) -> str:
    """Dump one process, with native frames if that works; return "" if it is not allowed.

    py-spy pauses a process while it reads the stacks. It cannot pause a stopped process, so that
    one is read without a pause and without native frames.
    """
    stopped = header.process_state() == "stopped"
    for options in [["--nonblocking"]] if stopped else [["--native"], []]:
        try:
            done = subprocess.run(
                [spy, "dump", *options, "--pid", str(header.pid)],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_PY_SPY_TIMEOUT_S,
                stdin=subprocess.DEVNULL,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0:
            _, begins, threads = done.stdout.partition("\nThread ")  # after the command line
            return (begins + threads).strip()[:_MOST_PY_SPY_CHARS]
    return ""


# Python stacks of ranks: the user's line at which a rank stands, and the ranks that stand alike.
#
# A rank can wait in torch without a record: while it makes a process group, or in its data loader.
# Its Python stack shows that (``code_place``). Stacks come from ``faulthandler`` (a rank's own
# watcher) or from py-spy.


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
_WRAPPERS = ("wrapper", "inner")


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
    """Return where the training thread of a dumped stack stands.

    That is the main thread, unless the stack marks another one. If only the main thread of a Ray
    worker is known, and it waits for tasks, then nothing is known: Ray Train trains in a thread.
    """
    frames = _training_frames(stack)
    if not frames or frames[0].is_ray_loop:
        return CodePlace()
    outer = next((n for n, frame in enumerate(frames) if not frame.is_internal), None)
    own = next((n for n, frame in enumerate(frames) if frame.is_users), outer)
    place = frames[outer if own is None else own] if outer is not None else frames[-1]
    above = frames[:outer]  # newest first: what the user's code, or a framework, has called
    return CodePlace(f"{place.file}:{place.line}", place.name, _inside(above))


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


def _training_frames(stack: str) -> list[Frame]:
    """Return the Python frames of the training thread, the newest first."""
    return [frame for frame in _all_training_frames(stack) if frame.line]


def _all_training_frames(stack: str) -> list[Frame]:
    """Return the training thread's frames, native ones too, the newest first."""
    threads = _THREADS.split(stack)
    main = next((thread for thread in threads if _MAIN_THREAD.search(thread)), threads[0])
    frames = []
    for text in next(filter(is_training, threads), main).splitlines():
        match = _FAULTHANDLER.match(text) or _PY_SPY.match(text)
        if match and not _is_native(match["file"]):
            frames.append(Frame(match["file"], int(match["line"]), match["name"].strip()))
        elif match or (match := _NATIVE.match(text)):
            frames.append(Frame(match["file"], 0, match["name"].strip()))
    return frames


def _is_native(file: str) -> bool:
    """Return whether a source file that py-spy names is a compiled one."""
    return file.endswith((".c", ".cc", ".cpp", ".cu", ".cxx", ".h", ".hpp", ".pyx", ".rs", ".S"))


# --- ranks with equal stacks ---


@dataclass(frozen=True)
class StackClass:
    """Ranks whose training threads stand at the same Python frames.

    ``frames``: of the first rank, the newest first, with its native frames if they are known.
    ``text``: the whole stack of the first rank, as it was dumped.
    """

    ranks: tuple[int, ...]
    frames: tuple[Frame, ...]
    text: str

    @property
    def line(self) -> str:
        """The user's line at which the ranks stand, as ``file:line``; empty if it is not known."""
        return code_place(self.text).line


def stack_classes(stacks: Mapping[int, str]) -> list[StackClass]:
    """Put ranks with equal stacks together: the smallest class first, then by the lowest rank.

    Other threads do not count: in a healthy process they are at a different line each time. A text
    without any frame is compared as it is.
    """
    alike: dict[object, list[int]] = {}
    for rank in sorted(stacks):
        alike.setdefault(_key(stacks[rank]), []).append(rank)
    classes = [
        StackClass(tuple(ranks), tuple(_all_training_frames(stacks[ranks[0]])), stacks[ranks[0]])
        for ranks in alike.values()
    ]
    return sorted(classes, key=lambda stack_class: (len(stack_class.ranks), stack_class.ranks))


def _key(stack: str) -> object:
    """Return what equal stacks share, whether the rank itself or py-spy has dumped them.

    py-spy shortens the names of files, and writes a method with its class.
    """
    frames = _training_frames(stack)
    if not frames:
        return stack.strip()
    return tuple(
        (PurePath(frame.file).name, frame.line, frame.name.rpartition(".")[2]) for frame in frames
    )


def telling_frames(frames: Sequence[Frame], most: int) -> list[Frame]:
    """Return at most ``most`` frames in their order: the newest one, then those of the user's code.

    If there is room, the newest of the others follow.
    """
    if len(frames) <= most:
        return list(frames)
    own = [n for n, frame in enumerate(frames) if frame.line and frame.is_users]
    outer = [n for n, frame in enumerate(frames) if frame.line and not frame.is_internal]
    order = dict.fromkeys([0, *own, *outer, *range(len(frames))])
    return [frames[n] for n in sorted(list(order)[:most])]
