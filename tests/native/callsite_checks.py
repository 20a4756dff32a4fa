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

def broadcast_object_list(pickle):
    pickle()
    lengths = probe.find()
    return [lengths, probe.find()]

def _engine_run_backward(call=probe.find):
    return call()

def deep(levels):
    return deep(levels - 1) if levels else probe.find()
"""


FRAMEWORK = """
def fit(call):
    return step(call, 0)

def step(call, levels):
    if levels:
        return step(call, levels - 1)
    return call()

def both(call):
    one = call()
    two = call()
    return one, two

def keep(found, call):
    found.append(call())

def generated(call):
    space = {"call": call}
    exec(compile("found = call()", FILE, "exec"), space)
    return space["found"]

FILE = __file__.replace("framework.py", "made.py")
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
        walk = lib.all_reduce()
        check(walk, here(-1), "lines", "all_reduce")
    walk = lib.wrapper(
        lib.all_reduce,
    )
    check(walk, here(-3), "lines", "all_reduce")
    check((lambda: lib.all_reduce())(), here(), "<lambda>", "all_reduce")
    (walk,) = [lib.all_reduce() for _ in range(1)]
    check(walk, here(-1), *comprehension())


def comprehension() -> tuple[str, str]:
    """Say what a list comprehension's frame is called: it has none of its own from 3.12 on."""
    return ("<listcomp>" if sys.version_info < (3, 12) else "lines"), "all_reduce"


def generators(lib) -> None:
    """A generator's frame, and a coroutine's."""

    def generate():
        yield lib.all_reduce(), here()

    walk, line = next(generate())
    check(walk, line, "generate", "all_reduce")

    async def coroutine():
        return lib.all_reduce(), here()

    try:
        coroutine().send(None)
    except StopIteration as stop:
        walk, line = stop.value
    check(walk, line, "coroutine", "all_reduce")


def batches(lib) -> None:
    """The ops of one call belong together, those of the next call do not."""
    for _ in range(3):
        walks = lib.batch_isend_irecv(3)
        assert [continues for _, continues in walks] == [False, True, True], walks
    assert [continues for _, continues in (lib.all_reduce(), lib.all_reduce())] == [False, False]
    for look in (look_at_stack, int):  # who looks at a stack makes objects of its frames
        for _ in range(3):
            walks = lib.broadcast_object_list(look)
            assert [continues for _, continues in walks] == [False, True], walks


def look_at_stack() -> None:
    """Look at all frames of this thread, as a sampler, a warning or a traceback does."""
    frame = sys._getframe()
    while frame is not None:
        frame = frame.f_back


