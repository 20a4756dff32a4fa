"""The native capture: C++ kernels in front of every c10d op (see kernels.h).

``RECORDER`` is the C++ module to build. ``layout_header`` makes one of its headers from our tables.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from rankcall import drop_in, record
from rankcall._native import NativeModule
from rankcall.capture import interface
from rankcall.capture.device_ops import DeviceOp
from rankcall.capture.device_status import device_times_wanted
from rankcall.capture.marks import Marks, span_of
from rankcall.capture.moments import DOING, Look
from rankcall.errors import CaptureUnavailableError, warn_once
from rankcall.record import (
    BATCH,
    DTYPES,
    OBJECT_CALLS,
    OPS,
    PICKLE_DTYPE,
    op_of_variant,
    public_name,
)
from rankcall.ring import layout, tables
from rankcall.ring.layout import Geometry
from rankcall.ring.tables import ENTRY_LINE, Group, encode_group, encode_line

_MOST_GROUPS = 4096  # with known hosts, for marks; a program may make groups without end
_module: ModuleType | None = None


def layout_header() -> str:
    """Return ``layout.h``: codes, the table of ops, offsets, names of fields, and checks."""
    codes = {f"k{_camel(name)}": code for code, name in enumerate(record.OPS)}
    messages = {f"kMessage{_camel(name)}": code for code, name in enumerate(record.MESSAGES)}
    constants = {
        "kWriting": record.COMMIT_WRITING,
        "kOpen": record.COMMIT_OPEN,
        "kClosing": record.COMMIT_CLOSING,
        "kDone": record.COMMIT_DONE,
        "kMaxDims": record.MAX_DIMS,
        "kP2p": record.KINDS.index("p2p"),
        **{f"k{_camel(name)}": code for code, name in enumerate(record.STATUSES)},
        **codes,
        **messages,
        "kReduceOps": len(record.REDUCE_OPS),
        "kFlagAbandoned": record.FLAG_ABANDONED,
        "kFlagAnySource": record.FLAG_ANY_SOURCE,
        "kFlagDevice": record.FLAG_DEVICE,
        "kFlagNotStarted": record.FLAG_NOT_STARTED,
        "kGroupsShare": layout.GROUPS_SHARE,
        "kErrorsShare": layout.ERRORS_SHARE,
        "kMostErrorBytes": layout.MOST_ERROR_BYTES,
        "kUnlistedGroups": layout.UNLISTED_GROUPS,
        "kEntryString": tables.ENTRY_STRING,
        "kEntryGroup": tables.ENTRY_GROUP,
        "kEntrySite": tables.ENTRY_SITE,
        "kEntrySizes": tables.ENTRY_SIZES,
        "kRank": layout.offset_of("rank"),
        "kHead": layout.offset_of("head"),
        "kStep": layout.offset_of("step"),
        "kTablesUsed": layout.offset_of("tables_used"),
        "kTablesLost": layout.offset_of("tables_lost"),
        "kInflightLost": layout.offset_of("inflight_lost"),
        "kNativeHeartbeat": layout.offset_of("native_heartbeat_ns"),
        "kTrainThread": layout.offset_of("train_thread"),
    }
    lines = [
        "// Generated from record.py, drop_in.py and ring/layout.py by layout_header.",
        "#pragma once",
        "#include <cstddef>",
        "namespace rankcall::layout {",
        *(f"constexpr unsigned {name} = {value};" for name, value in constants.items()),
        f"constexpr long long kEndUnknown = {record.END_UNKNOWN};",
        "// By op code: the columns of record.py's table that the recorder needs.",
        _array("kMessages", [record.MESSAGES.index(op.message) for op in record.TABLE]),
        _array("kP2pOps", [op.waits == "peer" for op in record.TABLE]),
        _array("kRootDescribes", [op.root_describes for op in record.TABLE]),
        *_names_of_others(),
        "}",
        "#define RANKCALL_ASSERT_LAYOUT(R) \\",
        f'  static_assert(sizeof(R) == {record.RECORD.itemsize}, "record size"); \\',
    ]
    for name, (_, offset) in (record.RECORD.fields or {}).items():  # type: ignore[misc]
        lines.append(f'  static_assert(offsetof(R, {name}) == {offset}, "{name}"); \\')
    return "\n".join(lines) + "\n\n"


def _names_of_others() -> list[str]:
    """Return the fields of descriptions and of statuses, in their order: see ``drop_in.py``."""
    facts = [f"k{_camel(field.fact)}" for field in drop_in.DESCRIPTION]
    fields = [
        f'{{"\\"{field.name}\\": ", Fact::{fact}}}'
        for field, fact in zip(drop_in.DESCRIPTION, facts, strict=True)
    ]
    names = [f'"{name}"' for name in drop_in.STATUS]
    return [
        f"enum class Fact {{ {', '.join(facts)} }};",
        "struct Field { const char* key; Fact fact; };",
        f"constexpr Field kDescription[] = {{{', '.join(fields)}}};",
        f"constexpr const char* kStatusFields[] = {{{', '.join(names)}}};",
    ]


def _array(name: str, values: Sequence[int]) -> str:
    numbers = ", ".join(str(int(value)) for value in values)
    return f"constexpr unsigned char {name}[] = {{{numbers}}};"


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.replace(" ", "_").split("_"))


RECORDER = NativeModule(
    "rankcall_recorder",
    Path(__file__).parent,
    "recorder.cpp",
    CaptureUnavailableError,
    {"layout.h": layout_header},
    ("USE_DISTRIBUTED", "USE_C10D_GLOO"),
    trial="rankcall.capture.native.trial",
)


def nvtx_bridge() -> NativeModule:
    """Return the bridge to NVTX.

    Raises ``CaptureUnavailableError`` if its headers are not installed.
    """
    return NativeModule(
        "rankcall_nvtx",
        RECORDER.sources,
        "nvtx_bridge.cpp",
        CaptureUnavailableError,
        includes=(nvtx_headers(),),
        uses_torch=False,
    )


def nvtx_headers() -> Path:
    """Return the include folder of NVTX, which comes with a package of NVIDIA's."""
    for entry in sys.path:
        for header in sorted(Path(entry or ".").glob("nvidia/*/include/nvtx3/nvToolsExt.h")):
            return header.parents[1]
    raise CaptureUnavailableError(
        "NVTX's headers are not installed: pip install 'rankcall[nvtx]' (it brings nvidia-nvtx)"
    )


