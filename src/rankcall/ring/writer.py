"""Create a ring file, and write records into it.

Both captures create their ring here. ``PythonRing`` is the writer of the pure-Python capture. It
writes the same bytes as the native recorder.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rankcall.files import create_file
from rankcall.process import Process
from rankcall.record import (
    COMMIT_CLOSING,
    COMMIT_DONE,
    COMMIT_OPEN,
    COMMIT_WRITING,
    END_UNKNOWN,
    FLAG_ABANDONED,
    FLAG_DEVICE,
    FLAG_NOT_STARTED,
    RECORD,
    STATUSES,
)
from rankcall.ring.layout import (
    CAPTURES,
    ERRORS_SHARE,
    GROUPS_SHARE,
    HEADER,
    HEADER_BYTES,
    MOST_ERROR_BYTES,
    UNLISTED_GROUPS,
    Geometry,
    make_header,
    offset_of,
)
from rankcall.ring.lock import WriterLock
from rankcall.ring.tables import (
    ENTRY_GROUP,
    ENTRY_HEADER,
    ENTRY_LINE,
    ENTRY_SITE,
    ENTRY_SIZES,
    ENTRY_STRING,
    CallSite,
    Group,
    encode_group,
    encode_line,
    encode_site,
)

_OPEN_OR_CLOSING = (COMMIT_OPEN, COMMIT_CLOSING)
RECORD_BYTES = RECORD.itemsize


@dataclass(frozen=True)
class Identity:
    """The rank that writes a ring. -1 stands for a number that is not known yet."""

    rank: int = -1
    world_size: int = -1
    local_rank: int = -1
    node: int = -1
    attempt: int = 0
    host: str = ""
    capture: str = "python"


def create(path: Path | None, identity: Identity, geometry: Geometry) -> mmap.mmap:
    """Make a ring file of mode 0600, write its header, and return its memory map.

    All pages are reserved and touched here, because a page without memory behind it would be a
    SIGBUS in the training thread later. Raises ``OSError`` if the file exists or there is no room.

    Args:
        path: The file to make; None makes a ring in anonymous memory.
        identity: The rank that will write the ring.
        geometry: The sizes of the ring's parts.
    """
    if path is None:
        return _prepared(mmap.mmap(-1, geometry.file_bytes), identity, geometry)
    ring, lock = create_locked(path, identity, geometry)
    lock.release()
    put(ring, "locked", 0)
    return ring


def create_locked(
    path: Path, identity: Identity, geometry: Geometry, run_dir: Path | None = None
) -> tuple[mmap.mmap, WriterLock]:
    """Make a ring file as ``create`` does, and lock it before its header can be read.

    The file gets its name last: a process that is killed before leaves none, and nobody could tell
    whose a ring without a header is. The caller keeps the lock for as long as it writes the ring.
    ``run_dir`` is written into the header, so that a later command can move the ring there.
    """
    try:
        ring, fd, lock = create_unnamed(path.parent, identity, geometry)
    except OSError:  # some file systems, such as NFS, have no files without a name
        return _create_with_name(path, identity, geometry, run_dir)
    try:
        if run_dir is not None:
            put_run_dir(ring, run_dir)
        name_file(fd, path)
    except OSError as error:
        lock.release()
        if isinstance(error, FileExistsError):
            raise
        return _create_with_name(path, identity, geometry, run_dir)
    finally:
        os.close(fd)
    return ring, lock


def _create_with_name(
    path: Path, identity: Identity, geometry: Geometry, run_dir: Path | None
) -> tuple[mmap.mmap, WriterLock]:
    fd = create_file(path)
    lock = WriterLock(fd)
    try:
        os.posix_fallocate(fd, 0, geometry.file_bytes)
        ring = mmap.mmap(fd, geometry.file_bytes)
        return _prepared(ring, identity, geometry, lock, run_dir), lock
    except BaseException:
        lock.release()
        os.unlink(path)
        raise
    finally:
        os.close(fd)


def create_unnamed(
    folder: Path, identity: Identity, geometry: Geometry
) -> tuple[mmap.mmap, int, WriterLock]:
    """Make a ring file without a name: it vanishes with its process, unless ``name_file`` names it.

    Returns the memory map, the descriptor and the lock. Raises ``OSError`` if ``folder`` cannot
    hold such a file, or has no room for it.
    """
    fd = os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(fd, 0o600)  # the umask may have taken bits away
        os.posix_fallocate(fd, 0, geometry.file_bytes)
        ring = mmap.mmap(fd, geometry.file_bytes)
    except OSError:
        os.close(fd)
        raise
    lock = WriterLock(fd)
    return _prepared(ring, identity, geometry, lock), fd, lock


def name_file(fd: int, path: Path) -> None:
    """Give a file without a name one. Raises ``OSError`` if it is taken, or without ``/proc``."""
    # The path is absolute: a descriptor only makes CPython call linkat, which follows.
    os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd, follow_symlinks=True)


def _prepared(
    ring: mmap.mmap,
    identity: Identity,
    geometry: Geometry,
    lock: WriterLock | None = None,
    run_dir: Path | None = None,
) -> mmap.mmap:
    for page in range(0, len(ring), mmap.PAGESIZE):
        ring[page] = 0
    ring[:HEADER_BYTES] = _header(identity, geometry, lock is not None and lock.held)
    if run_dir is not None:
        put_run_dir(ring, run_dir)
    return ring


def _header(identity: Identity, geometry: Geometry, locked: bool) -> bytes:
    epoch_ns, mono_ns = time.time_ns(), time.monotonic_ns()
    process = Process.current()
    return make_header(
        geometry,
        {
            "rank": identity.rank,
            "world_size": identity.world_size,
            "local_rank": identity.local_rank,
            "node": identity.node,
            "attempt": identity.attempt,
            "pid": process.pid,
            "process_start": process.start,
            "pid_namespace": process.pid_namespace,
            "locked": locked,
            "anchor_mono_ns": mono_ns,
            "anchor_epoch_ns": epoch_ns,
            "capture": CAPTURES.index(identity.capture),
            "host": identity.host.encode()[:63],  # and a zero byte
            "boot_id": process.boot_id.encode(),
            "native_heartbeat_ns": mono_ns,
            "python_heartbeat_ns": mono_ns,
        },
    )


def put_run_dir(ring: mmap.mmap, run_dir: Path) -> None:
    """Write the run directory into the header, unless its path is too long or is not UTF-8."""
    raw = os.fsencode(os.path.abspath(run_dir))
    room = HEADER.fields["run_dir"][0].itemsize  # type: ignore[index]
    if len(raw) < room and raw.decode("utf-8", "ignore").encode() == raw:
        at = offset_of("run_dir")
        ring[at : at + room] = raw.ljust(room, b"\0")


def put(ring: mmap.mmap, field: str, value: int) -> None:
    """Set a header field."""
    kind = HEADER.fields[field][0].str  # type: ignore[index]
    code = {"<i8": "<q", "<u8": "<Q", "<i4": "<i", "<u4": "<I", "|u1": "<B"}[kind]
    struct.pack_into(code, ring, offset_of(field), value)


def put_text(ring: mmap.mmap, field: str, text: str) -> None:
    """Set a text field of the header. A text that is too long is cut between two characters."""
    room = HEADER.fields[field][0].itemsize  # type: ignore[index]
    raw = text.encode()[: room - 1].decode("utf-8", "ignore").encode()
    at = offset_of(field)
    ring[at : at + room] = raw.ljust(room, b"\0")


def set_identity(ring: mmap.mmap, identity: Identity) -> None:
    """Correct the identity in the header, once the default process group is known."""
    for name in ("rank", "world_size", "local_rank", "node", "attempt"):
        put(ring, name, getattr(identity, name))


def _struct_of(names: tuple[str, ...]) -> struct.Struct:
    """Return a Struct for record fields that follow each other."""
    codes = {"u1": "B", "u2": "H", "u4": "I", "u8": "Q", "i2": "h", "i4": "i", "i8": "q", "f8": "d"}
    form = "<"
    for name in names:
        kind = RECORD[name]
        base, count = (kind.subdtype[0], kind.shape[0]) if kind.subdtype else (kind, 1)
        form += codes[base.str[1:]] * count
    return struct.Struct(form)


BODY_NAMES = tuple(name for name in RECORD.names or () if name not in ("commit", "pad"))
_WHOLE = _struct_of(("commit", *BODY_NAMES))
assert _WHOLE.size == RECORD.fields["pad"][1]  # type: ignore[index]
_WORD = struct.Struct("<Q")
_read_word, _write_word, _write_whole = _WORD.unpack_from, _WORD.pack_into, _WHOLE.pack_into
_HEAD_AT = offset_of("head")
_COMPLETED_AT = RECORD.fields["completed_ns"][1]  # type: ignore[index]
_STATUS_AT = RECORD.fields["status"][1]  # type: ignore[index]


def _field(name: str) -> tuple[Callable[..., None], int]:
    return _struct_of((name,)).pack_into, RECORD.fields[name][1]  # type: ignore[index]


_FIELDS = {name: _field(name) for name in BODY_NAMES if name != "shape"}


class PythonRing:
    """Writes records into a mapped ring from Python threads of one process.

    The lock is held only over a few struct calls, never over a user's code. It is re-entrant, so
    that a signal handler that issues a collective cannot deadlock.
    """

    def __init__(self, ring: mmap.mmap, geometry: Geometry) -> None:
        self.map = ring
        self.head = 0
        self.done = 0
        self._geometry = geometry
        self._records_at = geometry.records_offset
        self._mask = geometry.capacity - 1
        self._lock = threading.RLock()
        self._entries = 0
        self._tables_used = 0
        self._unlisted_groups = 0
        self._errors: dict[bytes, int] = {}
        self._errors_bytes = 0
        self._is_closed = False
        self._parked: dict[int, int] = {}  # index -> offset in the in-flight table
        self._next_parking = 0

    def append(self, kind: int, payload: bytes) -> int:
        """Add a side-table entry and return its id, or 0 if there is no room for it."""
        room = self._geometry.tables_bytes
        if kind != ENTRY_GROUP:
            room -= room // GROUPS_SHARE
        with self._lock:
            entry = ENTRY_HEADER.itemsize + (len(payload) + 7) // 8 * 8
            if self._tables_used + entry > room:
                self._count_lost_entry()
                return 0
            at = self._geometry.tables_offset + self._tables_used
            self._entries += 1
            # The payload comes first. A reader takes an entry only if its number is the next one
            # and its checksum fits, so it never sees one that is half there.
            self.map[at + 16 : at + 16 + len(payload)] = payload
            struct.pack_into(
                "<IIII", self.map, at, self._entries, kind, len(payload), zlib.crc32(payload)
            )
            self._tables_used += entry
            put(self.map, "tables_used", self._tables_used)
            return self._entries

    def _count_lost_entry(self) -> None:
        lost = _read_word(self.map, offset_of("tables_lost"))[0]
        put(self.map, "tables_lost", lost + 1)

    def string(self, text: str) -> int:
        """Add a string entry."""
        return self.append(ENTRY_STRING, text.encode("utf-8", "replace"))

    def error(self, message: str) -> int:
        """Return the id of an error text; add the text if it is new. 0 if there is no room for it.

        Retries can fail with ever new texts, so error texts get only a small share of the room.
        """
        text = message.encode("utf-8", "replace")[:MOST_ERROR_BYTES]
        with self._lock:
            if text not in self._errors:
                self._errors_bytes += len(text)
                if self._errors_bytes > self._geometry.tables_bytes // ERRORS_SHARE:
                    self._errors_bytes -= len(text)
                    self._count_lost_entry()
                    return 0
                self._errors[text] = self.append(ENTRY_STRING, text)
            return self._errors[text]

    def group(self, group: Group) -> int:
        """Add a process-group entry.

        A group for which there is no room gets an id without an entry, so that its records are not
        mixed up with those of other groups.
        """
        number = self.append(ENTRY_GROUP, encode_group(group))
        if number == 0:
            number = UNLISTED_GROUPS + self._unlisted_groups % UNLISTED_GROUPS
            self._unlisted_groups += 1
        return number

    def site(self, site: CallSite) -> int:
        """Add a call-site entry."""
        return self.append(ENTRY_SITE, encode_site(site))

    def line(self, site: int, text: str) -> int:
        """Add the source line of a call site."""
        return self.append(ENTRY_LINE, encode_line(site, text))

    def numels(self, shape_hash: int, numels: list[int]) -> int:
        """Add the numbers of elements of a coalesced op's tensors."""
        return self.append(ENTRY_SIZES, json.dumps({"hash": shape_hash, "numels": numels}).encode())

    def close(self) -> None:
        """Accept no new records. Records in flight can still be finished."""
        with self._lock:
            self._is_closed = True

    def issue(self, body: tuple[float, ...]) -> int:
        """Write a new record (all fields but commit and pad, in order); return its index.

        Raises ``ValueError`` if the ring is closed.
        """
        ring = self.map
        with self._lock:
            if self._is_closed:
                raise ValueError("the ring is closed")
            index = self.head
            self.head = index + 1
            at = self._records_at + (index & self._mask) * RECORD_BYTES
            word = (index + 1) << 2
            if _read_word(ring, at)[0] & 3 in _OPEN_OR_CLOSING:
                self._park(at)
            # Readers skip the record until its last word is written: it may be half there.
            _write_whole(ring, at, word | COMMIT_WRITING, *body)
            _write_word(ring, at, word | COMMIT_OPEN)
            _write_word(ring, _HEAD_AT, index + 1)
        return index

    def finish(self, index: int, status: int, completed_ns: int, **fields: float) -> bool:
        """Set a record's completion fields. Return False if it was finished or lost before."""
        ring = self.map
        with self._lock:
            at = self._where(index)
            word = (index + 1) << 2
            commit = _read_word(ring, at)[0]
            if commit == word | COMMIT_DONE:
                return False
            self.done += 1  # also of a lost record: each op that was issued ends once
            if commit != word | COMMIT_OPEN:
                return False
            # Until it is done, readers take the fields of the end for not set.
            _write_word(ring, at, word | COMMIT_CLOSING)
            _write_word(ring, at + _COMPLETED_AT, completed_ns)
            ring[at + _STATUS_AT] = status
            if fields:
                self._set(at, fields)
            _write_word(ring, at, word | COMMIT_DONE)
            self._parked.pop(index, None)
        return True

    def start(self, index: int, started_ns: int) -> None:
        """Note that an op on a device has begun; 0: that it has not; or what is not known."""
        with self._lock:
            at = self._where(index)
            if _read_word(self.map, at)[0] != (index + 1) << 2 | COMMIT_OPEN:
                return
            if started_ns > 0:
                started = {"started_ns": started_ns, "status": STATUSES.index("started")}
                self._set(at, {**started, "flags": FLAG_DEVICE})
            else:
                flag = {0: FLAG_NOT_STARTED, END_UNKNOWN: FLAG_ABANDONED}.get(started_ns, 0)
                self._set(at, {"flags": FLAG_DEVICE | flag})

    def _set(self, at: int, fields: dict[str, float]) -> None:
        for name, value in fields.items():
            pack, offset = _FIELDS[name]
            pack(self.map, at + offset, value)

    def _where(self, index: int) -> int:
        """Return the offset of an unfinished record: of its slot, or in the in-flight table."""
        if self._parked and index in self._parked:
            return self._parked[index]
        return self._records_at + (index & self._mask) * RECORD_BYTES

    def _park(self, at: int) -> None:
        """Move an unfinished record from the slot at ``at`` into the in-flight table."""
        word = _read_word(self.map, at)[0]
        for _ in range(self._geometry.inflight_capacity):
            place = self._geometry.inflight_offset + self._next_parking * RECORD_BYTES
            self._next_parking = (self._next_parking + 1) % self._geometry.inflight_capacity
            if _read_word(self.map, place)[0] & 3 not in _OPEN_OR_CLOSING:
                # The word comes last, so that no reader takes a half-copied record for a whole one.
                _write_word(self.map, place, 0)
                self.map[place + 8 : place + RECORD_BYTES] = self.map[at + 8 : at + RECORD_BYTES]
                _write_word(self.map, place, word)
                self._parked[(word >> 2) - 1] = place
                return
        lost = _read_word(self.map, offset_of("inflight_lost"))[0]
        put(self.map, "inflight_lost", lost + 1)
