"""The documentation's examples run.

In a page's source, an HTML comment above a code block says what it is: ``<!-- file: NAME -->``
writes it to a file, ``<!-- run -->`` runs it (Python as a script; of a console block the lines that
begin with ``$``). A page's blocks share one working directory and run in order.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from inspect import ismodule
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks

import rankcall
from rankcall.analysis.verdicts import KINDS

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"<!-- (run|file: (?P<file>\S+)) -->\n+```(?P<language>\w+)\n(?P<text>.*?)```", re.DOTALL
)

DEVICES = ("devices/README.md", "devices/docs/failure-handling.md")
# Pages whose jobs take long, and of which other tests run the like.
LONG = ("attach.md", "carry-on.md", "evidence.md", "frameworks.md", "report.md")
JOB = re.compile(r"torchrun --nproc-per-node (?P<ranks>\d+)(?: --standalone)? (?P<script>\w+\.py)")


def runnable() -> list[Path]:
    """Return the pages that have marked blocks."""
    return [page for page in PAGES if page.exists() and BLOCK.search(page.read_text())]


def has_jobs(page: Path) -> bool:
    """Return whether torchrun starts a script of the page, without an option of its own."""
    lines = (line.removeprefix("$ ") for line in page.read_text().splitlines())
    return any(JOB.fullmatch(line) for line in lines)


def cases() -> list[Any]:
    """Return how each page runs: as it is written, or with forked ranks instead of torchrun's.

    A forked rank has imported torch already. test_attach.py has near twins of attach.md's jobs.
    """
    written = [
        pytest.param(
            page,
            False,
            marks=pytest.mark.slow if has_jobs(page) or page.name in LONG else (),
            id=page.name,
        )
        for page in runnable()
    ]
    forked = [
        pytest.param(page, True, id=f"{page.name}-forked") for page in runnable() if has_jobs(page)
    ]
    return written + forked


def commands(language: str, text: str) -> list[list[str]]:
    """Return what to run for a block."""
    if language == "python":
        return [[sys.executable, "-c", text]]
    lines = [line[2:] for line in text.splitlines() if line.startswith("$ ")]
    assert lines, f"a {language} block without a line that begins with '$ '"
    return [["bash", "-euo", "pipefail", "-c", line] for line in lines]


@pytest.mark.multiproc
@pytest.mark.timeout(900)  # a page of jobs with torchrun, on a busy machine
@pytest.mark.parametrize(("page", "is_forked"), cases())
def test_examples_run(
    page: Path, is_forked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every marked block of a page runs and exits with 0."""
    bin_dir = Path(sys.executable).parent
    env = {**os.environ, "PATH": f"{bin_dir}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    monkeypatch.chdir(tmp_path)
    for block in BLOCK.finditer(page.read_text()):
        if block["file"]:
            (tmp_path / block["file"]).write_text(block["text"])
            continue
        for command in commands(block["language"], block["text"]):
            job = JOB.fullmatch(command[-1])
            if is_forked and job:
                run_ranks(tmp_path / job["script"], int(job["ranks"]), init=False)
                continue
            done = subprocess.run(
                command,
                cwd=tmp_path,
                env=env,
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
            assert done.returncode == 0, f"{command[-1]}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link of a page leads to a file, and to a heading in it if it names one."""
    for target, anchor in re.findall(
        r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text()
    ):
        file = page.parent / target if target else page
        assert file.exists(), f"{target} does not exist"
        if anchor:
            assert anchor in headings(file), f"{target or page.name} has no heading #{anchor}"


def headings(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and MkDocs make them for plain text."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    words = [re.sub(r"[^\w\s-]", "", title).strip().lower() for title in titles]
    return {re.sub(r"\s+", "-", text) for text in words}


def test_the_site_has_every_page() -> None:
    """The navigation of the site lists every page, and every public module has an API page."""
    listed = set(re.findall(r"(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    # Copied by tools/site_hooks.py.
    from_root = {"changelog.md", "contributing.md", *DEVICES}
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert listed - from_root == pages
    modules = {name for name in rankcall.__all__ if ismodule(getattr(rankcall, name))}
    assert {f"api/{name}.md" for name in modules | {"errors", "testing"}} <= pages


def test_the_list_for_assistants_has_every_guide() -> None:
    """llms.txt links pages that exist, and no guide is missing."""
    text = (ROOT / "docs/llms.txt").read_text()
    linked = set(re.findall(r"\]\((\S+\.md)\)", text))
    assert {f"guides/{page.name}" for page in (ROOT / "docs/guides").glob("*.md")} <= linked
    assert [page for page in linked if not (ROOT / "docs" / page).is_file()] == []


REPOSITORY_PATH = re.compile(
    r"`((?:tests|benchmarks|tools|examples|docs)/[\w./-]+?\w|[\w/]+/\w+\.(?:py|h|cpp))(?:::[\w.]+)?`"
)
TEST_NAME = re.compile(r"`(?:[\w/.]+::)?(test_\w+)(?:\.py)?`")


# test_architecture.py looks at every path of the pages about the code.
ABOUT_CODE = ("architecture.md", "recipes.md", "threads.md")


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name not in ABOUT_CODE], ids=lambda page: page.name
)
def test_named_files_and_tests_exist(page: Path) -> None:
    """A page that names a file of the repository, or a test as its proof, names one that exists."""
    text = page.read_text()
    bases = (ROOT, ROOT / "src/rankcall", ROOT / "tests/unit")
    gone = [
        path
        for path in REPOSITORY_PATH.findall(text)
        if not any((base / path).exists() for base in bases)
    ]
    assert not gone, f"{page.name} names files that do not exist: {', '.join(gone)}"
    unknown = set(TEST_NAME.findall(text)) - names_of_tests(ROOT / "tests")
    if unknown:  # it may be one of PyTorch's own
        (torch,) = find_spec("torch").submodule_search_locations
        unknown -= names_of_tests(Path(torch) / "testing/_internal/distributed")
    assert not unknown, f"{page.name} names tests that do not exist: {', '.join(unknown)}"


@functools.cache
def names_of_tests(folder: Path) -> set[str]:
    """Return the names of all test files and test functions below a folder."""
    files = list(folder.rglob("*.py"))
    functions = (re.findall(r"def (test_\w+)", file.read_text()) for file in files)
    return {file.stem for file in files}.union(*functions)


def test_every_kind_of_verdict_is_explained() -> None:
    """A reader of the JSON finds each ``kind`` in its page."""
    page = (ROOT / "docs" / "diagnose-json.md").read_text()
    assert all(f"| `{kind.kind}` |" in page for kind in KINDS)
