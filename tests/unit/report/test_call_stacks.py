"""Ranks with equal stacks share one row: in the terminal, in JSON and on the page."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from diagnosing import RANK_2_MISSING, diagnose_calls

from rankcall.report.diagnosis_text import diagnosis_text
from rankcall.report.json import render_verdict
from rankcall.report.stack_lines import stack_lines
from rankcall.run.frames import CodePlace, Frame, code_place
from rankcall.run.own_stacks import _Dump
from rankcall.run.stack_classes import stack_classes, telling_frames
from rankcall.run.stack_text import mark_training_thread, tidy

TORCH = "/usr/lib/python3/site-packages/torch/distributed/distributed_c10d.py"


def dumped(thread: int, *calls: tuple[str, int, str]) -> str:
    """Return a stack as faulthandler writes it, the newest call first."""
    lines = [f'  File "{file}", line {line} in {name}' for file, line, name in calls]
    return "\n".join([f"Current thread {thread:#018x} (most recent call first):", *lines])


def waiting(rank: int) -> str:
    """Return the stack of a rank that waits in a collective, 40 calls deep."""
    inner = (TORCH, 2900, "all_reduce"), (TORCH, 83, "wrapper")
    model = [("/home/ada/model.py", 10 + n, f"layer_{n}") for n in range(36)]
    outer = ("/home/ada/train.py", 91, "step"), ("/home/ada/train.py", 120, "<module>")
    return dumped(0x7000 + rank, *inner, *model, *outer)


def reading(rank: int) -> str:
    """Return the stack of a rank that reads a file."""
    return dumped(rank, ("/home/ada/data.py", 7, "read"), ("/home/ada/train.py", 88, "<module>"))


def saving(rank: int) -> str:
    """Return the stack of a rank that writes a checkpoint."""
    return dumped(rank, ("/home/ada/save.py", 3, "save"), ("/home/ada/train.py", 99, "<module>"))


def a_thousand() -> dict[int, str]:
    """Return 1,024 stacks in three classes, of 1,021, 2 and 1 ranks."""
    stacks = {rank: waiting(rank) for rank in range(1024)}
    return {**stacks, 341: reading(341), 5: saving(5), 900: saving(900)}


def test_equal_stacks_are_one_class_the_smallest_first() -> None:
    """The address of a thread does not count; the line does. Each rank is in exactly one class."""
    classes = stack_classes(a_thousand())
    assert [stack_class.ranks[:2] for stack_class in classes] == [(341,), (5, 900), (0, 1)]
    assert sorted(rank for stack_class in classes for rank in stack_class.ranks) == list(
        range(1024)
    )
    assert classes[0].line == "/home/ada/data.py:7"
    assert classes[2].frames[0] == Frame(TORCH, 2900, "all_reduce")


def test_a_line_apart_is_another_class() -> None:
    """Ranks in one function at different lines are told apart."""
    stack, other_stack = (dumped(1, ("/a/train.py", line, "main")) for line in (8, 9))
    assert [
        stack_class.ranks for stack_class in stack_classes({0: stack, 1: other_stack, 2: stack})
    ] == [(1,), (0, 2)]


def test_who_dumped_the_stack_does_not_matter() -> None:
    """A stack from py-spy, with native frames and short names, equals the rank's own dump."""
    spied = (
        'Thread 4711 (idle): "MainThread"\n'
        "    epoll_wait (libc.so.6)\n"
        "    c10d::wait (torch/csrc/Work.cpp:12)\n"
        "    Loader.read (data.py:7)\n"
        "    <module> (train.py:88)"
    )
    (stack_class,) = stack_classes({0: spied, 1: reading(1)})
    assert stack_class.ranks == (0, 1)
    assert [frame.name for frame in stack_class.frames] == [
        "epoll_wait",
        "c10d::wait",
        "Loader.read",
        "<module>",
    ]
    assert [frame.line for frame in stack_class.frames] == [0, 0, 7, 88]


