"""Pictures of a run for notebooks, and its table for pandas, from a world with planted times."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from worlds import MS, Call, group_of, together, write_world

from rankcall.errors import ExtraMissingError
from rankcall.run.load import Run, load

FOUR = group_of(4)
LATE, LATE_MS, STEPS, STEP_MS, CALL_MS = 2, 30, 20, 100, 10


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return four ranks of which one comes 30 ms late to each all_reduce; one call has no end."""
    monkeypatch.setenv("MPLBACKEND", "agg")
    calls: list[Call] = []
    for step in range(STEPS):
        start = step * STEP_MS * MS
        came = [start + (LATE_MS * MS if rank == LATE else 0) for rank in range(4)]
        calls += together(step + 1, came, start + (LATE_MS + CALL_MS) * MS, FOUR)
    calls.append(Call(0, STEPS + 1, STEPS * STEP_MS * MS, None, group=FOUR))
    write_world(tmp_path / "run", calls)
    return load(tmp_path / "run")


def test_a_timeline_has_a_bar_for_each_call(run: Run) -> None:
    """A bar is as long as the call, in the row of its rank; a call without an end is pale."""
    axes = run.plot.timeline()
    assert [label.get_text() for label in axes.get_yticklabels()] == [f"rank {n}" for n in range(4)]
    bars = [path.get_extents() for bar in axes.collections for path in bar.get_paths()]
    assert len(bars) == 4 * STEPS + 1
    late = [bar for bar in bars if bar.y0 < LATE < bar.y1]
    assert [bar.width for bar in late] == pytest.approx([CALL_MS / 1e3] * STEPS, rel=1e-3)
    (pale,) = [bar for bar in axes.collections if bar.get_alpha() == 0.4]
    (open_call,) = [path.get_extents() for path in pale.get_paths()]
    # Nothing is on record after it was issued, and yet it can be seen.
    assert open_call.x0 == pytest.approx(STEPS * STEP_MS / 1e3, rel=1e-3)
    assert open_call.x1 == pytest.approx(axes.get_xlim()[1])
    assert open_call.width > 0.02 * axes.get_xlim()[1]
    assert axes.get_legend().get_texts()[0].get_text() == "all_reduce"


def test_a_call_in_flight_lasts_as_long_as_its_rank_is_known_to_have_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hang of five seconds looks like five seconds, on any host; a rank that died in it ends."""
    monkeypatch.setenv("MPLBACKEND", "agg")
    second = 1000 * MS
    calls = together(1, [0] * 4, second, FOUR) + [
        Call(rank, 2, second, None, group=FOUR) for rank in range(3)
    ]
    last_beats = {0: 6, 1: 3, 2: 5, 3: 7}  # rank 3 has come to its end
    beats = {rank: (at * second, 2 * second) for rank, at in last_beats.items()}
    hosts = {2: "node-b", 3: "node-b"}
    axes = load(write_world(tmp_path / "run", calls, beats=beats, hosts=hosts)).plot.timeline()
    pale = [bar for bar in axes.collections if bar.get_alpha() == 0.4]
    bars = [path.get_extents() for bar in pale for path in bar.get_paths()]
    ends = {round((bar.y0 + bar.y1) / 2): (bar.x0, bar.x1) for bar in bars}
    assert ends == {rank: pytest.approx((1.0, last_beats[rank]), rel=1e-3) for rank in range(3)}
    assert axes.get_xlim()[1] == pytest.approx(6.0, rel=1e-3)


def test_a_timeline_of_some_ranks(run: Run) -> None:
    """The newest calls of the ranks that were asked for; none of them is an error that says so."""
    axes = run.plot.timeline([LATE], newest=3)
    assert sum(len(bar.get_paths()) for bar in axes.collections) == 3
    with pytest.raises(ValueError, match="no calls of rank 7"):
        run.plot.timeline([7])


def test_waiting_is_as_planted(run: Run) -> None:
    """Each rank but the late one waited 30 ms in each of its calls."""
    axes = run.plot.waiting()
    of = {bars.get_label(): [bar.get_width() for bar in bars] for bars in axes.containers}
    waited = STEPS * LATE_MS / 1e3
    assert of["waiting"][1] == pytest.approx(waited, rel=0.01)
    assert of["waiting"][LATE] == pytest.approx(0.0, abs=1e-6)
    assert of["transfer"][LATE] == pytest.approx(STEPS * CALL_MS / 1e3, rel=0.01)


def test_the_late_rank_stands_out(run: Run) -> None:
    """Its row is 30 ms, the others' are 0."""
    (image,) = run.plot.late().get_images()
    rows = image.get_array()
    assert rows is not None
    assert rows[LATE].compressed() == pytest.approx(LATE_MS, rel=0.01)
    assert rows[0].compressed() == pytest.approx(0.0, abs=0.01)


def test_noise_is_not_drawn_as_lateness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Colours of a healthy job begin at 5 % of a step, here of 100 ms, and the title says so."""
    monkeypatch.setenv("MPLBACKEND", "agg")
    calls: list[Call] = []
    for step in range(1, STEPS):
        start = step * STEP_MS * MS
        came = [start + (MS if rank == LATE else 0) for rank in range(4)]
        calls += together(step, came, start + CALL_MS * MS, FOUR, step=step)
    axes = load(write_world(tmp_path / "run", calls)).plot.late()
    (image,) = axes.get_images()
    assert image.get_clim() == pytest.approx((0.0, 5.0), rel=0.1)
    assert axes.get_title().startswith("No rank stands out: 1")


def test_pictures_go_into_given_axes(run: Run) -> None:
    """A notebook may lay several out in one figure."""
    from matplotlib import pyplot

    _, (above, below) = pyplot.subplots(2)
    assert run.plot.waiting(ax=above) is above
    assert run.plot.timeline(ax=below) is below
    pyplot.close("all")


def test_records_for_pandas(run: Run) -> None:
    """Whole numbers stay whole where some are missing, and nothing asks for pyarrow."""
    frame = run.to_pandas()
    assert list(frame.columns) == run.records.columns
    assert len(frame) == run.records.height == 4 * STEPS + 1
    assert str(frame["completed_ns"].dtype) == "Int64"
    assert frame["completed_ns"].isna().sum() == 1
    assert frame["completed_ns"].dropna().tolist() == (
        run.records["completed_ns"].drop_nulls().to_list()
    )
    assert set(frame["op"]) == {"all_reduce"}


@pytest.mark.parametrize(
    ("package", "call", "words"),
    [
        ("matplotlib", "plot.waiting()", r"rankcall\[plot\]"),
        ("pandas", "to_pandas()", "pip install pandas"),
    ],
)
def test_a_missing_package_is_named(
    run: Run, package: str, call: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says what to install."""
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ExtraMissingError, match=words):
        eval(f"run.{call}", {"run": run})  # the two calls above


def test_loading_a_run_imports_no_matplotlib(run: Run) -> None:
    """Who draws nothing pays for nothing."""
    code = (
        "import sys, rankcall; "
        f"rankcall.load({str(run.source)!r}).records; "
        "sys.exit(bool({'matplotlib', 'pandas', 'rankcall.report.plots'} & sys.modules.keys()))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
