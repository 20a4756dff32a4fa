"""A new sink is one file: the recipe "Add a sink" in docs/recipes.md, followed with a toy."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rankcall import trace
from rankcall.trace import sinks

RECIPES = Path(__file__).parents[3] / "docs/recipes.md"


def recipe() -> tuple[str, str]:
    """Return the file that the recipe names, and the code that it shows for it."""
    text = RECIPES.read_text().partition("## Add a sink\n")[2].partition("\n## ")[0]
    code = re.search(r"```python\n# src/rankcall/(trace/sinks/\w+\.py)\n(.*?)```", text, re.DOTALL)
    assert code is not None
    return code.group(1), code.group(2)


@pytest.fixture
def toy_sink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Put the recipe's file where sinks are, and return its name."""
    file, code = recipe()
    folder = tmp_path / "sinks"
    folder.mkdir()
    (folder / Path(file).name).write_text(code)
    monkeypatch.setattr(sinks, "__path__", [*sinks.__path__, str(folder)])
    yield Path(file).stem
    sys.modules.pop(f"{sinks.__name__}.{Path(file).stem}", None)


def test_a_new_sink_is_one_file(
    toy_sink: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name is known to ``enable`` and listed in the error for a wrong one; it gets every op."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"no trace sink 'csv': one of .*{toy_sink}.*"):
        trace.enable("ALL", sinks=["csv"])
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        with trace.enable("ALL", sinks=[toy_sink]) as handle:
            for _ in range(3):
                dist.all_reduce(torch.ones(4))
            dist.barrier()
            assert handle.flush(30)
    finally:
        dist.destroy_process_group()
    counts = json.loads((tmp_path / "ops.rank-0.json").read_text())
    assert counts == {"all_reduce": 3, "barrier": 1}
