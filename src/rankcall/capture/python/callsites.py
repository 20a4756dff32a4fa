"""The line that issued an op, for the Python capture: the twin of native/callsite.h."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType

from rankcall.capture.installed import skipped_folders
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
# What stands between the user and torch's context managers and deprecated functions.
_BETWEEN = ("/contextlib.py", "/typing_extensions.py", "/warnings.py")
_MAX_SITES = 1 << 16
_MAX_KINDS = 1 << 14


class CallSites:
    """Finds and numbers call sites. Keeps code objects of known lines alive, up to a bound."""

    def __init__(self, add: Callable[[CallSite], int]) -> None:
        self._add = add
        self._skip = tuple(skipped_folders())
        self._kinds: dict[CodeType, int] = {}
        self._sites: dict[tuple[CodeType, int, CodeType | None], int] = {}
        self._by_id: dict[int, CallSite] = {}
        self._last = threading.local()

    def find(self, frame: FrameType | None) -> tuple[int, bool]:
        """Return the nearest user frame's site, and whether this thread's last op was of one call.

        That is: of one call of a public function that issues several ops, such as
        ``batch_isend_irecv``.
        """
        api: FrameType | None = None
        many = False
        while frame is not None:
            kind = self._kind_of(frame.f_code)
            if kind == _USER:
                continues = self._continues(api) if many and api is not None else False
                return self._site_of(frame, api), continues
            if kind >= _API:
                api, many = frame, kind == _API_OF_MANY
            frame = frame.f_back
        return self._backward_site(), False

    def known(self, number: int) -> CallSite | None:
        """Return a site that was found, by its number."""
        return self._by_id.get(number)

    def _kind_of(self, code: CodeType) -> int:
        kind = self._kinds.get(code)
        if kind is None:
            kind = self._classify(code.co_filename, code.co_name)
            if len(self._kinds) < _MAX_KINDS:
                self._kinds[code] = kind
        return kind

    def _classify(self, file: str, name: str) -> int:
        if file.startswith(("<frozen ", "<eval_with_key>")) or "/torchinductor_" in file:
            return _HIDDEN
        if file.endswith(_BETWEEN):
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

    def _site_of(self, frame: FrameType, api: FrameType | None) -> int:
        key = (frame.f_code, frame.f_lasti, api.f_code if api is not None else None)
        site = self._sites.get(key)
        if site is None:
            if len(self._sites) >= _MAX_SITES:
                return 0
            name = api.f_code.co_name if api is not None else ""
            code = frame.f_code
            made = CallSite(code.co_filename, frame.f_lineno, code.co_name, name)
            site = self._sites[key] = self._add(made)
            self._by_id[site] = made
        return site

    def _continues(self, frame: FrameType) -> bool:
        """Tell whether ``frame`` is the call that issued this thread's last op.

        A frame's address is used again by the next call. The opcode-trace flag of a new frame is
        off, and without a tracer it does nothing: it marks the frames that were here before.
        """
        same = frame.f_trace_opcodes and getattr(self._last, "frame", 0) == id(frame)
        frame.f_trace_opcodes = True
        self._last.frame = id(frame)
        return same

    def _backward_site(self) -> int:
        """Return the line that called backward(), for ops that autograd's own threads issue."""
        for frame in sys._current_frames().values():
            backward = False
            api: FrameType | None = None
            walk: FrameType | None = frame
            while walk is not None:
                kind = self._kind_of(walk.f_code)
                if kind == _USER:
                    break
                backward |= kind == _BACKWARD
                api = walk if kind >= _API else api
                walk = walk.f_back
            if backward and walk is not None:
                return self._site_of(walk, api)
        return 0
