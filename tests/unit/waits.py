"""Find every wait in the package: in Python by its syntax tree, in C++ by its tokens.

A wait is reported unless its own line shows that it is bounded. A report is ``(file, kind, text)``:
no line number, so that an edit elsewhere changes nothing.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple


class Wait(NamedTuple):
    """A wait without a visible deadline. ``kind``: the kind of wait; ``text``: the call or lock."""

    file: str
    kind: str
    text: str


# Calls that wait for ever without an argument, and the names of arguments that bound them.
_BARE = ("join", "wait", "wait_for", "result", "communicate", "acquire", "select", "shutdown")
_BOUNDS = {"timeout", "timeout_s", "timeout_millis", "seconds", "deadline", "blocking"}
_SUBPROCESS = ("run", "call", "check_call", "check_output")
_COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "all_gather_object",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "monitored_barrier",
    "new_group",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
)
_SOCKET = ("accept", "recv", "recv_into", "recvfrom", "recv_bytes")
_LOCK_MAKERS = ("Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore")
_LOCK_NAMES = re.compile(r"lock|mutex|condition", re.IGNORECASE)
_STORES = re.compile(r"store|client|_own\b", re.IGNORECASE)
# Each waits for the store's answer: none of its timeouts applies while its host is stopped.
_STORE_REQUESTS = (
    "get",
    "multi_get",
    "set",
    "multi_set",
    "add",
    "append",
    "check",
    "compare_set",
    "delete_key",
    "list_keys",
    "num_keys",
    "clone",
)
_RESOLVERS = ("getaddrinfo", "gethostbyname", "gethostbyaddr", "getfqdn", "getnameinfo")
_TIMED = re.compile(r"deadline|monotonic|until|settled|stopping|\.wait\(", re.IGNORECASE)


def python_waits(file: str, source: str) -> Iterator[Wait]:
    """Yield the waits of a Python file that have no visible deadline."""
    tree = ast.parse(source)
    locks = _locks(tree)
    for node in ast.walk(tree):
        if isinstance(node, (ast.With, ast.AsyncWith)):
            for item in node.items:
                text = ast.unparse(item.context_expr)
                name = text.rpartition(".")[2]
                if "(" not in text and (name in locks or _LOCK_NAMES.search(name)):
                    yield Wait(file, "lock", text)
        elif isinstance(node, ast.While):
            body = ast.unparse(node)
            if ".sleep(" in body and not _TIMED.search(body):
                yield Wait(file, "sleep", ast.unparse(node.test))
        elif isinstance(node, ast.Call):
            kind = _kind(node)
            if kind:
                yield Wait(file, kind, ast.unparse(node.func))


def _locks(tree: ast.AST) -> set[str]:
    """Return the names that a file gives to locks and conditions."""
    names = set()
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or not isinstance(
            node.value, ast.Call
        ):
            continue
        if ast.unparse(node.value.func).rpartition(".")[2] in _LOCK_MAKERS:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {ast.unparse(target).rpartition(".")[2] for target in targets}
    return names


def _kind(call: ast.Call) -> str:
    """Return what a call waits for if nothing in the call bounds it, else an empty string."""
    if not isinstance(call.func, ast.Attribute):
        return "input" if ast.unparse(call.func) == "input" else ""
    name, owner = call.func.attr, ast.unparse(call.func.value)
    positional, words = len(call.args), {word.arg for word in call.keywords}
    text = ast.unparse(call)
    bounded = bool(words & _BOUNDS) and "timeout=None" not in text
    if owner == "atexit" and name == "register":
        return "atexit"  # all waits at exit share a budget: see rankcall.background
    if owner == "subprocess" and name in _SUBPROCESS:
        return "" if "timeout" in words else "subprocess"
    if owner == "fcntl" and name in ("flock", "lockf"):
        return "" if "LOCK_NB" in text or "LOCK_UN" in text else "flock"
    if owner == "dist" and name in _COLLECTIVES:
        return "collective"
    if owner == "os" and name in ("wait", "waitpid", "wait3", "wait4"):
        return "" if "WNOHANG" in text else "process"
    if owner == "select" and name == "select":
        return "" if positional == 4 else "select"
    if owner == "socket" and name == "create_connection":
        return "" if positional > 1 or bounded else "socket"
    if owner.endswith("connection") and name == "wait":
        return "" if positional > 1 or bounded else "wait"
    if name in _SOCKET:
        return "" if "MSG_DONTWAIT" in text else "socket"
    if name == "connect" and positional == 1 and not bounded:
        return "socket"
    if name == "synchronize" and positional < 3:
        return "synchronize"  # a device; rankcall.store's has a timeout
    if name in _RESOLVERS:
        return "resolver"
    is_store = bool(_STORES.search(owner.rpartition(".")[2]))
    if is_store and (name in _STORE_REQUESTS or (name == "wait" and positional < 2)):
        return "store"
    if name in ("get", "put") and "queue" in owner.rpartition(".")[2].lower():
        return "" if bounded or (name == "get" and positional > 1) else "queue"
    if name == "get" and not positional and not words:
        return "queue"
    if name in _BARE and not positional and not bounded:
        return name
    if name == "wait_for" and positional == 1 and not bounded:
        return name
    return ""


_COMMENTS = re.compile(r'//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"', re.DOTALL)
_CPP = (
    ("join", re.compile(r"\b[\w\].>-]*?(\w+)(?:\.|->)join\(\)")),
    ("wait", re.compile(r"(\w+)(?:\.|->)wait\(")),
    ("lock", re.compile(r"(?:lock_guard|unique_lock|scoped_lock)(?:<[^>]*>)?\s+\w+\(([^)]*)\)")),
    ("lock", re.compile(r"(\w+)(?:\.|->)lock\(\)")),
    ("synchronize", re.compile(r"(\w+(?:\([^()]*\))?)(?:\.|->)synchronize\(")),
    ("yield", re.compile(r"\b(sched_yield|this_thread::yield)\(")),
    ("sleep", re.compile(r"\b(u?sleep|nanosleep|sleep_for)\(")),
    ("gil", re.compile(r"\b(PyGILState_Ensure|gil_scoped_acquire)\b")),
    ("poll", re.compile(r"(\w+(?:\.|->)poll)\([^;]*-1\)")),
    ("recv", re.compile(r"(\w+(?:\.|->)msg_recv)\([^;]*, 0\)")),
    ("term", re.compile(r"(\w+(?:\.|->)ctx_term)\(")),
    ("flock", re.compile(r"\b(flock|lockf)\(")),
    ("read", re.compile(r"(?<![\w.>])(read|recv|accept|connect|waitpid)\(")),
)


def cpp_waits(file: str, source: str) -> Iterator[Wait]:
    """Yield the waits of a C++ file that have no deadline; ``wait_for`` and its like have one."""
    code = _COMMENTS.sub(" ", source)
    for kind, pattern in _CPP:
        for match in pattern.finditer(code):
            yield Wait(file, kind, match.group(1))
