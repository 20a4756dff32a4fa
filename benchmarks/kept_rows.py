"""Rows of a benchmark that runs in parts: one JSON object a line, found again by its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def kept(path: Path | None) -> dict[str, dict[str, Any]]:
    """Return the rows that earlier runs have kept, by their names."""
    rows = {}
    for line in path.read_text().splitlines() if path is not None and path.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:  # the run was stopped while it wrote
            continue
        rows[row["name"]] = row
    return rows


def keep(path: Path | None, row: dict[str, Any]) -> None:
    """Add a row to the file, if there is one."""
    if path is not None:
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
