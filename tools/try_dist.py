#!/usr/bin/env python3
"""Build the wheels and the sdist, and try each in a fresh environment.

One wheel is for every Python, and compiles the recorder when it is first used. The others are for
one Python on one processor each, and carry a recorder for each torch that is named
(``native_libraries.py``). Such a wheel is tried where no compiler can be found, with each of these
torches that is for its Python, if it is for this machine's processor.

The environment is a new virtual environment with one file installed into it. Its other packages
are those of the environment of the torch that is tried, and of the one that runs this program: they
are found below the installed rankcall, so nothing is downloaded. In it, ``rankcall run`` records a
job of two ranks, ``rankcall report`` and ``rankcall diagnose --json`` read it, and the figures are
compared with what the job did.

Each step is one line, with its seconds. The exit status is 1 if a step fails; its output follows
then. ``make dist`` runs this.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import native_libraries

ROOT = Path(__file__).resolve().parents[1]
# A step takes seconds on an idle machine. The first job compiles the native recorder, which can
# take minutes on a busy one.
STEP_S = 300.0
RANKS, STEPS = 2, 5
JOB = f"""\
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
gradients = torch.ones(1000)
for step in range({STEPS}):
    dist.all_reduce(gradients)
dist.destroy_process_group()
"""


class Failed(Exception):
    """A step failed; the text says which, and has its output."""


@contextlib.contextmanager
def step(name: str) -> Iterator[None]:
    """Print what is done, and how long it took."""
    print(f"{name:<44}", end="", flush=True)
    began = time.monotonic()
    try:
        yield
    except BaseException:
        print("FAILED", flush=True)
        raise
    print(f"{time.monotonic() - began:6.1f} s", flush=True)


def call(
    *command: str | Path,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    statuses: Collection[int] = (0,),
) -> str:
    """Run a program and return its stdout.

    Raises:
        Failed: It has an exit status that is not in ``statuses``, or takes more than ``STEP_S``
            seconds.
    """
    words = [str(word) for word in command]
    line = " ".join(words)
    try:
        done = subprocess.run(
            words, cwd=cwd, env=env, capture_output=True, text=True, timeout=STEP_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise Failed(f"{line}\nit did not end in {STEP_S:g} s") from error
    if done.returncode not in statuses:
        raise Failed(f"{line}\nexit status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def build(folder: Path) -> tuple[Path, Path]:
    """Build both files into a folder, and return the paths of the wheel and the sdist."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in [*folder.glob("rankcall-*.whl"), *folder.glob("rankcall-*.tar.gz")]:
        old.unlink()
    call(sys.executable, "-m", "hatchling", "build", "-d", folder, cwd=ROOT)
    (wheel,), (sdist,) = folder.glob("rankcall-*.whl"), folder.glob("rankcall-*.tar.gz")
    return wheel, sdist


def build_for(
    python: native_libraries.Python,
    machine: str,
    torches: Sequence[Path],
    folder: Path,
    scratch: Path,
) -> Path:
    """Build the wheel for one Python on one processor, with a recorder for each torch for it."""
    libraries = scratch / f"{python.tag}-{machine}"
    native_libraries.compile_all(python, machine, torches, libraries)
    tag = f"{python.tag}-{python.tag}-{native_libraries.PLATFORM}_{machine}"
    call(
        *(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder),
        cwd=ROOT,
        env={**os.environ, "RANKCALL_LIBRARIES": str(libraries), "RANKCALL_WHEEL_TAG": tag},
    )
    (wheel,) = folder.glob(f"rankcall-*-{tag}.whl")
    return wheel


