"""What the ways in cost a process that records nothing: Python's start, and torch's import.

``pth_added_ms``: the line in ``rankcall.pth``, without ``RANKCALL``, beside another package's
``.pth``; ``pth_alone_added_ms``: as the only ``.pth``, so that the first reading of such a file
counts as well. ``armed_added_ms``: with
``RANKCALL=1``, in a process that never creates a process group. Python itself measures both, around
the reading of the site files. ``armed_import_added_ms``: processor time that ``RANKCALL=1`` adds to
a process that imports torch. ``peer_import_typing_ms``: a line that imports one module of the
standard library, as other tools' lines do.

``first_record_seconds``, with ``--wheel``: what recording adds to a process that imports torch,
makes a group and issues one collective, from its start to the record, with a wheel that is newly
installed where no compiler can be found; ``wheel_mib``: that wheel's size. A launcher's own start
is not in it.

Each figure is the difference of the lower quartiles of many processes, which start in turns, so
that a change of the machine's speed meets all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "src"
_CASES: dict[str, tuple[str, dict[str, str]]] = {
    # name: the folder of site files, and the environment
    "bare": ("bare", {}),
    "pth": ("ours", {}),
    "bare_alone": ("bare_alone", {}),
    "pth_alone": ("ours_alone", {}),
    "armed": ("ours", {"RANKCALL": "1"}),
    "typing": ("typing", {}),
}


def make_sites(folder: Path) -> dict[str, Path]:
    """Make the folders that stand for a site-packages: without and with our files."""
    sites = {name: folder / name for name, _ in _CASES.values()}
    for name, site in sites.items():
        site.mkdir()
        if not name.endswith("_alone"):
            (site / "another.pth").write_text("# a path, usually\n")
    for name in ("_rankcall_hook.py", "rankcall.pth", "rankcall.start"):
        shutil.copy(SOURCES / name, sites["ours"])
        shutil.copy(SOURCES / name, sites["ours_alone"])
    (sites["typing"] / "peer.pth").write_text("import typing\n")
    return sites


def cpu_ms(code: str, site: Path, env: Mapping[str, str]) -> float:
    """Start a Python that reads a folder's site files, and return the processor time it took."""
    # -S leaves out the environment's own site files: addsitedir reads only the folder's.
    text = f"import site; site.addsitedir({str(site)!r}); {code}"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-S", "-c", text], env=dict(env), check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1e3 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


_INSIDE = """
import os, site, sys, time
began = time.perf_counter()
site.addsitedir({site!r})
print((time.perf_counter() - began) * 1e3)
"""


def inside_ms(site: Path, env: Mapping[str, str]) -> float:
    """Return how long Python takes to read a folder's site files, by its own clock."""
    done = subprocess.run(
        [sys.executable, "-S", "-c", _INSIDE.format(site=str(site))],
        env=dict(env),
        check=True,
        capture_output=True,
        text=True,
    )
    return float(done.stdout)


def _low(taken: list[float]) -> float:
    """Return the lower quartile."""
    return statistics.quantiles(taken, n=4)[0]


def measure(times: int, torch_times: int) -> dict[str, float]:
    """Return the differences in ms."""
    base = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    with tempfile.TemporaryDirectory() as scratch:
        sites = make_sites(Path(scratch))
        inside: dict[str, list[float]] = {name: [] for name in _CASES}
        for _ in range(times):
            for name, (site, env) in _CASES.items():
                inside[name].append(inside_ms(sites[site], {**base, **env}))
        load = f"import sys; sys.path[:0] = {[path for path in sys.path if path]!r}; import torch"
        torch: dict[str, list[float]] = {"bare": [], "armed": []}
        for _ in range(torch_times):
            for name, taken in torch.items():
                site, env = _CASES[name]
                taken.append(cpu_ms(load, sites[site], {**base, **env}))
    middle = {name: _low(taken) for name, taken in inside.items()}
    result = {
        "pth_added_ms": middle["pth"] - middle["bare"],
        "pth_alone_added_ms": middle["pth_alone"] - middle["bare_alone"],
        "armed_added_ms": middle["armed"] - middle["bare"],
        "peer_import_typing_ms": middle["typing"] - middle["bare"],
    }
    if torch_times:
        added = _low(torch["armed"]) - _low(torch["bare"])
        result["armed_import_added_ms"] = added
        result["import_torch_ms"] = _low(torch["bare"])
    return {name: round(value, 3) for name, value in result.items()}


_FIRST = """
import sys
sys.path[:0] = {path!r}
import torch
import torch.distributed as dist
{enable}
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(1))
{check}
"""
_ENABLE = "import rankcall; recording = rankcall.enable(sys.argv[1])"
_CHECK = "assert recording.capture.name == 'native' and recording.capture.counts()[0] == 1"


def first_record(wheel: Path, times: int) -> dict[str, float]:
    """Return what the first record costs with a new wheel and no compiler, and the wheel's size."""
    plain: list[float] = []
    recorded: list[float] = []
    for _ in range(times):
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            with zipfile.ZipFile(wheel) as files:
                files.extractall(folder / "site")
            others = [path for path in sys.path if path and Path(path) != SOURCES]
            cases = (
                (plain, others, "", ""),
                (recorded, [str(folder / "site"), *others], _ENABLE, _CHECK),
            )
            for taken, path, enable, check in cases:
                program = folder / "first.py"
                program.write_text(_FIRST.format(path=path, enable=enable, check=check))
                began = time.perf_counter()
                subprocess.run(
                    [sys.executable, "-S", program, folder / "run"],
                    env={"PATH": str(folder), "HOME": scratch, "GLOO_SOCKET_IFNAME": "lo"},
                    check=True,
                )
                taken.append(time.perf_counter() - began)
    # The least of each: whatever else the machine does only adds to a process's time.
    seconds = min(recorded) - min(plain)
    return {
        "first_record_seconds": round(seconds, 3),
        "first_record_plain_seconds": round(min(plain), 3),
        "wheel_mib": round(wheel.stat().st_size / 2**20, 2),
    }


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--times", type=int, default=100, help="processes of each kind")
    parser.add_argument("--torch-times", type=int, default=7, help="processes that import torch")
    parser.add_argument("--wheel", type=Path, help="a wheel that carries recorders")
    parser.add_argument("--wheel-times", type=int, default=5, help="first records")
    args = parser.parse_args()
    figures = measure(args.times, args.torch_times)
    if args.wheel is not None:
        figures |= first_record(args.wheel, args.wheel_times)
    if args.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:24} {value:9.3f}")


if __name__ == "__main__":
    main()
