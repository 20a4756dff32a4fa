"""Defects of torch's own functions, and torch's code with our functions in their place."""

from __future__ import annotations

import contextlib
import inspect
import time
from datetime import timedelta
from typing import Any

import pytest
from stores import WAIT_S, clients, keys_of, kind, meanwhile, ranks, until_key
from torch.distributed import DistStoreError, HashStore, Store, TCPStore
from torch.distributed.elastic.utils import store as model

import rankcall
from rankcall import store as ours
from rankcall.c10d.connection import Connection
from rankcall.c10d.requests import METHODS, Add, Append, Arrive, ListKeys, Read, Set, Steps, Wait
from rankcall.testing.simulated_store import Mark, Process, Simulation

__all__ = ["clients", "kind"]  # fixtures


# --- the model's defects ---


def test_a_prefix_serves_more_than_once() -> None:
    """The model lets one rank pass alone where the prefix was used before."""
    for barrier, passes in ((model.barrier, True), (ours.barrier, False)):
        store = HashStore()
        assert ranks(lambda rank, b=barrier, s=store: b(s, 2, "p", 5, rank), 2) == [None, None]
        (again,) = ranks(lambda rank, b=barrier, s=store: b(s, 2, "p", 0.2, rank), 1)
        assert (again is None) is passes


@pytest.mark.parametrize("which", [model.store_timeout, ours.store_timeout])
def test_a_timeout_is_put_back_after_an_error(which: Any) -> None:
    """The model leaves the short timeout behind."""
    store = HashStore()
    before = store.timeout  # type: ignore[attr-defined]
    with pytest.raises(KeyError), which(store, 5):
        raise KeyError
    after = store.timeout  # type: ignore[attr-defined]
    assert (after == before) is (which is ours.store_timeout)


def test_store_timeout_nests(clients: list[Store]) -> None:
    """Each level puts back what it found."""
    store: Any = clients[1]
    seen = [store.timeout]
    with ours.store_timeout(store, 7):
        with ours.store_timeout(store, 3):
            seen.append(store.timeout)
        seen.append(store.timeout)
    assert seen[1:] == [timedelta(seconds=3), timedelta(seconds=7)]
    assert store.timeout == seen[0]


def test_the_stores_timeout_is_never_touched(clients: list[Store]) -> None:
    """After a barrier, in time or not, and meanwhile, the store's timeout is what it was."""
    store: Any = clients[0]
    store.set_timeout(timedelta(seconds=77))
    with meanwhile(lambda: ours.barrier(store, 2, "never", 0.5, 0)) as outcome:
        until_key(clients[1], "never")
        while not outcome:
            assert store.timeout == timedelta(seconds=77)
            time.sleep(0.001)
    assert isinstance(outcome[0], rankcall.errors.BarrierTimeout)
    assert store.timeout == timedelta(seconds=77)


def test_the_timeout_is_what_it_was_after_any_outcome(clients: list[Store]) -> None:
    """Whichever function, and however it ends."""
    store: Any = clients[0]
    store.set_timeout(timedelta(seconds=77))
    clients[1].set("x0", "")
    clients[1].set("x1", "")
    for call in (
        lambda: ours.barrier(store, 1, "p", 20, 0),
        lambda: ours.barrier(store, 2, "q", 0.05, 0),
        lambda: ours.barrier(store, 2, "q", 0.05),
        lambda: ours.synchronize(store, b"", 0, 1, "p", 20),
        lambda: ours.synchronize(store, b"", 0, 2, "q", 0.05),
        lambda: ours.get_all(store, 1, "x", 2, timeout=20),
        lambda: ours.get_all(store, 1, "y", 2, timeout=0.05),
        lambda: ours.rollcall(store, 0, 2, timeout=0.05),
        lambda: ours.clean_up(store, None, 2, "q"),
    ):
        with contextlib.suppress(rankcall.errors.BarrierTimeout):
            call()
        assert store.timeout == timedelta(seconds=77)


# --- ours for theirs ---


@pytest.mark.parametrize("name", ["barrier", "get_all", "store_timeout", "synchronize"])
def test_positional_arguments_are_the_models(name: str) -> None:
    """Names, order and defaults are torch's; new parameters are keyword-only."""
    theirs = inspect.signature(getattr(model, name)).parameters
    mine = inspect.signature(getattr(ours, name)).parameters
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [parameter for parameter in mine.values() if parameter.kind in kinds]
    assert [(parameter.name, parameter.default) for parameter in positional] == [
        (parameter.name, parameter.default) for parameter in theirs.values()
    ]


