"""Evidence leaves the node: the tails of a node's rings go to another node, or to a URL.

Nodes may share no disk, and the memory of a node is lost with it. At a verdict, the leader of each
node sends a *bundle* through the job's store, and rank 0's node and the first other node that
answers keep the bundles of all nodes in their run directories. When a rank ends, it sends a bundle
to rank 0's node. A run directory with bundles is a run like any other.

This module has four parts: the bundle; the protocol, which posts bundles in a store and collects
them; sending at a verdict; and sending when a rank ends.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankcall._requests import Add, CompareSet, Delete, Now, Read, Set, Sleep, Steps
from rankcall.background import BackgroundCall, exit_budget
from rankcall.errors import CorruptRun, RankcallError, warn_once
from rankcall.process import host_name, open_file, replacing, run_folder
from rankcall.ring import Header, read_header
from rankcall.ring.writer import tail_of
from rankcall.run import ATTEMPTS, HANGS, TAIL, files_in, redact_text, ring_paths, tail_name
from rankcall.run.archive import pack, unpack
from rankcall.run.outcomes import STACKS, claim, id_of, kept_hangs, next_free, stacks_in
from rankcall.run.settle import EXITS, STATES, describe_states, states_name

if TYPE_CHECKING:
    from torch.distributed import Store


# A bundle: the tails of one node's rings, with the states of its processes and their stacks.
#
# Its files can also be written to a URL, beside those of the other nodes. A copy of them on a disk
# is a run like any other.
#
# A bundle is an archive (``rankcall.run.archive``), so everything in it is checked when it is
# unpacked: it may come from any process that reaches the store.


COLLECT_TO = "RANKCALL_COLLECT_TO"  # a URL, to which each node writes its newest records
MOST_BYTES = 1 << 18  # of a bundle, for each of its ranks
MOST_OF_ALL = 1 << 26  # of all bundles of a job together, as far as ranks share it evenly
Rings = dict[Path, Header]

_NEWEST = (256, 64, 16)  # records of each tail; fewer if the bundle would be too large
_MOST_EXITS = 1 << 18
_MOST_ABOUT = 1 << 20


def is_shared(run_dir: Path, attempt: int) -> bool:
    """Return whether another host has made this run directory: then it is on a disk for all nodes.

    Rank 0 makes the directory. In one that the user has named, it reserves the first attempt of the
    job; restarts, which have the next numbers, reserve none.
    """
    reserved = [
        path for path in (run_dir / ATTEMPTS).glob("*.json") if path.stem <= f"{attempt:05d}"
    ]
    try:
        with open_file(max(reserved, default=run_dir / "run.json")) as file:
            host = json.loads(file.read(_MOST_ABOUT))["host"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False
    return bool(host != host_name())


def node_rings(run_dir: Path, attempt: int) -> Rings:
    """Return the rings of this node's ranks in an attempt, with their headers."""
    rings = {}
    for path in ring_paths(run_dir):
        header = None if path.name.endswith(TAIL) else read_header(path)
        if header is not None and header.attempt == attempt and header.rank >= 0:
            rings[path] = header
    return rings


