"""How a program ended: the exception that ended it, as one line without secrets."""

from __future__ import annotations

from rankcall.run.redaction import redact_text


def cause_of(error: BaseException | None) -> BaseException | None:
    """Return the exception that ended a program; None if it ended without an error.

    A launcher of children may turn their exceptions into an exit status, as torch's does. The
    exception that it handled is then the context of ``SystemExit``.
    """
    if not isinstance(error, SystemExit):
        return error
    if error.code in (None, 0):
        return None
    return error.__context__ or error


def one_line(error: object) -> str:
    """Return an exception's type and message as one line, without secrets.

    The line goes into the ring, and from there into reports that users share.
    """
    try:  # its own code may fail to write it
        text = redact_text(" ".join(str(error).split()))
    except Exception:
        text = ""
    text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text.encode("utf-8", "replace").decode()
