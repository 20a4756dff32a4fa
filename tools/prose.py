#!/usr/bin/env python3
"""Count the turns of phrase that make prose hard to read, in 1,000 words.

It reads four kinds of text: ``code`` (docstrings and comments of Python and C++), ``messages``
(string literals of at least four words outside docstrings), ``tests`` (docstrings and comments
below a directory named tests) and ``docs`` (Markdown without its code).

A marker is a pattern, not a verdict. A sentence may be bad without one, and now and then a marker
is right. Write for a tired reader, not for this program.

It is a report, and has no limits: a text that is written to pass them is no easier to read. The
exit status is 2 if a path does not exist or a file cannot be read, and else 0.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

KINDS = ("code", "messages", "tests", "docs")

_VERB = (
    "is|are|was|were|has|have|had|comes?|waits?|waited|goes|does|did|says?|said|tells?|told|reads?|"
    "writes?|needs?|asks?|asked|looks?|stays?|stands?|gets?|got|ends?|ended|arrives?|takes?|makes?|"
    "can|may|must|cannot|would|belongs?|holds?|keeps?|knows?|costs?"
)
_CLAUSE_START = r"(?:^|[.:;(] +|, )"
_CONDITION = (
    "it|they|one|nobody|none|no|nothing|that|this|these|those|a|an|all|some|both|neither|it's"
)

# Each marker with what to write instead.
MARKERS = {
    # "Who waits longer ..." -> "A rank that waits longer ..."; questions are left alone.
    "clause that starts with who or what": (
        rf"{_CLAUSE_START}(?:who|what|whose|whom|whoever|whatever) "
        rf"(?!is the difference)(?:\w+ ){{0,6}}?(?:{_VERB})\b(?![^.]*\?)"
    ),
    # "where there is none" -> "if there is none"; "Raises X where the name is taken" -> "if".
    "where instead of if": (
        rf"(?:{_CLAUSE_START}where|(?<!every)(?<!any)(?<!some)\bwhere) "
        rf"(?:there (?:is|are|was|were)|(?:{_CONDITION})\b)|"
        rf"\b(?:raised|raises?|none|null|false|empty),? (?:[^\s.;:]+ ){{0,6}}?where "
    ),
    # "that is none" -> "without one", "that is not valid".
    "that is none": (
        r"\b(?:that|which|what) (?:is|are|was|were) (?:none|no|not one)\b|\bis none\b|"
        r"\bnot one of its\b"
    ),
    # "is to be had" -> "is available".
    "to be had": r"\b(?:to be had|is had|to be found out)\b",
    # "in vain" -> "without success"; "by itself" -> say what makes it happen.
    "stock phrase": (
        r"\b(?:in vain|for good|by itself|of its own accord|as it stands|as they stand|"
        r"at all events|likewise|thereby|therein|whereof|whence|hence)\b"
    ),
    # "the so-manieth op" -> "the index of the op".
    "invented ordinal": r"\b(?:how-many-th|so-manieth|how manieth)\b",
    # "is told" -> name who says it.
    "passive telling": r"\b(?:is|are|was|were|be|been) (?:told|said|asked|looked|heard)\b",
    # "nobody waits" -> "no rank waits".
    "nobody": r"\b(?:nobody|anybody|everybody)\b",
    # "it, too, ..." -> "it also ...".
    "trailing too": r", too,|\b(?:so|such) (?:much|many|a one) (?:as|that)\b",
    # "somebody else's" -> name the owner.
    "unnamed owner": r"\b(?:somebody|someone) else's\b|\bthe other one's\b|\bothers' \w+\b",
}
# A marker may go over the end of a line; ``^`` is the beginning of a paragraph.
_PATTERNS = {
    name: re.compile(re.sub(r" \+?", r"\\s+", text), re.IGNORECASE)
    for name, text in MARKERS.items()
}

_DIRECTIVES = ("type:", "noqa", "fmt:", "mypy:", "pragma", "!")
_CPP_COMMENT = re.compile(
    r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'|//(?P<line>[^\n]*)|/\*(?P<block>.*?)\*/', re.DOTALL
)
_FEWEST_WORDS = 4


class Paragraph(NamedTuple):
    """A piece of prose, and the line of the file where it begins."""

    line: int
    text: str


class Hit(NamedTuple):
    """One marker in one file."""

    line: int
    marker: str
    text: str


@dataclass
class FileScore:
    """The words and the markers of one kind of text in one file."""

    path: Path
    kind: str
    words: int = 0
    hits: list[Hit] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Markers in 1,000 words."""
        return 1000 * len(self.hits) / max(1, self.words)