def test_other_threads_do_not_count() -> None:
    """Only the main thread decides; a text without a frame is compared as it is."""
    pool = 'Thread 0x2:\n  File "/x/pool.py", line {} in run\n\n'
    first, second = (pool.format(line) + reading(1) for line in (1, 2))
    assert [stack_class.ranks for stack_class in stack_classes({0: first, 1: second})] == [(0, 1)]
    assert [stack_class.ranks for stack_class in stack_classes({0: "gone", 1: "gone", 2: "?"})] == [
        (2,),
        (0, 1),
    ]


def test_a_thousand_stacks_take_twenty_lines() -> None:
    """Three classes of 1,024 ranks fit; the newest call and the user's own lines are kept."""
    lines = stack_lines(a_thousand())
    assert len(lines) <= 20
    text = "\n".join(lines)
    assert "rank 341\n    read  data.py:7\n    <module>  train.py:88\n  2 ranks: 5,900\n" in text
    assert "1,021 ranks: 0-4,6-340,342-899,901-1023\n    all_reduce  " in text
    assert "layer_0  model.py:10" in text
    assert lines[-1] == "    and 36 more calls"


def test_many_classes_are_cut() -> None:
    """If every rank is somewhere else, six are shown, and the number of the others."""
    lines = stack_lines({n: dumped(n, ("/a/train.py", n + 1, "main")) for n in range(50)})
    assert lines[-1] == "and 44 more ranks with 44 other stacks (--json has all)"
    assert len(lines) == 1 + 6 * 2 + 1


def test_the_users_calls_are_kept_longest() -> None:
    """Of a stack that is too deep, the newest call stays, then the user's, in their order."""
    calls = [Frame(TORCH, n + 1, f"inner{n}") for n in range(9)] + [Frame("/a/t.py", 5, "fit")]
    assert [f.name for f in telling_frames(calls, 3)] == ["inner0", "inner1", "fit"]
    assert telling_frames(calls, 10) == calls


def test_names_cannot_act_on_the_terminal() -> None:
    """Control characters of a function's or file's name are replaced."""
    hostile = dumped(1, ("/a/\x1b[2Jx.py", 5, "f\x1b]0;owned\x07"))
    assert "\x1b" not in "".join(stack_lines({0: hostile}))


def test_terminal_and_json_have_the_same_classes(tmp_path: Path) -> None:
    """Both show the classes of the stacks that were dumped, in the same order."""
    diagnosis, stacks = diagnose_calls(tmp_path, RANK_2_MISSING, states={}), a_thousand()
    classes = json.loads(render_verdict(diagnosis, stacks))["stack_classes"]
    assert [len(stack_class["ranks"]) for stack_class in classes] == [1, 2, 1021]
    assert classes[0]["frames"][0] == {"file": "/home/ada/data.py", "line": 7, "name": "read"}
    text = diagnosis_text(diagnosis, 80, stacks)
    assert text.index("rank 341\n") < text.index("2 ranks: 5,900") < text.index("1,021 ranks: ")
    assert max(map(len, text.splitlines())) <= 80


def test_a_ray_worker_that_trains_in_a_thread() -> None:
    """The main thread's wait for tasks is no place; while it runs a task, that is one."""
    loop = (
        '  File "/venv/lib/python3.11/site-packages/ray/_private/worker.py", line 7 in main_loop\n'
        '  File "/venv/lib/python3.11/site-packages/ray/_private/workers/default_worker.py", '
        "line 323 in <module>"
    )
    first = "Stack (most recent call first):\n"
    assert code_place(first + loop) == CodePlace()
    task = '  File "/home/me/train.py", line 20 in work\n'
    assert code_place(first + task + loop).line == "/home/me/train.py:20"


TRAINING = """Thread 77 (trains, most recent call first):
  File "/home/me/train.py", line 20 in work
  File "/venv/lib/python3.11/site-packages/ray/train/_internal/session.py", line 9 in run
  File "/usr/lib/python3.11/threading.py", line 5 in _bootstrap

Thread 70 (most recent call first): "MainThread"
  File "/home/me/driver.py", line 7 in wait
  File "/home/me/driver.py", line 9 in <module>"""


