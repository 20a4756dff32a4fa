"""Pages that show other nodes: requests through the store, the answers, and the page's words."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from liveruns import HUNG_S, give_to

from rankcall.analysis.snapshot import ALIVE, GONE, RankState, Snapshot, no_calls
from rankcall.analysis.verdicts import diagnose
from rankcall.analysis.verdicts.finding import Finding
from rankcall.job import viewers
from rankcall.job.other_nodes import Exchange, Unreachable, members_from
from rankcall.job.viewers import LINGER_S, NodeViews, Questions
from rankcall.problems import texts
from rankcall.ring.layout import Header, read_header
from rankcall.run.load import load
from rankcall.run.paths import live_dir, make_live_dir
from rankcall.run.settle import settle
from rankcall.run.views import (
    ANSWERS,
    VIEWER,
    VIEWS,
    Answers,
    NodeAnswer,
    ViewerFile,
    note_viewer,
    read_answers,
)
from rankcall.serve import other_nodes
from rankcall.serve.live_run import LIVE, LiveRun, Look
from rankcall.testing.model import Planted
from rankcall.testing.simulated_store import (
    Mark,
    Process,
    Simulation,
    Sleep,
    Steps,
    Violation,
    World,
)
from rankcall.testing.synthetic import BOOT_NS, synthetic_run

DEADLINE_S = 200.0

# --- the protocol ---


def node(rank: int, turns: int) -> Process:
    """Return a node of one rank that answers each question that it sees with its number."""

    def start() -> Steps[None]:
        exchange, questions, last = Exchange(lambda: None), Questions(""), 0
        for _ in range(turns):
            yield from exchange._ask([(rank, f"node-{rank}", 1)])
            if exchange.question:
                question = yield from questions.question()
                if question > last:
                    yield from questions.answer(exchange.number, question, b"%d" % question)
                    last = question
            yield Sleep(1)

    return Process(f"node-{rank}", start)


def viewer(rank: int, times: int, kind: type[Questions] = Questions) -> Process:
    """Return a node of one rank that asks the others."""

    def start() -> Steps[None]:
        questions = kind("")
        for _ in range(times):
            answers = yield from questions.ask({rank}, 8)
            seen = tuple((answer.members[0][0], answer.data) for answer in answers)
            yield Mark("seen", (questions._first, seen))
            yield Sleep(1)
        yield Mark("asked", times)

    return Process(f"viewer-{rank}", start)


def check_answers(world: World, name: str, mark: Mark, earlier: tuple[Mark, ...]) -> None:
    """Check that no answer is older than the first question of its viewer."""
    if mark.name == "seen":
        first, seen = mark.value
        for _, data in seen:
            assert not data or int(data) >= first, f"{name} has an answer to an earlier viewer"
    else:
        assert len(earlier) == mark.value


@pytest.mark.parametrize("deaths", [0, 1])
def test_every_order_of_a_question_and_its_answer(deaths: int) -> None:
    """In every order of requests, a viewer gets an answer of its own time, or none."""
    explored = Simulation(
        [viewer(0, 2), node(1, 2)], on_mark=check_answers, deaths=deaths, ticks=2
    ).explore()
    assert explored.ends


def test_viewers_on_two_nodes_and_a_death() -> None:
    """A second viewer gets no answer to the first; each asks as often as it wants to."""
    processes = [viewer(0, 2), viewer(3, 3), node(1, 6), node(2, 6)]
    Simulation(processes, on_mark=check_answers, deaths=1, ticks=20).search(600, seed=5)


def test_an_old_answer_is_found_by_the_simulation() -> None:
    """If answers to earlier viewers were shown, the simulation would find it."""

    class Careless(Questions):
        def _newest(self, number: int, now: float) -> Any:
            answer = super()._newest(number, now)
            raw, _ = self._answered.get(number, (b"", now))
            return answer.__class__(answer.members, 0.0, 0.0, raw.partition(b"\n")[2])

    processes = [viewer(0, 2), viewer(3, 2, Careless), node(1, 6)]
    with pytest.raises(Violation, match="earlier viewer"):
        Simulation(processes, on_mark=check_answers, ticks=20).search(2000, seed=5)


# --- two nodes that share nothing but the store ---


@dataclass
class Node:
    """One node: its run directory, and the part of its leader in what pages show."""

    run: Path
    headers: dict[int, Header]
    store: Any
    requests: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Make the leader."""
        self.exchange = Counted(self)
        self.views = NodeViews(self.run, self.exchange, Counted(self), "", 30.0)

    def poll(self) -> None:
        """Poll the bell, as the watcher does seldom."""
        self.exchange.asked([(rank, h.host, h.pid) for rank, h in sorted(self.headers.items())])

    def turn(self, now: float) -> None:
        """Take a turn."""
        self.views.turn(self.headers, now)


