"""Remove secrets from command lines before they are written to a file.

A value is replaced if its name is that of a secret (``--token=X``, ``--api-key X``,
``WANDB_KEY=X``), or if it has the form of a well-known kind of token. Other secrets, for example
a password that is a positional argument, are not found.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

REDACTED = "[redacted]"
_SECRET_PART = re.compile(
    "token|secrets?|password|passwd|passphrase|pwd|pass|apikey|auth|authorization|bearer"
    "|credentials?|cookie|jwt"
)
_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_ASSIGNED = re.compile(
    r"""(?P<name>[\w.-]+)(?P<between>["']?\s*(?:=|:(?!//))\s*)"""
    r"""(?P<value>"[^"]*"|'[^']*'|[^\s"',;&]+)"""
)
_OPTION = re.compile(
    r"""(?P<name>(?<!\S)--?[A-Za-z][\w.-]*)(?P<between>\s+)(?P<value>"[^"]*"|'[^']*'|[^\s-]\S*)"""
)
_SHAPES = re.compile(
    r"\b(?:hf_|sk-|gh[opsur]_|github_pat_|glpat-|xox[abeprs]-|AKIA|ASIA|AIza|eyJ)[\w.=-]{12,}"
    r"|(?<=[Bb]earer )\S+"
    r"|(?<=://)[^\s/@:]*:[^\s/@]+(?=@)"
)


def is_secret_name(name: str) -> bool:
    """Return whether the name of an option, a variable or a key is that of a secret.

    ``key`` counts only as the last word: ``num_key_value_heads`` is not a secret.
    """
    parts = [part.lower() for part in _PARTS.findall(name)]
    return parts[-1:] == ["key"] or any(map(_SECRET_PART.fullmatch, parts))


def redact_text(text: str) -> str:
    """Return a text with the values of secret names, and known kinds of tokens, replaced."""
    return _SHAPES.sub(REDACTED, _without_values(_OPTION, _without_values(_ASSIGNED, text)))


def redact_command(command: Sequence[str]) -> list[str]:
    """Return a command line without its secrets; it has as many arguments as before."""
    redacted: list[str] = []
    secret_follows = False
    for argument in command:
        name, equals, _ = argument.partition("=")
        if secret_follows and not argument.startswith("--"):
            redacted.append(REDACTED)
            secret_follows = False
            continue
        secret_follows = not equals and argument.startswith("-") and is_secret_name(name)
        whole = equals and re.fullmatch(r"[\w.+/@-]+", name) and is_secret_name(name)
        redacted.append(f"{name}={REDACTED}" if whole else redact_text(argument))
    return redacted


def redact(value: Any) -> Any:
    """Return a JSON value without secrets: values of secret keys, command lines, any text."""
    if isinstance(value, dict):
        return {
            key: REDACTED if isinstance(item, str) and is_secret_name(str(key)) else redact(item)
            for key, item in value.items()
        }
    if isinstance(value, list):
        if value and all(isinstance(item, str) for item in value):
            return redact_command(value)
        return [redact(item) for item in value]
    return redact_text(value) if isinstance(value, str) else value


def _without_values(pattern: re.Pattern[str], text: str) -> str:
    """Replace the values of secret names. Other values are searched in turn: a URL has names."""
    parts, at = [], 0
    while match := pattern.search(text, at):
        parts.append(text[at : match.start("value")])
        at = match.start("value")
        if is_secret_name(match["name"]):
            parts.append(REDACTED)
            at = match.end()
    return "".join([*parts, text[at:]])
