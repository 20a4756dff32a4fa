"""Keep the tails of rings that are in use in the run, so that a copy of it has evidence."""

from __future__ import annotations

import contextlib
from pathlib import Path

from rankcall.errors import CorruptRunError
from rankcall.files import replacing
from rankcall.folders import run_folder
from rankcall.ring.layout import read_header
from rankcall.ring.tail import tail_of
from rankcall.run.exits import STATES, describe_states, states_name
from rankcall.run.paths import files_in, live_dir, tail_name, trusted_live_dirs


def keep_tails(run_dir: Path) -> None:
    """Write the tails of this host's live rings into the run, so that a copy of it has evidence.

    The states of their processes are noted as well. The rings stay in memory, because the ranks
    that still run read them there. Raises ``OSError``.
    """
    folder = live_dir(run_dir)
    if folder not in trusted_live_dirs(run_dir):
        return
    rings = files_in(folder, ".ring")
    for ring in rings:
        with contextlib.suppress(CorruptRunError):  # for example, it was moved meanwhile
            keep_tail(run_dir, ring.name, tail_of(ring))
    headers = [header for header in map(read_header, rings) if header is not None]
    with replacing(run_folder(run_dir, STATES) / states_name()) as file:
        file.write(describe_states(headers))


def keep_tail(run_dir: Path, name: str, tail: bytes) -> None:
    """Write the tail of a ring of this name into the run. Raises ``OSError``."""
    with replacing(run_folder(run_dir, "rings") / tail_name(name)) as file:
        file.write(tail)
