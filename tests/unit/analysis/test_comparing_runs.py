"""Two runs are compared: what was planted is found, and nothing in runs that are equal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from rankcall.analysis.comparing_runs import (
    PARTS,
    Difference,
    Figure,
    PartMedians,
    _chance,
    change_in,
    differences,
    measured,
)
from rankcall.cli import main
from rankcall.run.load import load
from rankcall.testing.synthetic import synthetic_run

STEP = Figure("step")
OWN = [Figure("before", "all_reduce", "train.py:9", rank) for rank in range(8)]
TRANSFER = Figure("in", "all_reduce", "train.py:9")


def made(
    seed: int, factors: dict[Figure, float] | None = None, since: int = 0, parts: int = PARTS
) -> PartMedians:
    """Return a run whose figures are noisy, and neighbouring parts alike.

    ``factors``: what is so many times slower, from the part ``since`` on.
    """
    random = np.random.default_rng(seed)
    figures = {}
    for figure in (STEP, *OWN, TRANSFER):
        noise = random.normal(0.0, 0.02, parts)
        for number in range(1, parts):
            noise[number] += 0.5 * noise[number - 1]
        values = 0.1 * np.exp(noise)
        values[0] *= 5  # the first part has the set-up
        values[since:] *= (factors or {}).get(figure, 1.0)
        figures[figure] = values
    return PartMedians(figures, [100 * number for number in range(parts)])


def named(found: Sequence[Difference]) -> list[Figure]:
    """Return what differs."""
    return [difference.figure for difference in found]


@pytest.mark.parametrize("seed", range(200))
def test_equal_runs_have_no_difference(seed: int) -> None:
    """Two runs with the same spread, of neighbours that are alike: nothing is said."""
    assert differences(made(2 * seed), made(2 * seed + 1)) == []
    assert change_in(made(2 * seed)) is None


@pytest.mark.parametrize("seed", range(20))
def test_what_was_planted_is_found(seed: int) -> None:
    """Exactly that, with its size, slower as well as faster."""
    for factor in (1.3, 0.7):
        slower = {STEP: factor, OWN[5]: factor}
        found = differences(made(seed), made(1000 + seed, slower))
        assert named(found) == [STEP, OWN[5]]
        for difference in found:
            assert difference.share == pytest.approx(factor - 1.0, abs=0.05)
            assert difference.chance < 0.001


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("since", [12, 24, 36])
def test_a_change_within_a_run(seed: int, since: int) -> None:
    """The moment is found to a part, and what else differs from there on."""
    change = change_in(made(seed, {STEP: 1.2, OWN[3]: 2.0}, since))
    assert change is not None
    assert abs(change.step - 100 * since) <= 100
    assert {STEP} <= set(named(change.differences)) <= {STEP, OWN[3]}


def test_few_parts_are_not_compared() -> None:
    """A figure that is known in some parts only is left out."""
    slow = made(1, {STEP: 3.0})
    slow.parts[STEP][8:] = np.nan
    assert differences(made(2), slow) == []


def test_small_differences_are_left_out() -> None:
    """They may be significant, and nobody would act on them."""
    exact = {STEP: np.full(PARTS, 0.1) + np.linspace(0, 1e-6, PARTS)}
    more = {STEP: exact[STEP] * 1.04}
    steps = list(range(PARTS))
    assert differences(PartMedians(exact, steps), PartMedians(more, steps)) == []


def test_the_probability_is_that_of_all_arrangements() -> None:
    """The approximation against the share of random arrangements that are as extreme."""
    random = np.random.default_rng(7)
    for shift in (0.0, 0.5, 1.0):
        old, new = random.normal(0, 1, 12), random.normal(shift, 1, 12)
        both = np.concatenate([old, new])

        def statistic(values: np.ndarray) -> float:
            return abs(float((values[:12, None] > values[None, 12:]).sum()) - 72.0)

        ours = statistic(both)
        as_extreme = np.mean([statistic(random.permutation(both)) >= ours for _ in range(4000)])
        assert _chance(old, new) == pytest.approx(as_extreme, abs=0.03)
    assert _chance(np.ones(10), np.ones(10)) == 1.0


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return three runs of four ranks: two alike, and one with a straggler of 20 ms."""
    folder = tmp_path_factory.mktemp("runs")
    return [
        synthetic_run(folder / "a", 4, 2000, seed=1).path,
        synthetic_run(folder / "b", 4, 2000, seed=2).path,
        synthetic_run(folder / "c", 4, 2000, seed=3, straggler=2).path,
    ]


def test_real_files(runs: list[Path]) -> None:
    """From rings to the difference: the rank that computes longer, before each op."""
    first, same, slow = (measured(load(path)) for path in runs)
    assert differences(first, same) == []
    found = differences(first, slow)
    assert found[0].figure == STEP
    own = [one for one in found if one.figure.kind == "before"]
    assert {one.figure.rank for one in own} == {2}
    for one in own:
        assert one.after_s - one.before_s == pytest.approx(0.020, abs=0.004)


def test_the_command(runs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    """The most telling first, ranks that differ alike in one line, and all of it as JSON."""
    first, same, slow = map(str, runs)
    assert main(["compare", first, same]) == 0
    assert capsys.readouterr().out.startswith("The runs do not differ, beyond noise, in the ")
    assert main(["compare", first, slow]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("steps take ")
    assert "% longer (" in lines[0]
    assert all(line.startswith("rank 2 comes ") for line in lines[1:3])
    assert main(["compare", first, slow, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["differences"]
    assert found[0]["kind"] == "step"
    assert found[0]["rank"] is None
    assert {one["rank"] for one in found if one["kind"] == "before"} == {2}
    assert main(["compare", first]) == 0
    assert capsys.readouterr().out == "The time of a step does not change, beyond noise.\n"
    assert main(["compare", first, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"since_step": None, "differences": []}


def test_a_run_without_steps_or_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """There is nothing to compare, and nothing fails."""
    short = str(synthetic_run(tmp_path / "short", 2, 5).path)
    assert main(["compare", short, short]) == 0
    assert "in the 0 figures they share" in capsys.readouterr().out
