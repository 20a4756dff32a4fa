"""Write the C++ header that ties the native recorder to ``record.py`` and ``ring/layout.py``."""

from __future__ import annotations

from rankcall import record
from rankcall.ring import layout


def layout_header() -> str:
    """Return ``layout.h``: codes, header offsets, and an assertion for every record field."""
    ops = {f"k{_camel(name)}": code for code, name in enumerate(record.OPS)}
    constants = {
        "kWriting": record.COMMIT_WRITING,
        "kOpen": record.COMMIT_OPEN,
        "kClosing": record.COMMIT_CLOSING,
        "kDone": record.COMMIT_DONE,
        "kMaxDims": record.MAX_DIMS,
        "kP2p": record.KINDS.index("p2p"),
        **{f"k{_camel(name)}": code for code, name in enumerate(record.STATUSES)},
        **ops,
        "kReduceOps": len(record.REDUCE_OPS),
        "kFlagAbandoned": record.FLAG_ABANDONED,
        "kFlagAnySource": record.FLAG_ANY_SOURCE,
        "kFlagDevice": record.FLAG_DEVICE,
        "kGroupsShare": layout.GROUPS_SHARE,
        "kErrorsShare": layout.ERRORS_SHARE,
        "kMostErrorBytes": layout.MOST_ERROR_BYTES,
        "kUnlistedGroups": layout.UNLISTED_GROUPS,
        "kEntryString": layout.ENTRY_STRING,
        "kEntryGroup": layout.ENTRY_GROUP,
        "kEntrySite": layout.ENTRY_SITE,
        "kEntrySizes": layout.ENTRY_SIZES,
        "kRank": layout.offset_of("rank"),
        "kHead": layout.offset_of("head"),
        "kStep": layout.offset_of("step"),
        "kTablesUsed": layout.offset_of("tables_used"),
        "kTablesLost": layout.offset_of("tables_lost"),
        "kInflightLost": layout.offset_of("inflight_lost"),
        "kNativeHeartbeat": layout.offset_of("native_heartbeat_ns"),
    }
    lines = [
        "// Generated from record.py and ring/layout.py by layout_header.py.",
        "#pragma once",
        "#include <cstddef>",
        "namespace rankcall::layout {",
        *(f"constexpr unsigned {name} = {value};" for name, value in constants.items()),
        "}",
        "#define RANKCALL_ASSERT_LAYOUT(R) \\",
        f'  static_assert(sizeof(R) == {record.RECORD.itemsize}, "record size"); \\',
    ]
    for name, (_, offset) in (record.RECORD.fields or {}).items():  # type: ignore[misc]
        lines.append(f'  static_assert(offsetof(R, {name}) == {offset}, "{name}"); \\')
    return "\n".join(lines) + "\n\n"


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))
