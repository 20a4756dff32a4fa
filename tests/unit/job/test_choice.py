"""The ranks of a job agree on one run and one attempt, in every order of their requests."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from stores import kind, ranks, stores_of

from rankcall.c10d.client import Over, perform
from rankcall.c10d.requests import Steps
from rankcall.capture.failure import cause_of
from rankcall.capture.settings import read_settings
from rankcall.job.choice import KEY, Choice, agree, decode, store_and_key
from rankcall.job.placement import Placement
from rankcall.job.proposals import own_run_dir, propose_in, propose_new, withdraw
from rankcall.run.paths import ATTEMPTS
from rankcall.testing.simulated_store import LostAnswer, Mark, Process, Simulation, World

__all__ = ["kind"]  # fixture


def _patiently(call: Callable[[], Steps[Any]]) -> Steps[Any]:
    """Make a call, and make it again if its answer was lost."""
    while True:
        try:
            return (yield from call())
        except LostAnswer:
            pass


def _rank(number: int) -> Process:
    """Do as a rank does: rank 0 proposes; the others wait, and propose in its place in the end."""
    mine = Choice(Path(f"/runs/{number}"), number)

    def start() -> Steps[None]:
        choice = None
        if number:
            choice = yield from _patiently(lambda: agree(KEY, None))
        if choice is None:
            choice = yield from _patiently(lambda: agree(KEY, lambda: mine))
        yield Mark("chose", choice)

    return Process(f"rank{number}", start)


def test_all_ranks_choose_the_same_in_every_order() -> None:
    """Also if an answer is lost, a rank dies, or the others stop waiting for rank 0."""

    def check(world: World, name: str, mark: Mark, earlier: tuple[Mark, ...]) -> None:
        if mark.name != "chose":
            return
        assert mark.value == decode(world.store[KEY])
        assert mark.value.run_dir == Path(f"/runs/{mark.value.first_attempt}")

    processes = [_rank(number) for number in range(3)]
    explored = Simulation(processes, on_mark=check, lost_answers=1, deaths=1).explore()
    assert explored.ends


def test_real_stores(kind: str, tmp_path: Path) -> None:
    """On every kind of store, over the caller's own connection; a third rank comes late."""
    clients = stores_of(kind, 3, tmp_path)

    def choose(rank: int) -> Choice | None:
        propose = None if rank else (lambda: Choice(tmp_path / "run", 7))
        return perform(clients[rank], 20, agree(KEY, propose), over=Over.CALLERS)

    assert ranks(choose, 2) == [Choice(tmp_path / "run", 7)] * 2
    assert choose(2) == Choice(tmp_path / "run", 7)


def test_a_wait_for_rank_0_has_an_end(kind: str, tmp_path: Path) -> None:
    """Without a proposal there is no choice at the deadline."""
    (client,) = stores_of(kind, 1, tmp_path)
    assert perform(client, 0.2, agree(KEY, None), over=Over.CALLERS) is None


@pytest.mark.parametrize(
    "published",
    [
        b"",
        b"\xff",
        b"[]",
        b"7",
        b'{"run_dir": "x", "attempt": 0}',
        b'{"run_dir": "/x"}',
        b'{"run_dir": "/x", "attempt": -1}',
        b'{"run_dir": "/x", "attempt": "y"}',
        b'{"run_dir": 7, "attempt": 0}',
        b"[" * 100_000,
    ],
)
def test_what_is_no_choice_is_refused(published: bytes) -> None:
    """A store may hold anything below the key, and a rank must not fail for it."""
    with pytest.raises(ValueError, match=r"."):
        decode(published)


def test_a_store_without_an_agent_is_used_as_it_is(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key is below the group's own prefix, unless the store is that of torchrun's agent."""
    (client,) = stores_of(kind, 1, tmp_path)
    assert store_and_key(client) == (client, KEY)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert store_and_key(client) == (client, KEY)  # the program made another one


def test_attempts_are_counted_up(tmp_path: Path) -> None:
    """Each job that is recorded into a directory gets the next number, and leaves its command."""
    run = tmp_path / "run"
    assert [propose_in(run).first_attempt for _ in range(3)] == [0, 1, 2]
    about = json.loads((run / "attempts/00002.json").read_text())
    assert about["torch"]
    assert about["command"]


def test_attempts_of_an_older_rankcall_count(tmp_path: Path) -> None:
    """A run without reservations has rings, whose names have the attempts."""
    rings = tmp_path / "run/rings"
    rings.mkdir(parents=True)
    (rings / "rank-00000.attempt-4.host.17.ring").touch()
    (rings / "other").touch()
    assert propose_in(tmp_path / "run").first_attempt == 5


def test_new_directories_never_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two jobs of one name and one second get two directories; an unused one can be withdrawn."""
    monkeypatch.chdir(tmp_path)
    first, second = propose_new(), propose_new()
    assert first.run_dir != second.run_dir
    assert first.run_dir.parent == tmp_path / "rankcall-runs"
    withdraw(second)
    assert not second.run_dir.exists()
    (first.run_dir / "rings").mkdir()
    withdraw(first)
    assert first.run_dir.exists()


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    """The proposal names it all the same: the recording says what is wrong with it."""
    (tmp_path / "file").touch()
    choice = propose_in(tmp_path / "file/run")
    assert choice == Choice(tmp_path / "file/run", 0)
    assert propose_new(tmp_path / "file/run").run_dir == tmp_path / "file/run"


def test_names_that_a_rank_chooses_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name has the program, and for a rank without a store the process that started the job."""
    monkeypatch.setattr("sys.argv", ["-c"])
    assert own_run_dir().name.endswith("-python")
    monkeypatch.setattr("sys.argv", ["/x/train.py"])
    assert own_run_dir(unique=True).name.partition("-")[2].startswith("train-")


@pytest.mark.parametrize(
    ("code", "cause"),
    [("raise KeyError(7)", "KeyError(7)"), ("sys.exit(1)", "KeyError(7)"), ("sys.exit(0)", "None")],
)
def test_the_exception_that_ends_a_process(code: str, cause: str) -> None:
    """It is the one that is raised, or that is handled by an exit with a failure's status."""
    caught: BaseException | None = None
    try:
        try:
            raise KeyError(7)
        except KeyError:
            exec(code, {"sys": sys})
    except BaseException as ended:
        caught = ended
    assert repr(cause_of(caught)) == cause
    assert repr(cause_of(SystemExit(3))) == "SystemExit(3)", "it was not because of another one"
    assert cause_of(SystemExit()) is None
    assert cause_of(None) is None


class _NoRecording:
    """Stands where a placement has its recording, of which it needs nothing here."""

    run_dir = None


def test_a_proposal_that_is_not_taken_is_withdrawn(tmp_path: Path) -> None:
    """Of two ranks that propose at once, one leaves its place; a later group changes nothing."""
    recording: Any = _NoRecording()
    for others, is_kept in ((None, True), (Choice(tmp_path / "other"), False)):
        store = dist.HashStore()
        if others is not None:
            store.set(KEY, others.encode())
        groups = SimpleNamespace(default_pg="world", pg_map={"world": (None, store)})
        for has_chosen in (False, True):
            placement = Placement(recording, read_settings(tmp_path / "mine"))
            placement._c10d = SimpleNamespace(_world=groups)
            mine = placement._propose()
            placement._choice = mine if has_chosen else None
            reservation = mine.run_dir / ATTEMPTS / f"{mine.first_attempt:05d}.json"
            assert reservation.exists()
            choice = placement._ask(placement._propose, 20.0)
            assert choice == others if others is not None else choice is not None
            assert reservation.exists() == (is_kept or has_chosen)
