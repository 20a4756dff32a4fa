"""The public names can be reached, old ones warn, and importing them costs nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

import rankcall
from rankcall import errors


def test_the_name_of_an_error_says_that_it_is_one() -> None:
    """test_public_names compares the names with the documentation."""
    ours = [name for name in errors.__all__ if name != "RankcallError"]
    assert all(name.endswith(("Error", "Timeout")) for name in ours)


@pytest.mark.parametrize("name", sorted({*errors._RENAMED, "BarrierTimeout", "PeerError"}))
def test_names_of_version_0_1_go_on_working(name: str) -> None:
    """An error of 0.1 is found at the top level and in ``errors``; each use warns at its line."""
    with pytest.warns(DeprecationWarning, match=rf"rankcall\.{name} is deprecated") as caught:
        old = getattr(rankcall, name)
    assert caught[0].filename == __file__
    assert old is getattr(errors, errors._RENAMED.get(name, name))
    if name in errors._RENAMED:
        with pytest.warns(DeprecationWarning, match=rf"errors\.{name} is deprecated") as caught:
            assert getattr(errors, name) is old
        assert caught[0].filename == __file__


def test_dir_lists_the_lazy_names() -> None:
    """Every public name can be reached, and dir() shows it."""
    for name in rankcall.__all__:
        assert getattr(rankcall, name) is not None
        assert name in dir(rankcall)


def test_import_has_no_side_effects() -> None:
    """Importing rankcall loads neither torch nor polars."""
    code = "import rankcall, sys; print([m for m in ('torch', 'polars') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True
    )
    assert done.stdout == "[]\n"


def test_a_watched_rank_loads_only_what_it_uses() -> None:
    """What every rank loads costs each of them memory: no tables, no other tools' evidence."""
    code = """
import sys, rankcall.job.attach, rankcall.watch, rankcall.watch, rankcall.c10d.parts
unused = ("rich", "polars", "jinja2", "rankcall.imports", "rankcall.export", "rankcall.cli",
          "rankcall.analysis.summary", "rankcall.report.formatting", "rankcall.rpc")
print([name for name in unused if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("command", ["run", "exec", "report", "diagnose", "top", "collect"])
def test_a_command_loads_no_torch(command: str) -> None:
    """``rankcall exec`` adds no seconds and no 190 MiB to a command that does not use torch."""
    code = f"import sys, rankcall.cli.{command}; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout == "False\n"
