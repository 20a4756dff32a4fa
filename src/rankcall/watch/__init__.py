"""The in-job watcher: if the job hangs, it names the rank that is the cause on the job's terminal.

Each rank has one watcher thread, which reads the rank's own ring. If a call has been in flight for
too long, one rank of each node reads all rings of its node. If there are several nodes, they
exchange the states of their ranks through the job's store, and one of them judges. The verdict and
all stacks are kept in the run directory, below ``hangs/``.

``DebugPage`` shows the verdict as a page of torch's own debug server.
"""

from __future__ import annotations

import logging
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from rankcall import attach, background
from rankcall.analysis.verdicts.finding import Finding
from rankcall.capture import session
from rankcall.capture.session import Recording, current
from rankcall.errors import RankcallError, RunNotFound, warn_once
from rankcall.process import boot_id
from rankcall.record import FLAG_ABANDONED
from rankcall.registry import Scoped
from rankcall.ring import Header, read_header
from rankcall.ring.follower import RingView
from rankcall.ring.writer import put
from rankcall.run.stacks import register_stack_dump, unregister_stack_dump
from rankcall.watch._judge import Judge, findings_of

__all__ = ["ABORT_STATUS", "DebugPage", "Handle", "arm", "start"]

HANG_AFTER, ON_HANG = "RANKCALL_HANG_AFTER", "RANKCALL_ON_HANG"  # set by the launcher
DEFAULT_S = 60.0


