"""Real ranks that name what they do: the verdict says which phase makes a rank late."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from launch import launch

from rankcall.analysis.verdicts import diagnose
from rankcall.analysis.verdicts.facts import Relation
from rankcall.run.load import load

pytestmark = pytest.mark.multiproc

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "reasons.md"


def test_the_job_of_the_guide(tmp_path: Path) -> None:
    """Rank 1 is slow in a phase that has a name on all ranks."""
    section = GUIDE.read_text().partition("## Name what your program does")[2]
    (tmp_path / "tokenizes.py").write_text(
        re.findall(r"```python\n(.*?)```", section, re.DOTALL)[0]
    )
    ended = launch("run", "--nproc-per-node", "2", "tokenizes.py", cwd=tmp_path, timeout=200)
    assert ended.status == 0, ended.err
    (finding,) = diagnose(load(tmp_path / "rankcall-runs" / "latest")).findings
    (fact,) = (fact for fact in finding.facts if fact.relation is Relation.LATE_BECAUSE)
    assert finding.ranks == (1,)
    assert (fact.value("cause"), fact.value("name")) == ("phase", "tokenize")
