"""Dumped stacks: the training thread comes first, and rankcall's own threads are left out."""

from __future__ import annotations

import ast
import faulthandler
import threading
from pathlib import Path

import rankcall
from rankcall.run.stack_text import OWN_THREADS, tidy, with_names

MAIN = 'Current thread 0x3 (most recent call first):\n  File "/tmp/loop.py", line 8 in <module>'
POOL = 'Thread 0x2 (most recent call first): "pool"\n  File "/x/pool.py", line 1 in run'
OURS = (
    'Thread 4 (idle): "rankcall-watch"\n    wait (threading.py:355)\n    _run (job/watcher.py:83)'
)


def test_stacks_begin_with_the_users() -> None:
    """The main thread comes first; rankcall's own threads are left out, whatever they run."""
    heart = OURS.replace("watch", "heart").replace("job/watch.py", "any/other.py")
    assert tidy(f"{OURS}\n\n{heart}\n\n{POOL}\n\n{MAIN}") == f"{MAIN}\n\n{POOL}"


def test_a_thread_of_the_users_is_shown_wherever_it_stands() -> None:
    """It may hang inside of rankcall, for example in ``watch.start``."""
    inside = f'{POOL}\n  File "/x/rankcall/job/watcher.py", line 78 in start'
    main = MAIN.replace("\n", '\n  File "/x/rankcall/job/watcher.py", line 78 in start\n', 1)
    assert tidy(f"{OURS}\n\n{inside}\n\n{main}") == f"{main}\n\n{inside}"


def test_only_our_threads() -> None:
    """If a text has no other thread, it is shown as it is."""
    assert tidy(OURS) == OURS


def test_the_own_dump_has_the_names_of_threads(tmp_path: Path) -> None:
    """A process that dumps itself writes the names, so that its rankcall threads are left out."""
    release = threading.Event()
    names = ("rankcall-test", "loader 3")
    threads = [threading.Thread(target=release.wait, args=(60,), name=name) for name in names]
    for thread in threads:
        thread.start()
    try:
        with (tmp_path / "stacks").open("w+") as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            text = with_names(file.read().strip())
    finally:
        release.set()
        for thread in threads:
            thread.join(60)
    assert text.count('"rankcall-test"') == text.count('"loader 3"') == 1
    shown = tidy(text)
    assert "rankcall-test" not in shown
    assert '"loader 3"' in shown
    assert '"MainThread"' in shown


def test_all_our_threads_have_our_name() -> None:
    """Each name that the package gives to a thread or a background call begins with ours."""
    root = Path(rankcall.__file__).parent
    given = []
    for path in root.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call):
                continue
            function = ast.unparse(call.func)
            if function == "threading.Thread":
                (name,) = (keyword.value for keyword in call.keywords if keyword.arg == "name")
                given.append((path, name))
            elif function.endswith("BackgroundCall") and len(call.args) > 1:
                given.append((path, call.args[1]))
    texts = [name.value for _, name in given if isinstance(name, ast.Constant)]
    assert len(texts) > 10
    assert all(text.startswith(OWN_THREADS) for text in texts)
