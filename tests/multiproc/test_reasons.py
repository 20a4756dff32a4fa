"""Real ranks that are late for a reason that was planted: the verdict names it, and no other."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from launch import Ended, launch

from rankcall.analysis.verdicts import diagnose
from rankcall.analysis.verdicts.facts import Fact, Relation
from rankcall.ring.layout import SAMPLE_COUNTERS
from rankcall.run.load import load

pytestmark = pytest.mark.multiproc

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "reasons.md"


def run(folder: Path, script: str, *options: str) -> Ended:
    """Run two ranks of a script."""
    (folder / "job.py").write_text(script)
    ended = launch("run", *options, "--nproc-per-node", "2", "job.py", cwd=folder, timeout=200)
    assert ended.status == 0, ended.err
    return ended


def reasons(folder: Path) -> tuple[str, list[Fact]]:
    """Return the kind of the verdict about the run, and the reasons that it names."""
    diagnosis = diagnose(load(folder / "rankcall-runs" / "latest"))
    named = (Relation.LATE_BECAUSE, Relation.ABSENT_BECAUSE)
    facts = [fact for finding in diagnosis.findings for fact in finding.facts]
    return diagnosis.kind, [fact for fact in facts if fact.relation in named]


def test_the_job_of_the_guide(tmp_path: Path) -> None:
    """A rank collects garbage in each step: as the guide shows it."""
    script = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)[0]
    run(tmp_path, script)
    kind, (fact,) = reasons(tmp_path)
    assert (kind, fact.value("cause"), fact.value("full")) == ("straggler", "gc", "yes")
    assert fact.ranks is not None
    assert fact.ranks.numbers == (1,)
    shown = launch("diagnose", cwd=tmp_path, env={"COLUMNS": "1000"}).out
    assert "collecting garbage (mostly full collections): that explains" in shown
    assert "Call gc.freeze() once everything is set up" in shown
    (finding,) = json.loads(launch("diagnose", "--json", cwd=tmp_path).out)["findings"]
    relations = [one["relation"] for one in finding["facts"]]
    assert relations.count("late_because") == 1


def rows_of_the_guide() -> list[tuple[str, str]]:
    """Return the causes that the guide has a program for, with the sentence of each."""
    section = GUIDE.read_text().partition("### See each of them")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([a-z_]+)` \| (.*) \|$", section, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize(("cause", "sentence"), rows_of_the_guide(), ids=lambda value: value[:12])
def test_each_row_of_the_guide(tmp_path: Path, cause: str, sentence: str) -> None:
    """Its program is late for that reason: the verdict names it with that sentence, and no other.

    On a busy machine, a rank that computes has no CPU for most of its time, which is true.
    """
    section = GUIDE.read_text().partition("### See each of them")[2]
    (script, *_) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    (tmp_path / "late.py").write_text(script)
    ended = launch("run", "--nproc-per-node", "2", "late.py", cause, cwd=tmp_path, timeout=400)
    assert ended.status == 0, ended.err
    kind, facts = reasons(tmp_path)
    named = [fact.value("cause") for fact in facts]
    if cause in ("checkpoint", "compilation") and named == ["no_cpu"]:
        return
    assert (kind, named) == ("straggler", [] if cause == "sleep" else [cause])
    shown = launch("diagnose", cwd=tmp_path, env={"COLUMNS": "1000"}).out
    told = re.findall(r"[Ii]t spent \S+ s of \S+ s (.*?): that explains", shown)
    assert told == ([] if cause == "sleep" else [sentence])


COLLECTS_FOR_LONG = """
import gc, os, time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
rank, total = dist.get_rank(), torch.ones(1)
objects = [[number] for number in range(100_000)] if rank else []
for step in range(6):
    while step == 5 and rank and not os.path.exists("rankcall-runs/latest/hangs/0001/verdict.json"):
        gc.collect()
    dist.all_reduce(total)
dist.destroy_process_group()
"""


def test_the_watcher_names_it_while_the_rank_is_missing(tmp_path: Path) -> None:
    """A rank collects garbage until the watcher has spoken."""
    ended = run(tmp_path, COLLECTS_FOR_LONG, "--hang-after", "4")
    text = " ".join(ended.err.split())
    assert re.search(r"Since its last call, it spent \S+ s of \S+ s collecting garbage", text), text


SHARES_A_CPU = """
import contextlib, os, subprocess, sys, time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
rank, total = dist.get_rank(), torch.ones(1)
busy = []
if rank:
    cpu = min(os.sched_getaffinity(0))
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(int(thread), {cpu})
    loop = f"import os; os.sched_setaffinity(0, {{{cpu}}})\\nwhile True: pass"
    busy = [subprocess.Popen([sys.executable, "-c", loop]) for _ in range(4)]
try:
    for step in range(12):
        until = time.thread_time() + 0.1
        while rank and time.thread_time() < until:
            pass
        dist.all_reduce(total)
finally:
    for each in busy:
        each.kill()
        each.wait()
dist.destroy_process_group()
"""


def test_a_rank_that_shares_its_cpu(tmp_path: Path) -> None:
    """Four busy loops on the CPU of rank 1: of each second it runs a fifth."""
    run(tmp_path, SHARES_A_CPU)
    kind, (fact,) = reasons(tmp_path)
    assert (kind, fact.value("cause")) == ("straggler", "no_cpu")
    assert fact.ranks is not None
    assert fact.ranks.numbers == (1,)


SLEEPS = """
import sys, time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
for step in range(12):
    time.sleep(0.2 * dist.get_rank())
    dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_rank_that_sleeps_has_no_reason(tmp_path: Path) -> None:
    """What explains nothing is not named; another program may take the CPU for real."""
    run(tmp_path, SLEEPS)
    _, facts = reasons(tmp_path)
    assert not any(fact.value("cause") in ("gc", "disk") for fact in facts)
    ring = load(tmp_path / "rankcall-runs" / "latest").rings[1]
    assert len(ring.samples) >= 2


@pytest.mark.slow
def test_without_proc_nothing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the system does not show is not known, and the job runs as before."""
    hidden = "import rankcall.capture.sampler as s; s._read = lambda path, parse: {}\n"
    run(tmp_path, hidden + SLEEPS)
    rings: Any = load(tmp_path / "rankcall-runs" / "latest").rings
    known = {int(bits) for ring in rings for bits in ring.samples["known"]}
    names = {name for bits in known for bit, name in enumerate(SAMPLE_COUNTERS) if bits >> bit & 1}
    # Collections, and what the native thread sees by itself.
    assert names - {"stopped_ns", "blocked_ns", "sleeping_ns"} == {"gc_ns", "full_gc_ns"}
    assert reasons(tmp_path)[1] == []
