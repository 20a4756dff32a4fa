"""Descriptions of a run that was read: by mode, and with hostile names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from worlds import MS, Call, write_world

from rankcall.capture.hosts import Hosts
from rankcall.ring.tables import Group
from rankcall.run.load import load
from rankcall.trace import describe

NEAR, FAR = Group("1", 0, "gloo", "", (0, 1)), Group("2", 0, "gloo", "", (0, 2))


def test_by_mode(tmp_path: Path) -> None:
    """All, those between hosts, or none; a wrong mode lists the right ones."""
    calls = [Call(0, 1, 0, MS, group=NEAR), Call(0, 1, 2 * MS, 3 * MS, group=FAR)]
    (ring,) = load(write_world(tmp_path / "run", calls)).rings
    assert [description["group"] for description in describe(ring, "all")] == ["1", "2"]
    span = Hosts(range(2), "a", lambda ranks: {})
    assert [description["group"] for description in describe(ring, "CrossNode", span)] == ["2"]
    assert list(describe(ring, "none", span)) == []
    with pytest.raises(ValueError, match=r"mode must be one of ALL, CROSSNODE, NONE .* 'some'"):
        describe(ring, "some")
    with pytest.raises(ValueError, match="CROSSNODE needs span"):
        describe(ring, "crossnode")


def test_names_with_markup_and_quotes(tmp_path: Path) -> None:
    """Each line is one JSON object all the same, with the name as it is."""
    nasty = '</script>"quoted"\\\n\u2028{{7*7}}'
    group = Group(nasty, 0, nasty, nasty, (0, 1))
    (ring,) = load(write_world(tmp_path / "run", [Call(0, 1, 0, MS, group=group)])).rings
    descriptions = describe(ring)
    (line,) = descriptions.lines().splitlines()
    assert json.loads(line) == next(iter(descriptions))
    assert json.loads(line)["group"] == nasty
    assert descriptions.frame()["group"].to_list() == [nasty]
