"""The scenario suite: planted faults, real ranks, the right cause named every way there is."""

from __future__ import annotations

from pathlib import Path

import pytest
from scenario_run import run
from scenarios import ALL, FAST, Scenario

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(400)]


def _marked(scenario: Scenario) -> object:
    marks = [] if scenario.name in FAST else [pytest.mark.slow]
    return pytest.param(scenario, id=scenario.name, marks=marks)


@pytest.mark.parametrize("scenario", [_marked(each) for each in ALL])
def test_scenario(scenario: Scenario, tmp_path: Path) -> None:
    """The watcher, and a diagnosis from outside or afterwards, name exactly what was planted."""
    found = run(scenario, tmp_path)
    assert not found.wrong, "\n".join(
        [*found.wrong, *(each.stderr[-3000:] for each in found.results)]
    )


def test_there_are_enough() -> None:
    """Names are unique; every verdict on a hang has several variants."""
    names = {each.name for each in ALL}
    assert len(names) == len(ALL) >= 40
    assert set(FAST) <= names
    kinds = [kind for each in ALL for kind, _ in each.causes]
    for kind in (
        "missing",
        "dead",
        "stopped",
        "exhausted",
        "desync",
        "mismatch",
        "deadlock",
        "straggler",
    ):
        assert kinds.count(kind) >= 3, kind
