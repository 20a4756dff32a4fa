"""The user's line behind a framework's: found by both captures, kept in the ring, shown first."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
from diagnosing import WORLD, diagnose_calls, together, unfinished
from worlds import MS, PAIR, Call, write_world

from rankcall.analysis.node_snapshot import decode, encode, node_snapshot_of
from rankcall.analysis.summary import summarise
from rankcall.analysis.verdicts.diagnosis import Diagnosis
from rankcall.analysis.verdicts.encoding import verdict_object
from rankcall.analysis.verdicts.finding import Finding
from rankcall.analysis.verdicts.kept import waits_that_ended
from rankcall.analysis.verdicts.verdict import Kept, Verdict
from rankcall.cli import main
from rankcall.export import export
from rankcall.report import json as json_report
from rankcall.report.html.first_screen import verdict_of_finding
from rankcall.report.standing import rows
from rankcall.report.top_lines import cells, lines_of
from rankcall.ring.tables import CallSite, UserLine, decode_site, encode_site
from rankcall.run.load import load

FRAMEWORK = """
import torch, torch.distributed as dist

def step(call):
    return call()

def sync(levels=0):
    if levels:
        return sync(levels - 1)
    dist.all_reduce(torch.ones(1))  # the framework's line

def backward(loss):
    loss.backward()

def spawn_main():
    sync()

SPAWN = compile(
    "def spawn_main():\\n  sync()", "/usr/lib/python3/multiprocessing/spawn.py", "exec"
)
"""
PROGRAM = """
import json, sys, sysconfig, threading
import torch, torch.distributed as dist
sys.path.insert(0, sys.argv[2])
import framework
import rankcall
from rankcall.capture import interface

folder_of = sysconfig.get_path  # folders of installed code may have names that are not UTF-8
sysconfig.get_path = lambda name: "/opt/\\udcff" if name == "scripts" else folder_of(name)
skipped = interface.skipped_folders
interface.skipped_folders = lambda: [*skipped(), "/opt/\\udcfe"]

class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        framework.sync()
        return gradient

dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
rankcall.enable(sys.argv[1], capture=sys.argv[3])
for _ in range(3):
    framework.sync()  # A
    framework.sync(40)  # B
    framework.step(lambda: dist.all_reduce(torch.ones(1)))  # C: no line of the framework's
thread = threading.Thread(target=framework.sync)  # D: nobody's line
thread.start()
thread.join()
space = {"sync": framework.sync}
exec(framework.SPAWN, space)
space["spawn_main"]()  # E: a child of multiprocessing's begins here
framework.backward(torch.ones(1, requires_grad=True) * 2)  # nothing is issued
loss = Reduce.apply(torch.ones(1, requires_grad=True)).sum()
framework.backward(loss)  # F: the line in Reduce.backward
rankcall.disable()
dist.destroy_process_group()
"""


def line_of(source: str, text: str) -> int:
    """Return the number of the line that has a text."""
    return next(n for n, line in enumerate(source.splitlines(), 1) if text in line)


@pytest.mark.parametrize("capture", ["native", "python"])
def test_both_captures_find_the_users_line(tmp_path: Path, capture: str) -> None:
    """A framework's line reached from two of the user's is two call sites, each with its text.

    A line of the user's own has no second line, nor has a thread that runs only installed code, nor
    what is behind the start of a multiprocessing child.
    """
    installed = tmp_path / "site-packages"
    installed.mkdir()
    (installed / "framework.py").write_text(FRAMEWORK, encoding="utf-8")
    program = tmp_path / "train.py"
    program.write_text(PROGRAM, encoding="utf-8")
    command = [sys.executable, str(program), str(tmp_path / "run"), str(installed), capture]
    subprocess.run(command, check=True, timeout=300, capture_output=True)
    (ring,) = load(tmp_path / "run").iter_rings()
    counts: dict[tuple[str, str], int] = {}
    text = {}
    for number in ring.records["call_site"].tolist():
        site = ring.tables.sites[number]
        key = str(site).replace(str(tmp_path), ""), site.user_line.replace(str(tmp_path), "")
        counts[key] = counts.get(key, 0) + 1
        text[key] = ring.tables.lines.get(number, "")
    framework = f"/site-packages/framework.py:{line_of(FRAMEWORK, 'the framework')}"

    def own(mark: str) -> str:
        return f"/train.py:{line_of(PROGRAM, mark)}"

    assert counts == {
        (framework, own("# A")): 3,
        (framework, own("# B")): 3,
        (own("# C"), ""): 3,
        (framework, ""): 2,  # D and E
        (framework, own("framework.sync()")): 1,
    }
    assert text[framework, own("# B")] == "framework.sync(40) # B"
    functions = {site.user.function for site in ring.tables.sites.values() if site.user}
    assert functions == {"<module>", "backward"}


SITE = CallSite("/lib/site-packages/fit.py", 340, "reduce", "all_reduce")
PAIR_SITE = replace(SITE, user=UserLine("/home/u/train.py", 12, "main"))


@pytest.mark.parametrize("site", [SITE, PAIR_SITE])
def test_a_ring_keeps_both_lines(site: CallSite) -> None:
    """A call site survives its side-table entry; one of an earlier version has no user's line."""
    assert decode_site(encode_site(site)) == site
    earlier = {"file": site.file, "line": 340, "function": "reduce", "api": "all_reduce"}
    assert decode_site(json.dumps(earlier).encode()) == SITE
    assert json.loads(encode_site(SITE)) == earlier  # which earlier versions can read