class Counted(Exchange):
    """Counts the times at which a node makes requests."""

    def __init__(self, node: Node) -> None:
        super().__init__(lambda: node.store, retry_s=0.0)
        self._node = node

    def perform(self, limit_s: float, steps: Steps[Any]) -> Any:
        """Count."""
        self._node.requests.append(steps.__qualname__)
        return super().perform(limit_s, steps)


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Node]]:
    """Return two nodes of four live ranks each; rank 2 hangs the job."""
    from torch.distributed import HashStore

    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setenv("RANKCALL_SHM", str(memory))
    import time

    offset = time.monotonic_ns() - BOOT_NS - HUNG_S * 10**9
    planted = Planted("missing", (2,), 41)
    whole = tmp_path / "whole"
    synthetic_run(
        whole, 8, 60, hosts=2, planted=planted, hung_s=HUNG_S, clock_offsets_ns=[offset, offset]
    )
    owner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    give_to(whole, owner.pid)
    shared, made = HashStore(), []
    by_host: dict[str, dict[int, Path]] = {}
    for path in sorted((whole / "rings").iterdir()):
        header = read_header(path)
        assert header is not None
        by_host.setdefault(header.host, {})[header.rank] = path
    for host, rings in by_host.items():
        run = tmp_path / host
        (run / "rings").mkdir(parents=True)
        headers = {}
        for rank, path in rings.items():
            copy = run / "rings" / path.name
            copy.write_bytes(path.read_bytes())
            copied_header = read_header(copy)
            assert copied_header is not None
            headers[rank] = copied_header
        make_live_dir(run)
        made.append(Node(run, headers, shared))
    yield made
    owner.kill()
    owner.wait(DEADLINE_S)


def causes(found: Any) -> list[Any]:
    """Return what findings say, without the times, which go on."""
    return [
        (
            finding.kind,
            finding.ranks,
            finding.victims,
            finding.op,
            finding.seq,
            finding.call_site,
            finding.confidence,
        )
        for finding in found.findings
    ]


def exchanged(nodes: list[Node], page: LiveRun) -> Look:
    """Let the page look, the leaders ask and answer, and the page look again."""
    here, there = nodes
    for node in nodes:
        node.poll()
    page.look()
    here.turn(100.0)
    there.poll()
    there.turn(100.0)
    page.look()
    here.turn(102.0)
    return page.look()


def test_the_page_of_one_node_shows_all_ranks(nodes: list[Node], tmp_path: Path) -> None:
    """Each node's page has every rank, and the verdict of ``diagnose`` with all records."""
    expected = diagnose(load(tmp_path / "whole"))
    for pair in (nodes, nodes[::-1]):
        look = exchanged(pair, LiveRun(pair[0].run))
        assert look.diagnosis is not None
        assert [state.rank for state in look.diagnosis.snapshot.ranks if state.blind] == []
        assert [state.host for state in look.diagnosis.snapshot.ranks] == [
            state.host for state in expected.snapshot.ranks
        ]
        assert causes(look.diagnosis) == causes(expected) != []
        assert look.diagnosis.snapshot.problems == []
        for node in pair:  # another viewer comes to the other node
            node.__post_init__()


def test_nothing_is_asked_while_nobody_looks(nodes: list[Node]) -> None:
    """Without a viewer, turns make no request; after the last look, they end."""
    for node in nodes:
        node.poll()
        node.requests.clear()
    for second in range(60):
        for node in nodes:
            node.turn(100.0 + second)
    assert [node.requests for node in nodes] == [[], []]
    exchanged(nodes, LiveRun(nodes[0].run))
    for second in range(103, 300):
        for node in nodes:
            node.turn(float(second))
    for node in nodes:
        node.requests.clear()
        node.turn(400.0)
        assert node.requests == []


