"""How two ranks that issue the same calls got out of step: by a loop, a shift, or calls too many.

All functions here compare two histories. One has the calls of a rank in a group by their sequence
numbers, each as what members must agree on and, last, the call site.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

History = dict[int, tuple[int, ...]]
_LONGEST_TURN = 64  # calls of one turn of a loop
_FARTHEST = 8  # calls that a member can be ahead or behind
# A shift is mentioned if so many calls of a rank differ from the calls of the same number of the
# other ranks, and equal their calls some numbers on. One or two also differ if calls were swapped,
# replaced or skipped.
ENOUGH = 3


@dataclass(frozen=True)
class Shift:
    """How far a member is ahead (+) or behind (-), and how many calls in a row show that.

    ``both_ways``: the calls repeat, so that it can be behind as well as ahead.
    """

    calls: int
    since: int  # sequence number
    shown_by: int
    both_ways: bool = False


def shift_between(mine: History, theirs: History, last: int) -> Shift | None:
    """Return the shift that explains most calls up to ``last``; None if none explains any.

    Calls are compared together with their call sites. Of two that explain as many, the smaller
    one is returned, and of two of one size the one ahead.
    """
    best: Shift | None = None
    for calls in [shift for distance in range(1, _FARTHEST + 1) for shift in (distance, -distance)]:
        begun, explained = _shifted_run(mine, theirs, calls, last)
        if explained and (best is None or explained > best.shown_by):
            other_way = best is not None and best.calls == -calls and best.shown_by >= ENOUGH
            best = Shift(calls, begun, explained, both_ways=other_way)
        elif explained >= ENOUGH and best is not None and best.calls == -calls:
            best = replace(best, both_ways=True)
    return best


def _shifted_run(mine: History, theirs: History, shift: int, last: int) -> tuple[int, int]:
    """Return the start of a run in which ``mine`` equals ``theirs`` ``shift`` calls later.

    The second value is the number of calls in it that only the shift explains. The run ends at
    ``last``, or at the newest call of the others. A rank is not behind if it never makes the calls
    that the others make in place of its own: then the call itself is wrong.
    """
    begun = explained = known = 0
    seq = min(last, max(theirs, default=0) - shift)
    own = set(mine.values())
    while seq in mine and theirs.get(seq + shift) == mine[seq]:
        if seq in theirs and mine[seq] != theirs[seq]:
            explained += 1
            known += theirs[seq] in own
            begun = seq
        seq -= 1
    return (begun, explained) if shift > 0 or known else (0, 0)


def agree_again(mine: History, theirs: History, seq: int) -> bool:
    """Tell whether two ranks are in step after a call in which they differ.

    A device's host issues calls behind one that hangs. If those agree, none was skipped.
    """
    later = [later_seq for later_seq in mine if later_seq > seq and later_seq in theirs]
    return len(later) >= ENOUGH and all(mine[later_seq] == theirs[later_seq] for later_seq in later)


def too_many(own: History, others: History, short: int) -> int | None:
    """Return where others have issued as many calls more as a rank is short of, or more.

    These are the only ones at which they differ, one after the other, from lines that the rank has
    not.
    """
    apart = sorted(seq for seq in own.keys() & others.keys() if own[seq] != others[seq])
    is_run = apart and apart == list(range(apart[0], apart[0] + len(apart)))
    if not is_run or not short <= len(apart) <= _FARTHEST:
        return None
    usual = set(own.values())
    return apart[0] if not any(others[seq] in usual for seq in apart) else None


def turns_more(longer: History, shorter: History, seq: int) -> int:
    """Return how many turns of a loop one rank makes more than the other, from ``seq`` on.

    The calls before ``seq`` are a turn of the loop, which both have made. 0 if there is no such
    loop, if less than a turn explains the difference as well (then calls were skipped inside of
    it), or if the rank does not issue the other one's calls after it, as far as they are on record.
    """
    apart = [
        distance
        for distance in range(1, _LONGEST_TURN + 1)
        for ahead, behind in ((shorter, longer), (longer, shorter))
        if ahead[seq] == behind.get(seq + distance)
    ]
    for length in range(1, _LONGEST_TURN + 1):
        if any(distance < length for distance in apart) or apart[:2] == [1, 1]:
            return 0
        behind = _after_loop(longer, shorter, seq, 0, length)
        if behind and longer.get(seq + behind) == shorter[seq]:
            return behind // length if _meet_again(longer, shorter, seq, behind) else 0
    return 0


def _after_loop(longer: History, shorter: History, seq: int, behind: int, length: int) -> int:
    """Return how far a rank is behind at ``seq`` once it has repeated the turn before it; or 0.

    ``behind``: how far it was behind in that turn.
    """
    turn = [shorter.get(seq - length + at) for at in range(length)]
    begin = behind
    while None not in turn and turn == [longer.get(seq + behind + at) for at in range(length)]:
        behind += length
    return behind if behind > begin else 0


def _meet_again(longer: History, shorter: History, seq: int, behind: int) -> bool:
    """Tell whether a rank issues all that the other one does from ``seq`` on, ``behind`` later.

    It may repeat that loop, or another one, more often than the other one again. Calls that are
    not on record contradict nothing.
    """
    while seq in shorter and seq + behind in longer:
        if shorter[seq] != longer[seq + behind]:
            repeated = (
                _after_loop(longer, shorter, seq, behind, length)
                for length in range(1, _LONGEST_TURN + 1)
            )
            behind = next(
                (
                    at
                    for at in repeated
                    if at and longer.get(seq + at, shorter[seq]) == shorter[seq]
                ),
                0,
            )
            if not behind:
                return False
        seq += 1
    return True
