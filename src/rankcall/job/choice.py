"""The run that the ranks of a job choose: the proposal, and how they agree on one."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankcall.c10d.requests import Read, Steps, Until
from rankcall.files import create_file
from rankcall.folders import run_folder
from rankcall.process import boot_seconds, process_start
from rankcall.run.paths import ATTEMPTS, about_job, default_run_dir, new_run_dir
from rankcall.whole_numbers import whole_number

if TYPE_CHECKING:
    from torch.distributed import Store


KEY = "rankcall/run"

_MOST_ATTEMPTS = 100_000
_MOST_TRIES = 1_000
_NAME = re.compile(r"\.attempt-(\d{1,9})\.")


@dataclass(frozen=True)
class Choice:
    """The run of a job. ``first_attempt`` is the number of its attempt before any restart."""

    run_dir: Path
    first_attempt: int = 0

    def encode(self) -> bytes:
        """Return the choice as it is published in the store."""
        return json.dumps({"run_dir": str(self.run_dir), "attempt": self.first_attempt}).encode()


def decode(published: bytes) -> Choice:
    """Return a choice that was published. Raises ``ValueError`` if it is not a choice."""
    try:
        fields = json.loads(published)
        run_dir, attempt = Path(fields["run_dir"]), int(fields["attempt"])
    except (TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"not the choice of a run: {published[:200]!r}") from error
    if not run_dir.is_absolute() or not 0 <= attempt < _MOST_ATTEMPTS:
        raise ValueError(f"not the choice of a run: {published[:200]!r}")
    return Choice(run_dir, attempt)


def agree(key: str, propose: Callable[[], Choice] | None) -> Steps[Choice | None]:
    """Return the choice of the job; None if it has not been published by the deadline.

    Args:
        key: The key in the store, the same on all ranks.
        propose: Called if nothing is published yet. Without it, wait for another rank's proposal.
    """
    if propose is None:
        published = yield Until(Read(key), lambda value: value is not None)
    else:
        published = yield Read(key)
        if published is None:
            from rankcall.c10d.parts import publish_once

            mine = propose()
            published = yield from publish_once(key, mine.encode())
            if published != mine.encode():
                withdraw(mine)
    return None if published is None else decode(published)


def store_and_key(store: Store) -> tuple[Store, str]:
    """Return the store and the key for a group's store.

    Below torchrun it is the agent's store, which all restarts of the job share. Each restart has
    another prefix in it.
    """
    from torch.distributed import PrefixStore, TCPStore

    root: Any = store
    while isinstance(root, PrefixStore):
        root = root.underlying_store
    agent = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if is_elastic() and isinstance(root, TCPStore) and (root.host, str(root.port)) == agent:
        return root, f"{KEY}/{os.environ.get('TORCHELASTIC_RUN_ID', '')}"
    return store, KEY


def evidence_store() -> tuple[Store | None, str]:
    """Return the store through which evidence leaves a node, and the prefix of its keys there.

    None and an empty prefix if the default group is gone, and its store with it.
    """
    from torch.distributed import distributed_c10d

    world: Any = distributed_c10d._world
    group = world.default_pg
    if group is None:
        return None, ""
    store, key = store_and_key(world.pg_map[group][1])
    return store, f"rankcall/evidence{key.removeprefix(KEY)}"


def is_elastic() -> bool:
    """Return whether a torchrun agent holds the job's store, and may restart the job."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


# --- proposals ---


def propose_in(run_dir: Path) -> Choice:
    """Reserve the next attempt of a run directory that the user has named."""
    import torch

    number = _next_attempt(run_dir)
    with contextlib.suppress(OSError):  # for example, it cannot be written
        folder = run_folder(run_dir, ATTEMPTS)
        text = json.dumps(about_job(sys.argv, torch.__version__), indent=1)
        for candidate in range(number, number + _MOST_TRIES):
            with contextlib.suppress(FileExistsError):
                with open(create_file(folder / f"{candidate:05d}.json"), "w") as file:
                    file.write(text)
                return Choice(run_dir, candidate)
    return Choice(run_dir, number)


def propose_new(base: Path | None = None) -> Choice:
    """Make a new run directory for this job, beside ``base`` if that is given."""
    return Choice(new_run_dir(base or own_run_dir().absolute()))


def withdraw(choice: Choice) -> None:
    """Remove the directory or the reservation of a proposal that was not taken."""
    with contextlib.suppress(OSError):
        (choice.run_dir / ATTEMPTS / f"{choice.first_attempt:05d}.json").unlink(missing_ok=True)
        choice.run_dir.rmdir()  # fails if it is in use


def own_run_dir(unique: bool = False) -> Path:
    """Name a run after the script and the start of the job, as far as this process knows that.

    If ``unique``, the process that started the job is in the name, so that no other job has it.
    """
    import multiprocessing

    started_by_other = "RANK" in os.environ or multiprocessing.parent_process() is not None
    starter = os.getppid() if started_by_other else os.getpid()
    ticks = process_start(starter) or 0
    moment = boot_seconds() + ticks // os.sysconf("SC_CLK_TCK")
    script = sys.argv[0] if sys.argv and sys.argv[0] not in ("", "-", "-c") else "python"
    if script == "-m":
        script = "python"
    path = default_run_dir(script, datetime.fromtimestamp(moment, timezone.utc))
    return path.with_name(f"{path.name}-{starter}") if unique else path


def _next_attempt(run_dir: Path) -> int:
    """Return the number after the last attempt that a run directory has seen."""
    numbers = [-1]
    with contextlib.suppress(OSError):
        reserved = (run_dir / ATTEMPTS).iterdir()
        named = (whole_number(path.stem) for path in reserved)
        numbers += [number for number in named if number is not None]
    with contextlib.suppress(OSError):  # of a run that an older rankcall recorded
        matches = (_NAME.search(path.name) for path in (run_dir / "rings").iterdir())
        numbers += [int(match[1]) for match in matches if match]
    return min(max(numbers) + 1, _MOST_ATTEMPTS - 1)
