"""The policy of restarts: each row, and what is taken for a fault of the program or the machine."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from rankcall.recovery.policy import (
    MACHINE,
    POLICY,
    PROGRAM,
    UNCLEAR,
    UNKNOWN,
    Case,
    Failure,
    Limits,
    decide,
    family_of,
    is_of_peer,
)
from rankcall.run.recoveries import Signature


def failure(family: str, step: int = 10, *, seconds: float = 0.0, line: str = "") -> Failure:
    """Return a failure at a step, of an attempt that got further unless that is the first."""
    signature = Signature("dead", line=line)
    return Failure(signature, family, step, step > 0, seconds, by_window=True)


# The program has not told of a checkpoint, so its step is only that of its last attempt.
UNTOLD = replace(failure(MACHINE, 9, seconds=70), by_window=False)


@pytest.mark.parametrize(
    ("rule", "stops", "case"),
    [
        ("try_again", False, Case(failure(PROGRAM))),
        ("try_again", False, Case(failure(UNCLEAR), [failure(UNCLEAR)])),
        ("try_again", False, Case(failure(PROGRAM, 11), [failure(PROGRAM, 10)])),
        ("try_again", False, Case(failure(PROGRAM, line="b"), [failure(PROGRAM, line="a")])),
        ("repeats", True, Case(failure(PROGRAM), [failure(PROGRAM)])),
        ("repeats", True, Case(failure(PROGRAM), [failure(PROGRAM), failure(MACHINE, 12)])),
        ("repeats_twice", True, Case(failure(UNCLEAR), [failure(UNCLEAR)] * 2)),
        (
            "repeats_twice",
            True,
            Case(failure(UNCLEAR, 0), [failure(MACHINE, 5), *[failure(UNCLEAR, 0)] * 2]),
        ),
        (
            "try_again",  # all starts look alike, and the job got further between these
            False,
            Case(failure(UNCLEAR, 0), [failure(UNCLEAR, 0), failure(MACHINE, 5)] * 3),
        ),
        (
            "repeats",
            True,
            Case(failure(PROGRAM, 0), [failure(MACHINE, 5), failure(PROGRAM, 0)]),
        ),
        ("goes_on", False, Case(failure(MACHINE), [failure(MACHINE)] * 5)),
        ("backs_off", False, Case(failure(MACHINE, 0))),
        ("backs_off", False, Case(failure(MACHINE, 0), [failure(MACHINE, 0)] * 2)),
        ("no_progress", True, Case(failure(MACHINE, 0), [failure(MACHINE, 0)] * 3)),
        (
            "too_many",
            True,
            Case(failure(MACHINE, 9, seconds=50), [failure(MACHINE)] * 3, Limits(3, 60)),
        ),
        (
            "goes_on",
            False,
            Case(failure(MACHINE, 9, seconds=70), [failure(MACHINE)] * 3, Limits(3, 60)),
        ),
        ("too_many", True, Case(failure(MACHINE), [], Limits(0, 60))),
        (
            "too_many",  # the window has passed, and nothing proves that the job got further
            True,
            Case(UNTOLD, [failure(MACHINE)] * 3, Limits(3, 60)),
        ),
        ("no_progress", True, Case(failure(PROGRAM, 0, line="b"), [failure(MACHINE, 0)] * 3)),
    ],
)
def test_each_row(rule: str, stops: bool, case: Case) -> None:
    """The first row that fits decides."""
    decision = decide(case)
    assert (decision.rule, decision.stops) == (rule, stops)
    assert decision.reason


def test_every_row_is_tested() -> None:
    """A new row needs a case above."""
    marks = test_each_row.pytestmark  # type: ignore[attr-defined]
    assert {values[0] for mark in marks for values in mark.args[1]} == {row.rule for row in POLICY}


def test_the_last_row_fits_always() -> None:
    """``decide`` finds a row whatever the failure is."""
    assert POLICY[-1].fits(Case(failure("made up")))


def test_a_repeated_failure_names_the_step() -> None:
    """The reason is what the user reads at the end of the job."""
    at = Case(failure(PROGRAM, 1200), [failure(PROGRAM, 1200)])
    assert decide(at).reason == "this failure repeats at step 1,200: restarting will not help"
    start = Case(failure(PROGRAM, 0), [failure(PROGRAM, 0)])
    assert "before an optimizer step was seen" in decide(start).reason


def test_pauses_double_up_to_a_minute() -> None:
    """Attempts that take no step wait longer and longer, and one that took steps ends that."""
    none = failure(MACHINE, 0)
    pauses = [decide(Case(none, [none] * count)).delay_s for count in range(3)]
    assert pauses == [2.0, 4.0, 8.0]
    assert decide(Case(none, [none, none, failure(MACHINE, 5)])).delay_s == 2.0
    assert decide(Case(failure(MACHINE, 5), [none] * 3)).delay_s == 0.0


@pytest.mark.parametrize(
    ("family", "kind", "code", "error"),
    [
        (MACHINE, "stopped", None, ""),
        (MACHINE, "stuck", None, ""),
        (MACHINE, "dead", -signal.SIGKILL, ""),
        (MACHINE, "dead", 137, ""),
        (MACHINE, "dead", 1, "RuntimeError: [pair.cc:547] Connection closed by peer [10.0.0.2]"),
        (MACHINE, "dead", 1, "DistNetworkError: Failed to recv. Connection was likely closed."),
        (MACHINE, "dead", 1, "The client socket has failed to connect to any network address of"),
        (MACHINE, "dead", 1, "torch.AcceleratorError: CUDA error: unspecified launch failure"),
        (PROGRAM, "dead", 1, "ValueError: bad batch"),
        (PROGRAM, "dead", None, "ValueError: bad batch"),
        (PROGRAM, "dead", -signal.SIGSEGV, ""),
        (PROGRAM, "mismatch", None, ""),
        (PROGRAM, "desync", None, ""),
        (PROGRAM, "exhausted", None, ""),
        (UNCLEAR, "missing", None, ""),
        (UNCLEAR, "no_progress", None, ""),
        (UNCLEAR, "dead", None, ""),
    ],
)
def test_families(family: str, kind: str, code: int | None, error: str) -> None:
    """An error of a device is the machine's, any other exception the program's."""
    assert family_of(kind, code, error) == family


def test_a_process_that_may_be_held_by_its_program() -> None:
    """A signal stops a process for sure; a thread that keeps the GIL is perhaps the program's."""
    assert family_of("stopped", None, "", certain=False) == UNCLEAR


def test_whose_error_a_broken_connection_is() -> None:
    """Another rank may have failed. A device's error is this rank's own."""
    assert is_of_peer("RuntimeError: [pair.cc:547] Connection closed by peer [10.0.0.2]:1")
    assert not is_of_peer("torch.AcceleratorError: CUDA error: unspecified launch failure")


def test_failures_of_which_nothing_is_known() -> None:
    """Nobody can say that they repeat. Without progress, they end the job all the same."""
    unknown = Failure(Signature(UNKNOWN), UNCLEAR, 0)
    rules = [decide(Case(unknown, [unknown] * count)).rule for count in range(4)]
    assert rules == ["try_again"] * 3 + ["no_progress"]