class Handle(Scoped):
    """A running watcher. ``stop()`` ends it, and so does the end of its ``with`` block."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher

    def stop(self) -> None:
        """Stop watching. The recording also ends, unless something else in this process uses it."""
        self._watcher.stop()

    def _end(self) -> None:
        self.stop()


def start(
    hang_after: float | None = None,
    on_hang: OnHang | None = None,
    *,
    run_dir: str | os.PathLike[str] | None = None,
) -> Handle:
    """Watch this rank for hangs, on a daemon thread. Call it on every rank, as ``enable``.

    A second call replaces the watcher. If recording is off, this function switches it on. The
    watcher never raises in training or waits for it, and ends it only with ``"abort"``.

    Args:
        hang_after: After how many seconds in flight a call counts as hung (default:
            ``RANKCALL_HANG_AFTER``, or 60). In the first step it is five times as many, and later
            at least ten times the median step.
        on_hang: What to do (default: ``RANKCALL_ON_HANG``, or ``"report"``). ``"report"`` prints
            the verdict once, on one rank, and watches on. ``"abort"`` also ends every rank that can
            still be ended, with exit status 124. A function is called with the findings, on each
            rank, on the watcher's thread.
        run_dir: Where to record, if recording is off.

    Raises:
        ValueError: An argument or an environment variable has a value that is not allowed.
        TypeError: ``on_hang`` is neither a string nor a function.

    It also raises the errors of ``rankcall.enable``.
    """
    after, how = _hang_after(hang_after), _on_hang(on_hang)
    recording = attach.claim("watch", run_dir)
    watcher = Watcher(recording, after, how)
    watcher.start()
    return Handle(watcher)


def arm(rank: int = -1, world_size: int = -1) -> bool:
    """Record and watch as the environment variables say; return whether we record.

    Called when this process is about to create its first process group. It never raises; an error
    is printed on stderr. If the program records or watches already, that goes on unchanged.

    Args:
        rank: The rank that this process will have; -1 if only the environment says it.
        world_size: The number of ranks, or -1.
    """
    try:
        attach.attach(rank, world_size)
    except (RankcallError, OSError, ValueError) as error:
        warn_once(f"not recording: {error}")
        return False
    try:
        if _hang_after(None) < math.inf and not is_watching():
            start()
    except (RankcallError, OSError, ValueError) as error:
        warn_once(f"not watching for hangs: {error}")
    return True


def _hang_after(given: float | None) -> float:
    """Return the threshold in seconds; infinity if the environment variable is 0, which is off."""
    if given is not None:
        if not (given > 0 and math.isfinite(given)):
            raise ValueError(f"hang_after must be a number of seconds above 0; got {given}")
        return float(given)
    text = os.environ.get(HANG_AFTER) or str(DEFAULT_S)
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (seconds >= 0 and math.isfinite(seconds)):
        raise ValueError(f"{HANG_AFTER} must be a number of seconds, 0 for off; got {text!r}")
    return seconds or math.inf


def _on_hang(given: OnHang | None) -> OnHang:
    how = given if given is not None else os.environ.get(ON_HANG) or "report"
    if not isinstance(how, str):
        if not callable(how):
            raise TypeError(f"on_hang must be a word or a function; got {type(how).__name__}")
        return how
    if how not in ("report", "abort"):
        raise ValueError(f"on_hang must be report, abort or a function; got {how!r}")
    return how


# The watcher's thread: read the rank's ring, act for the node if it leads, react to verdicts.
#
# ``Node`` is a node as one of its ranks sees it: the rings in one folder, and which rank leads.


logger = logging.getLogger("rankcall.watch")

ABORT_STATUS = 124  # the same as that of timeout(1)
_TICK_S = 0.25
_OWN_FAILURES = 10
_OWN_FAILURE_S = 1.0

OnHang = str | Callable[[list[Finding]], object]


class Watcher:
    """Watches one rank on a daemon thread, and its whole node if no lower rank can."""

    def __init__(self, recording: Recording, hang_after: float, on_hang: OnHang) -> None:
        self._recording = recording
        self._hang_after = hang_after
        self._on_hang = on_hang
        self._records = RingView(recording.ring, recording.geometry)
        self._node = Node(recording)
        self._judge: Judge | None = None  # until the recording has its run
        self._stopping = threading.Event()
        self._tick_s = min(_TICK_S, hang_after / 8)
        # Of each rank: its calls and steps, and when they last changed.
        self._issued: dict[int, tuple[int, float]] = {}
        self._next_asked = 0.0
        self._verdicts = 0  # that this rank gave
        # How many verdicts of the node's ranks this rank has reacted to, or were older than it.
        self._seen = 0
        put(recording.ring, "hang_after_ms", max(1, round(hang_after * 1e3)))
        self.thread = threading.Thread(target=self._run, name="rankcall-watch", daemon=True)

    def start(self) -> None:
        """Start the thread, and end the watcher before it, if there is one."""
        global _current
        before, _current = _current, self
        if before is not None:
            before.end()
        _register_once()
        register_stack_dump(self._recording.ring)
        self.thread.start()

    def stop(self) -> None:
        """End the thread and give up the recording, unless another watcher has taken over."""
        global _current
        self.end()
        if _current is self:
            _current = None
            unregister_stack_dump(self._recording.ring)
            session.drop("watch")

    def end(self) -> None:
        """End the thread; leave it behind if it waits for a store that does not answer."""
        self._stopping.set()
        if self.thread is not threading.current_thread():
            background.join(self.thread, 2.0)

    # --- on its thread ---

    def _run(self) -> None:
        failures = 0
        while failures < _OWN_FAILURES and not self._stopping.wait(self._tick_s):
            try:
                self._turn()
            except Exception as error:
                failures += 1
                over = "it goes on" if failures < _OWN_FAILURES else "it stops"
                logger.warning("the hang watcher failed; %s", over, exc_info=error)
                self._stopping.wait(_OWN_FAILURE_S)

    def _turn(self) -> None:
        put(self._recording.ring, "overdue_ns", self._overdue_ns())
        judge = self._judge or self._make_judge()
        if judge is None:
            return
        headers, rank = self._node.headers(), self._recording.rank()
        self._notice(headers, judge)
        if rank not in headers or not self._node.leads(headers, rank):
            return
        now = time.monotonic()
        self._note_issued(headers, now)
        first_ns = min((h.overdue_ns for h in headers.values() if h.overdue_ns), default=0)
        first_ns = first_ns or self._silent_since_ns(headers, now)
        if not first_ns:
            judge.rest()
        judge.look_back(headers)
        asked = self._is_asked(headers, now, judge)
        due = first_ns != 0 and now >= judge.next_look
        if (asked or due) and judge.look(headers, first_ns or time.monotonic_ns(), asked):
            judge.keep_evidence(self._recording.identity.attempt)
            self._call_for_reaction(judge)
        judge.views.turn(headers, time.monotonic())

    def _make_judge(self) -> Judge | None:
        """Return the judge of this run; None until the recording belongs to one."""
        run_dir = self._recording.run_dir
        if run_dir is None:
            return None
        self._judge = Judge(run_dir, self._hang_after)
        self._seen = self._verdict_count(self._node.headers())
        return self._judge

    def _call_for_reaction(self, judge: Judge) -> None:
        """Count a verdict, so that the node's ranks react to it.

        A verdict that no rank may be ended for is not counted: a rank that cannot read the verdicts
        ends if it is called.
        """
        if self._on_hang == "abort" and not _may_abort(judge.verdicts()):
            return
        self._verdicts += 1
        put(self._recording.ring, "verdicts", self._verdicts)

    def _overdue_ns(self) -> int:
        """Return when the oldest call was issued that has been in flight for too long, or 0."""
        rows = self._records.unfinished()
        rows = rows[rows["flags"] & FLAG_ABANDONED == 0]
        if not len(rows):
            return 0
        oldest = int(rows["enqueued_ns"].min())
        return oldest if time.monotonic_ns() - oldest >= self._hang_after * 1e9 else 0

    def _note_issued(self, headers: dict[int, Header], now: float) -> None:
        """Note which ranks of the node have issued a call or taken a step since the last turn."""
        for rank, header in headers.items():
            done = header.head + header.step
            if self._issued.get(rank, (-1, 0.0))[0] != done:
                self._issued[rank] = done, now

    def _silent_since_ns(self, headers: dict[int, Header], now: float) -> int:
        """Return since when no rank of the node has issued a call, or 0 if that is not long.

        No call is overdue then, but the ranks may wait in functions that leave no record.
        """
        since = max(self._issued[rank][1] for rank in headers)
        ended = any(header.closed_ns or header.left_ns for header in headers.values())
        return 0 if ended or now - since < self._hang_after else int(since * 1e9)

    def _is_asked(self, headers: dict[int, Header], now: float, judge: Judge) -> bool:
        """Return whether another node wants a verdict, by a poll of the store if one is due.

        While the node's ranks issue calls, the store gets one request in half of ``hang_after``, or
        in 30 seconds. It is polled every second if a rank has issued no call for half of
        ``hang_after``, or until there is a store.
        """
        world = max(header.world_size for header in headers.values())
        if len(headers) >= world:
            return False
        quiet = any(now - self._issued[rank][1] > self._hang_after / 2 for rank in headers)
        if now < self._next_asked and not (quiet and self._next_asked - now > 1.0):
            return False
        asked, soon = judge.asked(headers), min(1.0, self._hang_after / 4)
        seldom = judge.signed_on and not quiet
        self._next_asked = now + (judge.polls_every_s if seldom else soon)
        return asked

    # --- reactions ---

    @staticmethod
    def _verdict_count(headers: dict[int, Header]) -> int:
        return sum(header.verdicts for header in headers.values())

    def _notice(self, headers: dict[int, Header], judge: Judge) -> None:
        """Do what ``on_hang`` says if the node has a new verdict since the last turn."""
        count = self._verdict_count(headers)
        if count <= self._seen:
            return
        self._seen = count
        if self._on_hang == "abort" and _may_abort(judge.verdicts()):
            put(self._recording.ring, "aborted_ns", time.monotonic_ns())
            _abort(self._recording.rank())
        verdicts = judge.verdicts()
        if verdicts and callable(self._on_hang):
            try:
                self._on_hang(findings_of(verdicts[-1]))
            except Exception:
                logger.exception("on_hang failed; the watcher goes on")


def _may_abort(verdicts: list[dict[str, Any]]) -> bool:
    """Return whether the newest verdict is certain that the job hangs.

    Ranks that record nothing may compute for a long time, and must not be ended for that.
    """
    if not verdicts:
        return True
    findings = findings_of(verdicts[-1])
    return not all(
        finding.kind == "no_progress" and finding.confidence != "certain" for finding in findings
    )


def _abort(rank: int) -> None:
    """End this process from this thread, because its main thread may never run again."""
    print(
        f"rankcall: rank {rank} ends because the job hangs (on_hang=abort)",
        file=sys.stderr,
        flush=True,
    )
    os._exit(ABORT_STATUS)


_current: Watcher | None = None
_registered = False


def _register_once() -> None:
    global _registered
    if not _registered:
        _registered = True
        background.at_exit(_at_exit)
        os.register_at_fork(after_in_child=_in_forked_child)


def is_watching() -> bool:
    """Return whether a watcher runs in this process."""
    return _current is not None


def _at_exit() -> None:
    if _current is not None:
        _current.stop()


def _in_forked_child() -> None:
    global _current
    _current = None


_LIST_S = 2.0  # between two listings of the folder
_FRESH_S = 2.5  # five heartbeats


class Node:
    """The rings in the folder of one recording. Only the watcher's thread uses it."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._boot = boot_id()
        self._paths: list[Path] = []
        self._listed = float("-inf")

    def headers(self) -> dict[int, Header]:
        """Read the newest ring header of each rank of this node, for this rank's attempt."""
        path = self._recording.path
        if path is None:
            return {}
        if time.monotonic() - self._listed > _LIST_S:
            self._listed = time.monotonic()
            self._paths = self._list(path.parent)
        newest: dict[int, Header] = {}
        attempt = self._recording.identity.attempt
        for file in {*self._paths, path}:
            header = read_header(file)
            if header is None or header.boot_id != self._boot or header.attempt != attempt:
                continue
            known = newest.get(header.rank)
            if known is None or known.anchor_mono_ns < header.anchor_mono_ns:
                newest[header.rank] = header
        return newest

    def _list(self, folder: Path) -> list[Path]:
        """Return the rings in the folder; none if this process may no longer read it."""
        try:
            names = os.listdir(folder)
        except PermissionError:
            warn_once(
                f"no longer watching for hangs: this process now runs as user {os.geteuid()}, "
                f"who may not read {folder}; recording goes on"
            )
            return []
        except FileNotFoundError:  # the run was removed
            return []
        return sorted(folder / name for name in names if name.endswith(".ring"))

    def leads(self, headers: dict[int, Header], rank: int) -> bool:
        """Return whether ``rank`` acts for the node: it is the lowest whose watcher runs."""
        running = (header.rank for header in headers.values() if _watcher_runs(header))
        return rank == min(running, default=rank)