def threads(lib) -> None:
    """Each thread finds its own line."""
    walks = []

    def work() -> None:
        for _ in range(200):
            walks.append((lib.all_reduce(), here()))

    running = [threading.Thread(target=work) for _ in range(4)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert len(walks) == 800
    for walk, line in walks:
        check(walk, line, "work", "all_reduce")


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
    assert all(reference() is None for reference in dead)
    assert probe.codes() <= known + 2, (probe.codes(), known)


def check_pair(found: tuple[str | None, bool], line: int, function: str, framework: int) -> None:
    """Compare a walk through the framework with what is known: both lines."""
    assert found[0] is not None, "no call site"
    site = json.loads(found[0])
    assert os.path.basename(site["file"]) in ("framework.py", "made.py"), site
    assert site["line"] == framework, site
    assert site["user"] == {"file": __file__, "line": line, "function": function}, (site, line)


def through_a_framework(lib) -> None:
    """A framework's line is kept with the user's line that led there, however far away that is."""
    import framework

    deepest = framework.step.__code__.co_firstlineno + 3
    for levels in (0, 1, 50, 300):
        check_pair(framework.step(lib.all_reduce, levels), here(), "through_a_framework", deepest)
    for _ in range(3):
        first, second = framework.fit(lib.all_reduce), framework.fit(lib.all_reduce)
        for walk in (first, second):
            check_pair(walk, here(-2), "through_a_framework", deepest)
    # Two of the user's lines that lead to one line of the framework are two call sites.
    walk = framework.fit(lib.all_reduce)
    line = here(-1)
    again = framework.fit(lib.all_reduce)
    check_pair(walk, line, "through_a_framework", deepest)
    check_pair(again, line + 2, "through_a_framework", deepest)
    # The user's code calls the framework, that calls the user's, and that the library.
    site = json.loads(framework.fit(lambda: lib.all_reduce())[0])
    assert site["file"] == __file__, site
    assert "user" not in site, site


def two_lines_of_a_framework(lib) -> None:
    """Two lines of a framework that one line of the user's led to are two call sites."""
    import framework

    first = framework.both.__code__.co_firstlineno + 1
    for _ in range(3):
        walks = framework.both(lib.all_reduce)
        check_pair(walks[0], here(-1), "two_lines_of_a_framework", first)
        check_pair(walks[1], here(-2), "two_lines_of_a_framework", first + 1)


def no_user_behind_a_framework(lib) -> None:
    """A thread that runs only a framework's code has no line of the user's: one line is kept."""
    import framework

    walks = []
    thread = threading.Thread(target=framework.keep, args=(walks, lib.all_reduce))
    thread.start()
    thread.join()
    site = json.loads(walks[0][0])
    assert os.path.basename(site["file"]) == "framework.py", site
    assert "user" not in site, site


def known_pairs_take_no_gil(lib) -> None:
    """A pair of lines is new once, and once more for a new ring."""
    import framework

    def issue_all() -> int:
        before = probe.gil_taken()
        for _ in range(50):
            framework.fit(lib.all_reduce)
            framework.fit(lib.all_reduce)
        return probe.gil_taken() - before

    assert issue_all() > 0
    assert [issue_all() for _ in range(3)] == [0, 0, 0]
    configure(lib)
    assert [issue_all() for _ in range(3)] == [2, 0, 0]


def framework_code_made_anew(lib) -> None:
    """Code that a framework makes anew at each step takes no new entry for the user's line."""
    import framework

    def issue() -> int:
        before = probe.gil_taken()
        check_pair(framework.generated(lib.all_reduce), here(), "issue", 1)
        return probe.gil_taken() - before

    known = probe.codes()
    first = issue()
    counts = [issue() for _ in range(5000)]
    assert max(counts) <= 2 < first, (first, max(counts))  # the new code object, and its line
    assert probe.codes() <= known + 8, (probe.codes(), known)


def new_ring(lib) -> None:
    """After a reset each line is announced again, once, under a new number."""

    def issue():
        return lib.all_reduce()

    issue()
    configure(lib)
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


def configure(lib) -> None:
    """Begin a new ring: the library is passed over, and the framework is not the user's."""
    folder = os.path.dirname(lib.__file__)
    standard = os.path.dirname(os.__file__)
    probe.configure(folder + "/library.py", os.path.join(folder, "installed") + "/", standard + "/")


def main() -> None:
    """Run every check, then print what a walk costs."""
    with tempfile.TemporaryDirectory() as folder:
        installed = os.path.join(folder, "installed")
        os.mkdir(installed)
        for path, source in (("library.py", LIBRARY), ("installed/framework.py", FRAMEWORK)):
            with open(os.path.join(folder, path), "w") as file:
                file.write(source)
        sys.path[:0] = [folder, installed]
        import framework
        import library

        configure(library)
        checks = (lines, generators, batches, threads, much_code, hostile)
        pairs = (through_a_framework, two_lines_of_a_framework, no_user_behind_a_framework)
        pairs = (*pairs, known_pairs_take_no_gil, framework_code_made_anew)
        for check_one in (*checks, *pairs, many_sites, code_is_not_kept, new_ring, backward):
            check_one(library)
        took = functools.partial(library._engine_run_backward, probe.frameless_us)
        through = framework.step(probe.nanoseconds, 30)
        print(
            f"{sys.version.split()[0]} ok, {probe.nanoseconds():.0f} ns, through 30 frames of a "
            f"framework {through:.0f} ns, without frames {took():.1f} us"
        )


main()
kept = probe.walk_at_exit()  # freed with this module, which is after finalizing has begun
