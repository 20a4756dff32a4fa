"""The RPC agent's threads, calls, blocks and parser under load, watched by sanitizers."""

from __future__ import annotations

from pathlib import Path

import pytest
from sanitized import SANITIZERS, run_sanitized

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
NATIVE = HERE.parents[1] / "src" / "rankcall" / "rpc" / "native"


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_the_agents_parts_under_load(sanitizer: str, tmp_path: Path) -> None:
    """Every call ends once, no block has two writers, and the sanitizer has nothing to say."""
    source = HERE / "rpc_stress.cpp"
    assert run_sanitized(source, [NATIVE], sanitizer, tmp_path, "c++20") == "ok\n"