@pytest.mark.parametrize(
    "user", [7, "x", [], {"file": "a"}, {"file": "a", "line": -1, "function": "f"}]
)
def test_a_hostile_line_is_refused(user: object) -> None:
    """A damaged entry raises one of the errors after which a reader drops the rest."""
    payload = {"file": "a", "line": 1, "function": "f", "api": "", "user": user}
    with pytest.raises((ValueError, TypeError, KeyError)):
        decode_site(json.dumps(payload).encode())


def calls() -> list[Call]:
    """Three collectives through a framework; then one at another line, without rank 2."""
    early = [
        call for seq in (1, 2, 3) for call in together(seq, [0] * 4, seq * MS, WORLD, user_line=5)
    ]
    return [*early, *unfinished(WORLD, 4, (0, 1, 3), 5 * MS, line=340, user_line=12)]


@pytest.fixture
def hang(tmp_path: Path) -> Diagnosis:
    """Rank 2 does not come to a call that the others issued through a framework."""
    return diagnose_calls(tmp_path, calls())


def test_a_verdict_shows_the_users_line_first(hang: Diagnosis) -> None:
    """The summary, the evidence, the page and the JSON have both lines."""
    first = hang.findings[0]
    assert (first.kind, first.ranks) == ("missing", (2,))
    assert (first.call_site, first.user_line) == ("train.py:340", "/u/main.py:12")
    both = "/u/main.py:12 (through train.py:340)"
    assert f"at {both}" in first.summary
    assert any(both in line for line in first.evidence)
    waiting = verdict_of_finding(first).waiting
    assert waiting is not None
    assert (waiting[0], waiting[2]) == ("main.py:12 (train.py:340)", both)
    report = verdict_object(hang)
    assert report["findings"][0]["user_line"] == "/u/main.py:12"
    assert [rank["user_line"] for rank in report["ranks"]] == [
        *["/u/main.py:12"] * 2,
        "/u/main.py:5",
        "/u/main.py:12",
    ]


def test_the_tables_of_ranks_show_both_lines(hang: Diagnosis) -> None:
    """``diagnose`` and ``top`` name both files; ranks at two lines of the user's are two rows."""
    assert {row.line for row in rows(hang)} == {
        "main.py:12 (train.py:340)",
        "main.py:5 (train.py:1)",
    }
    shown = [cells(hang, line, 4)[4] for line in lines_of(hang)]
    assert set(shown) == {"main.py:12 (train.py:340)", "main.py:5 (train.py:1)"}


