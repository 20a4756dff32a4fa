"""A verdict shows where its culprit stands first, and where the others wait as a second fact."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from diagnosing import any_verdict, causes, diagnose_calls, unfinished
from worlds import MS, group_of, together

from rankcall.analysis.details import detail
from rankcall.analysis.verdicts import with_stacks
from rankcall.analysis.verdicts.diagnosis import Diagnosis
from rankcall.analysis.verdicts.encoding import verdict_object
from rankcall.analysis.verdicts.kept import kept_in
from rankcall.cli import main
from rankcall.job.keep import keep_verdict
from rankcall.report.diagnosis_text import diagnosis_text
from rankcall.report.html import render
from rankcall.report.html.first_screen import item_of_finding, verdict_of_finding
from rankcall.report.standing import rows
from rankcall.report.top_lines import cells, lines_of
from rankcall.run.hangs import add_lines, kept_lines
from rankcall.run.load import load
from rankcall.serve.history import History
from rankcall.serve.live_run import Look, Stacks
from rankcall.serve.view import sections

WORLD = group_of(4)
STACK = """\
Current thread 0x1 (most recent call first):
  File "/home/ada/train.py", line 77 in evaluate
  File "/home/ada/train.py", line 12 in <module>"""


@pytest.fixture
def desync(tmp_path: Path) -> Diagnosis:
    """Rank 0 takes another branch: it calls barrier at line 17, the others all_reduce at 23."""
    calls = [call for seq in (1, 2, 3) for call in together(seq, [0] * 4, seq * MS, WORLD, line=5)]
    calls += unfinished(WORLD, 4, (0,), 5 * MS, op="barrier", line=17)
    calls += unfinished(WORLD, 4, (1, 2, 3), 5 * MS, line=23)
    return diagnose_calls(tmp_path, calls)


@pytest.fixture
def missing(tmp_path: Path) -> Diagnosis:
    """Rank 2 left line 5 and evaluates at line 77; the others wait at line 23."""
    calls = [call for seq in (1, 2, 3) for call in together(seq, [0] * 4, seq * MS, WORLD, line=5)]
    calls += unfinished(WORLD, 4, (0, 1, 3), 5 * MS, line=23)
    diagnosis = diagnose_calls(tmp_path, calls)
    return with_stacks(load(tmp_path / "run"), diagnosis, {2: STACK})


def test_a_rank_that_calls_something_else(desync: Diagnosis) -> None:
    """The card has rank 0's own line; that of ranks 1 to 3 is the others'."""
    first = desync.findings[0]
    assert (first.kind, first.ranks, first.call_site) == ("desync", (0,), "train.py:23")
    card = verdict_of_finding(first)
    assert card.who == ("rank 0", "on node-a")
    assert card.where == ("train.py:17", "barrier #4", "train.py:17")
    assert card.waiting == ("train.py:23", "all_reduce #4 of group 0", "train.py:23")
    assert item_of_finding(first).where == "train.py:17"
    assert verdict_object(desync)["findings"][0]["culprit_line"] == "train.py:17"


def test_ranks_that_die_at_several_lines(tmp_path: Path) -> None:
    """Rank 0, killed before it came to line 23, is not said to have been there like the others."""
    calls = [call for seq in (1, 2, 3) for call in together(seq, [0] * 4, seq * MS, WORLD, line=5)]
    calls += unfinished(WORLD, 4, (1, 2, 3), 5 * MS, line=23)
    exits = dict.fromkeys(range(4), (-9, 60.0))
    diagnosis = diagnose_calls(tmp_path, calls, states=dict.fromkeys(range(4), "gone"), exits=exits)
    assert causes(diagnosis) == [("dead", (0, 1, 2, 3))]
    assert diagnosis.findings[0].culprit_line == ""
    lines = {rank: row.line for row in rows(diagnosis) for rank in row.ranks}
    assert lines == {0: "train.py:5", 1: "train.py:23", 2: "train.py:23", 3: "train.py:23"}


def test_a_rank_that_does_not_come(missing: Diagnosis) -> None:
    """Card, tables and JSON have the line of its stack, not that of the call that it left."""
    first = missing.findings[0]
    assert (first.kind, first.ranks) == ("missing", (2,))
    card = verdict_of_finding(first)
    assert card.where == ("train.py:77", "in evaluate()", "/home/ada/train.py:77")
    assert card.waiting is not None
    assert card.waiting[0] == "train.py:23"
    assert verdict_object(missing)["findings"][0]["culprit_line"] == "/home/ada/train.py:77"
    assert [place["line"] for place in verdict_object(missing)["ranks"]] == [
        "train.py:23",
        "train.py:23",
        "/home/ada/train.py:77",
        "train.py:23",
    ]
    assert {row.ranks: row.line for row in rows(missing)} == {
        (2,): "train.py:77",
        (0, 1, 3): "train.py:23",
    }
    assert [cells(missing, line, 4)[4] for line in lines_of(missing)] == [
        "train.py:77",
        "train.py:23",
    ]
    assert "train.py:77" in diagnosis_text(missing)


def test_without_a_stack(tmp_path: Path) -> None:
    """A line that is not known is not shown: the call that the rank has left is not where it is."""
    calls = [*together(1, [0] * 4, MS, WORLD, line=5), *unfinished(WORLD, 2, (0, 1, 3), 5 * MS)]
    first = diagnose_calls(tmp_path, calls).findings[0]
    card = verdict_of_finding(first)
    assert (first.culprit_line, card.where) == ("", None)
    assert card.waiting is not None


def test_culprits_at_two_lines(tmp_path: Path) -> None:
    """No line of one culprit is shown as that of both."""
    calls = [*together(1, [0] * 4, MS, WORLD), *unfinished(WORLD, 2, (0, 1), 5 * MS, line=23)]
    other = STACK.replace("line 77", "line 78")
    diagnosis = diagnose_calls(tmp_path, calls)
    run = load(tmp_path / "run")
    first = with_stacks(run, diagnosis, {2: STACK, 3: other}).findings[0]
    assert (first.kind, first.ranks, first.culprit_line) == ("missing", (2, 3), "")
    first = with_stacks(run, diagnosis, {2: STACK, 3: STACK}).findings[0]
    assert first.culprit_line == "/home/ada/train.py:77"


def test_the_report_has_the_watchers_stacks(
    tmp_path: Path, missing: Diagnosis, capsys: pytest.CaptureFixture[str]
) -> None:
    """All forms of the report of a run that was stopped have the stacks, equal ones together."""
    run, page = tmp_path / "run", tmp_path / "page.html"
    main(["report", str(run)])
    assert "watcher looked" not in capsys.readouterr().out
    main(["report", str(run), "-o", str(page)])
    assert 'id="stacks"' not in page.read_text()
    waiting = STACK.replace("line 77 in evaluate", "line 23 in step")
    keep_verdict(run, missing, {0: waiting, 1: waiting, 2: STACK, 3: waiting}, any_verdict)
    main(["report", str(run), "-o", str(page)])
    text = page.read_text()
    section = text[text.index('<section id="stacks"') :].partition("</section>")[0]
    assert section.count("<summary>") == 2
    capsys.readouterr()
    main(["report", str(run)])
    shown = capsys.readouterr().out.partition("Until then")[0]
    assert "Stacks of 4 ranks, equal ones together, when the job's own watcher looked" in shown
    assert shown.index("rank 2\n") < shown.index("3 ranks: 0-1,3\n") < shown.index("train.py:23\n")
    main(["report", str(run), "--json"])
    classes = json.loads(capsys.readouterr().out)["stack_classes"]
    assert [stack_class["ranks"] for stack_class in classes] == [[2], [0, 1, 3]]
    assert section.index("evaluate") < section.index("step")
    assert "3 ranks" in section


def test_paths_below_the_jobs_folder_are_short(tmp_path: Path, missing: Diagnosis) -> None:
    """Both pages write them from that folder on, and whole where one points at them."""
    run, page = tmp_path / "run", tmp_path / "page.html"
    keep_verdict(run, missing, dict.fromkeys(range(4), STACK), any_verdict)
    (run / "run.json").write_text(json.dumps({"cwd": "/home/ada"}))
    main(["report", str(run), "-o", str(page)])
    report = page.read_text()
    stacks = Stacks(dict.fromkeys(range(4), STACK), 80.0, by_watcher=True)
    look = Look("live", 80.0, str(run), diagnosis=missing, stacks=stacks, folder="/home/ada")
    live = "".join(sections(look, History()).values())
    for html in (report, live):
        assert 'title="/home/ada/train.py:77">train.py:77<' in html
        assert "/home/ada/" not in re.sub(r'title="[^"]*"', "", html)
    other = "".join(sections(replace(look, folder="/home/a"), History()).values())
    assert ">/home/ada/train.py:77<" in other


def test_the_pages_have_the_text_of_the_culprits_line(tmp_path: Path, missing: Diagnosis) -> None:
    """The report and the live page show it below the line, as text, if the watcher kept it."""
    run = tmp_path / "run"
    place = keep_verdict(run, missing, {2: STACK}, any_verdict)
    assert place is not None
    add_lines(place, {"/home/ada/train.py:77": "score = model(<b>)"})
    stacks = Stacks({2: STACK}, 70.0, by_watcher=True, lines=kept_lines(place))
    live = sections(Look("live", 70.0, diagnosis=missing, stacks=stacks), History())["verdict"]
    report = render(detail(load(run)), missing.findings, kept_in(run))
    for text in (report, live):
        card = text[text.index("<dt>Where</dt>") :].partition("</div>")[0]
        assert "score = model(&lt;b&gt;)" in card