def _watcher_runs(header: Header) -> bool:
    """Return whether a rank's watcher runs: not closed, not stopped, and not kept from the GIL."""
    age = time.monotonic_ns() - header.python_heartbeat_ns
    watches = header.stack_fd != 0 and not header.closed_ns and age < _FRESH_S * 1e9
    return watches and header.process_state() == "alive"


# A page for the debug server of torch: the verdict, and where every rank stands.
#
# ``torch.distributed.debug.start_debug_server`` starts an HTTP server. In torch 2.13 and 2.15, it
# takes pages of others (``handlers``), and calls their methods by name. The base class of its own
# pages is in a private module, so ``DebugPage`` does not derive from it.
#
# The server runs in a process of its own on rank 0. If that process was forked from rank 0, then no
# library with threads can be trusted in it. So the page is the output of ``rankcall diagnose``,
# which runs as a command.


_PATH = "/rankcall"
_TEMPLATE = """
{% extends "base.html" %}
{% block header %}<h1>{% block title %}rankcall{% endblock %}</h1>{% endblock %}
{% block content %}<pre>{{ text | e }}</pre>{% endblock %}
"""
_SECONDS = 60.0  # for the command; the server's own ``fetch_timeout`` replaces it
_PAGE_FRESH_S = 2.0  # all who ask within this time get the same text
_WIDTH = "120"


