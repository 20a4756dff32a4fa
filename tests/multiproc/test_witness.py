"""The records against PyTorch's own Flight Recorder in the same process: same ops, same order."""

from __future__ import annotations

import pytest
import witness
from op_cases.recorded import CAPTURES, RANKS, recorded_run

pytestmark = pytest.mark.multiproc


@pytest.mark.parametrize("capture", CAPTURES)
def test_the_flight_recorder_agrees(capture: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Every group of every rank: each entry's op and input bytes, in order, and none besides."""
    recorded = recorded_run(capture, tmp_path_factory)
    for rank in range(RANKS):
        assert sum(map(len, recorded.torch_saw[rank].values())) > 100
        assert witness.differences(recorded.rows[rank], recorded.torch_saw[rank]) == []


def test_the_witness_can_disagree(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A record left out, two swapped, or one of another size is noticed."""
    recorded = recorded_run("native", tmp_path_factory)
    rows, saw = recorded.rows[0], recorded.torch_saw[0]
    rows = [row for row in rows if row["group"] == "0" and row["kind"] == "collective"]
    saw = {"0": saw["0"]}
    assert witness.differences(rows, saw) == []
    ops = [row["op"] for row in rows]
    at = ops.index("broadcast")
    end = next(n for n in range(at, len(ops)) if ops[n] != "broadcast")
    swapped = [*rows[: end - 1], rows[end], rows[end - 1], *rows[end + 1 :]]
    larger = {**rows[at], "in_bytes": rows[at]["in_bytes"] + 4}
    assert witness.differences(rows[:at] + rows[at + 1 :], saw)
    assert witness.differences(swapped, saw)
    assert witness.differences([*rows[:at], larger, *rows[at + 1 :]], saw)
