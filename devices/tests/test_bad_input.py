"""What cannot work is refused with one clear sentence and exit status 2."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from simulated_devices import BuildError, TorchError, _build, _libraries, _torch


def fake_torch(folder: Path, *, cuda: str | None, library: bool = True) -> Path:
    """A folder that looks like an installed torch."""
    package = folder / "torch"
    (package / "lib").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "version.py").write_text(f"__version__ = '9.9.9'\ncuda: Optional[str] = {cuda!r}\ngit_version = 'abc'\n")
    if library:
        (package / "lib" / "libtorch_cuda.so").touch()
        (package / "lib" / "libc10_cuda.so").write_bytes(b"\0")
    return folder


def devices(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    source = Path(_build.__file__).parents[1]
    path = os.pathsep.join(filter(None, [variables.pop("FIRST", ""), str(source)]))
    return subprocess.run(
        [sys.executable, "-m", "simulated_devices", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"PYTHONPATH": path} | variables,
    )


def refused(done: subprocess.CompletedProcess[str], text: str) -> None:
    assert done.returncode == 2, (done.returncode, done.stderr)
    (line,) = [line for line in done.stderr.splitlines() if not line.startswith("devices: compiling")]
    assert line.startswith("devices: ") and text in line, line


def test_torch_without_cuda(tmp_path: Path) -> None:
    refused(
        devices("build", FIRST=str(fake_torch(tmp_path, cuda=None, library=False))),
        "torch 9.9.9 was built without CUDA",
    )


def test_unknown_cuda(tmp_path: Path) -> None:
    refused(
        devices("build", FIRST=str(fake_torch(tmp_path, cuda="14.2"))),
        "built for CUDA 14.2, and only CUDA 12 and 13 can be simulated",
    )


def test_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(TorchError, match="torch is not installed"):
        _torch.find_torch()


def test_no_compiler(tmp_path: Path) -> None:
    """Without a compiler on PATH the sentence says how to get one."""
    done = devices(
        "build",
        FIRST=str(fake_torch(tmp_path, cuda="13.0")),
        PATH=str(tmp_path),
        XDG_CACHE_HOME=str(tmp_path / "cache"),
        CXX="",
    )
    refused(done, "no C++ compiler was found")
    done = devices(
        "build",
        FIRST=str(tmp_path),
        XDG_CACHE_HOME=str(tmp_path / "cache"),
        CXX="/no/such/compiler",
    )
    refused(done, "/no/such/compiler was not found")


def test_a_compiler_that_fails(tmp_path: Path) -> None:
    """The first error is in the sentence, and the whole output in a file; nothing half-built is left."""
    done = devices(
        "build",
        FIRST=str(fake_torch(tmp_path, cuda="13.0")),
        XDG_CACHE_HOME=str(tmp_path / "cache"),
        CXX=str(_script(tmp_path, "echo x.cpp: error: broken >&2; exit 1")),
    )
    refused(done, "x.cpp: error: broken")
    assert sorted(path.name for path in (tmp_path / "cache" / "simulated-devices").iterdir()) == [
        "compiler.log",
        "lock",
    ]


def _script(folder: Path, body: str) -> Path:
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def test_a_build_that_another_process_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_build, "LOCK_DEADLINE_S", 0.1)
    with (
        _build._lock(tmp_path / "lock"),
        pytest.raises(BuildError, match="another process has been compiling"),
        _build._lock(tmp_path / "lock"),
    ):
        pass


def test_a_symbol_that_a_newer_torch_imports(tmp_path: Path) -> None:
    """An unknown function is generated, under the version node that torch asks for; it fails and is named."""
    library = _libraries.Library("libcudart.so.13", ())
    symbols = _libraries.Symbols({"libcudart.so.13": {"cudaFromTheFuture"}}, set(), set())
    wanted, node = _libraries.exports(library, symbols)
    assert (wanted, node) == ({"cudaFromTheFuture"}, "libcudart.so.13")
    assert "cudaFromTheFuture" in _libraries.stubs_source(library, wanted)
    assert _libraries.version_script(wanted, node).startswith("libcudart.so.13 {")


def test_every_import_of_torch_is_defined() -> None:
    """The built libraries export all that the installed torch imports from them."""
    torch = _torch.find_torch()
    built = _build.build(torch)
    symbols = _libraries.imported_symbols(torch)
    for library in _libraries.libraries(torch.cuda_major):
        wanted, _ = _libraries.exports(library, symbols)
        exported = {
            name.partition("@")[0]
            for name in _libraries._nm("-D", "--defined-only", str(built.folder / library.soname))
        }
        assert wanted <= exported, wanted - exported


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler")
def test_types_agree_with_cudas_headers(tmp_path: Path) -> None:
    """Sizes and offsets of the declared types are those of CUDA's own headers, wherever those are installed."""
    torch = _torch.find_torch()
    folders = [
        torch.folder.parent / "triton/backends/nvidia/include",
        *torch.folder.parent.glob("nvidia/*/include"),
    ]
    include = next(
        (
            folder
            for folder in folders
            if (folder / "cuda_runtime_api.h").exists() and (folder / "crt/host_defines.h").exists()
        ),
        None,
    )
    if (
        include is None
        or f"#define CUDART_VERSION  {torch.cuda_major}" not in (include / "cuda_runtime_api.h").read_text()
    ):
        pytest.skip("no headers of CUDA are installed")
    fields = {
        "cudaDeviceProp": [
            "uuid",
            "totalGlobalMem",
            "major",
            "multiProcessorCount",
            "maxSurface1D",
            "pciBusID",
            "l2CacheSize",
            "sharedMemPerMultiprocessor",
            "cooperativeLaunch",
            "hostRegisterSupported",
            "clusterLaunch",
        ],
        "cudaFuncAttributes": [
            "maxThreadsPerBlock",
            "binaryVersion",
            "maxDynamicSharedSizeBytes",
            "nonPortableClusterSizeAllowed",
        ],
        "cudaPointerAttributes": ["type", "device", "devicePointer", "hostPointer"],
        "cudaMemPoolProps": ["location", "maxSize"],
    }
    lines = [f'printf("{name} %zu\\n", sizeof({name}));' for name in fields if name != "cudaPointerAttributes"]
    lines += [
        f'printf("{name}.{field} %zu\\n", offsetof({name}, {field}));'
        for name, all_of in fields.items()
        for field in all_of
    ]
    lines += [
        f'printf("{name} %d\\n", {name});'
        for name in (
            "cudaErrorECCUncorrectable",
            "cudaErrorStreamCaptureImplicit",
            "cudaMemPoolAttrUsedMemHigh",
            "cudaStreamNonBlocking",
            "cudaMemoryTypeManaged",
        )
    ]
    program = "#include <cstddef>\n#include <cstdio>\nint main() { " + " ".join(lines) + " }\n"
    outputs = []
    for name, header, options in (
        ("real", "cuda_runtime_api.h", [f"-I{include}"]),
        (
            "ours",
            str(_build.NATIVE / "abi" / "cuda.h"),
            [f"-DSIMULATED_CUDA_MAJOR={torch.cuda_major}"],
        ),
    ):
        source = tmp_path / f"{name}.cpp"
        source.write_text(f'#include "{header}"\n{program}')
        subprocess.run(
            ["g++", "-std=c++17", "-w", *options, str(source), "-o", str(tmp_path / name)],
            check=True,
            timeout=120,
        )
        outputs.append(subprocess.run([str(tmp_path / name)], capture_output=True, text=True, check=True).stdout)
    assert outputs[0] == outputs[1]