def python_prose(source: str) -> tuple[list[Paragraph], list[Paragraph]]:
    """Return the docstrings and comments of a Python file, and the sentences in its strings.

    Consecutive comment lines are one paragraph. In an f-string, ``{...}`` counts as the word x.
    Raises ``SyntaxError`` or ``tokenize.TokenError`` for a file that is not valid Python.
    """
    tree = ast.parse(source)
    prose, docstrings = _docstrings(tree)
    comment: list[str] = []
    begin = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            text = token.string.lstrip("#: ").strip()
            if not text.startswith(_DIRECTIVES):
                begin = begin if comment else token.start[0]
                comment.append(text)
        elif token.type != tokenize.NL and comment:
            prose.append(Paragraph(begin, "\n".join(comment)))
            comment = []
    return prose, [
        paragraph
        for paragraph in _strings(tree, docstrings)
        if len(_words(paragraph.text)) >= _FEWEST_WORDS
    ]


def _docstrings(tree: ast.Module) -> tuple[list[Paragraph], set[ast.AST]]:
    """Return the docstrings of a file, and the nodes that hold them."""
    prose, nodes = [], set[ast.AST]()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                constant = node.body[0]
                assert isinstance(constant, ast.Expr)
                nodes.add(constant.value)
                prose += [Paragraph(constant.lineno + line, part) for line, part in _split(text)]
    return prose, nodes


def _strings(node: ast.AST, left_out: set[ast.AST]) -> Iterator[Paragraph]:
    """Yield the string literals at and below a node, but those to leave out."""
    if node in left_out:
        return
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield Paragraph(node.lineno, node.value)
    elif isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else "x" for part in node.values]
        yield Paragraph(node.lineno, "".join(map(str, parts)))
    else:
        for child in ast.iter_child_nodes(node):
            yield from _strings(child, left_out)


def cpp_prose(source: str) -> list[Paragraph]:
    """Return the comments of a C++ file; consecutive comment lines are one paragraph."""
    prose: list[Paragraph] = []
    last = 0
    for match in _CPP_COMMENT.finditer(source):
        text = match["line"] if match["line"] is not None else match["block"]
        if text is None:
            continue  # a string literal, which may hold //
        line = source.count("\n", 0, match.start()) + 1
        text = text.strip("/* \n")
        begins_line = not source[source.rfind("\n", 0, match.start()) + 1 : match.start()].strip()
        if prose and begins_line and line == last + 1:
            prose[-1] = Paragraph(prose[-1].line, f"{prose[-1].text}\n{text}")
        else:
            prose.append(Paragraph(line, text))
        last = line + match[0].count("\n")
    return prose


def markdown_prose(source: str) -> list[Paragraph]:
    """Return the paragraphs of a Markdown file, without code blocks; inline code counts as x."""

    def blank_lines(match: re.Match[str]) -> str:
        return "\n" * match[0].count("\n")

    text = re.sub(r"^ *```.*?^ *```", blank_lines, source, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"`[^`\n]*`", "x", text)
    return [Paragraph(line + 1, part) for line, part in _split(text)]


