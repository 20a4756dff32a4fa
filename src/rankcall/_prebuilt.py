"""The native libraries that a wheel carries, and which of them fits the torch that is here.

A wheel is for one CPython, and has a library for each torch that it was made with. torch promises
nothing about its C++ classes, so a library is used without a trial only with the very release that
it was compiled for. With another patch release of that version, it is tried first, in a process of
its own: a class that has changed would crash the job. Builds that are no release compile their own.
"""

from __future__ import annotations

import json
import re
import sysconfig
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "_libraries"
INDEX = "index.json"
_RELEASE = re.compile(r"\d+\.\d+\.\d+")


@dataclass(frozen=True)
class TorchBuild:
    """What identifies a build of torch: its version without the local part, commit and C++ ABI."""

    version: str
    commit: str
    cxx11_abi: bool

    @property
    def minor(self) -> str:
        """The version without its last number; empty if it is no release."""
        is_release = _RELEASE.fullmatch(self.version)
        return self.version.rpartition(".")[0] if is_release else ""


@dataclass(frozen=True)
class Fit:
    """A library of the wheel that may fit, or None; ``why`` says so in words.

    ``needs_trial``: it was compiled for another patch release.
    """

    path: Path | None
    why: str
    needs_trial: bool = False


def torch_here() -> TorchBuild:
    """Return the build of torch that this process imports."""
    import torch

    return TorchBuild(
        torch.__version__.partition("+")[0],
        str(torch.version.git_version),
        bool(torch._C._GLIBCXX_USE_CXX11_ABI),
    )


def entry(file: str, module: str, sources: str, soabi: str, torch: TorchBuild) -> dict[str, object]:
    """Return what the index says of a library.

    Args:
        file: The name of its file.
        module: The name of the module.
        sources: The digest of the sources that it is made of.
        soabi: The CPython that it is for, as ``sysconfig`` names it.
        torch: The torch that it was compiled for.
    """
    return {"file": file, "module": module, "sources": sources, "soabi": soabi, **vars(torch)}


def find(module: str, sources: str, torch: TorchBuild) -> Fit:
    """Return the library of a module that fits a build of torch. Raises nothing."""
    soabi = sysconfig.get_config_var("SOABI")
    try:
        entries = json.loads((FOLDER / INDEX).read_text())
        ours = {
            TorchBuild(library["version"], library["commit"], library["cxx11_abi"]): FOLDER
            / library["file"]
            for library in entries
            if (library["module"], library["sources"], library["soabi"]) == (module, sources, soabi)
            and (FOLDER / library["file"]).is_file()
        }
        pythons = {str(library["soabi"]) for library in entries}
    except FileNotFoundError:
        return Fit(None, "this installation carries no compiled libraries")
    except (OSError, ValueError, KeyError, TypeError) as error:
        return Fit(None, f"{FOLDER / INDEX} cannot be read ({error})")
    if torch in ours:
        return Fit(ours[torch], f"it was compiled for torch {torch.version}")
    for build, path in sorted(ours.items(), key=lambda item: item[0].version, reverse=True):
        if torch.minor and (build.minor, build.cxx11_abi) == (torch.minor, torch.cxx11_abi):
            return Fit(path, f"it was compiled for torch {build.version}", needs_trial=True)
    return Fit(None, _why_none(torch, ours, pythons, str(soabi)))


def _why_none(
    torch: TorchBuild, builds: Collection[TorchBuild], pythons: set[str], soabi: str
) -> str:
    """Say why none of a wheel's libraries may be tried.

    Args:
        torch: The torch that is here.
        builds: Those that there are libraries for, of this Python and these sources.
        pythons: The Pythons that there are libraries for, whatever the sources.
        soabi: This Python, by the same names; they tell musl (Alpine) from glibc, too.
    """
    if pythons and soabi not in pythons:
        return f"the wheel's libraries are for {', '.join(sorted(pythons))}; this Python is {soabi}"
    if not builds:
        return "the wheel's libraries are of another rankcall, or some are missing"
    other_abi = (torch.minor, not torch.cxx11_abi)
    if any((build.minor, build.cxx11_abi) == other_abi for build in builds):
        return f"torch {torch.version} has another C++ ABI here than the wheel's libraries"
    versions = {build.version for build in builds}
    this = f"another build of {torch.version}" if torch.version in versions else torch.version
    return f"the wheel's libraries are for torch {', '.join(sorted(versions))}; this is {this}"
