"""The live page of a job that ``--serve`` starts: a process beside the launcher."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from rankcall.cli.common import say
from rankcall.errors import RankcallError
from rankcall.interpreter import run_command
from rankcall.whole_numbers import whole_number

_END_S = 5.0  # for its viewers' streams; then it is killed, because the launcher must end


def address_of(text: str) -> tuple[str, int]:
    """Return host and port of ``PORT`` or ``HOST:PORT``. Raises ``RankcallError``."""
    host, _, port = text.rpartition(":")
    number = whole_number(port, most=65535)
    if number is None:
        raise RankcallError(f"--serve {text}: neither a port nor HOST:PORT")
    return host.strip("[]") or "127.0.0.1", number


@contextlib.contextmanager
def page_of(run: Path, address: str, hang_after: float) -> Iterator[None]:
    """Show a run on a page for the length of a block; without an address, do nothing.

    The page has a process and a session of its own, so that nothing in it can hold up the launcher.
    If it cannot start, it says why, and the job runs without it.
    """
    if not address:
        yield
        return
    host, port = address_of(address)
    process = None
    try:
        # Here, because it tells whether the extra is installed.
        from rankcall.serve import check_extra

        check_extra()
        process = subprocess.Popen(
            run_command(
                *("serve", str(run.absolute())),
                *("--host", host, "--port", str(port), "--end-with-parent"),
                *(["--hang-after", f"{hang_after:g}"] if hang_after else []),
            ),
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),  # the link; stdout belongs to the job
            start_new_session=True,
        )
    except (OSError, ValueError, RankcallError) as error:
        say(f"no live page: {error}; the job runs without it")
    try:
        yield
    finally:
        if process is not None:
            process.terminate()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_END_S)