def make_bundle(run_dir: Path, rings: Rings, world_size: int, node: Rings | None = None) -> bytes:
    """Return the bundle of a node; empty if even a short one is too large.

    Args:
        run_dir: The run directory of this node.
        rings: The rings to send.
        world_size: The number of ranks of the job, which share the room in the store.
        node: All rings of the node, if ``rings`` are only some of them.

    Raises:
        OSError: There is no room for temporary files.
    """
    most = len(rings) * min(MOST_BYTES, MOST_OF_ALL // max(1, world_size))
    for newest in _NEWEST:
        with tempfile.TemporaryDirectory(prefix="rankcall-") as scratch:
            target = Path(scratch) / "bundle.tar.zst"
            pack(list(_files(run_dir, rings, node or rings, newest, Path(scratch))), target, "run")
            if target.stat().st_size <= most:
                return target.read_bytes()
    return b""


def _files(
    run_dir: Path, rings: Rings, node: Rings, newest: int, scratch: Path
) -> Iterator[tuple[str, Path]]:
    for ring in rings:
        tail = scratch / tail_name(ring.name)
        with contextlib.suppress(CorruptRun):  # for example, it was moved meanwhile
            tail.write_bytes(tail_of(_where(ring, run_dir), newest))
            yield f"rings/{tail.name}", tail
    states = scratch / "states.json"
    states.write_bytes(describe_states(node.values()))
    yield f"{STATES}/{states_name()}", states
    for path in files_in(run_dir / EXITS, ".jsonl"):
        if path.stat().st_size <= _MOST_EXITS:
            yield f"{EXITS}/{path.name}", path
    for verdict in kept_hangs(run_dir)[-1:]:
        place = Path(verdict["place"])
        names = ["verdict.json", "verdict.txt"]
        ours = {f"rank-{header.rank:05d}.txt" for header in rings.values()}
        files = [place / name for name in names]
        files += [path for path in stacks_in(place) if path.name in ours]
        for path in files:
            if path.is_file():
                yield f"{HANGS}/{place.name}/{path.relative_to(place)}", path


def _where(ring: Path, run_dir: Path) -> Path:
    """Return the present place of a ring: it may have been moved into the run."""
    return ring if ring.exists() else run_dir / "rings" / ring.name


def keep_bundles(run_dir: Path, bundles: Sequence[bytes]) -> list[str]:
    """Put the bundles of other nodes into this node's run directory.

    Returns:
        A line for each bundle that cannot be read or kept.
    """
    problems = []
    for data in bundles:
        try:
            _keep(run_dir, data)
        except (OSError, CorruptRun, ValueError) as error:
            problems.append(f"the records of another node cannot be kept: {error}")
    return problems


def _keep(run_dir: Path, data: bytes) -> None:
    with tempfile.NamedTemporaryFile(prefix="rankcall-", suffix=".tar.zst") as file:
        file.write(data)
        file.flush()
        folder = unpack(Path(file.name))
    try:
        for name in (STATES, EXITS):
            for path in sorted((folder / name).glob("*.json*")):
                target = run_folder(run_dir, name) / path.name
                if name == STATES or not _is_longer(target, path):
                    _copy(path, target)
        _keep_hangs(run_dir, folder)
        # The rings come last: a reader that sees one finds the rest as well.
        for tail in sorted((folder / "rings").glob(f"*{TAIL}")):
            if read_header(tail) is not None:
                _copy(tail, run_folder(run_dir, "rings") / tail.name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _copy(path: Path, target: Path) -> None:
    with replacing(target) as out, open_file(path) as source:
        shutil.copyfileobj(source, out)


def _is_longer(known: Path, new: Path) -> bool:
    """Return whether a list to which lines are appended is at least as long as another copy."""
    return known.exists() and known.stat().st_size >= new.stat().st_size


def _keep_hangs(run_dir: Path, folder: Path) -> None:
    """Add the stacks to the same verdict here; without that verdict, keep it as well."""
    known = {id_of(verdict): Path(verdict["place"]) for verdict in kept_hangs(run_dir)}
    for verdict in kept_hangs(folder):
        source = Path(verdict["place"])
        place = known.get(id_of(verdict))
        if place is None:
            while not claim(source, place := next_free(run_folder(run_dir, HANGS))):
                pass
            continue
        for stack in stacks_in(source):
            (place / STACKS).mkdir(mode=0o700, exist_ok=True)
            if not (place / STACKS / stack.name).exists():
                shutil.copyfile(stack, place / STACKS / stack.name)


# --- URLs: any that fsspec knows, for example ``s3://bucket/run`` ---


def upload(url: str, run_dir: Path, rings: Rings, node: Rings) -> bool:
    """Write the tails of these rings, with states and stacks, below a URL.

    Any failure is one line on stderr. May take long: call it on a thread of its own.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="rankcall-") as scratch:
            files = list(_files(run_dir, rings, node, _NEWEST[0], Path(scratch)))
            if (run_dir / "run.json").is_file():
                files.append(("run.json", run_dir / "run.json"))
            _write(url, files)
    except Exception as error:  # of any package that serves a protocol
        reason = f"{redact_text(url)}: {type(error).__name__}: {redact_text(str(error))}"
        warn_once(f"the newest records cannot be written to {reason}")
        return False
    return True


def check_url(url: str) -> None:
    """Raise ``RankcallError`` if this Python cannot write to a URL."""
    fsspec = _fsspec()
    try:
        fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise RankcallError(redact_text(f"--collect-to {url}: {error}")) from None


def _write(url: str, files: list[tuple[str, Path]]) -> None:
    files_at, root = _fsspec().core.url_to_fs(url)
    made = set()
    for inside, path in files:
        target = f"{root.rstrip('/')}/{inside}"
        folder = target.rpartition("/")[0]
        if folder not in made:
            files_at.makedirs(folder, exist_ok=True)
            made.add(folder)
        files_at.pipe_file(target, path.read_bytes())


def _fsspec() -> Any:
    try:
        import fsspec
    except ImportError as error:
        raise RankcallError(
            "writing to a URL needs fsspec: pip install 'rankcall[remote]'"
        ) from error
    return fsspec


# Post bundles in the job's store, and collect them: the protocol.
#
# Keys, below the prefix of a verdict or of the ranks that end: ``posts``, a count;
# ``<number>/<part>``, a bundle in parts; ``<number>``, written last: the ranks of the bundle and
# the number of its parts; ``second``, the first node beside rank 0's, which collects as well;
# ``done``, a count of the collectors that have read all.
#
# A bundle is written before its last key. So a process that dies in between leaves nothing that
# another one reads, and no process waits for more than the deadline.


ENDED = "ended"  # the prefix of ranks that end; that of a verdict is its id
PART_BYTES = 1 << 18
SETTLE_S = 6.0  # how long a collector waits for the bundles of all ranks
_POLL_S = 0.05
_MOST_PARTS = 1 << 10
_COLLECTORS = 2


class Posts:
    """The bundles below one prefix, as one process sees them."""

    def __init__(self, prefix: str, settle_s: float = SETTLE_S) -> None:
        self._prefix = prefix
        self._settle_s = settle_s
        self._read: set[int] = set()

    def post(self, ranks: Collection[int], bundle: bytes) -> Steps[None]:
        """Post a bundle with the rings of these ranks; if it is empty, only that they have none."""
        number = yield Add(self._key("posts"), 1)
        parts = [bundle[at : at + PART_BYTES] for at in range(0, len(bundle), PART_BYTES)]
        for index, part in enumerate(parts):
            yield Set(self._key(f"{number}/{index}"), part)
        header = {"ranks": sorted(ranks), "parts": len(parts)}
        yield Set(self._key(str(number)), json.dumps(header).encode())

    def fresh(self, known: set[int], skipped: Collection[int] = ()) -> Steps[list[bytes]]:
        """Return the bundles that were posted since the last call; add their ranks to ``known``.

        Bundles of ``skipped`` ranks, which are the caller's own, are left out.
        """
        bundles = []
        last = int((yield Read(self._key("posts"))) or 0)
        for number in [
            post_number for post_number in range(1, last + 1) if post_number not in self._read
        ]:
            raw = yield Read(self._key(str(number)))
            header = _decoded(raw) if raw is not None else None
            if header is None:
                continue  # it is still being written, or was given up
            self._read.add(number)
            ranks, count = header
            known.update(ranks)
            if count and not set(ranks) <= set(skipped):
                parts = []
                for index in range(count):
                    parts.append((yield Read(self._key(f"{number}/{index}"))) or b"")
                bundles.append(b"".join(parts))
        return bundles

    def remove(self) -> Steps[None]:
        """Remove the bundles that this process has read."""
        for number in sorted(self._read):
            header = _decoded((yield Read(self._key(str(number)))) or b"")
            yield Delete(self._key(str(number)))
            for index in range(header[1] if header else 0):
                yield Delete(self._key(f"{number}/{index}"))

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def exchange(
        self, mine: Collection[int], bundle: bytes, world_size: int, name: str
    ) -> Steps[list[bytes]]:
        """Send this node's bundle; return those of the other nodes if this node collects them.

        Args:
            mine: The ranks of this node.
            bundle: Their bundle; empty if this node need not send any, nor collect.
            world_size: The number of ranks of the job.
            name: A name of this node that no other node has.
        """
        yield from self.post(mine, bundle)
        if 0 not in mine and not (bundle and (yield from self._is_second(name.encode()))):
            return []
        bundles = yield from self._all_of(mine, world_size, self._settle_s)
        done = yield Add(self._key("done"), 1)
        if done == _COLLECTORS or (yield Read(self._key("second"))) is None:
            yield from self.remove()
        return bundles

    def _is_second(self, name: bytes) -> Steps[bool]:
        return bool((yield CompareSet(self._key("second"), b"", name)) == name)

    def collect(self, mine: Collection[int], world_size: int, wait_s: float) -> Steps[list[bytes]]:
        """Return and remove all bundles; wait so long for those of ranks that have posted none."""
        bundles = yield from self._all_of(mine, world_size, wait_s)
        yield from self.remove()
        return bundles

    def _all_of(self, mine: Collection[int], world_size: int, wait_s: float) -> Steps[list[bytes]]:
        known, until = set(mine), (yield Now()) + wait_s
        bundles: list[bytes] = yield from self.fresh(known, mine)
        while len(known) < world_size and (yield Now()) < until:
            yield Sleep(_POLL_S)
            bundles += yield from self.fresh(known, mine)
        return bundles


def _decoded(raw: bytes) -> tuple[Sequence[int], int] | None:
    """Return the ranks and the number of parts of a bundle; None if that is damaged."""
    try:
        header = json.loads(raw)
        ranks, parts = [int(rank) for rank in header["ranks"]], int(header["parts"])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
    return (ranks, parts) if 0 <= parts <= _MOST_PARTS else None


# Send the evidence of a verdict to other nodes, on the watcher's thread of the node's leader.


MOST_S = SETTLE_S + 4.0  # that ``send`` takes: the verdict may have to end the job after it

Perform = Callable[[float, Any], Any]  # makes requests to the job's store, with a deadline


class EvidenceSender:
    """Sends the bundles of one node, and keeps those of others if this node collects them.

    Args:
        run_dir: The run directory of this node.
        name: A name of this node that no other node has.
        perform: Makes the requests of a protocol.
    """

    def __init__(self, run_dir: Path, name: str, perform: Perform) -> None:
        self._run_dir = run_dir
        self._name = name
        self._perform = perform
        self._last: Posts | None = None

    def send(self, prefix: str, verdict: str, attempt: int) -> list[str]:
        """Send this node's bundle for a verdict, and keep those of other nodes if it collects.

        Takes ten seconds at most, if the store, other nodes or the URL do not answer. Raises
        ``OSError``, and what ``perform`` raises.

        Args:
            prefix: The prefix of the job's evidence in the store; empty if there is no store.
            verdict: The id of the verdict, the same on all nodes.
            attempt: The attempt of the job.

        Returns:
            A line for each bundle that cannot be kept.
        """
        until = time.monotonic() + MOST_S
        rings = node_rings(self._run_dir, attempt)
        with self._uploading(rings, until):
            mine = {header.rank for header in rings.values()}
            world = max((header.world_size for header in rings.values()), default=0)
            if len(mine) >= world or not prefix:
                return []  # all ranks are on this node

            def perform(steps: Any) -> Any:
                return self._perform(max(0.1, until - time.monotonic()), steps)

            if self._last is not None and 0 in mine:
                perform(self._last.remove())
            shared = is_shared(self._run_dir, attempt)
            bundle = b"" if shared else make_bundle(self._run_dir, rings, world)
            self._last = Posts(f"{prefix}/{attempt}/{verdict}")
            bundles = perform(self._last.exchange(mine, bundle, world, self._name))
            if 0 in mine:  # a node whose ranks have all ended does not answer
                bundles += perform(Posts(f"{prefix}/{attempt}/{ENDED}").collect(mine, world, 0.0))
            return keep_bundles(self._run_dir, bundles)

    @contextlib.contextmanager
    def _uploading(self, rings: Rings, until: float) -> Iterator[None]:
        """Write the rings to the URL, if one is given, while the block runs and until then."""
        url = os.environ.get(COLLECT_TO, "")
        if not url:
            yield
            return
        call = BackgroundCall(lambda: upload(url, self._run_dir, rings, rings), "rankcall-upload")
        try:
            yield
        finally:
            if not call.ended(until - time.monotonic()):
                warn_once(f"the URL of {COLLECT_TO} has not taken any record within {MOST_S:g} s")
                call.give_up()


# Send a bundle when a rank ends, on a thread of its own that started with the recording.
#
# Python 3.12 starts no thread while the interpreter exits, and the user's thread must not wait for
# a store. So each rank of a job with several nodes has a thread that waits for the end. Then it
# sends the records of this rank, and of the ranks of its node that have ended without sending
# theirs. Rank 0 collects the records that the ranks of other nodes have sent.


logger = logging.getLogger("rankcall")

LEAVE_S = 1.0  # how long the end of a process is held up, at most
_STORE_S = 0.8
_UPLOAD_S = 1.5

FindStore = Callable[[], "tuple[Store | None, str]"]


@dataclass(frozen=True)
class Place:
    """The place of a rank's records."""

    run_dir: Path
    attempt: int
    rank: int
    world_size: int


class Departure:
    """Sends the records of this rank when it ends.

    Args:
        place: The place of the records.
        find_store: Returns the job's store (or None) and the prefix of the job's
            evidence. No reference to the store is kept.
        url: Where to write the records as well; empty for nowhere.
    """

    def __init__(self, place: Place, find_store: FindStore, url: str = "") -> None:
        self._place = place
        self._url = url
        self._find_store = find_store
        self._wake = threading.Event()
        self._is_leaving = self._has_failed = False
        from rankcall.store.parts import Standby  # here: the launcher imports this without torch

        self._standby = Standby()
        self._pid = os.getpid()
        self._helper = BackgroundCall(self._run, "rankcall-leave")

    def leave(self, failed: bool) -> None:
        """Send the records now; wait for that for a second at most. Never raises.

        If ``failed``, an exception has ended this rank. Rank 0 then waits for the other nodes.
        """
        if self._is_leaving or os.getpid() != self._pid:
            return
        self._is_leaving, self._has_failed = True, failed
        self._wake.set()
        most = LEAVE_S + (_UPLOAD_S if self._url else 0.0)
        if not exit_budget.spend(self._helper.ended, most):
            with contextlib.suppress(Exception):
                self._standby.release()
            logger.debug("the newest records of this rank have not been sent in time")

    def stay(self) -> None:
        """End the thread without sending anything."""
        self._wake.set()
        if os.getpid() == self._pid:
            exit_budget.spend(self._helper.ended, LEAVE_S)

    def _run(self) -> None:
        self._wake.wait()
        try:
            if self._is_leaving:
                self._send()
        except Exception as error:  # of the store, the disk or the network
            logger.debug("the newest records of this rank are not sent: %s", error)

    def _send(self) -> None:
        place = self._place
        rings = node_rings(place.run_dir, place.attempt)
        ended = _ended(rings, place.rank)
        if self._url:
            upload(self._url, place.run_dir, ended, rings)
        mine = {header.rank for header in rings.values()}
        if len(mine) >= place.world_size or is_shared(place.run_dir, place.attempt):
            return
        store, prefix = self._find_store()
        if store is None or (0 in mine and place.rank != 0):
            return
        posts = Posts(f"{prefix}/{place.attempt}/{ENDED}")
        if place.rank == 0:
            wait_s = _STORE_S if self._has_failed else 0.0
            steps = posts.collect(mine, place.world_size, wait_s)
            bundles = self._standby.perform(store, _STORE_S, steps)
            for problem in keep_bundles(place.run_dir, bundles):
                logger.warning(problem)
        else:
            bundle = make_bundle(place.run_dir, ended, place.world_size, rings)
            ranks = {header.rank for header in ended.values()}
            self._standby.perform(store, _STORE_S, posts.post(ranks, bundle))


def _ended(rings: Rings, rank: int) -> Rings:
    """Return the rings of this rank and of those that have ended."""
    return {
        path: header
        for path, header in rings.items()
        if header.rank == rank or header.process_state() not in ("alive", "stopped")
    }
