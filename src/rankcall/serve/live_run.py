"""A run as the page shows it: the result of one look, with the ranks of other nodes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rankcall.analysis.attempts import Attempts, attempts_of
from rankcall.analysis.looks import live_window, suspect_and_peer
from rankcall.analysis.recent_figures import Figures, recent_figures
from rankcall.analysis.run_reader import RunReader
from rankcall.analysis.verdicts import diagnose, judge, with_stacks
from rankcall.analysis.verdicts.diagnosis import Diagnosis
from rankcall.analysis.verdicts.kept import kept_in, lines_beside, stacks_beside
from rankcall.analysis.verdicts.verdict import Kept
from rankcall.errors import RankcallError, RunNotFoundError
from rankcall.run.live_jobs import chosen_run
from rankcall.run.load import Run, load
from rankcall.run.own_stacks import request_stacks
from rankcall.run.paths import job_folder, read_about, ring_paths
from rankcall.run.profiles import Profile, alive, take_profiles
from rankcall.run.stack_text import tidy
from rankcall.serve.other_nodes import OtherNodes

WAITING, LIVE, ENDED, LOST = "waiting", "live", "ended", "lost"
_NEWEST = 512  # records read from the end of each ring of a live job
PROFILE_S, _RATE = 3, 50  # of a profile: for how long, and samples per second
_MOST_STACKS = 4096  # ranks of this host that are asked: each gets a signal


@dataclass(frozen=True)
class Stacks:
    """Stacks by rank, and when they were dumped, as epoch seconds.

    ``lines``: the source text at which the ranks stood, by ``file:line``, if it was kept.
    """

    by_rank: Mapping[int, str]
    epoch_s: float
    by_watcher: bool  # the job's own watcher kept them with its verdict; else a viewer asked
    lines: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Profiles:
    """The profiles that a viewer asked for last, and when they were taken, as epoch seconds."""

    taken: Sequence[Profile]
    epoch_s: float


@dataclass(frozen=True)
class Look:
    """The result of one look at a run.

    ``state``: ``waiting`` (no ring yet), ``live``, ``ended``, or ``lost`` (the run was there and
    cannot be read any more; ``diagnosis`` is then the last one). ``problem`` says why it cannot be
    read or, of a live run, why nodes are missing.
    """

    state: str
    epoch_s: float
    run: str = ""
    problem: str = ""
    diagnosis: Diagnosis | None = None
    figures: Figures | None = None
    stacks: Stacks | None = None
    profiles: Profiles | None = None
    attempts: Attempts = field(default_factory=Attempts)
    folder: str = ""  # in which the job was started, if that is known
    reading_cpu_s: float = 0.0

    @property
    def hangs(self) -> bool:
        """Whether something stops the job."""
        return self.diagnosis is not None and self.diagnosis.stops


@dataclass
class LiveRun:
    """Looks at a run again and again, on one thread at a time.

    ``path`` None is the latest run below the working directory, so the page follows a job that is
    started again. ``attempt`` None is the last attempt of the run.
    """

    path: Path | None = None
    hang_after: float | None = None
    attempt: int | None = None
    clock: Callable[[], float] = time.time
    _reader: RunReader = field(default_factory=lambda: RunReader(_NEWEST), repr=False)
    _others: OtherNodes = field(default_factory=OtherNodes, repr=False)
    _seen: Look | None = field(default=None, repr=False)
    _over: tuple[object, Diagnosis, int] | None = field(default=None, repr=False)
    _asked: Stacks | None = field(default=None, repr=False)
    _profiled: Profiles | None = field(default=None, repr=False)

    def look(self) -> Look:
        """Read the newest records of every rank and judge them. Raises nothing."""
        began = time.thread_time()
        try:
            look = self._read()
        except (RankcallError, OSError, ValueError) as error:
            look = self._unread(" ".join(str(error).split()))
        look = replace(look, reading_cpu_s=time.thread_time() - began)
        if look.state in (LIVE, ENDED):
            self._seen = look
        return look

    def place(self) -> Path:
        """Return the run's path. Raises ``RunNotFoundError``.

        Without a name, another run takes the place of one that was seen only if it is newer: a live
        job from elsewhere that ends does not give way to the run before it here.
        """
        seen = Path(self._seen.run) if self._seen is not None and self.path is None else None
        try:
            chosen = chosen_run(self.path)
        except RunNotFoundError:
            if seen is None:
                raise
            return seen
        return chosen if seen is None or _began_ns(chosen) >= _began_ns(seen) else seen

    def take_stacks(self) -> Stacks:
        """Have this host's ranks dump their stacks; raises ``RankcallError`` if there is no run."""
        headers = [head.header for head in load(self.place()).heads][:_MOST_STACKS]
        texts = {rank: tidy(text) for rank, text in request_stacks(headers).items()}
        self._asked = Stacks(texts, self.clock(), by_watcher=False)
        return self._asked

    def take_profiles(self, ranks: Sequence[int] = ()) -> Profiles:
        """Profile ranks of this host for some seconds, and keep the profiles in the run.

        Args:
            ranks: The ranks; none: one that the verdict names, and one that it does not name.

        Raises:
            RankcallError: The ranks cannot be profiled; it says why.
            OSError: The run directory cannot be written.
        """
        where = self.place()
        if not where.is_dir():
            raise RankcallError("this run has no ranks that run")
        run = load(where)
        if self.attempt is not None:
            run = run.only(self.attempt)
        chosen = ranks or suspect_and_peer(run)
        if not chosen:
            raise RankcallError("no rank of this host stands out: say which to profile")
        taken = take_profiles(run.path, alive(run, chosen), PROFILE_S, _RATE)
        self._profiled = Profiles(taken, self.clock())
        return self._profiled

    def _unread(self, problem: str) -> Look:
        if self._seen is None:
            return Look(WAITING, self.clock(), str(self.path or ""), problem=problem)
        return replace(self._seen, state=LOST, problem=problem, epoch_s=self.clock())

    def _read(self) -> Look:
        where = self.place()
        if self._seen is not None and self._seen.run != str(where):
            # The job was started again.
            self._seen = self._over = self._asked = self._profiled = None
            self._reader, self._others = RunReader(_NEWEST), OtherNodes()
        finished = self._finished(where)
        if finished is not None:
            return self._as_look(where, ENDED, *finished)
        run = self._reader.load(where)
        if self.attempt is not None:
            run = run.only(self.attempt)
        run = self._others.ask(run)
        snapshot = self._others.add_to(self._reader.snapshot(run, live_window(run)))
        if not snapshot.live:
            ended = diagnose(run, self.hang_after or None)
            last_ns = max((head.header.last_sign_epoch_ns for head in run.heads), default=0)
            self._over = _fingerprint(where), ended, last_ns
            return self._as_look(where, ENDED, ended, last_ns)
        diagnosis = judge(run, snapshot, self.hang_after or None)
        sure = [
            finding
            for finding in diagnosis.findings
            if not self._others.is_outdated(finding, snapshot)
        ]
        now_ns = int(self.clock() * 1e9)
        look = self._as_look(where, LIVE, replace(diagnosis, findings=sure), now_ns)
        return self._with_kept_stacks(run, replace(look, problem=self._others.problem))

    def _finished(self, where: Path) -> tuple[Diagnosis, int] | None:
        """Return the diagnosis of a job that was over at the last look, if no file has changed.

        With it comes the time of the last sign of life, in ns since the epoch.
        """
        if self._over is None or self._over[0] != _fingerprint(where):
            return None
        return self._over[1:]

    def _as_look(self, where: Path, state: str, diagnosis: Diagnosis, until_ns: int) -> Look:
        is_moving = state == LIVE and not diagnosis.stops
        return Look(
            state,
            self.clock(),
            str(where),
            diagnosis=diagnosis,
            figures=recent_figures(diagnosis.snapshot) if is_moving else None,
            stacks=self._asked or (_stacks_of_watcher(kept_in(where)) if where.is_dir() else None),
            profiles=self._profiled,
            attempts=attempts_of(where, until_ns),
            folder=job_folder(read_about(where, [])),
        )

    def _with_kept_stacks(self, run: Run, look: Look) -> Look:
        """Add the newest stacks; those that were dumped during the hang are evidence about it."""
        diagnosis = look.diagnosis
        if diagnosis is None or not look.hangs:
            return look
        newest = [finding for kept in diagnosis.kept[-1:] for finding in kept.verdict.findings]
        causes = {finding.kind for finding in newest}
        of_watcher = None
        if not causes.isdisjoint(finding.kind for finding in diagnosis.findings):
            of_watcher = _stacks_of_watcher(diagnosis.kept)
        stacks = max(filter(None, (self._asked, of_watcher)), key=_epoch_s, default=None)
        if stacks is not None and stacks.epoch_s >= look.epoch_s - diagnosis.findings[0].since_s:
            diagnosis = with_stacks(run, diagnosis, stacks.by_rank)
        return replace(look, diagnosis=diagnosis, stacks=stacks)


def _began_ns(run: Path) -> int:
    """Return when a run was made, as far as its files show it; 0 if it is gone."""
    for place in (run / "run.json", run):
        with contextlib.suppress(OSError):
            return place.stat().st_mtime_ns
    return 0


def _epoch_s(stacks: Stacks) -> float:
    return stacks.epoch_s


def _fingerprint(where: Path) -> object:
    """Return what changes if anything is added to a run whose processes have ended."""
    rings = [(path.name, path.stat().st_mtime_ns) for path in ring_paths(where)]
    folders = [path.stat().st_mtime_ns for path in (where, where / "exits") if path.exists()]
    return sorted(rings), folders


def _stacks_of_watcher(verdicts: Sequence[Kept]) -> Stacks | None:
    """Return the stacks beside the newest verdict that the watcher kept, if it has any."""
    if not verdicts:
        return None
    newest = verdicts[-1]
    texts = stacks_beside(newest)
    epoch_s = newest.verdict.origin.epoch_ns / 1e9
    return Stacks(texts, epoch_s, True, lines_beside(newest)) if texts else None
