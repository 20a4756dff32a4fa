"""The pages about the code stay true: the files, names and threads that they mention exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import rankcall

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "rankcall"
PAGES = ("architecture.md", "recipes.md", "design/threads.md")
TEXT = "\n".join((ROOT / "docs" / page).read_text() for page in PAGES)
THREADS = (ROOT / "docs" / "design" / "threads.md").read_text()
SPANS = set(re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL)))
PATH = re.compile(r"(?P<path>\w[\w./]*(?:\.(?:py|h|cpp|md)|/))(?:::(?P<name>[\w.]+))?")
EXAMPLES = {"file.py::Name", "src/rankcall/trace/sinks/ops_count.py"}  # of the recipes
PATHS = sorted(span for span in SPANS - EXAMPLES if PATH.fullmatch(span))
DOTTED = sorted(span for span in SPANS if re.fullmatch(r"rankcall(\.\w+)+", span))

THREAD = re.compile(r'(?:Thread|BackgroundCall)\(.{0,120}?"(rankcall-[a-z-]+)"', re.DOTALL)


def file_at(path: str) -> Path | None:
    """Return what a path of the page means: below the package, or below the repository."""
    return next((base / path for base in (PACKAGE, ROOT) if (base / path).exists()), None)


def names_in(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """Return what a module or class defines or imports, with its definition."""
    names: dict[str, ast.stmt] = {}
    for statement in body:
        if isinstance(statement, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            names[statement.name] = statement
        for target in ast.walk(statement):
            if isinstance(target, ast.Name) and isinstance(target.ctx, ast.Store):
                names.setdefault(target.id, statement)
            if isinstance(target, ast.alias):
                names.setdefault((target.asname or target.name).split(".")[0], statement)
    return names


def is_defined(file: Path, dotted: str) -> bool:
    """Tell whether a file defines a name; in C++, whether it has the word."""
    source = file.read_text()
    if file.suffix != ".py":
        return re.search(rf"\b{dotted}\b", source) is not None
    body = ast.parse(source).body
    for name in dotted.split("."):
        definition = names_in(body).get(name)
        if definition is None:
            return False
        body = definition.body if isinstance(definition, ast.ClassDef) else []
    return True


def test_the_unit_tests_have_the_folders_of_the_package() -> None:
    """Who knows where a module is, finds its tests."""
    tests = ROOT / "tests" / "unit"
    folders = {file.parent.relative_to(tests) for file in tests.rglob("test_*.py")}
    assert len(folders) > 10
    for folder in folders:
        module = PACKAGE / folder
        assert module.is_dir() or module.with_suffix(".py").exists(), folder


@pytest.mark.parametrize("span", PATHS)
def test_each_path_exists(span: str) -> None:
    """A path names a file or folder, and what stands behind the colons is defined in the file."""
    match = PATH.fullmatch(span)
    assert match
    file = file_at(match["path"])
    assert file is not None, f"{match['path']} does not exist"
    if match["name"]:
        assert is_defined(file, match["name"]), f"{match['path']} does not define {match['name']}"


@pytest.mark.parametrize("span", DOTTED)
def test_each_dotted_name_exists(span: str) -> None:
    """A name such as ``rankcall.load`` is public, or a module, or an entry point's group."""
    parts = span.split(".")[1:]
    known = parts[0] in rankcall.__all__ or file_at("/".join(parts)) or file_at(f"{parts[0]}.py")
    sinks = (PACKAGE / "trace" / "sinks").glob("*.py")
    assert known or any(f'"{span}"' in file.read_text() for file in sinks)


def test_the_threads_are_those_that_the_code_starts() -> None:
    """The table of threads names every thread that the package starts, and the file that does."""
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|", THREADS, re.MULTILINE)
    listed = {
        (name, path)
        for threads, files in rows
        for name in re.findall(r"`(rankcall-[a-z-]+)`", threads)
        for path in re.findall(r"`([^`]+)`", files)
    }
    for name, path in sorted(listed):
        file = file_at(path)
        assert file is not None, path
        files = file.rglob("*.py") if file.is_dir() else [file]
        texts = [source_file.read_text() for source_file in files]
        is_started = any(name in THREAD.findall(text) or 'f"rankcall-{' in text for text in texts)
        assert is_started, f"{path} starts no thread {name}"
    started = {name for file in PACKAGE.rglob("*.py") for name in THREAD.findall(file.read_text())}
    missing = started - {name for name, _ in listed}
    assert not missing, f"threads that the table leaves out: {', '.join(sorted(missing))}"
