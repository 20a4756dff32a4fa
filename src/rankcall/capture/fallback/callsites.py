"""The line that issued an op, for the Python capture: corresponds to ``native/callsite.h``."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType

from rankcall.capture.interface import skipped_folders
from rankcall.ring.tables import CallSite

_USER, _HIDDEN, _WRAPPER, _API, _API_OF_MANY, _BACKWARD = range(6)
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
_MAX_SITES = _MAX_CODES = 1 << 16
_OWN_FOLDER = str(Path(__file__).parent) + "/"


class _Code:
    """A code object that is alive: its kind, and its lines that issued ops."""

    __slots__ = ("kind", "sites")

    def __init__(self, kind: int) -> None:
        self.kind = kind
        self.sites: dict[tuple[int, str], int] = {}  # by instruction and public function


class CallSites:
    """Finds and numbers call sites. Keeps no code object alive."""

    def __init__(self, add: Callable[[CallSite], int]) -> None:
        self._add = add
        self._skip = tuple(skipped_folders())
        # By address: to compare code objects takes long, and those of two files can be equal.
        self._codes: dict[int, _Code] = {}
        self._references: dict[int, weakref.ref[CodeType]] = {}
        self._numbers: dict[CallSite, int] = {}
        self._by_id: dict[int, CallSite] = {}
        self._last = _PerThread()

    def find(self, frame: FrameType | None, moment: int) -> tuple[int, bool]:
        """Return the nearest user frame's site, and whether this thread's last op was of one call.

        That is: of one call of a public function that issues several ops, such as
        ``batch_isend_irecv``. ``moment`` changes when a thread of autograd's, without frames of its
        own, has to look again who called ``backward()``.
        """
        api: FrameType | None = None
        many = False
        while frame is not None:
            code = frame.f_code
            known = self._codes.get(id(code)) or self._learn(code)
            kind = known.kind
            if kind == _USER:
                continues = self._continues(api) if many and api is not None else False
                return self._site_of(known, frame, api), continues
            if kind >= _API:
                api, many = frame, kind == _API_OF_MANY
            frame = frame.f_back
        return self._backward_site(moment), False

    def known(self, number: int) -> CallSite | None:
        """Return a site that was found, by its number."""
        return self._by_id.get(number)

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
        if file.startswith(("<frozen ", "<eval_with_key>")) or "/torchinductor_" in file:
            return _HIDDEN
        if file.endswith(_BETWEEN):
            return _HIDDEN
        if file.startswith(_OWN_FOLDER):
            return _HIDDEN
        if not file.startswith(self._skip):
            return _USER
        if name == "_engine_run_backward":
            return _BACKWARD
        if name in _WRAPPERS or "c10d_logger.py" in file:
            return _WRAPPER
        if name == "batch_isend_irecv" or "object" in name:
            return _API_OF_MANY
        return _API

    def _site_of(self, known: _Code, frame: FrameType, api: FrameType | None) -> int:
        name = api.f_code.co_name if api is not None else ""
        key = (frame.f_lasti, name)
        site = known.sites.get(key)
        if site is None:
            code = frame.f_code
            made = CallSite(code.co_filename, frame.f_lineno, code.co_name, name)
            site = known.sites[key] = self._number_of(made)
        return site

    def _number_of(self, made: CallSite) -> int:
        site = self._numbers.get(made)
        if site is None:
            if len(self._numbers) >= _MAX_SITES:
                return 0
            site = self._numbers[made] = self._add(made)
            self._by_id[site] = made
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
                if known.kind == _USER:
                    if backward:
                        return self._site_of(known, walk, api)
                    break
                backward |= known.kind == _BACKWARD
                api = walk if known.kind >= _API else api
                walk = walk.f_back
        return 0


class _PerThread(threading.local):
    """The last public call that issues several ops, and the last look for the backward call."""

    frame = 0
    moment = -1
    site = 0
