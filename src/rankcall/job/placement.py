"""Give one recording its run and its attempt, when the job's default group is created."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from pathlib import Path
from typing import Any

from rankcall.background import BackgroundCall
from rankcall.capture import session
from rankcall.capture.recording import Recording
from rankcall.capture.settings import Settings
from rankcall.errors import AuthenticationError, warn_once
from rankcall.folders import make_folder
from rankcall.job.choice import Choice, agree, evidence_store, is_elastic, store_and_key
from rankcall.job.proposals import own_run_dir, propose_in, propose_new, withdraw
from rankcall.job.sealing import ForgedError, sealed

logger = logging.getLogger("rankcall")

_INLINE_S = 2.0  # for the store, inside init_process_group
_LATER_S = 8.0  # for rank 0's proposal, on a thread of our own
_OWN_S = 2.0  # for a proposal in rank 0's place
_UNNAMED_S = 15.0  # a rank that waits so long in init_process_group gets a run of its own


class Placement:
    """Gives one recording its run and its attempt, when the job's default group is created.

    It never raises, and holds a group's creation up for at most ``_INLINE_S``. If the ranks cannot
    agree, for example because the store has gone, this rank chooses alone.
    """

    def __init__(self, recording: Recording, settings: Settings) -> None:
        # Weakly: the recording refers to this object by its callbacks.
        self._recording = weakref.ref(recording)
        self._settings = settings
        self._choice: Choice | None = None
        self._mine: Choice | None = None
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._has_group = False
        self._rank, self._world_size = -1, 0
        self._departs = False
        self._pid = os.getpid()
        # These need torch, which a process that only imports this module may lack.
        from torch.distributed import distributed_c10d

        from rankcall.capture.groups import watch

        self._c10d: Any = distributed_c10d
        self._groups = watch

    def start(self) -> None:
        """Watch for the default group; one that exists is used at once."""
        recording = self._recording()
        if recording is not None:
            recording.before_end(self._finish)
            self._note_place(recording.run_dir)  # it may be killed before it has a group
        self._groups.add(self._on_group)

    def name_in_time(self) -> None:
        """Name the run also if the group is long in coming, so that others can read the records."""
        recording = self._recording()
        if self._choice is None and recording is not None and recording.run_dir is None:
            call = BackgroundCall(self._wait_for_group, "rankcall-run")
            call.give_up()

    def _finish(self) -> None:
        """Place the records now, because the recording ends."""
        self._groups.remove(self._on_group)
        self._over.set()
        if self._choice is None and self._has_group:
            self._settle(self._alone())

    # The thread that creates a group calls these two: they must not wait for long.

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
        except (ForgedError, AuthenticationError) as error:
            warn_once(f"recording apart from the other ranks: {error}")
            choice = self._alone()
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
        choice = perform(store, seconds, sealed(agree(key, propose)), over=Over.CALLERS)
        # Once this rank has a choice, it records there, even if a later group finds another one.
        if self._choice is None and self._mine is not None and choice not in (None, self._mine):
            withdraw(self._mine)
        return choice

    # Threads of our own call these two.

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

    # Both kinds of threads call the rest.

    def _propose(self) -> Choice:
        """Return this rank's proposal, the same at every call: requests are repeated."""
        self._mine = self._mine or self._new_proposal()
        return self._mine

    def _new_proposal(self) -> Choice:
        recording = self._recording()
        place = recording.run_dir if recording is not None else None
        planned, outer = self._settings.run_dir, self._settings.outer_run
        if planned is None and place is None:
            return propose_new(outer and outer.with_name(f"{outer.name}-inner"))
        return propose_in(planned or place or own_run_dir())

    def _alone(self) -> Choice:
        """Return a choice without the others. Ranks with one parent name the same directory."""
        recording = self._recording()
        place = recording.run_dir if recording is not None else None
        named = self._settings.run_dir or place
        return Choice(named or own_run_dir(unique=True).absolute())

    def _settle(self, choice: Choice, announce: bool = False) -> None:
        with self._lock:
            if self._choice is not None:
                return
            self._choice = choice
        self._over.set()
        place = self._enter(choice)
        was_named = self._settings.run_dir is not None
        if announce and not was_named and place is not None and os.path.isdir(place):
            warn_once(f"recording in {place}")

    def _enter(self, choice: Choice) -> Path | None:
        recording = self._recording()
        if recording is None or os.getpid() != self._pid:
            return None
        path = self._settings.run_dir or _writable(choice.run_dir)
        with contextlib.suppress(OSError, RuntimeError):
            session.place(recording, path, choice.first_attempt)
        self._note_place(recording.run_dir)
        self._prepare_to_leave(recording)
        return recording.run_dir

    def _prepare_to_leave(self, recording: Recording) -> None:
        """Start the thread that sends this rank's records at the end, if they can be needed."""
        world, run_dir, url = self._world_size, recording.run_dir, self._settings.collect_to
        on_one_node = world < 2 or os.environ.get("LOCAL_WORLD_SIZE") == str(world)
        if run_dir is None or self._departs or (on_one_node and not url):
            return
        from rankcall.job.departure import Departure, Place

        self._departs = True
        place = Place(run_dir, recording.identity.attempt, self._rank, world)
        recording.on_end(Departure(place, evidence_store, url).recording_ended)

    def _note_place(self, run_dir: Path | None) -> None:
        """Tell ``rankcall exec``, if it runs on this host, where this rank's records are."""
        if self._settings.places and run_dir is not None:
            with contextlib.suppress(OSError):
                _append_path(Path(self._settings.places), run_dir)


def _writable(run_dir: Path) -> Path:
    """Return rank 0's directory, or one of that name here if this node does not have its path."""
    if run_dir.is_dir():
        return run_dir
    with contextlib.suppress(OSError):
        make_folder(run_dir, private=False)
        return run_dir
    return Path.cwd() / run_dir.parent.name / run_dir.name


def _append_path(file: Path, path: Path) -> None:
    """Add a path to a file that exists, in one write: all ranks of the host write to it."""
    fd = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.write(fd, os.fsencode(path) + b"\0")
    finally:
        os.close(fd)
