"""The cache of native modules: only our own code is loaded, and no wait is without an end."""

from __future__ import annotations

import fcntl
import os
import pwd
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from rankcall import _native, process
from rankcall._native import NativeModule
from rankcall.errors import CaptureUnavailableError

_COMPILER = """#!/bin/sh
{before}
while [ "$1" != -o ]; do shift; done
echo built > "$2"
chmod 777 "$2"
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NativeModule:
    """Return a module whose compiler writes a line of text."""
    monkeypatch.setenv("RANKCALL_CACHE", str(tmp_path / "cache"))
    use_compiler(tmp_path, monkeypatch)
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "x.cpp").write_text("")
    return NativeModule(
        "x", tmp_path / "sources", "x.cpp", CaptureUnavailableError, uses_torch=False
    )


def use_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch, before: str = "") -> None:
    """Make a compiler that runs ``before`` first."""
    script = folder / "compiler"
    script.write_text(_COMPILER.format(before=before))
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written into the working directory for a user whose number has no name."""

    def nobody(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    for name in ("HOME", "XDG_CACHE_HOME", "RANKCALL_CACHE"):
        monkeypatch.delenv(name, raising=False)
    place = _native.cache_dir()
    assert place.is_absolute()
    assert place.name == f"rankcall-cache-{os.geteuid()}"
    monkeypatch.setenv("HOME", "/home/ada")
    assert _native.cache_dir() == Path("/home/ada/.cache/rankcall")


def test_a_module_is_built_once(module: NativeModule) -> None:
    """The folder is private, others cannot write the module, and nothing else is left."""
    before = os.umask(0)
    try:
        target = module.prebuild()
    finally:
        os.umask(before)
    assert stat.S_IMODE(target.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(target.stat().st_mode) == 0o755
    inode = target.stat().st_ino
    assert module.prebuild().stat().st_ino == inode
    assert sorted(path.suffix for path in target.parent.iterdir()) == [".lock", ".so"]


def test_a_cache_that_others_can_write(module: NativeModule) -> None:
    """Any user could have put code into it: it is refused, whether the module is there or not."""
    target = module.prebuild()
    target.parent.chmod(0o777)
    with pytest.raises(
        CaptureUnavailableError, match=r"can be written by other users.*RANKCALL_CACHE"
    ):
        module.prebuild()
    target.unlink()
    with pytest.raises(CaptureUnavailableError, match="can be written by other users"):
        module.load()


def test_a_cache_of_another_user(module: NativeModule, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only this user and the superuser can provide code."""
    module.prebuild()
    monkeypatch.setattr(process.os, "geteuid", lambda: 54321)
    if os.getuid() == 0:
        module.prebuild()  # root may have built it for all users
        target = module.path()
        os.chown(target, 54322, 54322)
        with pytest.raises(CaptureUnavailableError, match="belongs to user 54322"):
            module.prebuild()
        os.chown(target.parent, 54322, 54322)
    with pytest.raises(CaptureUnavailableError, match="belongs to user"):
        module.prebuild()


def test_a_planted_module(module: NativeModule, tmp_path: Path) -> None:
    """A link, or a file that others can write, is not loaded in a module's place."""
    target = module.prebuild()
    target.chmod(0o775)
    with pytest.raises(CaptureUnavailableError, match="can be written by other users"):
        module.load()
    target.unlink()
    target.symlink_to(tmp_path / "evil.so")
    with pytest.raises(CaptureUnavailableError, match="is a link"):
        module.load()


def test_a_cache_behind_a_link(module: NativeModule, tmp_path: Path) -> None:
    """A user's own cache may be a link to a larger disk: the folder that it leads to counts."""
    (tmp_path / "disk").mkdir(mode=0o700)
    (tmp_path / "cache").symlink_to("disk")
    assert module.prebuild().parent == (tmp_path / "disk").resolve()


def test_a_stale_lock(module: NativeModule, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock that is never given back delays a build, and does not prevent it."""
    monkeypatch.setattr(_native, "_LOCK_SECONDS", 0.1)
    target = module.path()
    target.parent.mkdir(mode=0o700)
    with target.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert module.prebuild().read_text() == "built\n"


def test_a_module_that_is_there_is_never_replaced(
    module: NativeModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A builder that comes second leaves the file: a process may have mapped it."""
    target = module.path()
    use_compiler(tmp_path, monkeypatch, f"(umask 022; echo first > {target})")
    assert module.prebuild().read_text() == "first\n"


def test_without_hard_links(module: NativeModule, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some file systems have none; the module gets its name by a rename there."""

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(_native.os, "link", refuse)
    assert module.prebuild().read_text() == "built\n"


def test_the_key_tells_builds_of_torch_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nightlies of one version differ in their headers."""
    torch = pytest.importorskip("torch")
    from rankcall.capture.native import RECORDER

    before = RECORDER.path()
    assert RECORDER.path() == before
    monkeypatch.setattr(torch.version, "git_version", "another")
    assert RECORDER.path() != before


_LOAD = """
import sys
from pathlib import Path
from rankcall._native import NativeModule
from rankcall.errors import CaptureUnavailableError
try:
    NativeModule("x", Path(sys.argv[1]), "x.cpp", CaptureUnavailableError, uses_torch=False).load()
except CaptureUnavailableError as error:
    print(error)
"""


@pytest.mark.parametrize("options", ["exec", "noexec"])
def test_a_cache_whose_file_system_runs_no_code(
    module: NativeModule, tmp_path: Path, options: str
) -> None:
    """The message says that the mount forbids it, and what to set."""
    if os.geteuid() != 0 or not shutil.which("unshare"):
        pytest.skip("mount namespaces need root and unshare")
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    mounting = f'mount -t tmpfs -o mode=700,{options} tmpfs "$1" && shift && exec "$@"'
    inside = ["unshare", "--mount", "sh", "-c", mounting, "sh", str(cache)]
    done = subprocess.run(
        [*inside, sys.executable, "-c", _LOAD, str(module.sources)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert f"{cache}/x-" in done.stdout
    assert ("noexec" in done.stdout) == (options == "noexec")
    assert ("set RANKCALL_CACHE" in done.stdout) == (options == "noexec")
