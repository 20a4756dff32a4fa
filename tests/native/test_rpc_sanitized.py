"""The whole RPC agent in two Python processes, watched by the compiler's sanitizers.

The agent is built with the sanitizer into a cache of its own. Python, torch and libzmq are not, so
a ThreadSanitizer report counts only if both accesses are the agent's.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from sanitized import RACE_REPORT, build_module, races_in, run_to_end, runtime_library

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parent / "rpc_agent_stress.py"
BUILD = "from rankcall.rpc.backends.zmq.agent_module import AGENT; print(AGENT.prebuild())"


def drive(sanitizer: str, library: str, options: dict[str, str], folder: Path) -> None:
    """Build the agent with a sanitizer and run the program to its end."""
    env = build_module(BUILD, f"-fsanitize={sanitizer}", folder)
    env |= {"RANKCALL_RPC_SECRET": "a secret of the tests", "RANKCALL_SHM": str(folder)}
    # The C++ library has to be there when the sanitizer looks for what it intercepts.
    env |= {"LD_PRELOAD": f"{runtime_library(library)} {runtime_library('stdc++')}", **options}
    done = run_to_end(PROGRAM, env)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr[-8000:]


@pytest.mark.timeout(2000, func_only=True)
def test_no_invalid_memory(tmp_path: Path) -> None:
    """AddressSanitizer finds no access to memory that is freed or not the agent's."""
    drive("address", "asan", {"ASAN_OPTIONS": "detect_leaks=0"}, tmp_path)


@pytest.mark.timeout(2000, func_only=True)
def test_no_undefined_behaviour(tmp_path: Path) -> None:
    """UndefinedBehaviorSanitizer has nothing to say."""
    drive("undefined", "ubsan", {"UBSAN_OPTIONS": "print_stacktrace=1"}, tmp_path)


@pytest.mark.timeout(2000, func_only=True)
def test_no_data_race(tmp_path: Path) -> None:
    """ThreadSanitizer finds no two accesses of the agent's that race."""
    options = "exitcode=0 report_signal_unsafe=0 ignore_noninstrumented_modules=1"
    options += f" log_path={tmp_path}/report"
    drive("thread", "tsan", {"TSAN_OPTIONS": options}, tmp_path)
    reports = "".join(path.read_text() for path in tmp_path.glob("report.*"))
    race_reports = RACE_REPORT.findall(reports)
    assert [report for report in race_reports if races_in("rankcall_rpc-", report)] == []
