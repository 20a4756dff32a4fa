"""Real ranks that fail: the verdict quotes the first one's own words, whatever launched them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from launch import launch

from rankcall.analysis.verdicts import diagnose
from rankcall.analysis.verdicts.facts import Fact, Relation
from rankcall.run.load import load

pytestmark = pytest.mark.multiproc

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "last-words.md"


def quoted(folder: Path) -> list[Fact]:
    """Return what the verdict about the latest run quotes."""
    diagnosis = diagnose(load(folder / "rankcall-runs" / "latest"))
    facts = [fact for finding in diagnosis.findings for fact in finding.facts]
    return [fact for fact in facts if fact.relation is Relation.SAID_LAST]


def test_the_job_of_the_guide(tmp_path: Path) -> None:
    """A rank raises: its traceback is in the verdict, and all words still come out of stderr."""
    script = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)[0]
    (tmp_path / "fails.py").write_text(script)
    ended = launch("run", "--nproc-per-node", "2", "fails.py", cwd=tmp_path, timeout=200)
    assert ended.status == 1
    assert "  | ValueError: sample 3 is damaged" in ended.err
    assert "[rank1]: ValueError: sample 3 is damaged" in ended.err
    (fact,) = quoted(tmp_path)
    assert fact.ranks is not None
    assert fact.ranks.numbers == (1,)
    assert fact.value("text").startswith("Traceback (most recent call last):")


ABORTS = """
import ctypes
import torch, torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 1:
    throw = ctypes.CDLL("libstdc++.so.6")._ZSt20__throw_length_errorPKc
    throw.argtypes = [ctypes.c_char_p]
    throw(b"no such expert")
dist.all_reduce(torch.ones(1))
"""


@pytest.mark.slow
def test_a_cpp_exception_below_a_torchrun_that_exec_starts(tmp_path: Path) -> None:
    """A C++ exception that nothing catches aborts the rank: its ``what()`` is quoted."""
    (tmp_path / "aborts.py").write_text(ABORTS)
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    launch("exec", torchrun, "--nproc-per-node", "2", "aborts.py", cwd=tmp_path, timeout=200)
    (fact,) = quoted(tmp_path)
    assert fact.ranks is not None
    assert fact.ranks.numbers == (1,)
    assert "what():  no such expert" in fact.value("text")


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--redirects", "2"], ["--tee", "2"], ["--log-dir", "logs"]])
def test_torchruns_own_options_for_logs(tmp_path: Path, options: list[str]) -> None:
    """The user may send stderr into files: the words are quoted, and are where the user wants."""
    script = "import torch.distributed as dist\ndist.init_process_group('gloo')\n{}['lost']\n"
    (tmp_path / "fails.py").write_text(script)
    argv = ["--log-dir", "logs", *options, "--nproc-per-node", "1", "fails.py"]
    ended = launch("run", *argv, cwd=tmp_path, timeout=200)
    assert ended.status == 1
    (fact,) = quoted(tmp_path)
    assert "KeyError: 'lost'" in fact.value("text")
    logs = "".join(path.read_text() for path in (tmp_path / "logs").rglob("stderr.log"))
    assert ("KeyError: 'lost'" in logs) == (options[0] != "--log-dir")
