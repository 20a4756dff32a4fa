"""Hooks get the same statuses whether these are made natively or column by column."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rankcall
from rankcall.capture import session
from rankcall.capture.native import recorder_module
from rankcall.errors import CaptureUnavailableError
from rankcall.events.statuses import LazyRecord, StatusMaker
from rankcall.hooks import CollectiveStatus
from rankcall.record import OPS, RECORD, STATUSES
from rankcall.ring.follower import Batch
from rankcall.ring.tables import Group, Tables


def built_recorder() -> Any:
    """Return the recorder, or skip the test if it cannot be built."""
    try:
        return recorder_module()
    except CaptureUnavailableError as why:
        pytest.skip(str(why))


def rows_of_all_kinds(seed: int, count: int) -> np.ndarray:
    """Return records with and without times, device times, errors, and names that are known."""
    random = np.random.default_rng(seed)
    rows = np.zeros(count, RECORD)
    rows["seq"] = random.integers(0, 2**63, count, np.uint64)
    rows["group"] = random.integers(0, 6, count)
    rows["op"] = random.integers(0, len(OPS), count)
    rows["status"] = random.integers(0, len(STATUSES), count)
    rows["error"] = random.integers(0, 6, count)
    rows["enqueued_ns"] = random.integers(1, 2**50, count)
    rows["started_ns"] = random.integers(0, 2, count) * random.integers(1, 2**50, count)
    rows["completed_ns"] = random.integers(0, 2, count) * random.integers(1, 2**50, count)
    rows["flags"] = random.integers(0, 16, count)
    rows["device_ms"] = np.where(random.integers(0, 2, count), np.nan, random.random(count))
    return rows


@pytest.mark.parametrize(("starts", "ends"), [(True, True), (True, False), (False, True)])
def test_both_ways_say_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, starts: bool, ends: bool
) -> None:
    """Every field of every status, and the record behind it."""
    built_recorder()
    random = np.random.default_rng(7)
    rows = rows_of_all_kinds(11, 500)
    batch = Batch(rows, random.random(500) < 0.7, random.random(500) < 0.7, 0)
    groups = {number: Group(f"g{number}", 0, f"BACK{number}", "", (0,)) for number in (1, 2, 4)}
    with rankcall.enable(tmp_path / "run", capture="native"):
        recording = session.current()
        assert recording is not None
        natively, by_column = StatusMaker(recording), StatusMaker(recording)
    assert natively._native is not None
    by_column._native, by_column._epoch_ns = None, natively._epoch_ns
    tables = Tables(strings={2: "timed out", 5: "closed"}, groups=groups)
    for maker in (natively, by_column):
        monkeypatch.setattr(maker._live, "now", lambda: tables)
    native, columnar = (
        list(maker.statuses(batch, CollectiveStatus, starts, ends))
        for maker in (natively, by_column)
    )
    assert len(native) == int((batch.begins & starts).sum() + (batch.ends & ends).sum())
    assert {status.pg_name for status, _ in native} == {"unknown", "g1", "g2", "g4"}
    assert {status.error for status, ended in native if ended} <= {None, "timed out", "closed"}
    for (status, ended), (other, also_ended) in zip(native, columnar, strict=True):
        assert ended is also_ended
        assert str(dict(status.record or {})) == str(dict(other.record or {}))  # NaN is no NaN
        status.record = other.record = None
        assert status == other
        assert type(status.timestamp) is type(other.timestamp) is int


def test_what_is_no_class_of_slots_is_refused() -> None:
    """A class without the slots is an error, not a crash."""
    module = built_recorder()
    rows, at = np.zeros(1, RECORD), np.zeros(1, np.int64)
    names = object(), rows, ["unknown"], ["unknown"], OPS, STATUSES, {}
    with pytest.raises(AttributeError, match="pg_name"):
        module.statuses((dict, dict), names, 0, rows.view(np.uint8), at, at == 0)
    with pytest.raises(IndexError, match="no such row"):
        module.statuses(
            (CollectiveStatus, LazyRecord), names, 0, rows.view(np.uint8), at + 1, at == 0
        )
