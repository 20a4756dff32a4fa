"""The measuring programs find what is planted; ``shape.py``, of ``make lint``, has two limits."""

from __future__ import annotations

import json
from pathlib import Path

import pictures
import prose
import pytest
import shape

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Write a package with one circle of three modules, closed by imports that run late."""
    files = {
        "__init__.py": "",
        "_low.py": "import os\nLEVEL = 1\n",
        "first.py": "from toy import _low\nfrom toy.inner import second\n",
        "inner/__init__.py": "",
        "inner/second.py": "def late() -> None:\n    from . import third\n",
        "inner/third.py": (
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..first import x\n"
        ),
        "inner/low.py": "import toy._low\n",
        "inner/native.cpp": "int x;\nint y;\n",
    }
    root = tmp_path / "toy"
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_imports_in_functions_and_for_type_checkers_close_a_circle(package: Path) -> None:
    """A circle is found whatever kind of import closes it; its modules are counted."""
    figures, graph = shape.measure(package)
    assert figures.circles == [["toy.first", "toy.inner.second", "toy.inner.third"]]
    assert figures.modules_in_circles == 3
    way = shape.shortest_way_round(graph, figures.circles[0])
    assert way == ["toy.first", "toy.inner.second", "toy.inner.third", "toy.first"]


def test_the_size_of_a_package(package: Path) -> None:
    """Modules, lines and imports are counted; a name with and without underscore is repeated."""
    figures, graph = shape.measure(package)
    assert (figures.modules, figures.python_lines, figures.native_lines) == (7, 10, 2)
    assert graph["toy.first"] == {"toy._low", "toy.inner.second"}
    assert (figures.imports, figures.imports_per_1000_lines) == (5, 500.0)
    assert (figures.repeated_names, figures.longest_module) == (["low"], 3)


def test_vague_names_are_counted(package: Path) -> None:
    """A parameter or variable called ``each`` counts; a field, an attribute or a word does not."""
    (package / "inner/vague.py").write_text(
        "class Page:\n"
        "    who: str = ''\n"
        "def show(told, page):\n"
        "    # for each page\n"
        "    page.who = 'one'\n"
        "    return [each for each in told], lambda one: one\n"
    )
    figures, _ = shape.measure(package)
    assert figures.vague_names == [
        f"toy.inner.vague:{name}" for name in ("3 told", "6 each", "6 one")
    ]
    assert shape.main([str(package), "--max-vague", "3"]) == 0
    assert shape.main([str(package), "--max-vague", "2"]) == 1


def test_a_package_without_a_circle(package: Path) -> None:
    """A chain longer than the recursion limit is no circle, and does not end in an error."""
    chain = {str(number): frozenset({str(number + 1)}) for number in range(5000)}
    assert shape.circles_of({**chain, "5000": frozenset()}) == []
    assert shape.circles_of({**chain, "5000": frozenset({"0"})}) == [sorted([*chain, "5000"])]


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ([], 0),
        (["--max-in-circles", "3", "--max-vague", "0"], 0),
        (["--max-in-circles", "2"], 1),
    ],
)
def test_a_figure_above_its_limit_fails(
    package: Path, options: list[str], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit status is 1 above a limit, with a sentence that names the figure; 0 at it."""
    assert shape.main([str(package), *options]) == status
    printed = capsys.readouterr()
    assert "toy.first -> toy.inner.second -> toy.inner.third -> toy.first" in printed.out
    assert ("is above the limit" in printed.err) == bool(status)