def wheel_of(sdist: Path, folder: Path) -> Path:
    """Build a wheel from the sdist, as pip does, and return its path. Nothing is downloaded."""
    pip(sys.executable, "wheel", "--no-build-isolation", "-w", str(folder), str(sdist), cwd=folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


def pip(python: str | Path, *arguments: str, cwd: Path) -> None:
    """Run this environment's pip for another one; only files that are given are used."""
    first, *rest = arguments
    call(
        *(sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"),
        *(first, "--quiet", "--no-deps", "--no-index", *rest),
        cwd=cwd,
    )


def fresh_environment(
    folder: Path, wheel: Path, torch: Path | None = None, python: str | Path = sys.executable
) -> Path:
    """Make a virtual environment with a wheel in it, and return the folder of its programs.

    Args:
        folder: Where to make it.
        wheel: The file to install.
        torch: The folder of a torch that is to be found before this environment's.
        python: The Python that it is for.

    Raises:
        Failed: It cannot be made, or the wheel cannot be installed.
    """
    call(python, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    pip(folder / "bin/python", "install", str(wheel), cwd=folder.parent)
    # A plain path in a .pth file comes after the environment's own packages, and .pth files below
    # it are not read. So the rankcall that this environment has, which is the working tree, is
    # hidden by the installed one.
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(call(folder / "bin/python", "-c", code, cwd=folder).strip())
    shared = [str(torch.parent)] if torch is not None else []
    lines = [*shared, sysconfig.get_path("purelib"), ""]
    (site / "zz_shared.pth").write_text("\n".join(lines))
    return folder / "bin"


def bare_environment() -> dict[str, str]:
    """Return the environment variables without those that change what is imported or recorded."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "RANKCALL", "VIRTUAL_ENV", "TORCHELASTIC"))
    } | {"OMP_NUM_THREADS": "1"}


def try_job(programs: Path, folder: Path, *, compiles: bool = True) -> None:
    """Record a job of two ranks with the installed rankcall, and read it.

    Args:
        programs: The folder of the environment's programs.
        folder: A folder to work in.
        compiles: Whether the job may find a compiler, and recorders that were compiled before.
            Without one, it must be recorded by a recorder of the wheel.

    Raises:
        Failed: A command fails, or what it reads is not what the job did.
    """
    env, rankcall = bare_environment(), programs / "rankcall"
    if not compiles:
        cache = folder / "cache"
        env |= {"PATH": str(programs), "CXX": "", "RANKCALL_CACHE": str(cache)}
    place = call(
        programs / "python", "-c", "import rankcall; print(rankcall.__file__)", cwd=folder, env=env
    )
    if not Path(place.strip()).is_relative_to(programs.parent):
        raise Failed(f"rankcall was imported from {place.strip()}, not from {programs.parent}")
    (folder / "train.py").write_text(JOB)
    with step("  rankcall run, two ranks"):
        call(rankcall, "run", "--nproc-per-node", str(RANKS), "train.py", cwd=folder, env=env)
    # The run is named: without a name, a command takes the only job that is live on this host.
    run = folder / "rankcall-runs" / "latest"
    with step("  rankcall report"):
        call(rankcall, "report", run, cwd=folder, env=env)
        report = json.loads(call(rankcall, "report", run, "--json", cwd=folder, env=env))
        calls = {row["op"]: row["count"] for row in report["collectives"]}
        seen = len(report["ranks"]), calls.get("all_reduce"), report["problems"]
        if seen != (RANKS, STEPS, []):
            raise Failed(f"ranks, all_reduce calls and problems in the report: {seen}")
        captures = {row["capture"] for row in report["ranks"]}
        if not compiles and (captures != {"native"} or list(cache.glob("*.so"))):
            raise Failed(f"without a compiler, the job was recorded by {captures}")
    with step("  rankcall diagnose --json"):
        # The status is 1 if there is a finding. On a busy machine, a rank can be late in each step.
        text = call(rankcall, "diagnose", run, "--json", cwd=folder, env=env, statuses=(0, 1))
        verdict = json.loads(text)["verdict"]
        if verdict not in ("healthy", "straggler", "slow_link"):
            raise Failed(f"the verdict on a job that ended well is {verdict}:\n{text}")


def try_native(
    wheel: Path, python: native_libraries.Python, torches: Sequence[Path], scratch: Path
) -> None:
    """Record a job without a compiler, with each torch that is for the wheel's Python."""
    for torch in [torch for torch in torches if native_libraries.is_for(python, torch)]:
        version = native_libraries.torch_build(torch).version
        folder = scratch / f"native-{python.tag}-{version}"
        folder.mkdir()
        with step(f"install {wheel.name}"):
            programs = fresh_environment(folder / "venv", wheel, torch, python.program)
        print(f"  {python.tag}, torch {version}, without a compiler")
        try_job(programs, folder, compiles=False)


def main(arguments: list[str] | None = None) -> int:
    """Build and try both files, print the steps, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="try_dist.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "-o", "--output", type=Path, default=ROOT / "dist", help="the folder for all files"
    )
    native_libraries.add_arguments(parser)
    parsed = parser.parse_args(arguments)
    output = parsed.output.absolute()
    made_all: list[Path] = []
    try:
        pythons, torches = native_libraries.chosen(parsed)
        with tempfile.TemporaryDirectory(prefix="rankcall-dist-") as scratch:
            with step("build the wheel and the sdist"):
                wheel, sdist = build(output)
            for kind, made in (("wheel", wheel), ("sdist", sdist)):
                folder = Path(scratch) / kind
                folder.mkdir()
                with step(f"install {made.name}"):
                    source = made if kind == "wheel" else wheel_of(made, folder)
                    programs = fresh_environment(folder / "venv", source)
                try_job(programs, folder)
                made_all.append(made)
            machines = sorted(set(map(native_libraries.machine_of, torches)))
            for python, machine in itertools.product(pythons, machines):
                with step(f"compile for {python.tag} on {machine}"):
                    native = build_for(python, machine, torches, output, Path(scratch))
                made_all.append(native)
                if machine == native_libraries.HERE_MACHINE:
                    try_native(native, python, torches, Path(scratch))
                else:
                    print(f"  not tried: this machine is {native_libraries.HERE_MACHINE}")
    except (Failed, ValueError) as failed:
        print(f"try_dist.py: {failed}", file=sys.stderr)
        return 1
    for made in made_all:
        print(f"{made}: {made.stat().st_size / 1e6:.2f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