def test_the_training_thread_counts() -> None:
    """If a stack marks the thread that trains, the place is there, not in the main thread."""
    assert code_place(TRAINING).line == "/home/me/train.py:20"
    (stack_class,) = stack_classes({0: TRAINING, 1: TRAINING.replace("line 7", "line 8")})
    assert (stack_class.ranks, stack_class.line) == ((0, 1), "/home/me/train.py:20")
    assert tidy("\n\n".join(reversed(TRAINING.split("\n\n")))) == TRAINING


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["main", "trains"], ["work", "driver"]),
        (["main", ""], ["driver"]),
        (["", "trains"], []),  # it may be the late answer of the main thread
        (["main", "rest"], ["driver"]),
    ],
)
def test_answers_of_two_threads(
    texts: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer counts as the training thread's only if it cannot be another one's."""
    frame = 'Stack (most recent call first):\n  File "/a/t.py", line 1 in '
    known = {"main": f"{frame}driver", "trains": f"{frame}work", "rest": f"{frame}x"[20:], "": ""}
    monkeypatch.setattr("rankcall.run.own_stacks.training_thread_of", lambda header: 77)
    header = SimpleNamespace(rank=0, pid=os.getppid(), stack_fd=3, train_thread=77)
    dump = _Dump(header, {})  # type: ignore[arg-type]
    dump._texts = [known[text] for text in texts]
    assert re.findall(r"in (\w+)", dump.text()) == expected


def test_a_thread_is_marked_in_any_dump() -> None:
    """The first line of the thread gets the mark, as py-spy or ``faulthandler`` writes it."""
    spied = 'Thread 70 (idle): "MainThread"\n    f (a.py:1)\nThread 77 (idle)\n    g (b.py:2)'
    marked = mark_training_thread(spied, "77")
    assert "Thread 77 (trains, idle)" in marked
    assert code_place(marked).line == "b.py:2"
    dump = dumped(0x77, ("/a/b.py", 2, "g"))
    assert code_place(mark_training_thread(f"{TRAINING}\n\n{dump}", "0x99")).function == "work"
    both = f"{reading(1)}\n\n{dump}"
    assert code_place(mark_training_thread(both, f"{0x77:#018x}")).line == "/a/b.py:2"
    assert mark_training_thread(both, "") == both


def test_a_rank_stands_where_its_awaited_thread_does() -> None:
    """Unless that thread runs no code of the user's, as an idle one of a pool."""
    main = 'Thread 80 (most recent call first): "MainThread"\n  File "/a/b.py", line 2 in <module>'
    saver = 'Thread 81 (awaited, most recent call first):\n  File "{}", line 9 in save'
    assert code_place(f"{main}\n\n{saver.format('/a/save.py')}").line == "/a/save.py:9"
    pool = saver.format("/usr/lib/python3.11/concurrent/futures/thread.py")
    assert code_place(f"{main}\n\n{pool}").line == "/a/b.py:2"
    other = saver.replace("awaited", "in a call").format("/a/save.py")
    assert code_place(f"{main}\n\n{other}").line == "/a/b.py:2"
    text = tidy(f'{main}\n\nThread 82 (idle):\n  File "/a/c.py", line 1 in f\n\n{pool}')
    assert text.index("Thread 81") < text.index("Thread 82")


def test_another_thread_in_a_call_is_shown() -> None:
    """Its frames stand below those of the rank, and tell ranks apart that otherwise stand alike."""
    saver = 'Thread 81 (in a call, most recent call first):\n  File "/a/save.py", line {} in save'
    main = 'Thread 80 (most recent call first): "MainThread"\n  File "/a/b.py", line 2 in <module>'
    stacks = {rank: f"{main}\n\n{saver.format(line)}" for rank, line in ((0, 9), (1, 7), (2, 9))}
    classes = stack_classes(stacks)
    assert [stack_class.ranks for stack_class in classes] == [(1,), (0, 2)]
    assert [frame.line for frame in classes[0].in_calls[0]] == [7]
    assert code_place(stacks[0]).line == "/a/b.py:2"
    shown = "\n".join(stack_lines(stacks))
    assert shown.count("another thread there, in a call\n    save  save.py:") == 2
    other = main.replace("80", "82").replace("<module>", "idle").replace(' "MainThread"', "")
    text = tidy(f"{other}\n\n{saver.format(9)}\n\n{main}")
    assert [line[:9] for line in text.splitlines() if line.startswith("Thread")] == [
        "Thread 80",
        "Thread 81",
        "Thread 82",
    ]