def _split(text: str) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs of a text, each with the number of lines before it."""
    line = 0
    for part in re.split(r"(\n\s*\n)", text):
        if part.strip():
            yield line, part
        line += part.count("\n")


def _words(text: str) -> list[str]:
    return re.findall(r"[A-Za-z']+", text)


def paragraphs_of(path: Path) -> dict[str, list[Paragraph]]:
    """Return the prose of a file by kind; empty for a file that is neither code nor docs."""
    source = path.read_text(encoding="utf-8") if path.suffix in _SUFFIXES else ""
    kind = "tests" if "tests" in path.parts else "code"
    if path.suffix == ".py":
        prose, messages = python_prose(source)
        return {kind: prose} if kind == "tests" else {kind: prose, "messages": messages}
    if path.suffix in (".h", ".cpp"):
        return {kind: cpp_prose(source)}
    return {"docs": markdown_prose(source)} if path.suffix == ".md" else {}


_SUFFIXES = (".py", ".h", ".cpp", ".md")


def score(path: Path) -> list[FileScore]:
    """Return the words and markers of a file, one score for each kind of text in it."""
    scores = []
    for kind, paragraphs in paragraphs_of(path).items():
        file_score = FileScore(path, kind)
        for paragraph in paragraphs:
            file_score.words += len(_words(paragraph.text))
            file_score.hits += hits_in(paragraph)
        file_score.hits.sort()
        if file_score.words:
            scores.append(file_score)
    return scores


def hits_in(paragraph: Paragraph) -> list[Hit]:
    """Return the markers in a paragraph, each with the line of the file where it stands."""
    return [
        Hit(
            paragraph.line + paragraph.text.count("\n", 0, match.end()),
            marker,
            " ".join(match[0].split()).strip(".,:;("),
        )
        for marker, pattern in _PATTERNS.items()
        for match in pattern.finditer(paragraph.text)
    ]


def files_below(paths: list[Path]) -> list[Path]:
    """Return the files to read: those named, and those below directories, hidden ones left out."""
    files = []
    for root in paths:
        if root.is_dir():
            files += [
                path
                for path in sorted(root.rglob("*"))
                if path.suffix in _SUFFIXES
                and not any(part.startswith(".") for part in path.relative_to(root).parts)
            ]
        else:
            files.append(root)
    return files


def report(scores: list[FileScore], show: int) -> str:
    """Return the rate of each kind as text, and the markers of the ``show`` worst files."""
    lines = []
    for kind in KINDS:
        of_kind = [file_score for file_score in scores if file_score.kind == kind]
        if not of_kind:
            continue
        words, hits, rate = totals(of_kind)
        by_marker = Counter(hit.marker for file_score in of_kind for hit in file_score.hits)
        lines.append(f"{kind:9s}{rate:6.2f} markers in 1,000 words ({hits} in {words:,})")
        lines += [f"{count:12d}  {marker}" for marker, count in by_marker.most_common()]
    worst = sorted(
        (file_score for file_score in scores if file_score.hits),
        key=lambda file_score: -len(file_score.hits),
    )
    for file_score in worst[:show]:
        lines.append(f"{file_score.path}: {len(file_score.hits)} in {file_score.kind}")
        lines += [f"  {hit.line}: {hit.text}  [{hit.marker}]" for hit in file_score.hits]
    return "\n".join(lines)


def totals(scores: list[FileScore]) -> tuple[int, int, float]:
    """Return the words, the markers and the markers in 1,000 words of some files together."""
    words = sum(file_score.words for file_score in scores)
    hits = sum(len(file_score.hits) for file_score in scores)
    return words, hits, 1000 * hits / max(1, words)


def main(arguments: list[str] | None = None) -> int:
    """Count the markers below some paths, print them, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="prose.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="+", type=Path, help="files, or directories to search")
    parser.add_argument("--show", type=int, default=0, metavar="N", help="list the N worst files")
    options = parser.parse_args(arguments)
    scores: list[FileScore] = []
    for path in files_below(options.paths):
        try:
            scores += score(path)
        except (OSError, SyntaxError, tokenize.TokenError, UnicodeDecodeError) as error:
            print(f"prose.py: cannot read {path}: {error}", file=sys.stderr)
            return 2
    print(report(scores, options.show))
    return 0


if __name__ == "__main__":
    sys.exit(main())
