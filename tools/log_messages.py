#!/usr/bin/env python3
"""Write docs/log-messages.md from the table of messages that rankcall knows.

python tools/log_messages.py            writes the page
python tools/log_messages.py --check    exits with 1 if the page is not what the table says
"""

from __future__ import annotations

import sys
from pathlib import Path

from rankcall.imports.logs.sources import SOURCES

PAGE = Path(__file__).parents[1] / "docs" / "log-messages.md"

_HEAD = """\
# Messages in logs

`rankcall diagnose --log` knows these messages. The page is written from the table by which the logs
are read (`src/rankcall/imports/logs/sources/`): each example is a line as it was seen, and a test
reads it. Hosts and numbers in the examples are invented.

"""

_TAIL = """\
## Prefixes that are taken off

Collectors: JSON lines (`log`, `message`, `msg`, `textPayload`, `MESSAGE`), CRI, Docker, Compose,
kubectl and journald. Launchers: pdsh, srun (`12: `), mpirun (`[1,3]<stderr>:`), torchrun
(`[default3]:`) and Ray, with its colours and `[repeated 4x across cluster]`. Frameworks: vLLM,
SGLang, composer, Determined and SkyPilot. Times, levels, colours, and torch's own `[rank3]:`, also
[garbled](https://github.com/vllm-project/vllm/pull/41160) as `[rank3[]:`. A word and a colon that
stand before most lines of a log are a host. If a terminal or a collector has wrapped lines at a
fixed width, they are rejoined.

## Which rank a message is about

* torch's prefix `[rank3]:` is the rank of the process in the job. `[Rank 3]` inside a message is
  its number in a process group, and so are the ranks that a message lists. These are believed
  only if no process has another number there. The members of a group are in ascending order; so
  if rank 5 is number 5 of a group, ranks 0 to 5 have their own numbers, too.
* `Init START ... rank 3 nranks 8` of NCCL ties a process id to a rank, and so does torchrun's
  report. Then a line with this process id has a rank.
* Groups of one name can have different members on different ranks. Ranks are compared only within
  the group that `init_process_group` made, or if each of them has its own number in the group.
* `TP5` in the prefix of vLLM or SGLang is a rank of the job if it stands alone, or beside `EP`:
  with data or pipeline parallelism, these names stand there, too.
* The number in `[default3]:` counts the ranks of a node, so it is not used. The number of a task
  of srun or mpirun is used only if no line shows that a task has several ranks.
* torchrun's first failure is often a victim: the rank whose time-out came first. It is believed
  if a signal ended it that no failure of another rank sends (SIGKILL, SIGSEGV, SIGBUS, SIGFPE,
  SIGILL). Ranks that ended by the same signal in the same second are named together.
* An exception counts as the rank's own if it is not about a connection, a time-out or a
  collective, did not come of one that is, and ended the program.
* If ranks timed out in different calls of one number, and the calls of other ranks are not in the
  log, both sides are named: it is not known which is the smaller one.
"""


def page() -> str:
    """Return the text of the page."""
    parts = [_HEAD]
    for source in SOURCES:
        parts.append(f"## {source.name}\n\nBefore a line: {source.prefix}.\n\n")
        parts.append("| what it says | example | seen in |\n| --- | --- | --- |\n")
        for message in source.messages:
            example = message.example.strip().replace("|", "\\|")
            parts.append(f"| {message.meaning} | `{example}` | {message.seen_in} |\n")
        parts.append("\n")
    return "".join([*parts, _TAIL])


def main(arguments: list[str]) -> int:
    """Write the page, or check it; return the exit status."""
    if arguments == ["--check"]:
        return int(PAGE.read_text() != page())
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