def recorder_module() -> ModuleType:
    """Return the loaded recorder, building it first if need be.

    Raises ``CaptureUnavailableError``.
    """
    global _module
    if _module is None:
        _module = RECORDER.load()
    return _module


def use_library(library: Path) -> None:
    """Have this process record with a library, whether it fits or not. For ``trial``."""
    global _module
    _module = RECORDER.load_from(library)


class NativeCapture:
    """Records through the native kernels.

    The first ``start`` of the process installs them and they stay. After ``stop`` they pass ops on;
    the ring stays in use until ``drained``, because ops in flight still write their ends.
    """

    name = "native"

    def __init__(self, ring: mmap.mmap, geometry: Geometry, call_sites: bool = True) -> None:
        self._native = recorder_module()
        sizes = (
            geometry.capacity,
            geometry.inflight_capacity,
            geometry.tables_bytes,
            geometry.inflight_offset,
            geometry.tables_offset,
            geometry.records_offset,
        )
        self._recorder: Any = self._native.create(
            ring,
            sizes,
            list(interface.DTYPE_CODES.items()),
            interface.skipped_folders(),
            interface.installed_folders(),
            call_sites,
            device_times_wanted(),
        )
        self._groups: dict[int, Group] = {}
        self._marks: Marks | None = None

    @property
    def has_call_sites(self) -> bool:
        """Whether this Python's frames can be read."""
        return bool(self._native.CALL_SITES)

    def start(self) -> None:
        """Record every c10d op from now on."""
        if interface.must_install(self.name):
            codes = {name: OPS.index(op_of_variant(name)) for name in self._native.ops()}
            self._native.install(codes)
        self._native.start(self._recorder)

    def stop(self) -> None:
        """Record no new ops. Ops in flight still write their ends."""
        self._native.stop(self._recorder)

    def take_device_ops(self) -> list[DeviceOp]:
        """Return the ops on devices that were issued since the last call."""
        if self._native.device_time_failures(self._recorder):
            warn_once(
                "device times are incomplete: the device refused to record or read some events"
            )
        return [DeviceOp(*fields) for fields in self._native.take_device_ops(self._recorder)]

    def start_device_ops(self, records: list[int], time_ns: int) -> None:
        """Note that devices have started ops by ``time_ns``; see ``PythonRing.start``."""
        self._native.start_device_ops(self._recorder, records, time_ns)

    def take_ended_device_ops(self) -> list[int]:
        """Return the records that futures of Works have ended since the last call."""
        ended: list[int] = self._native.take_ended_device_ops(self._recorder)
        return ended

    def end_device_ops(self, records: list[int], time_ns: int) -> None:
        """End records that have not ended: completed at ``time_ns``, abandoned if that is 0."""
        self._native.end_device_ops(self._recorder, records, time_ns)

    @contextlib.contextmanager
    def reading_status(self) -> Iterator[bool]:
        """Keep first ops of groups waiting for a moment; yields False if one is under way."""
        try:
            yield bool(self._native.reading_status(True))
        finally:
            self._native.reading_status(False)

    def forget(self) -> None:
        """Do nothing: the recorder has switched itself off at the fork."""

    def drained(self) -> bool:
        """Whether every record of a stopped recorder has its end."""
        return bool(self._native.drained(self._recorder))

    def counts(self) -> tuple[int, int]:
        """Return how many records were issued, and how many have ended."""
        issued, ended = self._native.counts(self._recorder)
        return issued, ended

    def sleep(self, fd: int, wanted: int) -> None:
        """Have the eventfd written at the next end (1), or the next start or end (2)."""
        self._native.sleep(fd, wanted)

    @property
    def make_statuses(self) -> Callable[..., list[Any]]:
        """Make the statuses that hooks get: see statuses.h."""
        maker: Callable[..., list[Any]] = self._native.statuses
        return maker

    def add_group(self, group: Group, me: int) -> int:
        """Announce a group, and return its id; ``me`` is this rank's place in it."""
        number = self._native.add_group(self._recorder, group.name, encode_group(group))
        ranks = list(group.ranks)
        self._native.group_text(
            self._recorder, number, json.dumps(group.label), json.dumps(ranks), ranks, me
        )
        self._groups[number] = group
        if len(self._groups) > _MOST_GROUPS:
            del self._groups[next(iter(self._groups))]
        if self._marks is not None:
            self._native.group_span(self._recorder, number, *span_of(self._marks, group))
        return int(number)

    def add_line(self, site: int, text: str) -> None:
        """Add the source line of a call site."""
        self._native.append(self._recorder, ENTRY_LINE, encode_line(site, text))

    def mark(self, marks: Marks | None) -> None:
        """Call a tool at the issue of each op from now on; None ends that."""
        self._marks = marks
        if marks is None:
            self._native.marks_off(self._recorder)
            return
        self.learn_spans(marks)
        variants = self._native.ops()
        self._native.marks(
            self._recorder,
            tuple(marks.functions),
            json.dumps(marks.gpu_serial),
            json.dumps(marks.vm_id),
            list(DTYPES),
            variants,
            [public_name(variant) for variant in variants],
            list(OBJECT_CALLS),
            BATCH,
            PICKLE_DTYPE,
            marks.span is not None,
        )

    def learn_spans(self, marks: Marks) -> None:
        """Ask again which members of which groups are on other hosts."""
        for number, group in list(self._groups.items()):
            self._native.group_span(self._recorder, number, *span_of(marks, group))

    def note_exit_status(self, path: Path, fields: str) -> None:
        """Have the exit status appended to a file if it is not 0."""
        with contextlib.suppress(ValueError):  # a zero byte in the path
            self._native.note_exit_status(os.fsencode(path.parent), os.fsencode(path), fields)

    def look(self, thread: int) -> Look:
        """Return what a thread is doing, and what was seen of the process until now."""
        doing, *counters = self._native.look(self._recorder, sys._current_frames, thread)
        known = (value if value >= 0 else None for value in counters)
        return Look(DOING[doing] if doing >= 0 else None, *known)

    def step(self) -> None:
        """Count an optimizer step."""
        self._native.step(self._recorder)