def test_install_is_undone() -> None:
    """While it is installed torch's names are ours; afterwards they are what they were."""
    import torch.distributed.elastic.utils.distributed as distributed

    names = ("barrier", "get_all", "store_timeout", "synchronize")
    before = [getattr(model, name) for name in names] + [distributed.barrier]
    with ours.install() as handle:
        assert model.barrier is distributed.barrier is ours.barrier
        assert [getattr(model, name) for name in names] == [getattr(ours, name) for name in names]
        with pytest.raises(RuntimeError, match="installed already"):
            ours.install()
    with pytest.warns(DeprecationWarning, match="use stop"):
        handle.remove()
    assert [getattr(model, name) for name in names] + [distributed.barrier] == before


def test_torchs_own_code_meets_by_ours() -> None:
    """create_c10d_store's check that all are there, and a second use of one prefix, go through."""
    from torch.distributed.elastic.utils.distributed import create_c10d_store

    with ours.install():
        store = create_c10d_store(True, "127.0.0.1", world_size=1, timeout=10)
        assert any("/rankcall.0/" in key for key in keys_of(store))
        with pytest.raises(DistStoreError, match="Timed out waiting on barrier on rank 0"):
            model.barrier(store, 2, "p", 0.1, 0, str, 1)


def test_text_is_data(clients: list[Store]) -> None:
    """torch's own tests hand in text: its store encodes it as UTF-8."""
    exchanged = ranks(lambda rank: ours.synchronize(clients[rank], f"é{rank}", rank, 2, "p", 20), 2)
    assert exchanged == [["é0".encode(), "é1".encode()]] * 2


# --- the request that counts, as torch's store answers it and as the simulated one does ---

# What another client does while one waits for two, and whether it lets that one pass.
BESIDE_A_WAIT = {
    "counts itself in": (Arrive([], "in", 2, []), True),
    "sets the key": (Set("in", b"2"), True),
    "appends to the key": (Append("in", b"\n0"), True),
    "adds to the key": (Add("in", 1), True),
    "reads the key as rankcall does": (Read("in"), True),
    "lists the keys": (ListKeys(), False),
    "sets another key": (Set("other", b"2"), False),
}


@pytest.mark.parametrize("name", BESIDE_A_WAIT)
def test_the_simulated_store_counts_as_torchs(name: str) -> None:
    """A client passes when two are in, or when a request names the key, and not before."""
    request, lets_pass = BESIDE_A_WAIT[name]
    host = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    if not hasattr(host, "barrier"):
        pytest.skip("this torch has no request that counts")
    clients = [Connection(host.clone()) for _ in range(2)]  # type: ignore[attr-defined]
    wait_s = WAIT_S if lets_pass else 0.5
    with meanwhile(lambda: clients[0].arrive(Arrive([], "in", 2, []), wait_s)) as passed:
        until_key(host, "in")
        if isinstance(request, Arrive):
            assert clients[1].arrive(request, WAIT_S)
        else:
            getattr(clients[1], METHODS[type(request)])(*request)
    assert passed == [lets_pass]

    def one_that_waits() -> Steps[None]:
        yield Mark("passed", (yield Arrive([], "in", 2, [])))

    def another() -> Steps[None]:
        yield Wait(["in"])
        yield request

    simulation = Simulation([Process("one", one_that_waits), Process("another", another)])
    trace = "1. one: step\n2. another: step\n3. another: step\n"
    world = simulation.replay(trace)
    assert world.can_go_on("one") is lets_pass


# --- any_failed ---


def test_every_rank_learns_which_ranks_failed(clients: list[Store]) -> None:
    """All ranks get the same failures, also one without a text; a prefix serves again."""
    errors = {1: KeyError("no such file"), 3: RuntimeError()}

    def ask(rank: int) -> list[dict[int, str]]:
        return [
            ours.any_failed(clients[rank], error, rank, 4, "checkpoint", WAIT_S)
            for error in (errors.get(rank), None, "x" * 5000 if rank == 2 else None, "")
        ]

    first, fine, long, empty = zip(*ranks(ask, 4), strict=True)
    assert first == ({1: "KeyError: 'no such file'", 3: "RuntimeError"},) * 4
    assert fine == ({},) * 4
    assert long == ({2: "x" * 2000},) * 4
    assert empty == (dict.fromkeys(range(4), ""),) * 4


def test_a_failure_is_an_error_or_its_text() -> None:
    """Anything else, such as False for no failure, is refused before a request is made."""
    with pytest.raises(TypeError, match="error must be an exception, a str or None; got bool"):
        ours.any_failed(HashStore(), False, 0, 2, "p")  # type: ignore[arg-type]
