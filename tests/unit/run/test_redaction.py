"""Secrets do not reach run.json."""

from __future__ import annotations

import pytest

from rankcall.capture.failure import one_line
from rankcall.run.paths import about_job
from rankcall.run.redaction import redact, redact_command

GONE = "[redacted]"


@pytest.mark.parametrize(
    ("command", "kept"),
    [
        (["--token=abc"], [f"--token={GONE}"]),
        (["--hf-token", "abc", "--lr", "1"], ["--hf-token", GONE, "--lr", "1"]),
        (["--api-key", "X", "y"], ["--api-key", GONE, "y"]),
        (["--apiKey=abc=="], [f"--apiKey={GONE}"]),
        (["WANDB_API_KEY=abc"], [f"WANDB_API_KEY={GONE}"]),
        (["AWS_SECRET_ACCESS_KEY=a b"], [f"AWS_SECRET_ACCESS_KEY={GONE}"]),
        (["+model.password=x"], [f"+model.password={GONE}"]),
        (["-c", "export MY_SECRET=abc; x"], ["-c", f"export MY_SECRET={GONE}; x"]),
        (["-c", "x --password 'a b' --lr 3"], ["-c", f"x --password {GONE} --lr 3"]),
        (['{"api_key": "abc", "lr": 1}'], [f'{{"api_key": {GONE}, "lr": 1}}']),
        (["https://me:pw@host/x?y=1"], [f"https://{GONE}@host/x?y=1"]),
        (["https://host/x?token=abc&y=1"], [f"https://host/x?token={GONE}&y=1"]),
        (["hf_abcdefghijklmnopqrst"], [GONE]),
        (["Bearer abcdef"], [f"Bearer {GONE}"]),
    ],
)
def test_secrets_are_replaced(command: list[str], kept: list[str]) -> None:
    """The value goes, its name and everything else stay."""
    assert redact_command(["train.py", *command]) == ["train.py", *kept]


@pytest.mark.parametrize(
    "command",
    [
        ["--tokenizer=gpt2", "--max-tokens", "512", "--author", "me", "--monkey=1"],
        ["--num-key-value-heads", "8", "--keyboard=x", "--passes=3"],
        ["--rdzv-endpoint=host:29500", "--url", "https://host:80/x", "-m", "pkg.mod"],
        ["--token", "--lr", "1"],
    ],
)
def test_other_arguments_stay(command: list[str]) -> None:
    """A word that only contains another, or an option without a value, is left alone."""
    assert redact_command(command) == command


def test_a_whole_description() -> None:
    """Keys, lists and texts at any depth are searched; numbers and None are kept."""
    about = {"command": ["x", "--token", "a"], "env": {"MY_KEY": "b", "n": 3}, "z": [None, 1.5]}
    assert redact(about) == {
        "command": ["x", "--token", GONE],
        "env": {"MY_KEY": GONE, "n": 3},
        "z": [None, 1.5],
    }


def test_run_json_has_no_secrets() -> None:
    """A secret that is written to disk is a secret that leaks."""
    command = about_job(["train.py", "--hf-token=hf_SECRET"], "2.13")["command"]
    assert command == ["train.py", f"--hf-token={GONE}"]


def test_a_recorded_exception_has_no_secrets() -> None:
    """A failed request often names its URL, with the password in it."""
    error = ConnectionError("cannot reach https://me:pw@host/x?token=abc&n=1: refused")
    assert one_line(error) == (
        f"ConnectionError: cannot reach https://{GONE}@host/x?token={GONE}&n=1: refused"
    )
