"""The page docs/scoreboard.md, made of the figures of ``scoreboard.py --page``."""

from __future__ import annotations

from typing import Any

_HEAD = """\
# Scoreboard

How often the verdict is right where the fault is known, beside what torch itself says. The page is
written by one command, and its figures are measured by it:

```console
$ .venv/bin/python benchmarks/scoreboard.py --page docs/scoreboard.md
```

An answer is right if it has the kind of fault and exactly the ranks that were planted.

"""

# What only one look could tell: a log that rankcall was mended for is no longer unseen.
_AT_FIRST_SIGHT = """
Before anything was mended for them (2026-11-26): 44 logs of public reports that were not among the
tests, told again by somebody who knew the reader's code and decided the right answers first, gave
38 right answers, three times `undecided` and three times `nothing_found` where a rank or a failure
could be read, and no wrong rank; of ten made-up logs without a failure, nine gave none, and one was
`undecided`. All but one were then mended. The next 20 logs of reports gave 16 right answers, two
times `undecided` and two times `nothing_found`, and no wrong rank. The next 29, most of them looked
for because their last words were not in the table, gave 12 right answers, 17 times `nothing_found`,
and no wrong rank. The next 27, told again by somebody who had read the code, gave 22 right answers,
four times `nothing_found`, and one wrong rank: MPI had raised where a message came in that was too
long. All these were mended. On 2026-11-27, 57 logs of failed jobs, 46 of them of public reports,
most looked for because their last words were in no row, gave 23 right answers, 30 times
`nothing_found`, four times `undecided` without what the log says, and no wrong rank; 15 logs of
healthy programs gave no finding. The next 20, ten of reports, gave 18 right answers, two times
`undecided` without what the log says, and no wrong rank; of two more healthy jobs, one gave
`undecided`. All these were mended.

"""
_NOT_HAD = """\
## What could not be compared

* **NVRx's attribution.** The newest `nvidia-resiliency-ext` on PyPI for Python 3.11 and 3.12 is
  0.4.1, and there is none for 3.13 (2026-11-26). It reads neither logs nor dumps: its module for
  attribution lists the interruptions that its own wrapper has recorded. So it has no answer on
  these inputs.
* **The traces of ByteDance's StragglerAnalysis.** No package of PyPI, Debian or npm that has them
  was found (2026-11-25).
"""


def page(figures: dict[str, Any]) -> str:
    """Return the text of the page."""
    return "".join([_HEAD, _programs(figures), _logs(figures), _dumps(figures), _NOT_HAD])


def _programs(figures: dict[str, Any]) -> str:
    if "by_class" not in figures:
        return (
            "## Programs\n\nThe programs were not run with this page: their newest figures are in "
            "[Performance](performance.md).\n\n"
        )
    planted = sum(row["planted"] for row in figures["by_class"].values())
    before, after = figures["load"]
    text = (
        "## Programs\n\n"
        f"{figures['programs']} of the table's {figures['in_table']} small programs of 2 to 4 "
        "ranks on Gloo, with the classes of faults of the MPI Bugs Initiative and\nof "
        "MPI-CorrBench, and correct ones; {planted} faults are "
        "planted. A finding that was not planted is a false alarm.\n`torch` is a run without "
        "rankcall and with `TORCH_DISTRIBUTED_DEBUG=DETAIL`: in how many programs its message\n"
        "names exactly the right ranks, or the right ones among others.\n\n"
        "| class of fault | programs | planted | found | false alarms | torch: right ranks | "
        "torch: among others |\n| --- | --- | --- | --- | --- | --- | --- |\n"
    ).replace("{planted}", str(planted))
    rows = {**figures["by_class"], "all": figures}
    for name, row in rows.items():
        torch = row["torch_detail"]
        cells = (
            *(name, row["programs"], row["planted"], row["found"], row["false_alarms"]),
            *(torch.get("right ranks", 0), torch.get("among others", 0)),
        )
        text += f"| {' | '.join(map(str, cells))} |\n"
    wrong = "".join(f"* {problem}\n" for problem in figures["wrong"])
    seconds = sorted(figures["seconds"])
    middle = seconds[len(seconds) // 2] / 2 if seconds else 0.0  # each program ran twice
    return (
        f"{text}\n{'Not as planted:' if wrong else 'All verdicts are as planted.'}\n\n"
        f"{wrong}{chr(10) if wrong else ''}"
        f"Measured on {figures['date']} at a load of {before} to {after} on two cores. In the "
        f"middle, a program with its verdict took {middle:.1f} s,\nof which 4 s are the time-out "
        f"of its groups if it hangs ({len(seconds)} programs).\n\n"
    )


def _logs(figures: dict[str, Any]) -> str:
    names = {
        "plain": "logs that torch wrote of planted faults, and forms of NCCL's messages",
        "collected": "the same behind the prefixes of 24 collectors and launchers",
        "collected_and_wrapped": "the same, wrapped by a terminal of 140 columns",
        "generated": "made-up jobs of 4 to 16 ranks, interleaved, behind a collector",
        "reports": "logs of public reports, told again; most were mended for",
        "torchrun": "torchrun's own root cause, on the logs that have its report",
    }
    text = (
        "## Logs\n\n`undecided` is the right answer if the log does not say which rank is at "
        "fault.\n\n| logs | cases | right | other ranks blamed |\n| --- | --- | --- | --- |\n"
    )
    for key, name in names.items():
        row = figures["logs"][key]
        text += f"| {name} | {row.get('cases', 0)} | {row.get('right', 0)} | "
        text += f"{row.get('blamed', 0)} |\n"
    return text + _AT_FIRST_SIGHT


def _dumps(figures: dict[str, Any]) -> str:
    text = (
        "## Flight Recorder dumps\n\nDumps of made-up jobs of 16 ranks in the groups of Megatron, "
        "up to 500 ops ahead of their devices. One rank does\nnot come, issues another op or size, "
        "or its device does not end an op.\n\n| analyser | jobs | exactly the faulty rank | "
        "healthy ranks named | no answer |\n| --- | --- | --- | --- | --- |\n"
    )
    for name, row in (
        ("rankcall", figures["dumps"]["rankcall"]),
        ("torchfrtrace of the installed torch", figures["dumps"]["torchfrtrace"]),
    ):
        cells = (*(row.get(key, 0) for key in ("cases", "right", "blamed", "no_answer")),)
        text += f"| {name} | {' | '.join(map(str, cells))} |\n"
    return (
        f"{text}\nLogs and dumps were judged on {figures['evidence'][0]} at a load of "
        f"{figures['evidence'][1]} on two cores.\n\n"
    )