def test_shape_prints_json(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --json the figures are one object on one line."""
    assert shape.main([str(package), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["modules"] == 7


def test_a_path_that_does_not_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both programs exit with 2, and name the path."""
    missing = tmp_path / "missing"
    assert shape.main([str(missing)]) == 2
    assert prose.main([str(missing / "x.py")]) == 2
    assert capsys.readouterr().err.count(str(missing)) >= 2


# A text with the marker, and one with the same words and without it.
PLANTED = [
    ("clause that starts with who or what", "Who holds the lock waits.", "The owner waits."),
    (
        "where instead of if",
        "It stops, where\n    there is no store.",
        "The line where the rank stops.",
    ),
    (
        "where instead of if",
        "Raises ``TypeError`` where the name is taken.",
        "Raises ``TypeError`` if the name is taken.",
    ),
    ("that is none", "Raise for a port that is none.", "Raise for an invalid port."),
    ("to be had", "No room is to be had.", "No room is free."),
    ("stock phrase", "It ends by itself.", "It ends at the deadline."),
    ("invented ordinal", "The so-manieth op.", "The index of the op."),
    ("passive telling", "The rank is told.", "The leader tells the rank."),
    ("nobody", "Nobody waits.", "No rank waits."),
    ("trailing too", "It, too, waits.", "It also waits."),
    ("unnamed owner", "It is somebody else's.", "It belongs to another rank."),
]


@pytest.mark.parametrize(("marker", "bad", "good"), PLANTED)
def test_each_marker_is_found(marker: str, bad: str, good: str) -> None:
    """The planted turn of phrase is found once, also over the end of a line; the other is not."""
    assert [hit.marker for hit in prose.hits_in(prose.Paragraph(1, bad))] == [marker]
    assert prose.hits_in(prose.Paragraph(1, good)) == []


def test_every_marker_is_planted() -> None:
    """No pattern goes without an example."""
    assert {marker for marker, _, _ in PLANTED} == set(prose.MARKERS)


SOURCE = '''"""One.

Nobody here.
"""
NAME = "nobody"  # A name, not a sentence.
# It waits
# in vain.
MESSAGE = f"nobody answered {NAME} in time"  # noqa: nobody


def function():
    """Nobody there."""
'''


def test_python_is_read_as_docstrings_comments_and_messages(tmp_path: Path) -> None:
    """Each is read once, with the lines of its markers; names and directives are left out."""
    path = tmp_path / "module.py"
    path.write_text(SOURCE)
    code, messages = prose.score(path)
    assert (code.kind, [hit.line for hit in code.hits]) == ("code", [3, 7, 12])
    assert (messages.kind, [hit.line for hit in messages.hits]) == ("messages", [8])


def test_the_kind_of_a_text(tmp_path: Path) -> None:
    """Tests, C++ comments and Markdown prose count apart; strings and code blocks do not count."""
    texts = {
        "tests/test_it.py": '"""Nobody."""\nX = "nobody is asked about this"\n',
        "it.h": 'int x;  // nobody\n/* in\n   vain */\nauto y = "// nobody is asked";\n',
        "it.md": "Nobody.\n\n```\nnobody\n```\n\nThe name `nobody`\nwaits in vain.\n",
        "it.txt": "nobody",
    }
    marks = {}
    for name, text in texts.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        marks[name] = [
            (file_score.kind, [hit.line for hit in file_score.hits])
            for file_score in prose.score(path)
        ]
    assert marks == {
        "tests/test_it.py": [("tests", [1])],
        "it.h": [("code", [1, 3])],
        "it.md": [("docs", [1, 8])],
        "it.txt": [],
    }


def test_the_rate_of_each_kind_is_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No rate fails; --show prints the file, the line and the marker."""
    (tmp_path / "it.md").write_text("Nobody. " + 9 * "Word. ")
    assert prose.main([str(tmp_path), "--show", "1"]) == 0
    printed = capsys.readouterr()
    assert "docs     100.00 markers in 1,000 words (1 in 10)" in printed.out
    assert "  1: Nobody  [nobody]" in printed.out


def test_the_package_itself() -> None:
    """The real package is measured: ``make lint`` passes the limits that stand in the Makefile."""
    (line,) = (line for line in MAKEFILE.splitlines() if "tools/shape.py" in line)
    assert shape.main(line.split("tools/shape.py")[1].split()) == 0


def test_the_demo_of_readme_is_a_reports_beginning() -> None:
    """Only the text of the demo's report is replaced, and only by one that names its slow rank."""
    assert f"--slow-rank {pictures.RANK} {' '.join(pictures.DEMO)}" in MAKEFILE
    readme = (ROOT / "README.md").read_text()
    report = "Rank 2 (a) came last.\nWaiting for it cost much.\n\nWhat ran where\n  ranks 4\n"
    made = pictures.with_text(readme, report)
    assert "like this:\n\n```text\nRank 2 (a) came last.\nWaiting for it cost much.\n```\n" in made
    before, after = (text.partition("like this:")[2].partition("```\n") for text in (readme, made))
    assert before[2].partition("```")[2] == after[2].partition("```")[2]
    with pytest.raises(SystemExit, match="does not begin with rank 2"):
        pictures.with_text(readme, report.replace("Rank 2", "Rank 3"))
    with pytest.raises(SystemExit, match="no text"):
        pictures.with_text("# rankcall\n", report)
