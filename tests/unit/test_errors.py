"""Every error survives the way to another process, and says why."""

from __future__ import annotations

import pickle

import pytest

from rankcall import errors
from rankcall.c10d.errors import lost


@pytest.mark.parametrize("name", [name for name in errors.__all__ if name != "RankcallError"])
def test_an_error_can_be_pickled(name: str) -> None:
    """As it is on its way out of a worker; its text and attributes arrive."""
    error = getattr(errors, name)("who, what, where")
    error.note = 3
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_a_late_group_is_a_late_barrier() -> None:
    """Whoever catches the one, or Python's own, catches the other, and finds who was missing."""
    error = errors.RpcTimeout("late", missing_ranks=[2], arrived=2, world_size=3)
    assert isinstance(error, (errors.BarrierTimeout, RuntimeError))
    assert isinstance(error, TimeoutError)
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.missing_ranks, copy.arrived, copy.world_size) == ((2,), 2, 3)


@pytest.mark.parametrize(
    ("launcher", "lines"),
    [
        ({}, ["rankcall: the disk is full"]),
        ({"LOCAL_RANK": "0"}, ["rankcall: the disk is full"]),
        ({"LOCAL_RANK": "1"}, []),
        ({"SLURM_LOCALID": "3"}, []),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "1"}, []),
        ({"MPI_LOCALRANKID": "1"}, []),
        ({"LOCAL_RANK": "0", "SLURM_LOCALID": "3"}, ["rankcall: the disk is full"]),
        ({"LOCAL_RANK": "first", "SLURM_LOCALID": "1"}, []),
    ],
)
def test_one_rank_of_a_node_warns(
    launcher: dict[str, str],
    lines: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whatever launched it; torchrun's word counts for more than that of Slurm, which ran it."""
    for name in errors._LOCAL_RANKS:
        monkeypatch.delenv(name, raising=False)
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(errors, "_warnings", set())
    for _ in range(2):
        errors.warn_once("the disk is full")
    assert capsys.readouterr().err.splitlines() == lines


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("Broken pipe", "is gone: Broken pipe. Look at"),
        ("Broken pipe.\nframe #0", "is gone: Broken pipe. Look at"),
        ("Failed. Did the server crash?", "is gone: Failed. Did the server crash? Look at"),
        ("", "is gone: no reason was given. Look at"),
    ],
)
def test_the_reason_for_which_a_store_is_lost(reason: str, said: str) -> None:
    """It is a sentence, whatever torch says."""
    assert said in str(lost("at host:1", reason))
