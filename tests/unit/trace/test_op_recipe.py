"""A new op is one row: the recipe "Add an op" in docs/recipes.md, followed with a toy.

The row goes into a copy of the package. A program that uses the copy issues the op, and looks for
it wherever ops are read: records, bandwidths, verdicts, traces and exports.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import rankcall

RECIPES = Path(__file__).parents[3] / "docs/recipes.md"

PROGRAM = """
import io, json, sys
import torch, torch.distributed as dist
import rankcall
from rankcall import trace
from rankcall.analysis.verdicts import diagnose
from rankcall.analysis.summary import summarise
from rankcall.export import write_jsonl
from rankcall.report.json import as_object
from rankcall.testing.synthetic import Op, Planted, synthetic_run

folder, capture = sys.argv[1:]
# torch gets an op that it does not have, of which no line of rankcall but the new row knows.
library = torch.library.Library("c10d", "FRAGMENT")
library.define(
    "halo_exchange_(Tensor(a!) output, Tensor input, "
    "__torch__.torch.classes.c10d.ProcessGroup process_group) -> ()"
)
def exchange(output, input, group):
    output.copy_(input[:2])
library.impl("halo_exchange_", exchange, "CPU")
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
sink = trace.MemorySink()
with rankcall.enable(f"{folder}/run", capture=capture), trace.enable("ALL", sinks=[sink]) as handle:
    torch.ops.c10d.halo_exchange_(torch.zeros(2), torch.ones(10), dist.group.WORLD.boxed())
    assert handle.flush(30)
dist.destroy_process_group()
(record,) = rankcall.load(f"{folder}/run").records.to_dicts()

program = [Op("halo_exchange", message_bytes=1 << 20)]
synthetic_run(f"{folder}/healthy", 4, 60, program=program)
healthy = rankcall.load(f"{folder}/healthy")
exported = io.BytesIO()
write_jsonl(healthy, exported)
planted = [Planted("mismatch", (2,), 40)]
synthetic_run(f"{folder}/hung", 4, 60, program=program, planted=planted)
findings = diagnose(rankcall.load(f"{folder}/hung")).findings
print(json.dumps({
    "record": {name: record[name] for name in ("op", "variant", "message_bytes", "status")},
    "trace": [(each["name"], each["message_size"]) for each in sink.descriptions],
    "report": as_object(summarise(healthy))["collectives"],
    "exported": json.loads(exported.getvalue().splitlines()[0])["op"],
    "verdict": [(found.kind, found.ranks) for found in findings],
}))
"""


def row_of_recipe() -> tuple[str, str]:
    """Return the file that the recipe names, and the row that it shows for it."""
    text = RECIPES.read_text().partition("## Add an op\n")[2].partition("\n## ")[0]
    file = re.search(r"`(\w+\.py)`", text)
    row = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert file is not None
    assert row is not None
    return file.group(1), row.group(1)


def with_row(folder: Path) -> Path:
    """Copy the package, and add the recipe's row; return the folder to import from."""
    copy = folder / "src"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(rankcall.__file__).parent, copy / "rankcall", ignore=ignored)
    file, row = row_of_recipe()
    table = (copy / "rankcall" / file).read_text()
    last = table.index("\n)", table.index("TABLE = ("))
    (copy / "rankcall" / file).write_text(f"{table[:last]}\n    {row.strip()},{table[last:]}")
    return copy


def run(folder: Path, capture: str) -> Any:
    """Run the program with the new row; return what it found."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), capture],
        env={**os.environ, "PYTHONPATH": str(with_row(folder))},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "capture",
    ["python", pytest.param("native", marks=[pytest.mark.slow, pytest.mark.timeout(700)])],
)
def test_a_new_op_is_one_row(tmp_path: Path, capture: str) -> None:
    """Records, traces, bandwidths, verdicts and exports know it; the recorder is compiled anew."""
    outputs = run(tmp_path, capture)
    assert outputs["record"] == {
        "op": "halo_exchange",
        "variant": "halo_exchange_",
        "message_bytes": 40,  # its input, as the row says
        "status": "completed",
    }
    assert outputs["trace"] == [["halo_exchange", 40]]
    (reported,) = outputs["report"]
    assert reported["op"] == "halo_exchange"
    assert reported["busbw_gbps"] == reported["algbw_gbps"]  # its factor is 1
    assert outputs["exported"] == "halo_exchange"
    assert outputs["verdict"][0] == ["mismatch", [2]]  # its members must agree in message_bytes