def test_nodes_exchange_both_lines(hang: Diagnosis) -> None:
    """A node's part of a snapshot has the user's lines after it was sent."""
    sent = decode(encode(node_snapshot_of(hang.snapshot)))
    assert sent.sites == hang.snapshot.sites
    assert any(site.user for site in sent.sites)


def test_a_wait_that_passed_is_known_by_both_lines() -> None:
    """A wait at one line of the user's says nothing of another that led to the same place."""
    finding = Finding("missing", (1,), call_site="fit.py:340", user_line="train.py:12")
    kept = Kept(Verdict("run", [finding]), Path("hangs/0001"), over_s=90.0)
    assert waits_that_ended([kept]) == {"train.py:12 (through fit.py:340)": 90.0}


def test_tables_have_a_column(tmp_path: Path) -> None:
    """``user_line`` is the user's line, and null for a line that is the user's own."""
    world = [*together(1, [0, 0], MS, PAIR, user_line=5), *together(2, [0, 0], MS, PAIR)]
    run = load(write_world(tmp_path / "run", world))
    frame = run.records.sort("rank", "seq")
    assert frame["call_site"].to_list() == ["train.py:1"] * 4
    assert frame["user_line"].to_list() == ["/u/main.py:5", None] * 2


def test_a_report_shows_both_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Terminal, JSON and page list the user's line first, with its function."""
    folder = write_world(tmp_path / "run", together(1, [0, 0], MS, PAIR, user_line=5))
    assert main(["report", str(folder)]) == 0
    both = "/u/main.py:5 (through train.py:1)"
    assert "main.py:5 (train.py:1)" in " ".join(capsys.readouterr().out.split())
    assert main(["report", str(folder), "-o", str(tmp_path / "page.html")]) == 0
    assert both in (tmp_path / "page.html").read_text(encoding="utf-8")
    (entry,) = json_report.as_object(summarise(load(folder)))["call_sites"]
    assert (entry["call_site"], entry["user_line"]) == ("train.py:1", "/u/main.py:5")
    assert (entry["function"], entry["user_function"]) == ("step", "main")


def unpacked(trace: bytes) -> bytes:
    """Return the packets of a Perfetto trace, unpacked by its protobuf definitions."""
    proto = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    packets = proto.Trace.FromString(trace).packet
    return b"".join(zlib.decompress(packet.compressed_packets) for packet in packets)


def test_exports_keep_the_users_line(tmp_path: Path) -> None:
    """JSON lines, Parquet, Perfetto and Kineto have it."""
    run = load(write_world(tmp_path / "run", together(1, [0, 0], MS, PAIR, user_line=5)))
    for kind in ("jsonl", "parquet", "perfetto", "kineto"):
        export(run, kind, tmp_path / kind)
    for frame in (pl.read_ndjson(tmp_path / "jsonl"), pl.read_parquet(tmp_path / "parquet")):
        assert frame["user_line"].to_list() == ["/u/main.py:5"] * 2
    assert b"/u/main.py:5" in unpacked((tmp_path / "perfetto").read_bytes())
    paths = sorted((tmp_path / "kineto").iterdir())
    assert len(paths) == 2
    for path in paths:
        trace = json.loads(gzip.decompress(path.read_bytes()))
        lines = [event.get("args", {}).get("User line") for event in trace["traceEvents"]]
        assert "/u/main.py:5" in lines


def test_dumps_tell_the_users_line(tmp_path: Path) -> None:
    """A stack of a dump has both lines, if the first one is an installed package's."""
    world = together(1, [0, 0], MS, PAIR, user_line=5, file="/x/site-packages/fit.py")
    run = load(write_world(tmp_path / "run", world))
    export(run, "flight-recorder", tmp_path / "dumps")
    frame = load(tmp_path / "dumps").records
    assert set(frame["call_site"]) == {"/x/site-packages/fit.py:1"}
    assert set(frame["user_line"]) == {"/u/main.py:5"}
