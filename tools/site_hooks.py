"""What ``make docs`` adds to MkDocs: the files outside ``docs/`` that the pages link to.

It also fails the build if a page loads anything from the network: the site is read on machines
without one.

In the repository, a page links to ``../../examples/x.py``, and the change log links to
``docs/x.md``. The site has copies of these files, and the links lead to the copies.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
# Where a file of the repository is in the site.
PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
DEVICES = ("devices/README.md", "devices/docs/failure-handling.md")  # at the same paths
LOADED = re.compile(r"""<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=["']?https?:[^>]*>""")
logger = logging.getLogger("mkdocs.site_hooks")  # a warning here fails a strict build


def on_files(files: Files, config: Any) -> Files:
    """Add the pages and the examples from outside ``docs/``."""
    copies = {name: page for name, page in PAGES.items() if (ROOT / name).exists()}
    copies |= {name: name for name in DEVICES}
    copies |= {f"examples/{path.name}": f"examples/{path.name}" for path in _examples()}
    for source, target in copies.items():
        files.append(File.generated(config, target, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let the links that leave ``docs/`` lead to the copies."""
    if page.file.src_uri in PAGES.values():
        return re.sub(r"\]\(docs/", "](", markdown)
    up = "../" * page.file.src_uri.count("/")
    for name, target in PAGES.items():
        markdown = markdown.replace(f"](../{up}{name}", f"]({up}{target}")
    return markdown.replace(f"](../{up}examples/", f"]({up}examples/")


def on_page_content(html: str, **_: Any) -> str:
    """End a paragraph before an example with one colon: docstrings write two."""
    return html.replace("::</p>", ":</p>")


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Warn about everything that a browser would fetch from another host."""
    for tag in LOADED.findall(output):
        logger.warning("%s loads from the network: %s", page.file.src_uri, tag)
    return output


def _examples() -> list[Path]:
    return sorted((ROOT / "examples").glob("*.py"))
