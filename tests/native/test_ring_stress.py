"""The native ring under many threads, checked by ThreadSanitizer if the compiler has it."""

from __future__ import annotations

from pathlib import Path

import pytest
from sanitized import SANITIZERS, run_sanitized

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
NATIVE = HERE.parents[1] / "src" / "rankcall" / "capture" / "native"


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_many_threads_in_a_small_ring(sanitizer: str, tmp_path: Path) -> None:
    """Every record is finished once, none is mixed up, and the sanitizer reports nothing."""
    from rankcall.capture.native import layout_header

    (tmp_path / "layout.h").write_text(layout_header())
    source = HERE / "ring_stress.cpp"
    output = run_sanitized(source, [tmp_path, NATIVE], sanitizer, tmp_path, "c++17")
    assert output.startswith("ok: 180000 records")
