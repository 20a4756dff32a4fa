"""Sends and receives matched by (group, source, destination, tag, sequence number)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rankcall.analysis.timing.extract import Columns, Messages, Session
from rankcall.record import OPS
from rankcall.ring.tables import Group

_RECV = OPS.index("recv")


@dataclass
class Mail:
    """One group's messages in one session; ``sent[i]`` and ``received[i]`` are one message.

    Both are row numbers of ``columns`` (which has ``rank`` and ``host`` besides what ``Messages``
    has); -1 stands for an end that left no record.
    """

    session: Session
    group: Group
    columns: Columns
    sent: npt.NDArray[np.intp]
    received: npt.NDArray[np.intp]


def match(session: Session, group: Group, messages: Sequence[Messages]) -> Mail:
    """Find both ends of every message of a group."""
    names = list(messages[0].columns)
    columns: Columns = {
        name: np.concatenate([each.columns[name] for each in messages]) for name in names
    }
    lengths = [len(each.columns["seq"]) for each in messages]
    columns["rank"] = np.repeat([each.rank for each in messages], lengths)
    columns["host"] = np.repeat([each.host for each in messages], lengths)
    is_recv = columns["op"] == _RECV
    source = np.where(is_recv, columns["peer"], columns["own"])
    target = np.where(is_recv, columns["own"], columns["peer"])
    order = np.lexsort((is_recv, columns["seq"], columns["tag"], target, source))
    sent, received = _pairs(order, is_recv, columns, source, target)
    return Mail(session, group, columns, sent, received)


def _pairs(
    order: npt.NDArray[np.intp],
    is_recv: npt.NDArray[np.bool_],
    columns: Columns,
    source: npt.NDArray[np.int32],
    target: npt.NDArray[np.int32],
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Pair neighbours in ``order`` that are a send and a receive of the same message."""
    first, second = order[:-1], order[1:]
    same = ~is_recv[first] & is_recv[second]
    for column in (columns["seq"], columns["tag"], source, target):
        same &= column[first] == column[second]
    # An any-source receive in flight has no peer and no number yet: it matches nothing.
    same &= (source[first] >= 0) & (columns["seq"][first] > 0)
    alone = np.ones(len(order), bool)
    alone[first[same]] = alone[second[same]] = False
    lonely = np.flatnonzero(alone)
    sends, receives = lonely[~is_recv[lonely]], lonely[is_recv[lonely]]
    sent = np.concatenate([first[same], sends, np.full(len(receives), -1)])
    received = np.concatenate([second[same], np.full(len(sends), -1), receives])
    return sent, received
