"""The vocabulary: one name for each fact, the same in tables, in hooks, on paper and in C++."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from tracing import some
from worlds import MS, Call, write_world

from rankcall.capture.native import layout_header
from rankcall.drop_in import DESCRIPTION, STATUS
from rankcall.hooks import CollectiveStatus
from rankcall.record import DERIVED_FACTS, FACTS
from rankcall.ring.decode import decode_record
from rankcall.run.load import load

PAGE = Path(__file__).parents[2] / "docs/records.md"
TABLE = PAGE.read_text().partition("\n## ")[0]
ALL_FACTS = {**FACTS, **DERIVED_FACTS}


def test_the_page_has_the_table() -> None:
    """docs/records.md explains every column in the words of ``record.py``, in the same order."""
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", TABLE, re.MULTILINE)
    assert rows == list(FACTS.items())
    derived = PAGE.read_text().partition("## Derived from records")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", derived, re.MULTILINE)
    assert rows == list(DERIVED_FACTS.items())


def test_the_page_has_the_names_of_others() -> None:
    """docs/records.md lists each name that differs, and our name for the fact."""
    text = PAGE.read_text()
    listed = set(re.findall(r"^\| `(\w+)` \| `(\w+)` \| descriptions \|$", text, re.MULTILINE))
    assert listed == {(field.name, field.fact) for field in DESCRIPTION} - {
        (field.fact, field.fact) for field in DESCRIPTION
    }
    listed = set(re.findall(r"^\| `(\w+)` \| `(\w+)` \| statuses of hooks \|$", text, re.MULTILINE))
    assert listed == {pair for pair in STATUS.items() if pair[1] not in (None, pair[0])}


def test_records_have_these_columns(tmp_path: Path) -> None:
    """The columns of a table, and the keys of one record, are the facts and no others."""
    run = load(write_world(tmp_path / "run", [Call(0, 1, 0, MS)]))
    assert set(run.records.columns) == set(FACTS)
    (ring,) = run.rings
    record = decode_record(ring.records[0], ring.tables)
    assert record.keys() == FACTS.keys() - {"rank", "attempt", "host"}


def test_descriptions_have_these_facts() -> None:
    """A description is made of facts; its columns and its table have their names, too."""
    batch = some(3)
    state = {"in_flight", "failed", "prints", "first"}  # of the description, not of the op
    for facts in batch.facts():
        assert facts.keys() - state <= ALL_FACTS.keys()
    assert batch.columns.keys() - state - {"call"} <= ALL_FACTS.keys()
    assert {field.fact for field in DESCRIPTION} <= ALL_FACTS.keys()
    old = {field.name for field in DESCRIPTION}
    assert set(batch.frame().columns) - old <= ALL_FACTS.keys()


def test_statuses_have_the_names_of_the_hooks_that_they_replace() -> None:
    """Both makers of statuses set the fields in the order of the table."""
    assert [field.name for field in fields(CollectiveStatus)] == list(STATUS)
    assert {fact for fact in STATUS.values() if fact is not None} <= ALL_FACTS.keys()


def test_the_recorder_gets_the_names() -> None:
    """The generated header has the fields of a description and of a status, in their order."""
    header = layout_header()
    description = re.search(r"kDescription\[\] = (.*);", header)
    assert description is not None
    assert re.findall(r'\\"(\w+)\\": ', description.group(1)) == [f.name for f in DESCRIPTION]
    status = re.search(r"kStatusFields\[\] = (.*);", header)
    assert status is not None
    assert re.findall(r'"(\w+)"', status.group(1)) == list(STATUS)
