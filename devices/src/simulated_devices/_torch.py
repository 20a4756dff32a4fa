"""Look at the installed torch without importing it.

Importing it would load the very libraries that are to be replaced, and takes seconds.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from ._errors import TorchError

# The majors whose binary interface the sources in native/ follow.
KNOWN_CUDA_MAJORS = (12, 13)


@dataclass(frozen=True)
class TorchBuild:
    """The build of torch that the libraries are made for."""

    folder: Path
    version: str
    cuda: str
    git_version: str

    @property
    def cuda_major(self) -> int:
        """The major version of CUDA that it was built for."""
        return int(self.cuda.partition(".")[0])

    @property
    def cuda_version(self) -> int:
        """The version as CUDA's own functions return it, for example 13000."""
        major, _, minor = self.cuda.partition(".")
        return int(major) * 1000 + int(minor or 0) * 10

    @property
    def libraries(self) -> list[Path]:
        """Its own shared libraries, which import what is replaced."""
        return sorted((self.folder / "lib").glob("*.so"))

    @property
    def identity(self) -> str:
        """A text that differs between builds whose libraries may differ."""
        return f"{self.version} {self.cuda} {self.git_version} {self.nccl_version}"

    @property
    def nccl_version(self) -> int:
        """The version of NCCL that torch expects, as ``ncclGetVersion`` returns it."""
        for name in (f"nvidia-nccl-cu{self.cuda_major}", "nvidia-nccl"):
            try:
                found = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
            major, minor, patch = (int(part) for part in [*found.split("."), "0", "0"][:3])
            return major * 10000 + minor * 100 + patch
        return 23007


def find_torch() -> TorchBuild:
    """Return the build of the torch that this Python would import.

    Raises:
        TorchError: There is none, it was built without CUDA, or for a CUDA that is not known.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise TorchError(
            "torch is not installed for this Python: install a CUDA build, for example with `pip install torch`."
        )
    folder = Path(next(iter(spec.submodule_search_locations)))
    try:
        text = (folder / "version.py").read_text(encoding="utf-8")
    except OSError as error:
        raise TorchError(f"the torch in {folder} has no readable version.py ({error}): install it again.") from error
    version = _value(text, "__version__") or "unknown"
    cuda = _value(text, "cuda")
    if cuda is None or not (folder / "lib" / "libtorch_cuda.so").exists():
        raise TorchError(
            f"torch {version} was built without CUDA: install a CUDA build, "
            "which on Linux is what `pip install torch` takes."
        )
    build = TorchBuild(folder, version, cuda, _value(text, "git_version") or "unknown")
    if build.cuda_major not in KNOWN_CUDA_MAJORS:
        known = " and ".join(str(major) for major in KNOWN_CUDA_MAJORS)
        raise TorchError(
            f"torch {version} was built for CUDA {cuda}, and only CUDA {known} can be simulated: "
            "install a torch for one of those."
        )
    return build


def _value(text: str, name: str) -> str | None:
    match = re.search(rf"^{name}\b[^=\n]*=\s*'([^']*)'", text, re.MULTILINE)
    return match.group(1) if match else None
