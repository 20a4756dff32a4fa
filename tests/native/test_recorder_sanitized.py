"""The whole native recorder in a Python process, watched by each of the compiler's sanitizers.

The recorder is built with the sanitizer into a cache of its own. Python, torch and numpy are not,
so their own data races are reported as well: a report counts if both accesses are the recorder's.
The ring's readers race with its writers on purpose, and find out by the records' commit words.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from sanitized import RACE_REPORT, build_module, races_in, run_to_end, runtime_library

pytestmark = pytest.mark.slow

OURS = "rankcall_recorder-"  # the module's file name; other frames are in other files
PROGRAM = Path(__file__).parent / "recorder_stress.py"
BUILD = "from rankcall.capture.native import RECORDER; print(RECORDER.prebuild())"


def build(sanitizer: str, folder: Path) -> dict[str, str]:
    """Build the recorder with a sanitizer; return the environment to use it in."""
    return build_module(BUILD, f"-fsanitize={sanitizer}", folder)


def drive(env: dict[str, str], *arguments: str) -> None:
    """Run the program to its end."""
    done = run_to_end(PROGRAM, env, *arguments)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


@pytest.mark.timeout(1500, func_only=True)
def test_no_invalid_memory(tmp_path: Path) -> None:
    """AddressSanitizer finds no access to memory that is freed or not the recorder's."""
    env = build("address", tmp_path)
    # The C++ library has to be there when the sanitizer looks for what it intercepts.
    preload = f"{runtime_library('asan')} {runtime_library('stdc++')}"
    drive({**env, "LD_PRELOAD": preload, "ASAN_OPTIONS": "detect_leaks=0"})


@pytest.mark.timeout(1500, func_only=True)
def test_no_undefined_behaviour(tmp_path: Path) -> None:
    """UndefinedBehaviorSanitizer reports nothing."""
    env = build("undefined", tmp_path)
    options = "print_stacktrace=1"
    drive({**env, "LD_PRELOAD": runtime_library("ubsan"), "UBSAN_OPTIONS": options})


@pytest.mark.timeout(1500, func_only=True)
def test_no_data_race(tmp_path: Path) -> None:
    """ThreadSanitizer finds no two accesses of the recorder's that race."""
    env = build("thread", tmp_path)
    options = f"exitcode=0 report_signal_unsafe=0 log_path={tmp_path}/report"
    drive({**env, "LD_PRELOAD": runtime_library("tsan"), "TSAN_OPTIONS": options}, "--no-fork")
    reports = "".join(path.read_text() for path in tmp_path.glob("report.*"))
    assert [report for report in RACE_REPORT.findall(reports) if races_in(OURS, report)] == []


def test_reports_are_told_apart() -> None:
    """A race between two frames of the recorder counts, one with a reader does not."""
    stack = "  {} of size 8 at 0x7f by thread T{}:\n    #0 memmove x.cpp:1 (libtsan.so+0x5)\n"
    ours, other = f"    #1 f r.h:1 ({OURS}8fd7.so+0x1)\n", "    #1 g (numpy.so+0x1)\n"
    tail = "\n  Thread T1 created by main thread at:\n    #0 pthread_create (libtsan.so+0x5)\n\n"
    write, read = stack.format("Write", 1), stack.format("Previous atomic read", 2)
    assert races_in(OURS, f"data race (pid=1)\n{write}{ours}\n{read}{ours}{tail}")
    assert not races_in(OURS, f"data race (pid=1)\n{write}{ours}\n{read}{other}{tail}")
    assert not races_in(OURS, f"data race (pid=1)\n{write}{other}\n{read}{other}{tail}")
