"""Bundles: the tails of a node's rings, with the states of its processes and their stacks.

Nodes may share no disk, and the memory of a node is lost with it. At a verdict, the leader of each
node sends a *bundle* through the job's store, and rank 0's node and the first other node that
answers keep the bundles of all nodes in their run directories. When a rank ends, it sends a bundle
to rank 0's node. A run directory with bundles is a run like any other.

This module makes bundles, and keeps those of other nodes. ``posts`` has the protocol that takes
them through a store, ``evidence`` sends them at a verdict, and ``departure`` when a rank ends.
``uploads`` writes the same files to a URL.

A bundle is an archive (``rankcall.run.archive``), so everything in it is checked when it is
unpacked: it may come from any process that reaches the store.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rankcall.errors import CorruptRunError
from rankcall.files import open_file, replacing
from rankcall.folders import run_folder
from rankcall.job.posts import MOST_OF_ALL
from rankcall.process import host_name
from rankcall.ring.layout import Header, read_header
from rankcall.ring.tail import tail_of
from rankcall.run.archive import pack
from rankcall.run.exits import EXITS, STATES, describe_states, states_name
from rankcall.run.hangs import (
    LINES,
    STACKS,
    add_lines,
    hang_folders,
    keep_copy,
    kept_lines,
    stacks_in,
)
from rankcall.run.paths import ATTEMPTS, HANGS, TAIL, files_in, ring_paths, tail_name
from rankcall.run.unpack import unpack

if TYPE_CHECKING:
    from rankcall.analysis.verdicts.verdict import Kept

MOST_BYTES = 1 << 18  # of a bundle, for each of its ranks
Rings = dict[Path, Header]

# Records of each tail; fewer if the bundle would be too large. A diagnosis needs the newest calls
# of every rank more than the history of some.
NEWEST = (256, 64, 16)
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
    for newest in NEWEST:
        with tempfile.TemporaryDirectory(prefix="rankcall-") as scratch:
            target = Path(scratch) / "bundle.tar.zst"
            pack(
                list(bundle_files(run_dir, rings, node or rings, newest, Path(scratch))),
                target,
                "run",
            )
            if target.stat().st_size <= most:
                return target.read_bytes()
    return b""


def bundle_files(
    run_dir: Path, rings: Rings, node: Rings, newest: int, scratch: Path
) -> Iterator[tuple[str, Path]]:
    """Yield the files of a bundle, each with its path inside the run.

    Args:
        run_dir: The run directory of this node.
        rings: The rings to send.
        node: All rings of the node.
        newest: How many records of each ring to send.
        scratch: A folder for the tails, which are made here.
    """
    for ring in rings:
        tail = scratch / tail_name(ring.name)
        with contextlib.suppress(CorruptRunError):  # for example, it was moved meanwhile
            tail.write_bytes(tail_of(_where(ring, run_dir), newest))
            yield f"rings/{tail.name}", tail
    states = scratch / "states.json"
    states.write_bytes(describe_states(node.values()))
    yield f"{STATES}/{states_name()}", states
    for path in files_in(run_dir / EXITS, ".jsonl"):
        if path.stat().st_size <= _MOST_EXITS:
            yield f"{EXITS}/{path.name}", path
    for kept in _verdicts(run_dir)[-1:]:
        place = kept.folder
        names = ["verdict.json", "verdict.txt", LINES]
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
        except (OSError, CorruptRunError, ValueError) as error:
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
    known = {kept.verdict.origin.id: kept.folder for kept in _verdicts(run_dir)}
    for kept in _verdicts(folder):
        source = kept.folder
        place = known.get(kept.verdict.origin.id)
        if place is None:
            keep_copy(source, run_dir)
            continue
        for stack in stacks_in(source):
            (place / STACKS).mkdir(mode=0o700, exist_ok=True)
            if not (place / STACKS / stack.name).exists():
                shutil.copyfile(stack, place / STACKS / stack.name)
        add_lines(place, kept_lines(source))


def _verdicts(path: Path) -> list[Kept]:
    if not hang_folders(path):
        return []
    # Here: a rank that is not watched sends bundles, and does not load what judges need.
    from rankcall.analysis.verdicts.kept import kept_in

    return kept_in(path)
