"""``rankcall collect``: put a run that is spread over nodes into one file."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from rankcall.cli.common import say, say_moved, working
from rankcall.errors import CorruptRunError, RankcallError
from rankcall.files import open_file
from rankcall.problems import Problem, texts
from rankcall.process import boot_id
from rankcall.ranks import with_noun
from rankcall.ring.layout import Header
from rankcall.ring.reader import read_head
from rankcall.run.archive import FOLDERS, check_name, is_archive, pack
from rankcall.run.exits import STATES, describe_states, states_name
from rankcall.run.paths import HANGS, find_run, ring_paths
from rankcall.run.redaction import redact
from rankcall.run.settle import settle
from rankcall.run.stderr_tails import STDERR, redacted
from rankcall.run.unpack import unpack

__all__ = ["command"]

_MOST_BYTES = 1 << 24  # run.json is not read beyond that


def command(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUN",
            help="A run directory, or the run directories or archives of several nodes of one run. "
            "Without it: the latest run here.",
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="The archive: .tar.zst, .tar.gz or .tar. Without it: one named after the run, "
            "here.",
        ),
    ] = None,
    to: Annotated[Path | None, typer.Option("--to", metavar="FILE", hidden=True)] = None,
) -> None:
    """Put a run into one file, which report and diagnose read like a run directory.

    If the nodes of a job share no file system, run this on each node, and then once more over the
    archives. A job that still runs is collected in its current state.
    """
    places = [find_run(path) for path in runs] if runs else [find_run(None)]
    if to is not None:
        say_moved(f"--to {to}", f"-o {to}")
    target = file or to or Path(f"{places[0].name.partition('.tar')[0]}.tar.zst")
    try:
        check_name(target)
    except ValueError as error:
        raise RankcallError(str(error)) from error
    with tempfile.TemporaryDirectory(prefix="rankcall-") as scratch:
        extracted: list[Path] = []
        try:
            folders = [_folder(place, extracted) for place in places]
            with working(f"writing {target}"):
                _collect(folders, places[0], target, Path(scratch))
        finally:
            for folder in extracted:
                shutil.rmtree(folder, ignore_errors=True)


def _folder(place: Path, extracted: list[Path]) -> Path:
    if place.is_dir():
        settle(place)
        return place
    if not is_archive(place):
        raise CorruptRunError(f"{place}: neither a run directory nor an archive of one")
    extracted.append(unpack(place))
    return extracted[-1]


def _collect(folders: list[Path], first: Path, target: Path, scratch: Path) -> None:
    files: list[tuple[str, Path]] = []
    left: list[str] = []
    for number, folder in enumerate(folders):
        files += _files(folder, scratch / f"run-{number}.json", left)
    headers = _headers([path for inside, path in files if inside.startswith("rings/")])
    if not headers:
        raise CorruptRunError(f"{first}: no ring files: not a run, or nothing was recorded in it")
    on_this_host = [header for header in headers if header.boot_id == boot_id()]
    if on_this_host:
        name = f"{STATES}/{states_name()}"
        (scratch / "states.json").write_bytes(describe_states(on_this_host))
        files.insert(0, (name, scratch / "states.json"))
    left += pack(files, target, first.name.partition(".tar")[0] or "run")
    for line in left:
        say(f"left out: {line}")
    _summarise(headers, target)


def _files(folder: Path, run_json: Path, left: list[str]) -> list[tuple[str, Path]]:
    """Return the files of a run, each with its name inside the archive.

    Args:
        folder: The run directory. Its rings may be elsewhere.
        run_json: Where to write a copy of ``run.json`` without secrets. What ranks wrote to stderr
            is copied beside it.
        left: Gets a line for each link. Links are not followed, because they may lead to any file
            of this user.
    """
    files: list[tuple[str, Path]] = []
    problems: list[Problem] = []
    rings = ring_paths(folder, problems)
    left += texts(problems)
    for ring in rings:
        if ring.is_symlink() or ring.parent.is_symlink():
            left.append(f"{ring}: it is a link")
        else:
            files.append((f"rings/{ring.name}", ring))
    if _write_redacted(folder / "run.json", run_json, left):
        files.append(("run.json", run_json))
    for subfolder in (*FOLDERS[1:], HANGS):
        for place, folders, names in os.walk(folder / subfolder):
            parent = Path(place)
            links = [name for name in [*folders, *names, "."] if (parent / name).is_symlink()]
            left += [f"{parent / name}: it is a link" for name in links]
            if "." in links:
                break
            regular = [parent / name for name in sorted(names) if name not in links]
            files += [(str(file.relative_to(folder)), file) for file in regular]
    return [
        (name, _write_tail(path, run_json, left) if name.startswith(f"{STDERR}/") else path)
        for name, path in files
    ]


def _write_tail(source: Path, run_json: Path, left: list[str]) -> Path:
    """Copy what a rank wrote to stderr, without secrets, and return the path of the copy."""
    target = run_json.with_name(f"{run_json.stem}.{source.name}")
    try:
        target.write_bytes(redacted(source))
    except OSError as error:
        left.append(f"{source}: it cannot be read: {error}")
    return target


def _write_redacted(source: Path, target: Path, left: list[str]) -> bool:
    """Copy ``run.json`` without the secrets of the command line; return whether it exists."""
    try:
        with open_file(source) as file:
            about = redact(json.loads(file.read(_MOST_BYTES)))
        text = json.dumps(about, indent=1)
    except FileNotFoundError:
        return False
    except (OSError, ValueError, RecursionError) as error:
        left.append(f"{source}: it cannot be read: {error}")
        return False
    target.write_text(text + "\n")
    return True


def _headers(rings: list[Path]) -> list[Header]:
    headers = []
    for ring in rings:
        try:
            headers.append(read_head(ring).header)
        except CorruptRunError as error:
            say(str(error))
    return headers


def _summarise(headers: list[Header], target: Path) -> None:
    world = max(header.world_size for header in headers)
    ranks = sorted({header.rank for header in headers})
    missing = sorted(set(range(world)) - set(ranks))
    size = target.stat().st_size
    say(
        f"{len(ranks):,} of {max(world, len(ranks)):,} ranks in {target} ({size / 1e6:,.1f} MB); "
        f"read it with: rankcall diagnose {target}"
    )
    if missing:
        say(
            f"no records of {with_noun(missing)} here: collect on their nodes as well, "
            f"then merge the archives: rankcall collect {target} OTHERS... -o ALL.tar.zst"
        )