class _Route(NamedTuple):
    path: str
    handler: Callable[[Any], bytes]


class _Link(NamedTuple):
    path: str
    label: str


class DebugPage:
    """A page ``/rankcall`` of torch's debug server. It shows what ``rankcall diagnose`` says.

    Create it on rank 0 once the job's default process group exists, and start the server with it.
    The other ranks start the server without pages::

        from torch.distributed.debug._debug_handlers import default_handlers

        pages = [*default_handlers(), DebugPage()]
        start_debug_server(handlers=pages, enabled_dumps={"stacks", "rankcall"})

    With ``dump_dir``, the server also writes the text to a file at intervals, if ``enabled_dumps``
    contains ``"rankcall"``. While the job runs, the page has only the ranks of rank 0's host, and
    says so.
    """

    def __init__(self, run: str | os.PathLike[str] | None = None) -> None:
        """Show a run.

        Args:
            run: The run directory. The default is the one that this process records into.

        Raises:
            RunNotFound: No run is given, and this process does not record.
        """
        recording = current()
        if run is None and recording is not None:
            run = recording.run_dir
        if run is None:
            raise RunNotFound(
                "this process does not record into a run: create the page after "
                "init_process_group, in a job that 'rankcall run' started, or give it a run"
            )
        self.run = Path(run).absolute()
        self.fetch_timeout = _SECONDS  # the server sets it
        self._start()

    def _start(self) -> None:
        self._asking = threading.Lock()
        self._text, self._until = "", 0.0

    def __getstate__(self) -> dict[str, Any]:
        return {"run": self.run, "fetch_timeout": self.fetch_timeout}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    def routes(self) -> list[_Route]:
        """Return the address of the page, and what makes it."""
        return [_Route(_PATH, self._answer)]

    def nav_links(self) -> list[_Link]:
        """Return the link that the server shows on all pages."""
        return [_Link(_PATH, "rankcall")]

    def templates(self) -> dict[str, str]:
        """Return the page's template, which extends the server's own."""
        return {"rankcall.html": _TEMPLATE}

    def dump(self) -> str | None:
        """Return the text that the server writes to a file."""
        return self.text()

    def dump_filename(self) -> str:
        """Return the first part of that file's name."""
        return "rankcall"

    def _answer(self, request: Any) -> bytes:
        page: bytes = request.frontend.render_template("rankcall.html", text=self.text())
        return page

    def text(self) -> str:
        """Return what ``rankcall diagnose`` says now. Many who ask at once get one answer."""
        if not self._asking.acquire(timeout=self.fetch_timeout):
            return f"rankcall diagnose was not done after {self.fetch_timeout:.0f} s"
        try:
            if time.monotonic() >= self._until:
                self._text = _diagnosis(self.run, self.fetch_timeout)
                self._until = time.monotonic() + _PAGE_FRESH_S
            return self._text
        finally:
            self._asking.release()


def _diagnosis(run: Path, seconds: float) -> str:
    command = [sys.executable, "-m", "rankcall", "diagnose", str(run)]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env={**os.environ, "COLUMNS": _WIDTH},
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"rankcall diagnose was not done after {seconds:.0f} s"
    except OSError as error:
        return f"rankcall diagnose cannot be started: {error.strerror}"
    output = done.stdout if done.returncode in (0, 1) else done.stdout + done.stderr
    return output.decode("utf-8", "replace").strip()
