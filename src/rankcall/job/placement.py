"""Give one recording its run and its attempt, when the job's default group is created."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankcall.background import BackgroundCall
from rankcall.capture import session
from rankcall.capture.recording import Recording
from rankcall.errors import warn_once
from rankcall.job.choice import (
    Choice,
    agree,
    evidence_store,
    is_elastic,
    own_run_dir,
    propose_in,
    propose_new,
    store_and_key,
)

if TYPE_CHECKING:
    from rankcall.job.departure import Departure


logger = logging.getLogger("rankcall")

PLACES = "RANKCALL_PLACES"  # a file of ``rankcall exec``, to which ranks add the path of their run

_INLINE_S = 2.0  # for the store, inside init_process_group
_LATER_S = 8.0  # for rank 0's proposal, on a thread of our own
_OWN_S = 2.0  # for a proposal in rank 0's place
_UNNAMED_S = 15.0  # a rank that waits so long in init_process_group gets a run of its own


class Placement:
    """Gives one recording its run and its attempt, when the job's default group is created.

    It never raises, and holds a group's creation up for at most ``_INLINE_S``. If the ranks cannot
    agree, for example because the store has gone, this rank chooses alone.
    """

    def __init__(self, recording: Recording, planned: Path | None, outer: Path | None) -> None:
        self._recording = weakref.ref(recording)
        self._planned = planned
        self._outer = outer
        self._choice: Choice | None = None
        self._mine: Choice | None = None
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._has_group = False
        self._rank, self._world_size = -1, 0
        self._departure: Departure | None = None
        self._pid = os.getpid()
        # These need torch, which a process that only imports this module may lack.
        from torch.distributed import distributed_c10d

        from rankcall.capture.hosts import watch

        self._c10d: Any = distributed_c10d
        self._groups = watch

    def start(self) -> None:
        """Watch for the default group; one that exists is used at once."""
        recording = self._recording()
        if recording is not None:
            _note_place(recording.run_dir)  # of a rank that may be killed before it has a group
        self._groups.add(self._on_group)

    def name_in_time(self) -> None:
        """Name the run also if the group is long in coming, so that others can read the records."""
        recording = self._recording()
        if self._choice is None and recording is not None and recording.run_dir is None:
            call = BackgroundCall(self._wait_for_group, "rankcall-run")
            call.give_up()

    def finish(self) -> None:
        """Place the records now, because the recording ends."""
        self._groups.remove(self._on_group)
        self._over.set()
        if self._choice is None and self._has_group:
            self._settle(self._alone())

    # --- on the thread that creates a group ---

    def _on_group(self, process_group: Any, group: Any) -> None:
        if group.description != "default_pg" and process_group is not self._c10d._world.default_pg:
            return
        self._has_group = True
        rank = group.ranks[process_group.rank()]
        self._rank, self._world_size = rank, 0 if group.backend == "fake" else len(group.ranks)
        known = self._choice
        propose = self._propose if known is None else lambda: known
        is_first = rank == 0 or known is not None
        try:
            if group.backend == "fake" or (len(group.ranks) == 1 and not is_elastic()):
                choice: Choice | None = propose()
            else:
                choice = self._ask(propose if is_first else None, _INLINE_S)
        except Exception as error:
            logger.debug("the job's store does not say which run this is: %s", error)
            choice = None  # ask again, because the others may have got an answer
        if known is None and choice is not None:
            self._settle(choice, announce=rank == 0)
        elif known is None:
            call = BackgroundCall(self._ask_later, "rankcall-run")
            call.give_up()

    def _ask(self, propose: Any, seconds: float) -> Choice | None:
        """Ask the store for the job's choice. Raises whatever the store raises."""
        from rankcall.c10d.client import Over, perform

        group = self._c10d._world.default_pg
        if group is None:
            raise RuntimeError("the default process group is gone")
        store, key = store_and_key(self._c10d._world.pg_map[group][1])
        return perform(store, seconds, agree(key, propose), over=Over.CALLERS)

    # --- on other threads ---

    def _ask_later(self) -> None:
        """Wait for rank 0's proposal, and then propose in its place: it may not be recorded."""
        try:
            choice = self._ask(None, _LATER_S) or self._ask(self._propose, _OWN_S)
        except Exception as error:
            logger.debug("rankcall chooses a run without the job's store: %s", error)
            choice = None
        if not self._over.is_set():
            self._settle(choice or self._alone())

    def _wait_for_group(self) -> None:
        if not self._over.wait(_UNNAMED_S) and not self._has_group:
            self._enter(self._alone())

    # --- both ---

    def _propose(self) -> Choice:
        """Return this rank's proposal, the same at every call: requests are repeated."""
        self._mine = self._mine or self._new_proposal()
        return self._mine

    def _new_proposal(self) -> Choice:
        recording = self._recording()
        place = recording.run_dir if recording is not None else None
        if self._planned is None and place is None:
            outer = self._outer
            return propose_new(outer and outer.with_name(f"{outer.name}-inner"))
        return propose_in(self._planned or place or own_run_dir())

    def _alone(self) -> Choice:
        """Return a choice without the others. Ranks with one parent name the same directory."""
        recording = self._recording()
        place = recording.run_dir if recording is not None else None
        return Choice(self._planned or place or own_run_dir(unique=True).absolute())

    def _settle(self, choice: Choice, announce: bool = False) -> None:
        with self._lock:
            if self._choice is not None:
                return
            self._choice = choice
        self._over.set()
        place = self._enter(choice)
        if announce and self._planned is None and place is not None and os.path.isdir(place):
            warn_once(f"recording in {place}")

    def _enter(self, choice: Choice) -> Path | None:
        recording = self._recording()
        if recording is None or os.getpid() != self._pid:
            return None
        path = self._planned or _writable(choice.run_dir)
        with contextlib.suppress(OSError, RuntimeError):
            session.place(recording, path, choice.first_attempt)
        _note_place(recording.run_dir)
        self._prepare_to_leave(recording)
        return recording.run_dir

    def _prepare_to_leave(self, recording: Recording) -> None:
        """Start the thread that sends this rank's records at the end, if they can be needed."""
        world, run_dir = self._world_size, recording.run_dir
        on_one_node = world < 2 or os.environ.get("LOCAL_WORLD_SIZE") == str(world)
        if run_dir is None or self._departure is not None:
            return
        url = os.environ.get("RANKCALL_COLLECT_TO", "")
        if not on_one_node or url:
            from rankcall.job.departure import Departure, Place

            attempt = recording.identity.attempt
            place = Place(run_dir, attempt, self._rank, world)
            self._departure = Departure(place, evidence_store, url)

    def leave(self, failed: bool) -> None:
        """Send this rank's records to another node; its ring is complete."""
        if self._departure is not None:
            self._departure.leave(failed)

    def stay(self) -> None:
        """Send nothing: the recording has ended before the process."""
        if self._departure is not None:
            self._departure.stay()


def _writable(run_dir: Path) -> Path:
    """Return rank 0's directory, or one of that name here if this node does not have its path."""
    if run_dir.is_dir():
        return run_dir
    with contextlib.suppress(OSError):
        run_dir.mkdir(parents=True, mode=0o700, exist_ok=True)
        return run_dir
    return Path.cwd() / run_dir.parent.name / run_dir.name


def _note_place(run_dir: Path | None) -> None:
    """Tell ``rankcall exec``, if it runs on this host, where this rank's records are."""
    path = os.environ.get(PLACES)
    if path and run_dir is not None:
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                os.write(fd, os.fsencode(run_dir) + b"\0")
            finally:
                os.close(fd)
