"""The text of dumped stacks: the names of threads in it, which one trains, and what people see.

A text comes from ``faulthandler`` or from py-spy. In both, each thread begins with a heading. The
heading of the thread that trains has ``TRAINS``. Other threads have ``IN_CALL`` if they are in a
call, and ``AWAITED`` if others wait in a group whose calls they issued.
"""

from __future__ import annotations

import re
import threading

from rankcall.printable import clean

TRAINS = "(trains, "
IN_CALL = "(in a call, "  # of another thread, which has issued a call that has not ended
AWAITED = "(awaited, "  # of another thread, which issued its rank's last call in a group that waits
OWN_THREADS = "rankcall-"  # the names of all threads that rankcall starts begin with it
THREADS = re.compile(r"\n(?=Thread |Current thread )")
_MAIN = re.compile(r"<module>|^(?:Current t|T)hread .*\"MainThread\"$", re.MULTILINE)
_OURS = re.compile(rf'(?:Current t|T)hread [^\n]*"{OWN_THREADS}[^"\n]*"(?:\n|$)')
_HEADING = re.compile(r"^(?:Current t|T)hread (0x[0-9a-f]+) .*:$", re.MULTILINE)


def is_training(stack: str) -> bool:
    """Return whether the stack of one thread is marked as that of the training thread."""
    return TRAINS in stack.partition("\n")[0]


def is_in_call(stack: str) -> bool:
    """Return whether the stack of one thread is marked as that of another thread in a call."""
    return IN_CALL in stack.partition("\n")[0]


def is_awaited(stack: str) -> bool:
    """Return whether the stack of one thread is marked as that of one that others wait for."""
    return AWAITED in stack.partition("\n")[0]


def with_names(text: str) -> str:
    """Write the name of each thread behind its heading, as py-spy does.

    ``faulthandler`` writes only a thread's number. Names tell rankcall's own threads from others,
    also if a thread of the user's is inside a function of rankcall.
    """
    names = {f"{thread.ident or 0:#018x}": thread.name for thread in threading.enumerate()}

    def named(heading: re.Match[str]) -> str:
        name = names.get(heading[1])
        return f'{heading[0]} "{clean(name)}"' if name else heading[0]

    return _HEADING.sub(named, text)


def mark_training_thread(text: str, thread: str) -> str:
    """Write ``TRAINS`` into the first line of a thread's stack; ``thread`` is its name there."""
    return mark_thread(text, thread, TRAINS)


def mark_thread(text: str, thread: str, mark: str) -> str:
    """Write a mark into the first line of a thread's stack; ``thread`` is its name there."""
    if not thread:
        return text
    return re.sub(rf"^((?:Current t|T)hread {thread}) \(", rf"\1 {mark}", text, count=1, flags=re.M)


def tidy(text: str) -> str:
    """Put the training and the main thread first, then marked ones; leave out rankcall's own.

    None of these runs the training loop. If a thread of the user's waits for one of them, for
    example in a barrier of ``rankcall.store``, its own stack says so.
    """
    threads = [stack.rstrip() for stack in THREADS.split(text) if not _OURS.match(stack.strip())]
    threads.sort(
        key=lambda stack: (
            not is_training(stack),
            _MAIN.search(stack) is None,
            not (is_awaited(stack) or is_in_call(stack)),
        )
    )
    return "\n\n".join(threads) or text
