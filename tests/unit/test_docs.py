"""The documentation's examples run.

In a page's source, an HTML comment above a code block says what it is: ``<!-- file: NAME -->``
writes it to a file, ``<!-- run -->`` runs it (Python as a script; of a console block the lines that
begin with ``$``). A page's blocks share one working directory and run in order.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"<!-- (run|file: (?P<file>\S+)) -->\n+```(?P<language>\w+)\n(?P<text>.*?)```", re.DOTALL
)


def runnable() -> list[Path]:
    """Return the pages that have marked blocks."""
    return [page for page in PAGES if page.exists() and BLOCK.search(page.read_text())]


def commands(language: str, text: str) -> list[list[str]]:
    """Return what to run for a block."""
    if language == "python":
        return [[sys.executable, "-c", text]]
    lines = [line[2:] for line in text.splitlines() if line.startswith("$ ")]
    assert lines, f"a {language} block without a line that begins with '$ '"
    return [["bash", "-euo", "pipefail", "-c", line] for line in lines]


@pytest.mark.multiproc
@pytest.mark.timeout(900)  # a page of jobs with torchrun, on a busy machine
@pytest.mark.parametrize("page", runnable(), ids=lambda page: page.name)
def test_examples_run(page: Path, tmp_path: Path) -> None:
    """Every marked block of a page runs and exits with 0."""
    bin_dir = Path(sys.executable).parent
    env = {**os.environ, "PATH": f"{bin_dir}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    for block in BLOCK.finditer(page.read_text()):
        if block["file"]:
            (tmp_path / block["file"]).write_text(block["text"])
            continue
        for command in commands(block["language"], block["text"]):
            done = subprocess.run(
                command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300,
                check=False,
            )  # fmt: skip
            assert done.returncode == 0, f"{command[-1]}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link of a page is a file that exists."""
    targets = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text())
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing
