"""Record this process, and give its records a place in the run of its job.

A recording begins before the job's run is known. The ranks choose the run when the default process
group is created. Until then, the ring of a run without a name vanishes with its process.

The ranks agree through the job's own store, because a store is all that the ranks of every launcher
have in common. Rank 0 proposes a run. The others take what is published, so none of them waits for
a rank that has not created its process group.

A run holds *attempts*: each job that is recorded into a run directory is one, and each elastic
restart of it is a further one. Attempts are reserved by files in the run directory::

    attempts/00000.json     the command that the attempt belongs to

The store of torchrun's agent outlives a restart, so all restarts of a job find the same choice.
"""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import re
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from multiprocessing import util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankcall._requests import Read, Steps, Until
from rankcall.background import BackgroundCall, exit_budget
from rankcall.capture import session
from rankcall.capture.session import Recording
from rankcall.errors import warn_once
from rankcall.process import boot_seconds, process_start, run_folder
from rankcall.run import ATTEMPTS, about_job, default_run_dir, new_run_dir

if TYPE_CHECKING:
    from torch.distributed import Store

    from rankcall.transfer import Departure

logger = logging.getLogger("rankcall")

NESTED = "RANKCALL_WORKER"  # the pid of a recorded rank: a group below it belongs to another job
PLACES = "RANKCALL_PLACES"  # a file of ``rankcall exec``, to which ranks add the path of their run
KEY = "rankcall/run"
_INLINE_S = 2.0  # for the store, inside init_process_group
_LATER_S = 8.0  # for rank 0's proposal, on a thread of our own
_OWN_S = 2.0  # for a proposal in rank 0's place
_UNNAMED_S = 15.0  # a rank that waits so long in init_process_group gets a run of its own
_MOST_ATTEMPTS = 100_000
_MOST_TRIES = 1_000
_NAME = re.compile(r"\.attempt-(\d{1,9})\.")


def enable(
    run_dir: str | os.PathLike[str] | None = None,
    *,
    capture: str | None = None,
    capacity: int | None = None,
    call_sites: bool = True,
) -> Recording:
    """Record every collective of this process, from now on, until ``disable()``.

    Call it before or after ``init_process_group``, on every rank at the same point of the program:
    sequence numbers count from here.

    Args:
        run_dir: The directory of the run. The default is ``RANKCALL_RUN_DIR``, or
            ``rankcall-runs/<UTC time>-<script>`` in rank 0's working directory. The ranks agree on
            it when they create the default process group. If the directory has a run already, the
            job becomes a new attempt of it.
        capture: ``auto``, ``native`` or ``python``. The default is ``RANKCALL_CAPTURE``, or
            ``auto``: native, and Python if the native recorder cannot be built.
        capacity: The number of records in the ring, rounded up to a power of two. Newer records
            overwrite the oldest ones. The default is ``RANKCALL_CAPACITY``, or 16,384.
        call_sites: Whether to record the line that issued each op.

    Returns:
        The recording, a context manager. If recording is on already, the one that is on.

    Raises:
        TorchMissing: torch is absent or too old.
        ValueError: The capture is unknown, or the capacity out of range.
        CaptureUnavailable: ``native`` was chosen by name, and cannot be built.
    """
    return claim("user", run_dir, capture, capacity, call_sites)


def claim(
    owner: str,
    run_dir: str | os.PathLike[str] | None,
    capture: str | None = None,
    capacity: int | None = None,
    call_sites: bool = True,
) -> Recording:
    """Claim the recording for ``owner``, and choose its run once there is a group."""
    planned, outer = _planned(run_dir)
    recording = session.claim(owner, planned, capture, capacity, call_sites)
    placement = Placement(recording, planned, outer)
    with _starting:
        is_first = recording.placement is None
        if is_first:
            recording.placement = placement
    if is_first:
        placement.start()
    return recording


_starting = threading.Lock()


def _planned(run_dir: str | os.PathLike[str] | None) -> tuple[Path | None, Path | None]:
    """Return the run directory that the user names, and that of the job around this one."""
    current = session.current()
    if run_dir:
        return Path(run_dir).absolute(), None
    inherited = os.environ.get("RANKCALL_RUN_DIR")
    if not inherited or (current is not None and current.placement is not None):
        return None, None
    path = Path(inherited).absolute()
    return (None, path) if _is_nested() else (path, None)


def attach(rank: int, world_size: int) -> None:
    """Record this process, which is about to create its first group. Raises as ``enable``.

    Processes that it starts from now on are jobs of their own, and the environment says so.
    """
    recording = enable()
    recording.expect_rank(rank, world_size)
    os.environ[NESTED] = str(os.getpid())
    if recording.placement is not None:
        recording.placement.name_in_time()
    if multiprocessing.parent_process() is not None:
        # Children that multiprocessing forks end without atexit, but run these.
        util.Finalize(None, _end_child, exitpriority=0)


def _end_child() -> None:
    """End the recording of a child of multiprocessing, which handles its last exception now."""
    exit_budget.begin()  # such a child runs no exit handlers
    session.note_end(sys.exc_info()[1])
    session.end()


def _is_nested() -> bool:
    """Return whether this process was started by a recorded rank, and so belongs to another job."""
    return os.environ.get(NESTED, str(os.getpid())) != str(os.getpid())


# --- the choice, and how the ranks agree on it ---


@dataclass(frozen=True)
class Choice:
    """The run of a job. ``first_attempt`` is the number of its attempt before any restart."""

    run_dir: Path
    first_attempt: int = 0

    def encode(self) -> bytes:
        """Return the choice as it is published in the store."""
        return json.dumps({"run_dir": str(self.run_dir), "attempt": self.first_attempt}).encode()


