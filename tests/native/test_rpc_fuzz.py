"""The decoder of RPC messages, fuzzed under AddressSanitizer and UBSan.

With clang, libFuzzer steers by coverage (``make fuzzer`` installs it). Any other compiler builds
the same target with a driver that changes the seeds at random.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from byte_fuzz import read_corpus, write_corpus
from rpcwire import PACKED, PART, SHARED, build, cut

HERE = Path(__file__).parent
CORPUS = HERE.parent / "corpora" / "rpc.zip"
NATIVE = HERE.parents[1] / "src" / "rankcall" / "rpc" / "native"
KNOWN, MORE = 1, 2  # flags of a frame


def as_input(messages: list[list[bytes]], flags: int = KNOWN) -> bytes:
    """Return an input of the target (see rpc_fuzz.cpp)."""
    return b"".join(
        bytes([flags | (MORE if number + 1 < len(frames) else 0)])
        + len(frame).to_bytes(2, "little")
        + frame
        for frames in messages
        for number, frame in enumerate(frames)
    )


def write_seeds(folder: Path) -> None:
    """Write messages in one piece and in chunks, of one session and of two in turns."""
    buffers = [(PACKED, b"packed"), (PART, b"part" * 20), (SHARED, b""), (PART, b"")]
    large, small = build(b"payload", b"pickle", buffers), build(b"hello", b"", [], kind=3)
    turns = zip(cut(large, 1, 40, session=1), cut(large, 2, 40, session=2), strict=True)
    seeds = {
        "whole": as_input([large, small]),
        "chunks": as_input(cut(large, 1, 30) + cut(small, 2, 30)),
        "turns": as_input([chunk for pair in turns for chunk in pair]),
        "broken off": as_input(cut(large, 1, 50)[:3] + cut(small, 2, 500)),
        "stranger": as_input(cut(small, 1, 500), flags=0),
    }
    folder.mkdir()
    for name, seed in seeds.items():
        (folder / name).write_bytes(seed)


def build_target(folder: Path) -> tuple[Path, bool]:
    """Build the target; return it, and whether libFuzzer drives it."""
    clangs = ["clang++", *(f"clang++-{version}" for version in range(25, 13, -1))]
    source, program = str(HERE / "rpc_fuzz.cpp"), folder / "rpc_fuzz"
    common = ["-std=c++20", "-O1", "-g", f"-I{NATIVE}", "-fno-sanitize-recover=all"]
    common += [
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Wno-missing-field-initializers",
        "-o",
        str(program),
        source,
    ]
    for clang in filter(None, map(shutil.which, clangs)):
        command = [clang, "-fsanitize=fuzzer,address,undefined", *common]
        built = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if built.returncode == 0:
            return program, True
        assert "cannot find" in built.stderr, built.stderr  # its libFuzzer is another package
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler here")
    command = [compiler, "-fsanitize=address,undefined", "-DRANKCALL_FUZZ_MAIN", *common]
    built = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if "cannot find" in built.stderr:
        pytest.skip("this compiler has no AddressSanitizer")
    assert built.returncode == 0, built.stderr
    return program, False


def fuzz(seconds: int, folder: Path, *options: str) -> str:
    """Fuzz for a while; return what the driver says of its work."""
    seeds = folder / "seeds"
    write_seeds(seeds)
    for data in read_corpus(CORPUS):
        (seeds / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
    program, has_coverage = build_target(folder)
    if has_coverage:
        limits = ["-timeout=60", "-rss_limit_mb=2048", "-malloc_limit_mb=64", "-max_len=4096"]
        limits += [f"-max_total_time={seconds}", f"-artifact_prefix={folder}/", *options]
        command = [str(program), *limits, str(seeds)]
    else:
        command = [str(program), str(seconds), str(seeds)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=seconds + 300, check=False
    )
    if has_coverage and os.environ.get("RANKCALL_KEEP_CORPORA"):
        keep_corpus(program, folder)
    artifacts = [f"{path.name}: {path.read_bytes()!r}" for path in folder.glob("*-*[0-9a-f]")]
    assert done.returncode == 0, f"{done.stderr[-6000:]}\n{artifacts}"
    matches = re.findall(r"^Done (\d+) runs|cov: (\d+)", done.stderr, re.MULTILINE)
    runs = [int(count) for count, _ in matches if count]
    coverage = [int(count) for _, count in matches if count]
    assert runs[-1] > 1000, done.stderr[-2000:]
    return f"{runs[-1]} inputs" + (f", {coverage[-1]} edges" if coverage else ", no coverage")


def keep_corpus(program: Path, folder: Path) -> None:
    """Keep the smallest inputs that reach all that the run has reached (libFuzzer's -merge)."""
    (folder / "merged").mkdir()
    command = [str(program), "-merge=1", "-max_len=4096", str(folder / "merged")]
    subprocess.run([*command, str(folder / "seeds")], check=True, timeout=900, capture_output=True)
    write_corpus(CORPUS, [path.read_bytes() for path in (folder / "merged").iterdir()])


def test_the_decoder_in_short(tmp_path: Path) -> None:
    """For ten seconds: no invalid access, and every message is the bytes that were sent."""
    print(fuzz(10, tmp_path, "-seed=1"))


@pytest.mark.slow
@pytest.mark.timeout(3000, func_only=True)
def test_the_decoder_for_long(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same for ten minutes, or for RANKCALL_FUZZ_SECONDS, from another seed each time.

    With clang and RANKCALL_KEEP_CORPORA=1, inputs that reach new edges are kept in tests/corpora.
    """
    outcome = fuzz(int(os.environ.get("RANKCALL_FUZZ_SECONDS", "600")), tmp_path)
    with capsys.disabled():
        print(f"\n{outcome}")
