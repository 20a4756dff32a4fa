"""The line that issued an op, for the Python capture: corresponds to ``native/callsite.h``."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType

from rankcall.capture.interface import installed_folders, skipped_folders
from rankcall.ring.tables import JOIN, CallSite, UserLine

_USER, _FRAMEWORK, _CHILD, _HIDDEN, _WRAPPER, _API, _API_OF_MANY, _BACKWARD = range(8)
# Functions of torch's decorators (``_exception_logger``, ``no_grad``, ``torch.compile``) and of
# ``Module.__call__``: what the user called is the function around or inside of them.
_WRAPPERS = {
    "wrapper",
    "inner",
    "wrapped",
    "_wrapped_call_impl",
    "_call_impl",
    "decorate_context",
    "_fn",
}
# Frames between the user and torch's context managers and deprecated functions.
_BETWEEN = ("/contextlib.py", "/typing_extensions.py", "/warnings.py")
_JOINS = ("/rankcall/join/", "/torch/distributed/algorithms/join.py")
_PACKAGES = ("/site-packages/", "/dist-packages/")
# Names of programs that came on the command line or were typed: the user's own.
_TYPED = ("<string>", "<stdin>", "<python-input", "<ipython-input")
# A program that makes code objects without end (``exec``, notebooks) must not make the tables grow
# without end. Ops of later sites are recorded without one.
_MAX_SITES = _MAX_CODES = 1 << 16
# Between a framework's line and the user's. Lightning has some 30; deeper is a recursion, and each
# op would pay for it.
_MOST_FRAMES = 400
_OWN_FOLDER = str(Path(__file__).parent) + "/"


class _Code:
    """A code object that is alive: its kind, and its lines that issued ops."""

    __slots__ = ("kind", "numbers", "sites", "through")

    def __init__(self, kind: int) -> None:
        self.kind = kind
        self.sites: dict[tuple[int, str], int] = {}  # by instruction and public function
        # Of a framework's code: the numbers of its lines, by the same key. Of the user's: the sites
        # of pairs of lines, by instruction and the number of the framework's line.
        self.numbers: dict[tuple[int, str], int] = {}
        self.through: dict[tuple[int, int], int] = {}


class CallSites:
    """Finds and numbers call sites. Keeps no code object alive."""

    def __init__(self, add: Callable[[CallSite], int]) -> None:
        self._add = add
        self._skip = tuple(skipped_folders())
        self._installed = tuple(installed_folders())
        # By address: to compare code objects takes long, and those of two files can be equal.
        self._codes: dict[int, _Code] = {}
        self._references: dict[int, weakref.ref[CodeType]] = {}
        self._numbers: dict[CallSite, int] = {}
        self._framework_lines: dict[CallSite, int] = {}
        self._last = _PerThread()

    def find(self, frame: FrameType | None, moment: int) -> tuple[int, bool]:
        """Return the site of the nearest frame of the user's, and whether its call goes on.

        It goes on if the same call of a public function that issues several ops, such as
        ``batch_isend_irecv``, has issued this thread's last op, too. ``moment`` is a number that
        changes when a thread of autograd's, which has no frames of its own, has to look again who
        called ``backward()``.
        """
        api: FrameType | None = None
        many = False
        while frame is not None:
            code = frame.f_code
            known = self._codes.get(id(code)) or self._learn(code)
            kind = known.kind
            if kind <= _CHILD:
                continues = self._continues(api) if many and api is not None else False
                return self._site_of(known, frame, api), continues
            if kind >= _API:
                api, many = frame, kind == _API_OF_MANY
            frame = frame.f_back
        return self._backward_site(moment), False

    def _learn(self, code: CodeType) -> _Code:
        known = _Code(self._classify(code.co_filename, code.co_name))
        address = id(code)
        if len(self._codes) < _MAX_CODES:
            codes, references = self._codes, self._references

            def forget(_: object) -> None:  # before another object can have this address
                codes.pop(address, None)
                references.pop(address, None)

            references[address] = weakref.ref(code, forget)
            codes[address] = known
        return known

    def _classify(self, file: str, name: str) -> int:
        # Importlib's code, and code that FX and Inductor generate: no line of it is in a file that
        # somebody wrote.
        if file.startswith(("<frozen ", "<eval_with_key>")) or "/torchinductor_" in file:
            return _HIDDEN
        if file.endswith(_BETWEEN):
            return _HIDDEN
        if file.startswith(_OWN_FOLDER):
            return _HIDDEN
        if not file.startswith(self._skip):
            return self._classify_outside(file, name)
        if name == "_engine_run_backward":
            return _BACKWARD
        if name in _WRAPPERS or "c10d_logger.py" in file:
            return _WRAPPER
        if name == "batch_isend_irecv" or "object" in name:
            return _API_OF_MANY
        return _API

    def _classify_outside(self, file: str, name: str) -> int:
        # A child of multiprocessing's begins there; multiprocessing wrote its first line.
        if name == "spawn_main" and "/multiprocessing/" in file:
            return _CHILD
        if name == "main" and "/multiprocessing/forkserver.py" in file:
            return _CHILD
        if file.startswith(self._installed) or any(folder in file for folder in _PACKAGES):
            return _FRAMEWORK
        return _FRAMEWORK if file.startswith("<") and not file.startswith(_TYPED) else _USER

    def _site_of(self, known: _Code, frame: FrameType, api: FrameType | None) -> int:
        name = _api_of(api.f_code) if api is not None else ""
        key = (frame.f_lasti, name)
        if known.kind == _FRAMEWORK:
            behind = self._user_behind(frame)
            if behind is not None:
                return self._site_of_pair(known, frame, key, *behind)
        site = known.sites.get(key)
        if site is None:
            site = known.sites[key] = self._number_of(_call_site(frame, name))
        return site

    def _user_behind(self, frame: FrameType) -> tuple[_Code, FrameType] | None:
        """Return the user's own frame behind one of a framework."""
        behind = frame.f_back
        for _ in range(_MOST_FRAMES):
            if behind is None:
                return None
            known = self._codes.get(id(behind.f_code)) or self._learn(behind.f_code)
            if known.kind == _USER:
                return known, behind
            if known.kind == _CHILD:
                return None
            behind = behind.f_back
        return None

    def _site_of_pair(
        self, known: _Code, frame: FrameType, key: tuple[int, str], own: _Code, user: FrameType
    ) -> int:
        """Return the site of a framework's line that the user's line led to.

        Code objects made of the same source have the same numbers, so that code that is made anew
        at each step does not fill the tables.
        """
        number = known.numbers.get(key)
        if number is None:
            lines = self._framework_lines
            if len(lines) >= _MAX_SITES:
                return 0
            number = lines.setdefault(_call_site(frame, key[1]), len(lines))
            known.numbers[key] = number
        pair = (user.f_lasti, number)
        site = own.through.get(pair)
        if site is None:
            line = UserLine(user.f_code.co_filename, user.f_lineno, user.f_code.co_name)
            site = self._number_of(_call_site(frame, key[1], line))
            if site:
                own.through[pair] = site
        return site

    def _number_of(self, call_site: CallSite) -> int:
        site = self._numbers.get(call_site)
        if site is None:
            if len(self._numbers) >= _MAX_SITES:
                return 0
            site = self._numbers[call_site] = self._add(call_site)
        return site

    def _continues(self, frame: FrameType) -> bool:
        """Tell whether ``frame`` is the call that issued this thread's last op.

        A frame's address is used again by the next call. The opcode-trace flag of a new frame is
        off, and without a tracer it does nothing: it marks the frames that were here before.
        """
        same = frame.f_trace_opcodes and self._last.frame == id(frame)
        frame.f_trace_opcodes = True
        self._last.frame = id(frame)
        return same

    def _backward_site(self, moment: int) -> int:
        """Return the line that called backward(), for ops that autograd's own threads issue."""
        if self._last.moment != moment:
            self._last.moment, self._last.site = moment, self._find_backward()
        return self._last.site

    def _find_backward(self) -> int:
        for frame in sys._current_frames().values():
            backward = False
            api: FrameType | None = None
            walk: FrameType | None = frame
            while walk is not None:
                known = self._codes.get(id(walk.f_code)) or self._learn(walk.f_code)
                if known.kind <= _CHILD:
                    if backward:
                        return self._site_of(known, walk, api)
                    break
                backward |= known.kind == _BACKWARD
                api = walk if known.kind >= _API else api
                walk = walk.f_back
        return 0


def _api_of(code: CodeType) -> str:
    """Return the name of a public function; of all that a ``Join`` issues, that of the class."""
    return JOIN if any(place in code.co_filename for place in _JOINS) else code.co_name


def _call_site(frame: FrameType, api: str, user: UserLine | None = None) -> CallSite:
    code = frame.f_code
    return CallSite(code.co_filename, frame.f_lineno, code.co_name, api, user)


class _PerThread(threading.local):
    """The last public call that issues several ops, and the last look for the backward call."""

    frame = 0
    moment = -1
    site = 0
