"""The scenario suite on NCCL: planted faults, real ranks, the right cause named every way."""

from __future__ import annotations

from pathlib import Path

import pytest
from scenario_run import run
from scenarios import ALL, Scenario
from scenarios_on_devices import (
    CAUSES,
    FAST,
    GO_THROUGH,
    LEFT_OUT,
    NOT_NATIVE,
    ON_DEVICES,
    start_fork_server,
)

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(400)]


@pytest.fixture(scope="module", autouse=True)
def _ranks_on_devices(devices: None) -> None:
    start_fork_server()


def _marked(scenario: Scenario) -> object:
    marks = [] if scenario.name in FAST else [pytest.mark.slow]
    return pytest.param(scenario, id=scenario.name, marks=marks)


@pytest.mark.parametrize("scenario", [_marked(scenario) for scenario in ON_DEVICES])
def test_scenario(scenario: Scenario, capture: str, tmp_path: Path) -> None:
    """The watcher, and a diagnosis from outside or afterwards, name exactly what was planted."""
    if capture == "native" and scenario.name in NOT_NATIVE:
        pytest.skip("no fault can be planted")
    outcome = run(scenario, tmp_path, capture, check_facts=False)
    assert not outcome.wrong, "\n".join(
        [*outcome.wrong, *(result.stderr[-3000:] for result in outcome.results)]
    )


def test_the_tables_name_scenarios() -> None:
    """Each name in the tables of this suite is a scenario's."""
    tables = {*CAUSES, *GO_THROUGH, *LEFT_OUT, *NOT_NATIVE, *FAST}
    assert tables <= {scenario.name for scenario in ALL}
