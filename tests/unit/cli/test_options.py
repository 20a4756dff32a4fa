"""The options of all commands: one help that people can read, and one spelling for one thing."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from worlds import MS, Call, write_world

from rankcall.cli import exec as exec_command
from rankcall.cli import main
from rankcall.cli import run as run_command
from rankcall.cli.commands import COMMANDS
from rankcall.cli.job_options import OPTIONS, JobOptions, Reaction, TraceMode

READERS = ("report", "diagnose", "explain-policy", "profile", "export", "top", "serve")
TYPES = re.compile(r"<(?:list|int|float|str|path|bool|Path)\b")


def help_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what ``rankcall COMMAND --help`` prints."""
    capsys.readouterr()
    assert main([command, "--help"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """No help shows a type of Python, and each word of the usage line is explained below it."""
    text = help_of(command, capsys)
    assert not TYPES.search(text), text
    assert "hidden" not in text.lower()
    words = re.findall(r"[\[{](\w+)[\]}]", text.splitlines()[0])
    for word in words:
        assert word.isupper(), text
        assert word == "OPTIONS" or re.search(rf"^  {word}  +\S", text, re.MULTILINE), text
    options = text.partition("\nOptions:\n")[2].partition("\nExamples:\n")[0]
    for line in options.splitlines():
        if line.startswith("  -"):
            assert re.search(r"\S  +\S|^  \S+.*$", line)


@pytest.mark.parametrize("command", COMMANDS)
def test_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The help ends with examples of this command, whose options exist. -h shows it as well."""
    text = help_of(command, capsys)
    assert main([command, "-h"]) == 0
    assert capsys.readouterr().out == text
    options, _, examples = text.partition("\nExamples:\n")
    lines = [line.strip() for line in examples.splitlines() if f"rankcall {command}" in line]
    assert len(lines) >= 2
    for line in lines:
        own = line.partition(f"rankcall {command}")[2].partition(" -- ")[0]
        for option in re.findall(r"(?<=\s)-[-\w]+", own):
            is_torchruns = command == "run" and option == "--nproc-per-node"
            assert is_torchruns or re.search(rf"^  (-\w, )?{option}\b", options, re.M), line


def test_groups(capsys: pytest.CaptureFixture[str]) -> None:
    """Every command is in one group of the help, and the help says that a run may be an archive."""
    assert main(["-h"]) == 0
    text = capsys.readouterr().out
    groups = re.findall(r"^([A-Z][\w-]+):\n((?:  .*\n)+)", text, re.MULTILINE)
    assert [name for name, _ in groups] == ["Options", "Record", "Read", "Serve", "House-keeping"]
    listed = [name for _, body in groups[1:] for name in re.findall(r"^  ([\w-]+)  ", body, re.M)]
    assert sorted(listed) == sorted(COMMANDS)
    assert "archive" in text


@pytest.mark.parametrize("option", ["--nproc-per-node", "-m"])
def test_an_option_of_the_command(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    """``exec`` says where an option of torchrun belongs."""
    assert main(["exec", option, "4", "x.py"]) == 2
    error = capsys.readouterr().err
    assert f"'rankcall exec -- torchrun {option} ...'" in error
    assert "rankcall run takes torchrun's own options" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "completed"), [("rankcall di", "diagnose"), ("rankcall top --on", "--once")]
)
def test_completion(words: str, completed: str) -> None:
    """A shell that completes a line gets the names of commands and of their options."""
    variables = {
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
        "_RANKCALL_COMPLETE": "complete_bash",
    }
    done = subprocess.run(
        [Path(sys.executable).with_name("rankcall")],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert (done.stdout.split(), done.stderr) == ([completed], "")


@pytest.mark.parametrize("command", COMMANDS)
def test_where_to_write(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A file to write is ``-o``; ``--to`` is a format."""
    text = help_of(command, capsys)
    assert ("-o, --output FILE" in text) == (command in ("report", "export", "collect"))
    to = re.search(r"^  --to (\S+)", text, re.MULTILINE)
    assert to is None or to[1] in ("FORMAT", "<text|html|json>")


def test_an_attempt_wherever_a_run_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    """Every command that reads a run takes one attempt of it."""
    with_attempt = [name for name in COMMANDS if "--attempt N" in help_of(name, capsys)]
    assert set(with_attempt) == set(READERS)


def test_run_and_exec_share_their_options(capsys: pytest.CaptureFixture[str]) -> None:
    """Both take the fields of ``JobOptions``, with one help text, and nothing else."""
    texts = [help_of(name, capsys).partition("\nOptions:\n")[2] for name in ("run", "exec")]
    own = [text.partition("\nExamples:\n")[0] for text in texts]
    assert own[0] == own[1]
    assert set(re.findall(r"^  (--[a-z-]+)", own[0], re.MULTILINE)) == set(OPTIONS)
    for command in (run_command.command, exec_command.command):
        names = [f"--{name.replace('_', '-')}" for name in inspect.signature(command).parameters]
        assert names[1:] == list(OPTIONS)


def test_the_variables_of_options() -> None:
    """Options become variables that the ranks read; those that are not given set nothing."""
    bare = JobOptions(hang_after=0).variables()
    assert bare == {"RANKCALL_HANG_AFTER": "0", "RANKCALL_ON_HANG": "report"}
    assert JobOptions(
        on_hang=Reaction.abort,
        trace=TraceMode.crossnode,
        history=True,
        collect_to="/tmp/x",
        notify="http://x",
    ).variables() == {
        "RANKCALL_HANG_AFTER": "60",
        "RANKCALL_ON_HANG": "abort",
        "RANKCALL_NOTIFY": "http://x",
        "RANKCALL_COLLECT_TO": "/tmp/x",
        "RANKCALL_TRACE": "1",
        "TORCH_DISTRIBUTED_TRACING": "CROSSNODE",
        "RANKCALL_HISTORY": "1",
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run of two attempts: rank 1 comes late in the last one, and hangs in the first."""
    first = [Call(0, 1, MS, None, attempt=0), Call(1, 1, MS, 2 * MS, attempt=0)]
    last = [Call(rank, 1, MS, 2 * MS, "barrier", attempt=1) for rank in range(2)]
    return write_world(tmp_path / "run", [*first, *last])


@pytest.mark.parametrize("attempt", [0, 1])
def test_one_attempt(run: Path, attempt: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Each reader shows the ranks and calls of the attempt that was asked for."""
    op, other = [("all_reduce", "barrier"), ("barrier", "all_reduce")][attempt]
    for command in (
        ["report"],
        ["top", "--once"],
        ["diagnose"],
        ["export", "--to=jsonl", "-o", "-"],
    ):
        assert main([*command, str(run), "--attempt", str(attempt)]) in (0, 1)
        out = capsys.readouterr().out
        assert op in out
        assert other not in out
        assert main([*command, str(run), "--attempt", "2"]) == 2
        assert "has no attempt 2: its attempts are 0-1" in capsys.readouterr().err


def test_the_forms_of_a_report(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """-o writes a file; its ending, or --to, says in which form."""
    monkeypatch.chdir(run.parent)
    monkeypatch.setenv("COLUMNS", "100")  # as wide as a file: without it, a pipe has no width
    for options in (["-o", "a.html"], ["--to", "html"], ["--to", "html", "-o", "b.page"]):
        assert main(["report", str(run), *options]) == 0
    for name in ("a.html", "report.html", "b.page"):
        assert Path(name).read_text(encoding="utf-8").startswith("<!doctype html>")
    assert main(["report", str(run), "--json", "-o", "r.json"]) == 0
    assert json.loads(Path("r.json").read_text())["schema"] == 1
    assert main(["report", str(run), "-o", "r.txt"]) == 0
    assert "r.txt: " in capsys.readouterr().out
    assert "barrier" in Path("r.txt").read_text()
    assert main(["report", str(run), "--to", "text"]) == 0
    assert capsys.readouterr().out.split() == Path("r.txt").read_text().split()
    assert main(["report", str(run), "--json", "--to", "html"]) == 2
    assert "html and json: one form of the report at a time" in capsys.readouterr().err


def test_old_spellings(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They work for one version, and say on stderr what to write instead."""
    monkeypatch.chdir(run.parent)
    assert main(["report", str(run), "--html", "page.html"]) == 0
    assert "rankcall: --html page.html is now -o page.html; " in capsys.readouterr().err
    assert main(["collect", str(run), "--to", "all.tar"]) == 0
    assert "rankcall: --to all.tar is now -o all.tar; " in capsys.readouterr().err
    assert Path("page.html").exists()
    assert Path("all.tar").exists()
