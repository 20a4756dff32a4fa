"""``outcome.json``: what each end of a job says, and that the page describes it."""

from __future__ import annotations

import json
import re
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from receiving import Receiver

from rankcall.cli.outcome import keep_outcome
from rankcall.job import notices
from rankcall.run.outcome import OUTCOME, JobFailure, JobOutcome
from rankcall.run.recoveries import AttemptEnd, AttemptStart, Signature, file_of, note
from rankcall.testing import synthetic_run

PAGE = Path(__file__).parents[3] / "docs/outcome.md"
END = AttemptEnd(
    0,
    Signature("dead", "", "ValueError: bad batch", "one rank"),
    "program",
    culprits=(1,),
    summary="Rank 1 failed.",
    step=1200,
    steps=200,
    lost=200,
    progressed=True,
    noticed_ns=5,
    decision="restart",
    rule="try_again",
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run of two ranks that ended well."""
    synthetic_run(tmp_path / "run", 2, 20)
    return tmp_path / "run"


def outcome(run: Path, status: int, **more: Any) -> dict[str, Any]:
    """Return what is written for a status."""
    keep_outcome(run, status, time.time_ns(), **more)
    content: dict[str, Any] = json.loads((run / OUTCOME).read_text())
    return content


def test_a_failure_that_came_back(run: Path) -> None:
    """The culprit, its host and the step are named, and a restart does not help."""
    for event in (END, replace(END, restart=1, noticed_ns=9, decision="stop", rule="repeats")):
        note(file_of(run, "node-a", 1), event)
    content = outcome(run, 65)
    assert (content["outcome"], content["restart_helps"]) == ("repeats", False)
    assert "repeats at step 1,200" in content["reason"]
    failure = content["failure"]
    assert (failure["ranks"], failure["step"], failure["lost_steps"]) == ([1], 1200, 200)
    assert (failure["family"], content["failures"]) == ("program", 2)
    assert failure["hosts"]


def test_an_earlier_launcher_that_failed_more_often(run: Path) -> None:
    """The failures of the launcher that ran last count, with those of nodes beside it."""
    hang = replace(END, signature=Signature("missing"), family="machine", culprits=(0, 2))
    for number in range(4):
        note(file_of(run, "node-a", 1), replace(hang, restart=number, noticed_ns=number + 1))
    note(file_of(run, "node-a", 2), AttemptStart(0, 10))
    note(file_of(run, "node-a", 2), replace(END, noticed_ns=12))
    note(file_of(run, "node-a", 2), replace(END, restart=1, noticed_ns=14, rule="repeats"))
    note(file_of(run, "node-b", 9), replace(hang, noticed_ns=13))
    content = outcome(run, 65)
    assert (content["failure"]["ranks"], content["failures"]) == ([1], 2)
    assert "repeats at step 1,200" in content["reason"]


def test_a_first_failure_of_the_program(run: Path) -> None:
    """torchrun's budget was used up; the policy would have tried once more."""
    note(file_of(run, "node-a", 1), END)
    content = outcome(run, 1)
    assert (content["outcome"], content["restart_helps"]) == ("failed", True)


@pytest.mark.parametrize(
    ("status", "was_asked", "word", "helps"),
    [
        (0, False, "done", False),
        (1, True, "interrupted", None),
        (-15, True, "interrupted", None),
        (69, False, "barred", False),
        (1, False, "failed", None),  # the records know of no failure
    ],
)
def test_ends_without_a_failure(
    status: int, was_asked: bool, word: str, helps: bool | None, run: Path
) -> None:
    """Nothing is blamed, and what is not known is null."""
    content = outcome(run, status, was_asked=was_asked)
    assert (content["outcome"], content["restart_helps"]) == (word, helps)
    assert content["failure"] is None


def test_a_node_that_ends_with_another_hides_no_reason(run: Path) -> None:
    """The node that decided has written first; an older job's file is replaced."""
    began_ns = time.time_ns()
    keep_outcome(run, 65, began_ns)
    keep_outcome(run, 1, began_ns)
    assert json.loads((run / OUTCOME).read_text())["status"] == 65
    keep_outcome(run, 0, time.time_ns())
    assert json.loads((run / OUTCOME).read_text())["status"] == 0


def test_the_end_is_told(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A receiver of notices gets what the file says."""
    with Receiver().serving() as receiver:
        monkeypatch.setenv(notices.NOTIFY, receiver.url)
        content = outcome(run, 65)
        notices.wait(60)
    [(_, body)] = receiver.got
    told = json.loads(body)
    assert told["type"] == "rankcall.ended"
    del content["schema"]
    assert told["data"].items() >= content.items()


def test_a_run_without_records(tmp_path: Path) -> None:
    """The file is written all the same."""
    (tmp_path / "run").mkdir()
    assert outcome(tmp_path / "run", 1)["outcome"] == "failed"


def test_the_page_describes_all_fields() -> None:
    """Each field has a row, and the example has exactly these fields."""
    text = PAGE.read_text()
    example = json.loads(re.search(r"```json\n(.*?)```", text, re.DOTALL)[1])  # type: ignore[index]
    assert set(example) == {field.name for field in fields(JobOutcome)}
    assert set(example["failure"]) == {field.name for field in fields(JobFailure)}
    rows = {
        name
        for row in re.findall(r"^\| (`[^|]*) \|", text, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", row)
    }
    assert rows >= set(example) | set(example["failure"])