def decode(published: bytes) -> Choice:
    """Return a choice that was published. Raises ``ValueError`` if it is not a choice."""
    try:
        fields = json.loads(published)
        run_dir, attempt = Path(fields["run_dir"]), int(fields["attempt"])
    except (TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"not the choice of a run: {published[:200]!r}") from error
    if not run_dir.is_absolute() or not 0 <= attempt < _MOST_ATTEMPTS:
        raise ValueError(f"not the choice of a run: {published[:200]!r}")
    return Choice(run_dir, attempt)


def agree(key: str, propose: Callable[[], Choice] | None) -> Steps[Choice | None]:
    """Return the choice of the job; None if it has not been published by the deadline.

    Args:
        key: The key in the store, the same on all ranks.
        propose: Called if nothing is published yet. Without it, wait for another rank's proposal.
    """
    if propose is None:
        published = yield Until(Read(key), lambda value: value is not None)
    else:
        published = yield Read(key)
        if published is None:
            from rankcall.store.parts import publish_once

            mine = propose()
            published = yield from publish_once(key, mine.encode())
            if published != mine.encode():
                withdraw(mine)
    return None if published is None else decode(published)


def store_and_key(store: Store) -> tuple[Store, str]:
    """Return the store and the key for a group's store.

    Below torchrun it is the agent's store, which all restarts of the job share. Each restart has
    another prefix in it.
    """
    from torch.distributed import PrefixStore, TCPStore

    root: Any = store
    while isinstance(root, PrefixStore):
        root = root.underlying_store
    agent = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if is_elastic() and isinstance(root, TCPStore) and (root.host, str(root.port)) == agent:
        return root, f"{KEY}/{os.environ.get('TORCHELASTIC_RUN_ID', '')}"
    return store, KEY


def evidence_store() -> tuple[Store | None, str]:
    """Return the store through which evidence leaves a node, and the prefix of its keys there.

    None and an empty prefix if the default group is gone, and its store with it.
    """
    from torch.distributed import distributed_c10d

    world: Any = distributed_c10d._world
    group = world.default_pg
    if group is None:
        return None, ""
    store, key = store_and_key(world.pg_map[group][1])
    return store, f"rankcall/evidence{key.removeprefix(KEY)}"


def is_elastic() -> bool:
    """Return whether a torchrun agent holds the job's store, and may restart the job."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


# --- proposals ---


def propose_in(run_dir: Path) -> Choice:
    """Reserve the next attempt of a run directory that the user has named."""
    import torch

    number = _next_attempt(run_dir)
    with contextlib.suppress(OSError):  # for example, it cannot be written
        folder = run_folder(run_dir, ATTEMPTS)
        text = json.dumps(about_job(sys.argv, torch.__version__), indent=1)
        for candidate in range(number, number + _MOST_TRIES):
            with contextlib.suppress(FileExistsError):
                with (folder / f"{candidate:05d}.json").open("x") as file:
                    file.write(text)
                return Choice(run_dir, candidate)
    return Choice(run_dir, number)


def propose_new(base: Path | None = None) -> Choice:
    """Make a new run directory for this job, beside ``base`` if that is given."""
    return Choice(new_run_dir(base or own_run_dir().absolute()))


def withdraw(choice: Choice) -> None:
    """Remove the directory or the reservation of a proposal that was not taken."""
    with contextlib.suppress(OSError):
        (choice.run_dir / ATTEMPTS / f"{choice.first_attempt:05d}.json").unlink(missing_ok=True)
        choice.run_dir.rmdir()  # fails if it is in use


def own_run_dir(unique: bool = False) -> Path:
    """Name a run after the script and the start of the job, as far as this process knows that.

    If ``unique``, the process that started the job is in the name, so that no other job has it.
    """
    import multiprocessing

    started_by_other = "RANK" in os.environ or multiprocessing.parent_process() is not None
    starter = os.getppid() if started_by_other else os.getpid()
    ticks = process_start(starter) or 0
    moment = boot_seconds() + ticks // os.sysconf("SC_CLK_TCK")
    script = sys.argv[0] if sys.argv and sys.argv[0] not in ("", "-", "-c") else "python"
    if script == "-m":
        script = "python"
    path = default_run_dir(script, datetime.fromtimestamp(moment, timezone.utc))
    return path.with_name(f"{path.name}-{starter}") if unique else path


def _next_attempt(run_dir: Path) -> int:
    """Return the number after the last attempt that a run directory has seen."""
    numbers = [-1]
    with contextlib.suppress(OSError):
        reserved = (run_dir / ATTEMPTS).iterdir()
        numbers += [int(path.stem) for path in reserved if path.stem.isdecimal()]
    with contextlib.suppress(OSError):  # of a run that an older rankcall recorded
        matches = (_NAME.search(path.name) for path in (run_dir / "rings").iterdir())
        numbers += [int(match[1]) for match in matches if match]
    return min(max(numbers) + 1, _MOST_ATTEMPTS - 1)


# --- one recording's place ---


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

        from rankcall.capture.groups import watch

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
        from rankcall.store.parts import perform_shared

        group = self._c10d._world.default_pg
        if group is None:
            raise RuntimeError("the default process group is gone")
        store, key = store_and_key(self._c10d._world.pg_map[group][1])
        return perform_shared(store, seconds, agree(key, propose))

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
            from rankcall.transfer import Departure, Place

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
