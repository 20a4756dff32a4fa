"""What the live page and the leader of its node tell each other, by files beside the live rings.

The page notes that somebody looks. While it does so, the leader asks the other nodes through the
job's store, and writes their answers into one file, which the page reads. Both files are in memory,
and go with the rings.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from rankcall.files import open_file, replacing
from rankcall.folders import check_file, make_folder
from rankcall.run.paths import VIEWS, live_dir, trusted_live_dirs

VIEWER, ANSWERS = "viewer", "answers"
PRESENT_S = 5.0  # after a look, somebody is there for so long
_MOST_BYTES = 1 << 30  # of all answers together; the rest is not read
_LATEST_NS = 1 << 62  # a later time is damage
_MOST_HEAD = 1 << 26  # bytes of the line of JSON before the answers

Member = tuple[int, str, int]  # rank, host, pid


@dataclass(frozen=True)
class NodeAnswer:
    """The newest answer of another node.

    ``age_s`` is the time since the leader got the answer, and ``asked_s`` the time since it first
    asked for one. ``data`` is a snapshot of the node, encoded; empty if the node has not answered.
    """

    members: tuple[Member, ...]
    age_s: float
    asked_s: float
    data: bytes = b""


@dataclass(frozen=True)
class Answers:
    """The answers of all other nodes, as the leader of this one had them at ``mono_ns``.

    ``attempt`` is that of the leader's job. ``notice_s`` is the longest time, in seconds, until a
    node whose ranks go on sees that somebody has opened the page. ``problem`` says why the other
    nodes cannot be asked.
    """

    mono_ns: int
    attempt: int
    notice_s: float
    problem: str = ""
    nodes: tuple[NodeAnswer, ...] = ()


def note_viewer(run: Path) -> None:
    """Note that somebody looks at a run. Raises nothing; the job may be over."""
    for folder in trusted_live_dirs(run):
        with contextlib.suppress(OSError):
            make_folder(folder / VIEWS, _owners(run, folder))
            with replacing(folder / VIEWS / VIEWER):
                pass


def read_answers(run: Path) -> Answers | None:
    """Return what the leader of this node has written; None without a file that can be read."""
    for folder in trusted_live_dirs(run):
        path = folder / VIEWS / ANSWERS
        with contextlib.suppress(
            OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError
        ):
            check_file(path, _owners(run, folder))
            with open_file(path) as file:
                head, _, data = file.read(_MOST_BYTES).partition(b"\n")
            return _decoded(head[:_MOST_HEAD], data)
    return None


def _owners(run: Path, folder: Path) -> Collection[int]:
    """Return the users that are trusted with these files: those of the rings."""
    return {folder.stat().st_uid, *([run.stat().st_uid] if run.exists() else [])}


def _decoded(head: bytes, data: bytes) -> Answers:
    header = json.loads(head)
    nodes, at = [], 0
    for node in header["nodes"]:
        size = int(node["bytes"])
        members = tuple((int(r), str(h), int(p)) for r, h, p in node["members"])
        nodes.append(
            NodeAnswer(members, float(node["age_s"]), float(node["asked_s"]), data[at : at + size])
        )
        at += size
    mono_ns = int(header["mono_ns"])
    if not 0 <= mono_ns < _LATEST_NS:
        raise ValueError("an impossible time")
    return Answers(
        mono_ns,
        int(header["attempt"]),
        float(header["notice_s"]),
        str(header["problem"]),
        tuple(nodes),
    )


class ViewerFile:
    """Whether somebody looks at a run from this host, by changes of the page's file."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = live_dir(run_dir) / VIEWS
        self._seen: tuple[int, int] | None = None
        self._until = float("-inf")

    def is_watched(self, now: float) -> bool:
        """Return whether the file has changed in the last seconds before ``now``."""
        try:
            status = (self._folder / VIEWER).lstat()
            seen = status.st_ino, status.st_mtime_ns
        except OSError:
            seen = None
        if seen is not None and seen != self._seen:
            self._until = now + PRESENT_S
        self._seen = seen
        return now < self._until

    def write(self, answers: Answers) -> None:
        """Write the answers for the page. Raises ``OSError``."""
        head = {
            "mono_ns": answers.mono_ns,
            "attempt": answers.attempt,
            "notice_s": answers.notice_s,
            "problem": answers.problem,
            "nodes": [
                {
                    "members": node.members,
                    "age_s": node.age_s,
                    "asked_s": node.asked_s,
                    "bytes": len(node.data),
                }
                for node in answers.nodes
            ],
        }
        with replacing(self._folder / ANSWERS) as file:
            file.write(json.dumps(head).encode() + b"\n")
            for node in answers.nodes:
                file.write(node.data)


def age_s(answers: Answers) -> float:
    """Return how long ago the answers were written on this host, s."""
    return max(0.0, (time.monotonic_ns() - answers.mono_ns) / 1e9)
