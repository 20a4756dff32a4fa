"""The words of the errors: who, what, where, and what to do next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from rankcall.errors import WorldMismatch
from rankcall.run import format_ranks
from rankcall.store._errors import BarrierTimeout
from rankcall.store._keys import Keys
from rankcall.store._roster import Claim

__all__ = ["claimed_twice", "places", "timed_out", "worlds_differ"]

Decoder = Callable[[int], str]
UNKNOWN = "host unknown"


def places(ranks: Iterable[int], hosts: Mapping[int, str]) -> str:
    """Write ranks with their hosts: ``17-18 (node-c), 512 (node-k)``."""
    runs: list[tuple[str, list[int]]] = []
    for rank in ranks:
        host = hosts.get(rank, UNKNOWN)
        if runs and runs[-1][0] == host:
            runs[-1][1].append(rank)
        else:
            runs.append((host, [rank]))
    return ", ".join(f"{format_ranks(run)} ({host})" for host, run in runs)


def decoded(ranks: Sequence[int], decoder: Decoder | None) -> tuple[dict[int, str], str]:
    """Return what a person knows the ranks by, and what to say of a decoder that failed."""
    if decoder is None:
        return {}, ""
    words: dict[int, str] = {}
    failure = ""
    for rank in ranks:
        try:
            words[rank] = str(decoder(rank))
        except Exception as error:
            failure = failure or f"; rank_tracing_decoder({rank}) raised {error!r}"
    return words, failure


def titled(kind: str, prefix: str, what: str | None) -> str:
    """Name a barrier or an exchange."""
    return f"{kind} {prefix!r}" + (f" ({what})" if what else "")


def timed_out(
    kind: str,
    keys: Keys,
    *,
    rank: int | None,
    missing: Sequence[int],
    arrived: int,
    timeout: float,
    hosts: Mapping[int, str],
    decoder: Decoder | None = None,
    what: str | None = None,
    notes: str = "",
    named: bool = True,
    did: str = "arrived",
) -> BarrierTimeout:
    """Say who is missing; with the words that people search their logs for already."""
    words, failure = decoded(missing, decoder)
    shown = {**hosts, **words}
    size = keys.world_size
    where = "" if rank is None else f" on rank {rank} ({hosts.get(rank, UNKNOWN)})"
    noun = "processes" if rank is None else "ranks"
    text = f"{titled(kind, keys.prefix, what)} timed out after {timeout:g} s{where}: "
    if named:
        text += f"{arrived:,} of {size:,} {noun} {did}"
        text += f"; missing {places(missing, shown)}" if missing else ""
    else:
        text += "who is missing could not be read in time (trace_timeout, or a slow store)"
    text += f"{notes}{failure}."
    if rank is None:
        text += " Call it with rank= to have the missing named."
    listed = ", ".join(words.get(one, str(one)) for one in missing)
    searched = "Timed out waiting on barrier" if kind == "barrier" else f"Timed out on {kind}"
    text += (
        f" {searched} on rank {rank}, for key prefix: {keys.prefix} "
        f"(world_size={size}, missing_ranks=[{listed}], timeout={timeout})"
    )
    return BarrierTimeout(
        text,
        missing_ranks=missing,
        arrived=arrived,
        world_size=size,
        hosts={one: hosts[one] for one in missing if one in hosts},
        key_prefix=keys.prefix,
        rank=rank,
        timeout=timeout,
        what=what,
    )


def claimed_twice(keys: Keys, claims: Sequence[Claim], what: str | None = None) -> WorldMismatch:
    """Say which processes are one and the same rank."""
    first = claims[0]
    who = " and ".join(one.who for one in claims[:4])
    more = f" and {len(claims) - 4:,} more" if len(claims) > 4 else ""
    return WorldMismatch(
        f"{titled('under', keys.prefix, what)} rank {first.rank} of {first.world_size} is claimed "
        f"by {len(claims)} processes: {who}{more}. Look at how they get their rank (RANK); where "
        "one replaces another that has died elsewhere, restart the attempt or use another "
        "key_prefix",
        claims=[one.plain for one in claims],
    )


def worlds_differ(
    keys: Keys, rank: int | None, claims: Sequence[Claim], what: str | None
) -> WorldMismatch:
    """Say who believes in which world size."""
    said = []
    for size in sorted({one.world_size for one in claims}):
        same = [one for one in claims if one.world_size == size]
        ranks = sorted({one.rank for one in same if one.rank >= 0})
        hosts = {one.rank: one.host for one in same}
        whom = f"ranks {places(ranks, hosts)}" if ranks else ", ".join(one.who for one in same)
        said.append(f"{size} say {whom}")
    here = "here" if rank is None else f"on rank {rank}"
    return WorldMismatch(
        f"{titled('under', keys.prefix, what)} the world size {here} is {keys.world_size}, but "
        f"{'; '.join(said)}. All of them wait: look at how they get it (WORLD_SIZE)",
        claims=[one.plain for one in claims],
    )


def turned_away(strays: Sequence[Claim], standing: Sequence[Claim], world_size: int) -> str:
    """Mention processes that wanted to be a rank that another one is, and are none now."""
    here = {one.process for one in standing}
    said = [
        f"rank {one.rank} was claimed a second time by {one.who}"
        for one in strays
        if one.world_size == world_size and one.process not in here
    ]
    return "".join(f"; {each}" for each in said[:3]) + ("; ..." if len(said) > 3 else "")


def seen(who: Sequence[str]) -> str:
    """List processes that have come to a barrier without ranks, now or before."""
    more = f" and {len(who) - 16:,} more" if len(who) > 16 else ""
    return f" (seen so far: {', '.join(who[:16])}{more})" if who else ""
