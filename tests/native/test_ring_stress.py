"""The native ring under many threads, checked by ThreadSanitizer where the compiler has it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NATIVE = HERE.parents[1] / "src" / "rankcall" / "capture" / "native"


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_many_threads_in_a_small_ring(sanitizer: str, tmp_path: Path) -> None:
    """Every record is finished once, none mixed up, and the sanitizer has nothing to say."""
    from rankcall.capture.native.layout_header import layout_header

    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler here")
    (tmp_path / "layout.h").write_text(layout_header())
    program = tmp_path / "ring_stress"
    command = [compiler, "-std=c++17", "-O1", "-g", "-pthread", f"-fsanitize={sanitizer}"]
    command += ["-fno-sanitize-recover=all", "-Wall", "-Wextra", "-Werror"]
    # GCC's sanitizer does not model fences; they matter to readers, which this program has none of.
    command += ["-Wno-tsan"] if sanitizer == "thread" and "clang" not in compiler else []
    command += [f"-I{tmp_path}", f"-I{NATIVE}", str(HERE / "ring_stress.cpp"), "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if "cannot find" in built.stderr or "unrecognized" in built.stderr:
        pytest.skip(f"this compiler has no -fsanitize={sanitizer}")
    assert built.returncode == 0, built.stderr
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=110, check=False)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("ThreadSanitizer does not run on this kernel")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("ok: 180000 records")
