"""Run under any Python with callsite_probe built for it: `python callsite_checks.py FOLDER`.

It compares the walk with the interpreter's own line, and exits non-zero if they differ.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
import threading
import weakref

sys.path.insert(0, sys.argv[1])
import callsite_probe as probe

LIBRARY = """
import callsite_probe as probe

def all_reduce():
    return probe.find()

def wrapper(call):
    return call()

def batch_isend_irecv(times):
    return [probe.find() for _ in range(times)]

def _engine_run_backward(call=probe.find):
    return call()

def deep(levels):
    return deep(levels - 1) if levels else probe.find()
"""


def here(offset: int = 0) -> int:
    """Return the caller's line."""
    return sys._getframe(1).f_lineno + offset


def check(found: tuple[str | None, bool], line: int, function: str, api: str) -> None:
    """Compare one walk with what is known."""
    assert found[0] is not None, "no call site"
    site = json.loads(found[0])
    expected = {"file": __file__, "line": line, "function": function, "api": api}
    assert site == expected, (site, expected)


def lines(lib) -> None:
    """Direct calls, through wrappers, deep in the library, over several lines, in a loop."""
    check(lib.all_reduce(), here(), "lines", "all_reduce")
    check(lib.wrapper(lib.all_reduce), here(), "lines", "all_reduce")
    check(lib.deep(200), here(), "lines", "deep")
    for _ in range(3):
        found = lib.all_reduce()
        check(found, here(-1), "lines", "all_reduce")
    found = lib.wrapper(
        lib.all_reduce,
    )
    check(found, here(-3), "lines", "all_reduce")
    check((lambda: lib.all_reduce())(), here(), "<lambda>", "all_reduce")
    (found,) = [lib.all_reduce() for _ in range(1)]
    check(found, here(-1), *comprehension())


def comprehension() -> tuple[str, str]:
    """Say what a list comprehension's frame is called: it has none of its own from 3.12 on."""
    return ("<listcomp>" if sys.version_info < (3, 12) else "lines"), "all_reduce"


def generators(lib) -> None:
    """A generator's frame, and a coroutine's."""

    def generate():
        yield lib.all_reduce(), here()

    found, line = next(generate())
    check(found, line, "generate", "all_reduce")

    async def coroutine():
        return lib.all_reduce(), here()

    try:
        coroutine().send(None)
    except StopIteration as stop:
        found, line = stop.value
    check(found, line, "coroutine", "all_reduce")


def batches(lib) -> None:
    """The ops of one call belong together, those of the next call do not."""
    for _ in range(3):
        results = lib.batch_isend_irecv(3)
        assert [continues for _, continues in results] == [False, True, True], results
    assert [continues for _, continues in (lib.all_reduce(), lib.all_reduce())] == [False, False]


def threads(lib) -> None:
    """Each thread finds its own line."""
    results = []

    def work() -> None:
        for _ in range(200):
            results.append((lib.all_reduce(), here()))

    running = [threading.Thread(target=work) for _ in range(4)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert len(results) == 800
    for found, line in results:
        check(found, line, "work", "all_reduce")


def much_code(lib) -> None:
    """More code objects than the caches hold, made and dropped: no stale line, none leaked."""
    for number in range(5000):
        space = {"lib": lib}
        exec(compile("\n" * (number % 97) + "found = lib.all_reduce()", "made.py", "exec"), space)
        site = json.loads(space["found"][0])
        assert (site["file"], site["line"]) == ("made.py", number % 97 + 1), site


def many_sites(lib) -> None:
    """A line is new once, however many are in use: 2,000 functions, then 2,000 lines of one."""
    functions = []
    for number in range(2000):
        space = {"lib": lib}
        exec(compile(f"def f():\n  return lib.all_reduce(), {number}", "many.py", "exec"), space)
        functions.append(space["f"])
    space = {"lib": lib}
    calls = "".join("  lib.all_reduce()\n" for _ in range(2000))
    exec(compile(f"def long():\n{calls}", "long.py", "exec"), space)
    functions.append(space["long"])

    def issue_all() -> int:
        before = probe.gil_taken()
        for function in functions:
            function()
        return probe.gil_taken() - before

    assert issue_all() >= 4000
    assert [issue_all() for _ in range(3)] == [0, 0, 0]


def code_is_not_kept(lib) -> None:
    """A code object dies when its owner drops it, and the walk keeps nothing of it."""
    known = probe.codes()
    dead = []
    for _ in range(300):
        space = {"lib": lib}
        exec(compile("def f():\n  return lib.all_reduce()", "dropped.py", "exec"), space)
        space["f"]()
        dead.append(weakref.ref(space.pop("f").__code__))
    assert all(each() is None for each in dead)
    assert probe.codes() <= known + 2, (probe.codes(), known)


def new_ring(lib) -> None:
    """After a reset each line is announced again, once, under a new number."""

    def issue():
        return lib.all_reduce()

    issue()
    probe.configure(lib.__file__.rpartition("/")[0] + "/")
    before = probe.gil_taken()
    (site, _), line = issue(), issue.__code__.co_firstlineno + 1
    assert json.loads(site)["line"] == line
    assert probe.gil_taken() == before + 1
    issue()
    assert probe.gil_taken() == before + 1


def backward(lib) -> None:
    """Without frames of its own a thread gets the backward call's line, as others come and go."""
    walk, walks = probe.walk_beside_new_threads, 100_000
    assert lib._engine_run_backward(functools.partial(walk, walks)) == walks


def hostile(lib) -> None:
    """A file name with quotes, backslashes and control characters is still JSON."""
    name = 'a"b\\c\n\x01é.py'
    space = {"lib": lib}
    exec(compile("found = lib.all_reduce()", name, "exec"), space)
    assert json.loads(space["found"][0])["file"] == name


def main() -> None:
    """Run every check, then print what a walk costs."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "library.py")
        with open(path, "w") as file:
            file.write(LIBRARY)
        probe.configure(folder + "/")
        sys.path.insert(0, folder)
        import library

        checks = (lines, generators, batches, threads, much_code, hostile)
        for check_one in (*checks, many_sites, code_is_not_kept, new_ring, backward):
            check_one(library)
        took = functools.partial(library._engine_run_backward, probe.frameless_us)
        print(
            f"{sys.version.split()[0]} ok, {probe.nanoseconds():.0f} ns, without frames "
            f"{took():.1f} us"
        )


main()
kept = probe.walk_at_exit()  # freed with this module, which is after finalizing has begun
