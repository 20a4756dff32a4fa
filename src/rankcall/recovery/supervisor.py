"""What torchrun's agent asks when its workers have ended: restart them, or stop.

``Supervisor`` needs no torch. It never raises, except to stop: if it cannot find out what failed,
or cannot write into the run, the job is restarted as torchrun would.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rankcall.analysis.verdicts.kept import kept_in
from rankcall.background import BackgroundCall
from rankcall.job.notices import notify
from rankcall.process import host_name
from rankcall.ranks import with_noun
from rankcall.recovery.failures import Attempt, Cause, cause_elsewhere, cause_of, failure_of
from rankcall.recovery.health import examine
from rankcall.recovery.leftovers import end_leftovers
from rankcall.recovery.links import Links
from rankcall.recovery.policy import (
    MAX_RECOVERIES,
    PROGRAM,
    UNCLEAR,
    UNKNOWN,
    WINDOW_S,
    Case,
    Decision,
    Failure,
    Limits,
    decide,
)
from rankcall.recovery.rendezvous import Rendezvous, is_signal
from rankcall.run.bars import BAR_S, Bar, bar_of, newest, note_bar, read_bars
from rankcall.run.exits import Exit, note_exit, read_exits
from rankcall.run.outcome import BARRED, REPEATS, JobFailure
from rankcall.run.recoveries import (
    ABSENT,
    FOLLOWS,
    GAVE_UP,
    JOINED,
    SUSPECT,
    AttemptEnd,
    AttemptStart,
    Check,
    Event,
    NodeChecked,
    Signature,
    file_of,
    note,
    tell_workers,
)
from rankcall.run.settle import settle

logger = logging.getLogger("rankcall")
MAX_VARIABLE, WINDOW_VARIABLE = "RANKCALL_MAX_RECOVERIES", "RANKCALL_RECOVERY_WINDOW"
BAR_AFTER_VARIABLE = "RANKCALL_BAR_AFTER"
BAR_AFTER = 2  # once may be chance
HEALTH_VARIABLE = "RANKCALL_HEALTH_CHECK"


class NodeBarred(SystemExit):
    """This node is barred, and leaves the job to the others."""

    def __init__(self, reason: str) -> None:
        super().__init__(BARRED)
        self.reason = reason


class JobStopped(SystemExit):
    """The policy stops the job. ``codes`` are the workers that failed, by (rank, pid)."""

    def __init__(self, reason: str, codes: Mapping[tuple[int, int], int]) -> None:
        super().__init__(REPEATS)
        self.reason, self.codes = reason, codes


@dataclass(frozen=True)
class Supervised:
    """The settings of a supervisor: the run, and the limits of the policy."""

    run_dir: Path
    limits: Limits
    bar_after: int = BAR_AFTER
    health_check: str = ""


def settings_from_environment() -> Supervised | None:
    """Return the settings of a job that is to carry on; None if it is not, or has no run."""
    run_dir = os.environ.get("RANKCALL_RUN_DIR")
    if os.environ.get("RANKCALL_ON_HANG") != "recover" or not run_dir:
        return None
    limits = Limits(int(_number(MAX_VARIABLE, MAX_RECOVERIES)), _number(WINDOW_VARIABLE, WINDOW_S))
    return Supervised(
        Path(run_dir).absolute(),
        limits,
        bar_after=int(_number(BAR_AFTER_VARIABLE, BAR_AFTER)),
        health_check=os.environ.get(HEALTH_VARIABLE, ""),
    )


def _number(name: str, default: float) -> float:
    try:
        value = float(os.environ.get(name) or default)
    except ValueError:
        return default
    return value if 0 <= value < 1e9 else default


class Supervisor:
    """Decides for one agent. Only the agent's thread calls it."""

    def __init__(
        self,
        settings: Supervised,
        say: Callable[[str], object],
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._run_dir, self._limits = settings.run_dir, settings.limits
        self._bar_after, self._health_check = settings.bar_after, settings.health_check
        self._say, self._sleep = say, sleep
        self._file = file_of(self._run_dir, host_name(), os.getpid())
        self._links = Links(host_name())
        self._attempt = Attempt()
        self._restart = 0
        self._earlier: list[Failure] = []
        self._ended: AttemptEnd | None = None  # how the last attempt ended
        self._has_moved_on = False  # since the last of them, in an attempt that did not fail
        self._blamed_ns = 0
        self._blamed = 0  # how often a rank of this node was the culprit, and not the program
        self._saved = -1  # the step of the job from which the present attempt went on, if known
        self._tells = False  # whether a rank of this node has said what it saved
        self._has_told = True  # whether the other nodes know what it said last

    def close(self) -> None:
        """Answer other nodes no more: the agent ends."""
        self._links.close()

    def before_start(self, restart: int, rendezvous: Rendezvous | None = None) -> None:
        """Note that an attempt's workers are about to be started. They inherit the environment.

        Args:
            restart: The number of the attempt.
            rendezvous: The rendezvous that all nodes have come to, if it has a store for agents.
        """
        job = ""
        if rendezvous is not None and rendezvous.is_dynamic:
            self._hear_saved(rendezvous)
            job = rendezvous.job()
        tell_workers(self._file, self._ended)
        if not self._attempt.started_ns:
            self._end_leftovers()  # of an agent on this node that was killed
        self._restart = restart
        verdicts = {kept.verdict.origin.id for kept in kept_in(self._run_dir)}
        # Taken before the workers start, so that no verdict of theirs can be among the known ones,
        # nor a ring of theirs be older than the attempt.
        self._attempt = Attempt(
            host=host_name(), started_ns=time.time_ns(), known_verdicts=verdicts
        )
        self._note(AttemptStart(restart, self._attempt.started_ns, job))

    def started(self, pids: Mapping[int, int], world_size: int) -> None:
        """Take the pids of the workers, by rank."""
        self._attempt = replace(self._attempt, pids=dict(pids), world_size=world_size)
        if self._restart:
            # A worker that was killed leaves its ring in shared memory, and a job may be restarted
            # for months. The new workers are not held up by the copying; it is given up if the run
            # directory does not answer, and tried again after the next restart.
            BackgroundCall(lambda: settle(self._run_dir, 0.0), "rankcall-settle").give_up()

    def failed(self, codes: Mapping[int, int]) -> None:
        """Note that workers have failed: by rank, the exit status or the negative signal."""
        self._attempt = replace(self._attempt, codes=dict(codes), noticed_ns=time.time_ns())

    def may_restart(self) -> None:
        """Return when the workers are to be started again. Raises ``JobStopped`` if never.

        torchrun's agent has ended all workers of this node.
        """
        self._end_leftovers()
        failure, end = self._look(cause_of)
        decision = decide(Case(failure, self._earlier, self._limits))
        self._add(failure)
        # The decision is noted before the pause: a reader then sees why the job stands still.
        self._conclude(end, decision)
        if not decision.stops:  # the launcher tells of the end
            self._tell(end, decision)
        self._carry_out(decision, failure)

    def gave_up(self) -> None:
        """Note how the last attempt ended, after which torchrun's own limit allows no restart."""
        self._end_leftovers()
        failure, end = self._look(cause_of)
        self._add(failure)
        self._conclude(end, Decision(GAVE_UP, True, "torchrun's --max-restarts is used up"))

    def follows(self) -> None:
        """Note why this node's workers were ended, although none has failed: another node's did.

        That node decides, so this one restarts whatever the policy says. Two nodes that decided
        about one failure could come to different decisions, because each sees its own records.
        """
        self._end_leftovers()
        self._attempt = replace(self._attempt, noticed_ns=time.time_ns())
        kind = "another_node"
        failure, end = self._look(lambda run, attempt: cause_elsewhere(run, attempt, kind))
        self._add(failure)
        self._conclude(end, Decision(FOLLOWS, False, "another node restarts its workers"))

    def joined(self) -> None:
        """Note that this node's workers were ended so that a new node can take part.

        Nothing has failed, so the policy does not count it.
        """
        self._end_leftovers()
        self._attempt = replace(self._attempt, noticed_ns=time.time_ns())
        failure, end = self._look(lambda run, attempt: cause_elsewhere(run, attempt, "new_node"))
        self._has_moved_on = failure.progressed
        self._conclude(end, Decision(JOINED, False, "a new node joins the job"))

    def admit(self, rendezvous: Rendezvous) -> None:
        """Return if this node may join the other nodes. Raises ``NodeBarred`` if not.

        A node bars itself, once it was the culprit often enough: its own agent knows its ranks, and
        the agents need no protocol for it. A person may have barred it as well. A job that cannot
        go on without the node keeps it, and says so. Never raises anything else.
        """
        if not rendezvous.is_dynamic:
            return
        self._tell_saved(rendezvous)
        try:
            bar = self._bar(rendezvous)
            if bar is None:
                return
            needed = rendezvous.why_needed()
        except Exception as error:  # what the store raises; torch tells of it in a moment
            if is_signal(error):
                raise
            logger.warning("cannot find out whether this node is barred: %s", error)
            return
        node = self._attempt.host or host_name()
        if needed:
            self._say(f"{node} is to leave the job ({bar.reason}), and stays: {needed}")
            return
        self._keep_bar(rendezvous, bar)
        rendezvous.leave()
        lasts = bar.until_ns > bar.at_ns
        until = f", and is barred until {bar.shown_end}" if lasts else ""
        again = f". To let it in again: rankcall unbar {node} {self._run_dir}" if lasts else ""
        self._say(f"{node} leaves the job{until}: {bar.reason}{again}")
        raise NodeBarred(bar.reason)

    def _tell_saved(self, rendezvous: Rendezvous) -> None:
        """Tell the other nodes what this one knows from its ranks: the step that was saved last.

        Without it, the others would count the steps of each attempt from 0, and take two failures
        for one that repeats which came after as many steps.
        """
        if self._has_told:
            return
        try:
            rendezvous.tell_saved(self._saved)
            self._has_told = True
        except Exception as error:  # what the store raises; torch tells of it in a moment
            if is_signal(error):
                raise
            logger.warning("the other nodes cannot be told of the last checkpoint: %s", error)

    def _hear_saved(self, rendezvous: Rendezvous) -> None:
        """Take the step from which all nodes go on. Each has told it before it came here."""
        try:
            saved = rendezvous.saved()
        except Exception as error:
            if is_signal(error):
                raise
            saved = None
        if saved is not None:
            self._saved = saved

    def _bar(self, rendezvous: Rendezvous) -> Bar | None:
        """Return the bar of this node that holds now: a new one, or one from the run or store."""
        node = host_name()
        known = newest([*read_bars(self._run_dir), *rendezvous.bars_of(node)]).get(node)
        if known is not None and not known.barred and known.at_ns > self._blamed_ns:
            self._blamed = 0  # a person says that the node is well
        if self._bar_after and self._blamed >= self._bar_after:
            times = "once" if self._blamed == 1 else f"{self._blamed} times"
            return bar_of(node, f"its ranks held the job up {times}", BAR_S)
        if known is not None and known.holds(time.time_ns()):
            return known
        failed = self._examine(rendezvous).first_failed if self._health_check else None
        # It lasts, although the check could say when the node is well again: a fault that comes and
        # goes would have all workers restarted each time that the node comes back.
        return bar_of(node, failed.text, BAR_S) if failed else None

    def _examine(self, rendezvous: Rendezvous) -> NodeChecked:
        """Check this node, and note what was found."""
        node = host_name()
        checks = examine(self._health_check, self._run_dir, node, self._file)
        try:
            checks += self._links.checks(rendezvous)
        except Exception as error:  # what the store raises
            if is_signal(error):
                raise
            text = f"the job's store does not answer: {type(error).__name__}"
            checks.append(Check("network", ABSENT, text))
        checked = NodeChecked(node, time.time_ns(), tuple(checks))
        self._note(checked)
        for check in checks:
            if check.state == SUSPECT:
                self._say(f"{check.name}: {check.text}")
        return checked

    def _keep_bar(self, rendezvous: Rendezvous, bar: Bar) -> None:
        """Keep a bar in the run and the store; another agent on this node then finds it."""
        try:
            rendezvous.publish(bar)
            if bar not in read_bars(self._run_dir):
                note_bar(self._run_dir, bar)
        except Exception as error:
            if is_signal(error):
                raise
            logger.warning("cannot keep everywhere that this node is barred: %s", error)

    def _blame(self, cause: Cause) -> None:
        """Count a failure against this node if its ranks are the culprits, and not the program.

        A node that has only its own records cannot tell why a connection to another one broke.
        """
        here = set(cause.culprits) & set(self._attempt.pids)
        is_ours = bool(here) and cause.is_own and cause.family != PROGRAM
        if is_ours and len(self._attempt.pids) < self._attempt.world_size:
            self._blamed, self._blamed_ns = self._blamed + 1, time.time_ns()

    def _end_leftovers(self) -> None:
        ranks = end_leftovers(self._run_dir, host_name(), self._file)
        if ranks:
            self._say(
                f"ended {with_noun(ranks)} before the next attempt: what had started the process "
                "was ended, but not the process itself"
            )

    def _look(self, find: Callable[[Path, Attempt], Cause]) -> tuple[Failure, AttemptEnd]:
        """Return what ended the attempt, and what is to be noted of it, without the decision."""
        stopped_ns = time.time_ns()
        try:
            self._note_exits()
            cause = find(self._run_dir, self._attempt)
        except Exception as error:  # any run may be damaged in any way, and the job is to go on
            if is_signal(error):
                raise
            logger.warning("cannot find out why the workers ended", exc_info=True)
            cause = Cause(Signature(UNKNOWN), UNCLEAR, (), "", 0, -1, 0, 0, 0, 0, "")
        self._blame(cause)
        return self._account(cause, stopped_ns)

    def _account(self, cause: Cause, stopped_ns: int) -> tuple[Failure, AttemptEnd]:
        """Return a cause as the policy sees it, and as it is noted, with the step of the job."""
        if cause.saved >= 0:
            self._saved, self._tells, self._has_told = cause.saved, True, False
        step, progressed = cause.reached(self._saved, self._earlier)
        since = cause.since_saved if cause.saved >= 0 else cause.steps
        end = replace(
            cause.as_end(
                self._restart,
                step,
                # A rank of another node may have saved a later step than the attempt went on from.
                lost=since if self._tells else -1,
                progressed=progressed or self._has_moved_on,
            ),
            noticed_ns=self._attempt.noticed_ns,
            stopped_ns=stopped_ns,
        )
        # A rank of another node may have told of its checkpoints. This node does not know it, and
        # must not end such a job after few recoveries in a long time.
        by_window = self._saved >= 0 or len(self._attempt.pids) < self._attempt.world_size
        return failure_of(end, time.monotonic(), by_window=by_window), end

    def _conclude(self, end: AttemptEnd, decision: Decision) -> None:
        self._ended = replace(
            end,
            decision="stop" if decision.stops else "restart",
            rule=decision.rule,
            reason=decision.reason,
            delay_s=decision.delay_s,
        )
        self._note(self._ended)

    def _tell(self, end: AttemptEnd, decision: Decision) -> None:
        """Tell the receiver of notices that the workers are started again, if there is one."""
        hosts = [host_name()] if set(end.culprits) & set(self._attempt.pids) else []
        said = {
            "restarts": self._restart + 1,
            "rule": decision.rule,
            "reason": decision.reason,
            "delay_s": decision.delay_s,
            "failure": asdict(JobFailure.of(end, hosts)),
        }
        notify("restart", self._run_dir, said)

    def _add(self, failure: Failure) -> None:
        self._earlier.append(failure)
        self._has_moved_on = False

    def _carry_out(self, decision: Decision, failure: Failure) -> None:
        what = f"{failure.signature}" + (f" at step {failure.step:,}" if failure.step > 0 else "")
        if decision.stops:
            codes = {
                (rank, self._attempt.pids.get(rank, 0)): code
                for rank, code in self._attempt.codes.items()
            }
            self._say(f"the job ends with status {REPEATS} ({what}): {decision.reason}")
            raise JobStopped(decision.reason, codes)
        pause = f", in {decision.delay_s:g} s" if decision.delay_s else ""
        self._say(f"restarting the workers{pause} ({what}): {decision.reason}")
        self._sleep(decision.delay_s)

    def _note_exits(self) -> None:
        """Note in the run how workers ended that nobody else has noted."""
        known = {(ended.rank, ended.pid) for ended in read_exits(self._run_dir)}
        for rank, code in self._attempt.codes.items():
            pid = self._attempt.pids.get(rank, 0)
            if pid and (rank, pid) not in known:
                ended = Exit(rank, self._restart, host_name(), pid, code, self._attempt.noticed_ns)
                with contextlib.suppress(OSError):  # the disk is full: the verdict may be elsewhere
                    note_exit(self._run_dir, ended)

    def _note(self, event: Event) -> None:
        try:
            note(self._file, event)
        except OSError as error:
            logger.warning("cannot note the recovery in %s: %s", self._run_dir, error)