def test_a_question_asks_each_node_once(nodes: list[Node]) -> None:
    """Turns within a second ask once, and a node answers a question once."""
    here, there = nodes
    exchanged(nodes, LiveRun(here.run))
    for node in nodes:
        node.requests.clear()
    note_viewer(here.run)
    for step in range(4):
        here.turn(110.0 + step / 4)
    for step in range(40):
        there.turn(110.0 + step / 4)
    assert here.requests == ["Questions.ask"]
    assert there.requests.count("Questions.answer") == 1


def test_a_node_that_does_not_answer_is_named(
    nodes: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named when it is late; its ranks are shown for a while, and then as not known."""
    here, _ = nodes
    page = LiveRun(here.run)
    exchanged(nodes, page)
    for at, known in ((12.0, True), (other_nodes.KNOWN_S + 1.0, False)):
        with monkeypatch.context() as patched:
            patched.setattr(other_nodes, "age_s", lambda answers, at=at: at)
            look = page.look()
        assert look.diagnosis is not None
        snapshot = look.diagnosis.snapshot
        assert [state.blind for state in snapshot.ranks] == [False] * 4 + [not known] * 4
        assert {state.host for state in snapshot.ranks[4:]} == {"node-1"}
        assert any(
            f"has not asked the other nodes for {at:.0f} s" in p for p in texts(snapshot.problems)
        )
        assert any(
            f"node-1 (rank 4-7) has not answered for {at:.0f} s" in p
            for p in texts(snapshot.problems)
        )
        assert look.diagnosis.findings[0].ranks == (2,)


def test_a_node_that_has_not_answered_yet(nodes: list[Node]) -> None:
    """Before its first answer, the page says so, and blames none of its ranks."""
    here, there = nodes
    there.poll()
    here.poll()
    page = LiveRun(here.run)
    page.look()
    here.turn(100.0)
    look = page.look()
    assert look.diagnosis is not None
    snapshot = look.diagnosis.snapshot
    assert [state.blind for state in snapshot.ranks] == [False] * 4 + [True] * 4
    assert not any(state.unheard for state in snapshot.ranks)
    assert "node-1 (rank 4-7) has not answered yet" in snapshot.problems[0].text
    assert "every 30 s" in snapshot.problems[0].text


def test_a_store_that_is_gone(nodes: list[Node]) -> None:
    """The page says that the store does not answer, keeps the ranks for a while, and goes on."""
    here, _ = nodes
    page = LiveRun(here.run)
    exchanged(nodes, page)
    here.store = None
    page.look()
    here.turn(110.0)
    look = page.look()
    assert look.state == LIVE
    assert look.diagnosis is not None
    (problem,) = texts(look.diagnosis.snapshot.problems)
    assert problem.startswith("the other nodes cannot be asked: the job's store does not answer")
    assert not any(state.blind for state in look.diagnosis.snapshot.ranks)


def test_an_answer_from_before_the_wait_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Living ranks are not named by a wait that is younger than their answer; dead ones are."""
    monkeypatch.setattr(other_nodes, "age_s", lambda answers: 0.5)
    members = ((2, "node-b", 12), (3, "node-b", 13))
    page = other_nodes.OtherNodes()
    page._answers = Answers(0, 0, 1.0, nodes=(NodeAnswer(members, 2.5, 9.0, b"data"),))
    states = [RankState(rank, state=ALIVE) for rank in range(3)] + [RankState(3, state=GONE)]
    snapshot = Snapshot(states, no_calls(), [], [], [], [])
    for ranks, since_s, outdated in (
        ((2,), 3.9, True),
        ((2,), 4.1, False),
        ((1, 2), 3.9, True),
        ((1,), 0.1, False),
        ((3,), 0.1, False),
        ((), 0.1, False),
    ):
        finding = Finding("missing", ranks, since_s=since_s)
        assert page.is_outdated(finding, snapshot) is outdated, (ranks, since_s)


def test_no_watcher_on_this_node(nodes: list[Node]) -> None:
    """Without a leader, the page shows its own ranks and says why the others are not there."""
    now = [0.0]
    page = LiveRun(nodes[0].run)
    page._others = other_nodes.OtherNodes(clock=lambda: now[0])
    page.look()
    now[0] = 12.0
    look = page.look()
    assert look.diagnosis is not None
    (problem,) = texts(look.diagnosis.snapshot.problems)
    assert "ranks 4-7, on other nodes" in problem
    assert "has not answered for 12 s" in problem


def test_forged_answers_are_left_out(nodes: list[Node]) -> None:
    """A file or an answer that is damaged, and a link, count as no answer."""
    here, there = nodes
    page = LiveRun(here.run)
    exchanged(nodes, page)
    there.exchange.perform(5.0, Questions("").answer(there.exchange.number, 10**9, b"\x80nonsense"))
    here.turn(110.0)
    page.look()
    here.turn(112.0)
    look = page.look()
    assert look.diagnosis is not None
    assert [state.blind for state in look.diagnosis.snapshot.ranks] == [False] * 4 + [True] * 4
    path = live_dir(here.run) / VIEWS / ANSWERS
    for text in (b"", b"[]\n", b"{}\n", b'{"nodes": [{"bytes": "x"}]}\n', b"[" * 100_000 + b"\n"):
        path.write_bytes(text)
        path.chmod(0o600)
        assert read_answers(here.run) is None
        assert page.look().state == LIVE
    path.unlink()
    path.symlink_to("/etc/hostname")
    assert read_answers(here.run) is None


def test_the_files_go_with_the_rings(nodes: list[Node], tmp_path: Path) -> None:
    """Nothing of what page and leader told each other is left in memory once the job is over."""
    run = nodes[0].run
    exchanged(nodes, LiveRun(run))
    assert (live_dir(run) / VIEWS / VIEWER).exists()
    assert (live_dir(run) / VIEWS / ANSWERS).exists()
    settle(run)
    assert not live_dir(run).exists()
    note_viewer(run)
    assert not live_dir(run).exists()


def test_a_viewer_is_there_for_some_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look counts from when the leader sees it; no wall clock has a part in that."""
    monkeypatch.setenv("RANKCALL_SHM", str(tmp_path))
    run = tmp_path / "run"
    run.mkdir()
    file = ViewerFile(run)
    assert not file.is_watched(0.0)
    make_live_dir(run)
    note_viewer(run)
    assert [file.is_watched(now) for now in (10.0, 14.9, 15.1, 100.0)] == [True, True, False, False]
    note_viewer(run)
    assert file.is_watched(101.0)


def test_a_store_that_fails_once_is_asked_again(nodes: list[Node]) -> None:
    """A leader that could not ask, or answer, does so at its next turn."""
    here, there = nodes
    shared = here.store
    exchanged(nodes, LiveRun(here.run))
    there.store = here.store = None
    note_viewer(here.run)
    here.turn(110.0)
    there.turn(110.0)
    failed = read_answers(here.run)
    assert failed is not None
    assert failed.problem
    there.store = here.store = shared
    there.requests.clear()
    note_viewer(here.run)
    here.turn(112.0)
    there.turn(116.0)
    answers = read_answers(here.run)
    assert answers is not None
    assert answers.problem == ""
    assert there.requests == ["Questions.question", "Questions.answer"]


def test_a_lost_store_is_not_an_error_of_the_watcher(nodes: list[Node]) -> None:
    """No exception leaves a turn, whatever the store raises."""

    def broken() -> Any:
        raise OSError("broken pipe")

    here, _ = nodes
    here.views._requests._job_store = broken
    here.poll()
    note_viewer(here.run)
    here.turn(100.0)
    answers = read_answers(here.run)
    assert answers is not None
    assert "broken pipe" in answers.problem
    with pytest.raises(Unreachable):
        here.views._requests.perform(1.0, Questions("").question())


def test_a_failure_does_not_end_the_watch(
    nodes: list[Node], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An unforeseen error is logged once, and no turn raises it."""

    def broken(*_: Any) -> None:
        raise RuntimeError("a bug")

    here, _ = nodes
    here.poll()
    note_viewer(here.run)
    monkeypatch.setattr(here.views, "_ask", broken)
    for second in range(3):
        here.turn(100.0 + 2 * second)
    assert [line.message for line in caplog.records] == ["pages on other nodes get no more answers"]


def test_members_that_are_damaged_are_no_ranks() -> None:
    """A registration of another program, or half of one, names no rank."""
    for raw in (b"", b"{}", b"[1]", b'[["x", "h", 1]]', b"[" * 100_000, json.dumps([[1]]).encode()):
        assert members_from(raw, 4) == ()
    assert viewers.PAUSES_S[1] < LINGER_S
