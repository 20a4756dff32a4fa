"""The errors that a store raises, and their texts: who, what, where, and what to do next.

``rankcall.errors`` defines the errors without torch. Those that are raised here derive from torch's
errors as well, so that existing ``except`` clauses catch them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from torch.distributed import DistStoreError

from rankcall import errors
from rankcall.c10d.errors import StoreLostError
from rankcall.errors import WorldMismatchError
from rankcall.ranks import format_ranks
from rankcall.store.keys import Keys
from rankcall.store.protocol import Claim, NotAllArrived

Decoder = Callable[[int], str]
UNKNOWN = "host unknown"


class BarrierTimeout(errors.BarrierTimeout, DistStoreError):
    """Raised if a rank did not arrive at a barrier or an exchange in time; it names the missing.

    ``rankcall.errors.BarrierTimeout``, which lists the attributes, and torch's own error, so that
    an ``except`` clause for either catches it.
    """


def name_of(kind: str, prefix: str, what: str | None) -> str:
    """Name a barrier or an exchange: ``barrier 'epoch' (checkpoint 1200)``."""
    return f"{kind} {prefix!r}" + (f" ({what})" if what else "")


def ranks_with_hosts(ranks: Iterable[int], hosts: Mapping[int, str]) -> str:
    """Write ranks with their hosts: ``17-18 (node-c), 512 (node-k)``."""
    runs: list[tuple[str, list[int]]] = []
    for rank in ranks:
        host = hosts.get(rank, UNKNOWN)
        if runs and runs[-1][0] == host:
            runs[-1][1].append(rank)
        else:
            runs.append((host, [rank]))
    return ", ".join(f"{format_ranks(run)} ({host})" for host, run in runs)


def timed_out(
    kind: str,
    keys: Keys,
    error: NotAllArrived,
    *,
    rank: int | None,
    timeout_s: float,
    hosts: Mapping[int, str],
    decoder: Decoder | None = None,
    what: str | None = None,
    arrived: int | None = None,
    did: str = "arrived",
) -> BarrierTimeout:
    """Return the error that names the missing, with the words of torch's own error.

    ``hosts`` are the known hosts. ``arrived`` ranks have done the thing that ``did`` names.
    """
    missing, size = error.missing, keys.world_size
    names, failure = _decoded(missing, decoder)
    arrived = size - len(missing) if arrived is None else arrived
    here = "" if rank is None else f" on rank {rank} ({hosts.get(rank, UNKNOWN)})"
    text = f"{name_of(kind, keys.prefix, what)} timed out after {timeout_s:g} s{here}: "
    if error.named:
        text += f"{arrived:,} of {size:,} {'processes' if rank is None else 'ranks'} {did}"
        text += f"; missing {ranks_with_hosts(missing, {**hosts, **names})}" if missing else ""
    else:
        text += "the missing ranks could not be read in time (trace_timeout, or a slow store)"
    for claim in error.rejected[:3]:
        text += f"; rank {claim.rank} was claimed a second time by {_process(claim)}"
    if rank is not None and rank in missing:
        text += "; the arrival of this rank is gone, too: has another process removed the keys?"
    text += f"{failure}."
    if rank is None:
        text += " Call it with rank= to have the missing ranks named."
    listed = ", ".join(names.get(missing_rank, str(missing_rank)) for missing_rank in missing)
    searched = "Timed out waiting on barrier" if kind == "barrier" else f"Timed out on {kind}"
    text += (
        f" {searched} on rank {rank}, for key prefix: {keys.prefix} "
        f"(world_size={size}, missing_ranks=[{listed}], timeout={timeout_s:g}"
    )
    if rank and decoder is not None and 0 not in missing:  # torch's other ranks have no list
        known, _ = _decoded([0], decoder)
        text += f"; or check rank 0 ({known.get(0, UNKNOWN)}) for missing rank info"
    text += ")"
    return BarrierTimeout(
        text,
        missing_ranks=missing,
        arrived=arrived if error.named else 0,
        world_size=size,
        hosts={
            missing_rank: hosts[missing_rank] for missing_rank in missing if missing_rank in hosts
        },
        key_prefix=keys.prefix,
        rank=rank,
        timeout_s=timeout_s,
        what=what,
    )


def clean_up_pending(
    kind: str, keys: Keys, missing: Sequence[int], rank: int, timeout_s: float, what: str | None
) -> BarrierTimeout:
    """Return the error for a rank that uses a prefix again before its clean-up is over."""
    waits_for = (
        f"ranks {format_ranks(missing)} have not called clean_up"
        if missing
        else "the rank that removes the keys has not finished"
    )
    return BarrierTimeout(
        f"{name_of(kind, keys.prefix, what)} timed out after {timeout_s:g} s on rank {rank}: this "
        f"rank has called clean_up for the prefix, but {waits_for}. Call it on all ranks; if one "
        "of them is gone, call clean_up(store, None, world_size, key_prefix)",
        missing_ranks=missing,
        arrived=keys.world_size - len(missing),
        world_size=keys.world_size,
        key_prefix=keys.prefix,
        rank=rank,
        timeout_s=timeout_s,
        what=what,
    )


def unconfirmed(name: str, place: str, or_use: str = "") -> StoreLostError:
    """Return the error for a process that does not know whether it has arrived.

    The store may be there again, but to arrive twice could let the other ranks pass too early.

    Args:
        name: The call, as ``name_of`` names it.
        place: The place of the store.
        or_use: What the caller can use instead of another prefix.
    """
    return StoreLostError(
        f"{name}: the store {place} did not answer when this process arrived, in an earlier call "
        f"or in this one, so it may have arrived or not: use another key_prefix"
        f"{', or ' + or_use if or_use else ''}",
        host=place.removeprefix("at "),
    )


def claimed_twice(
    kind: str, keys: Keys, claims: Sequence[Claim], what: str | None
) -> WorldMismatchError:
    """Return the error that says which processes are one and the same rank."""
    rank = claims[0].rank
    return WorldMismatchError(
        f"{name_of(kind, keys.prefix, what)}: rank {rank} of {keys.world_size} is claimed by "
        f"{len(claims)} processes: {' and '.join(map(_process, claims))}. Check how they get their "
        "rank (RANK). If the first one has ended and this one replaces it, use another key_prefix "
        "or attempt, or call clean_up with rank=None first",
        claims=[_plain(claim) for claim in claims],
    )


def claimed_by_a_thread(keys: Keys, claim: Claim) -> WorldMismatchError:
    """Return the error for two threads of one process that are the same rank."""
    return WorldMismatchError(
        f"rank {claim.rank} of {keys.world_size} is in {keys.prefix!r} already, in another "
        f"thread of this process ({_process(claim)}): give each thread a rank, or a key_prefix, "
        "of its own",
        claims=[_plain(claim)],
    )


def worlds_differ(
    kind: str, keys: Keys, rank: int | None, claims: Sequence[Claim], what: str | None
) -> WorldMismatchError:
    """Return the error that says which rank expects which world size."""
    parts = []
    for size in sorted({claim.world_size for claim in claims}):
        same = [claim for claim in claims if claim.world_size == size]
        ranks = sorted({claim.rank for claim in same if claim.rank >= 0})
        hosts = {claim.rank: claim.host for claim in same}
        names = (
            f"{'rank' if len(ranks) == 1 else 'ranks'} {ranks_with_hosts(ranks, hosts)}"
            if ranks
            else f"{len(same)} {'process' if len(same) == 1 else 'processes'} without a rank"
        )
        verb = "expects" if len(same) == 1 else "expect"
        parts.append(f"{names} {verb} {size} ranks")
    here = "this process" if rank is None else f"rank {rank}"
    return WorldMismatchError(
        f"{name_of(kind, keys.prefix, what)}: {here} expects {keys.world_size} ranks, but the "
        f"world sizes differ: {'; '.join(parts)}. All of them wait. Check how WORLD_SIZE is set",
        claims=[_plain(claim) for claim in claims],
    )


def _decoded(ranks: Sequence[int], decoder: Decoder | None) -> tuple[dict[int, str], str]:
    """Return the names that a person knows ranks by, and what to say of a decoder that fails."""
    if decoder is None:
        return {}, ""
    names: dict[int, str] = {}
    failure = ""
    for rank in ranks:
        try:
            names[rank] = str(decoder(rank))
        except Exception as error:
            failure = failure or f"; rank_tracing_decoder({rank}) raised {error!r}"
    return names, failure


def _process(claim: Claim) -> str:
    return f"pid {claim.pid} on {claim.host}"


def _plain(claim: Claim) -> tuple[int, int, str, int]:
    return claim.rank, claim.world_size, claim.host, claim.pid
