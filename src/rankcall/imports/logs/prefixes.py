"""Take off what launchers, frameworks and log collectors put before a line, and note what it tells.

A line can have several prefixes: a collector's (JSON, CRI, Docker, Compose, kubectl, journald), a
launcher's (pdsh, srun, mpirun, torchrun, Ray), a framework's (vLLM, composer) and torch's own
``[rank3]:``. ``Prefixes.read`` takes them off one after the other, until none is left. A prefix
that is not known but stands before most lines of a log, for example the name of a host and a colon,
is learnt from the lines of that log.

What a prefix tells differs: torch's is the rank in the job; torchrun's ``[default3]:`` counts the
ranks of a node; a number of srun or mpirun is a task, which may be a launcher of several ranks. So
a ``Writer`` keeps them apart, and ``rankcall.imports.logs.job`` decides which process it is.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from rankcall.ranks import MAX_RANKS

__all__ = ["Line", "Prefixes", "Writer"]

_MOST_PREFIXES = 8  # one after the other; a line with more is a forgery
_FAR = 200  # characters before ``[rank3]:``: a time, a pod, the name of an actor
_MOST_JSON = 1 << 16
_DAY_S = 86_400.0


class Writer(NamedTuple):
    """The process that wrote a line, as far as its prefixes and its file tell.

    Attributes:
        file: The index of the log.
        stream: All prefixes but times. The lines of one message have the same.
        rank: The rank that torch put before the line, or -1.
        task: The number that srun or mpirun put before it, or -1.
        host: The host or pod that a collector put before it.
        pid: The process id that a framework put before it, or -1.
        worker: The name that a framework gave the process: ``TP12``.
        by_torch: Whether torch's own prefix told the rank. torch puts it before each line of an
            exception that ends a program.
    """

    file: int
    stream: str = ""
    rank: int = -1
    task: int = -1
    host: str = ""
    pid: int = -1
    worker: str = ""
    by_torch: bool = False


class Line(NamedTuple):
    """A line without its prefixes, colours and time.

    ``time`` is in seconds since the beginning of some year, and ``resolution`` the smallest step of
    the clock that wrote it; both are 0 if the line has no time.
    """

    writer: Writer
    number: int  # in its log, from 1
    text: str
    time: float = 0.0
    resolution: float = 0.0


@dataclass
class _Parts:
    """A line on the way: what is left of it, and what its prefixes have told so far."""

    text: str
    writer: Writer
    time: float = 0.0
    resolution: float = 0.0

    def take(self, match: re.Match[str], *, stream: bool = True, **fields: Any) -> None:
        """Take a prefix off."""
        prefix = " ".join(match[0].split())
        names = f"{self.writer.stream} {prefix}".strip() if stream else self.writer.stream
        self.writer = self.writer._replace(stream=names, **fields)
        self.text = self.text[match.end() :]

    def note_time(self, moment: tuple[float, float]) -> None:
        """Note the time of the line; the innermost prefix with a time is the program's own."""
        if moment[1]:
            self.time, self.resolution = moment


_COLOUR = re.compile(r"\x1b(?:\[[0-9;?]*[A-Za-z]|\][^\x07\x1b]{0,200}(?:\x07|\x1b\\))")
_REPEATED = re.compile(r"\s*\[repeated \d+x across cluster\](?: \([^)]*\))?\s*$")

_MONTHS = {
    name: number
    for number, name in enumerate(
        ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"), 1
    )
}
_CLOCK = r"(\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?"
# 2026-03-14T09:02:36.123Z, 2026-03-14 09:02:36,123, 03-14 09:02:36
_ISO = re.compile(
    rf"\[?(?:\d{{4}}[-/])?(\d\d)[-/](\d\d)[T ]{_CLOCK}(?:Z|[+-]\d\d:?\d\d)?\]?(?: UTC)?"
    r"(?:[:|,]|\s-)?\s*"
)
_SYSLOG = re.compile(
    rf"([A-Z][a-z]{{2}}) ([ \d]\d) {_CLOCK} ([\w.-]{{1,253}}) ([\w./@-]{{1,100}})"
    r"(?:\[(\d{1,10})\])?: "
)
_TIME_ONLY = re.compile(rf"\[?{_CLOCK}\]?\s+")
_GLOG = re.compile(rf"\[?[EWIFD](\d{{1,2}})(\d\d) {_CLOCK} ")

_CRI = re.compile(r"(\d{4}-\d\d-\d\dT\S{8,40}) (?:stdout|stderr) [FP] ")
_COMPOSE = re.compile(r"([A-Za-z0-9][\w.-]{0,120})\s+\| ?")
_KUBECTL = re.compile(r"\[pod/([\w.-]{1,253})(?:/([\w.-]{1,253}))?\] ?")
_STREAM = re.compile(r"\[?(?:stdout|stderr|STDOUT|STDERR)\]?(?::|\s)\s?")
_MPI = re.compile(r"\[(?:\d+,)?(\d{1,7})\]<std(?:err|out)>:\s?")
_TORCHRUN = re.compile(r"\[([A-Za-z_][A-Za-z_\-]*\d+)\]:\s?")
_SRUN = re.compile(r"\s*(\d{1,7}):(?: |$)")
_ADDRESS = re.compile(r"(\d{1,3}(?:\.\d{1,3}){3}|\[?[0-9a-f]{0,4}(?::[0-9a-f]{0,4}){2,7}\]?): ?")
_RAY = re.compile(
    r"\(([\w.<>-]{1,200}(?:\([^)]{0,80}\))?)?\s?pid=(\d{1,10})(?:, ip=([\w.:-]{1,100}))?\) ?"
)
_WORKER = re.compile(r"\((?:Worker_|worker_|Worker)([A-Za-z0-9_]{0,40})(?: pid=(\d{1,10}))?\) ?")
_SGLANG = re.compile(rf"\[\d{{4}}-(\d\d)-(\d\d) {_CLOCK} ((?:[DPE]P\d{{1,7}} )*TP\d{{1,7}})\] ?")
_COMPOSER = re.compile(r"rank(\d{1,7})\[(\d{1,10})\]\[\w{1,80}\]: (?:[A-Z]{4,8}: )?")
_LEVEL = re.compile(
    r"\[?(?:ERROR|WARNING|WARN|INFO|DEBUG|CRITICAL|FATAL|TRACE)\]?"
    rf"(?:\s+(\d\d)-(\d\d) {_CLOCK})?\s*(?:[:|]|-(?=\s))?\s*(?:\[[\w./-]{{1,120}}:\d{{1,6}}\]\s?)?"
)
# torch writes ``[rank3]:`` before its messages; some versions garble the bracket.
_RANK = re.compile(r"\[rank(\d{1,7})\[?\]:\s?")
# What may begin a line of a message without being a host's name: ``ValueError: ...``.
_NO_HOST = re.compile(
    r"(?:\w*(?:Error|Exception|Warning|Interrupt|Exit|Iteration)|Traceback|File|[A-Z]{4,8}|https?"
    r"|srun|slurmstepd|mpirun|rank\d*|Rank|time|host|rank|exitcode|error_file|traceback|Failures)$"
)
_TOKEN = re.compile(r"([A-Za-z0-9][\w.@-]{1,120}):\s")
_LEARN_SHARE, _LEARN_LEAST, _MOST_NAMES = 0.6, 4, 4096

_JSON_TEXT = ("log", "message", "msg", "textPayload", "MESSAGE", "body", "line", "event", "text")
_JSON_HOST = ("_HOSTNAME", "hostname", "host", "pod", "pod_name", "node", "kubernetes", "resource")
_JSON_TIME = ("time", "timestamp", "ts", "@timestamp", "asctime")
_JSON_RANK = ("rank", "global_rank")


def _seconds(month: str, day: str, clock: Sequence[str | None]) -> tuple[float, float]:
    """Return a time in seconds and the smallest step of its clock; (0, 0) if it is no time.

    Months count 31 days: times are only compared within a job, and a job rarely lasts a month.
    """
    hours, minutes, seconds, part = clock
    moment = (int(month) * 31 + int(day)) * _DAY_S
    moment += int(hours or 0) * 3600 + int(minutes or 0) * 60 + int(seconds or 0)
    digits = len(part) if part else 0
    return moment + (int(part) / 10**digits if part else 0.0), 10.0**-digits


class Prefixes:
    """Reads the prefixes of the lines of one log.

    Args:
        file: The index of the log.
        head: Some of its first lines, from which prefixes that are not known are learnt.
    """

    def __init__(self, file: int, head: Iterable[str] = ()) -> None:
        self._file = file
        self._hosts: frozenset[str] = frozenset()
        self._hosts = self._learnt(head)

    def _learnt(self, head: Iterable[str]) -> frozenset[str]:
        """Return the words that stand before most lines, each followed by a colon: hosts' names."""
        words: Counter[str] = Counter()
        lines = 0
        for text in head:
            parts = self._parts(text, whole=False)
            lines += bool(parts.text.strip())
            match = _TOKEN.match(parts.text)
            if match and not _NO_HOST.match(match[1]):
                words[match[1]] += 1
        common = {word for word, count in words.items() if count > 1}
        covered = sum(words[word] for word in common)
        if covered < max(_LEARN_LEAST, _LEARN_SHARE * lines) or len(common) > _MOST_NAMES:
            return frozenset()
        return frozenset(common)

    def read(self, number: int, text: str) -> list[Line]:
        """Return the line without its prefixes; several if a collector put them into one record."""
        lines = []
        parts = self._parts(text, whole=True)
        for index, piece in enumerate(parts.text.split("\n")):
            inner = parts if not index and "\n" not in parts.text else replace(parts, text=piece)
            if "\n" in parts.text:
                inner = self._strip(inner)
            lines.append(
                Line(
                    inner.writer,
                    number,
                    _REPEATED.sub("", inner.text) if "[repeated" in inner.text else inner.text,
                    inner.time,
                    inner.resolution,
                )
            )
        return lines

    def has_prefix(self, text: str) -> bool:
        """Whether a line begins with a prefix, so that it does not continue the line before it."""
        parts = self._parts(text, whole=True)
        return bool(parts.writer.stream or parts.resolution or parts.writer.rank >= 0)

    def _parts(self, text: str, *, whole: bool) -> _Parts:
        text = _COLOUR.sub("", text) if "\x1b" in text else text
        parts = _Parts(text, Writer(self._file))
        return self._strip(parts, learn=not whole)

    def _strip(self, parts: _Parts, *, learn: bool = False) -> _Parts:
        """Take prefixes off until none is left."""
        for _ in range(_MOST_PREFIXES):
            if "\n" in parts.text or not any(step(self, parts) for step in _STEPS):
                break
        if not learn:
            self._take_rank(parts)
        return parts

    # Each step takes one prefix off, and returns whether it did.

    def _json(self, parts: _Parts) -> bool:
        text = parts.text.strip()
        if not (text.startswith("{") and text.endswith("}")) or len(text) > _MOST_JSON:
            return False
        try:
            record = json.loads(text)
            if not isinstance(record, dict):
                return False
            inner, host = _json_text(record), _json_host(record)
        except (ValueError, RecursionError):  # it may be nested as deep as it is long
            return False
        if inner is None:
            return False
        stream = f"{parts.writer.stream} {{{host}}}".strip()
        parts.writer = parts.writer._replace(stream=stream, host=host or parts.writer.host)
        for key in _JSON_TIME:
            match = _ISO.match(str(record.get(key, "")))
            if match:
                parts.note_time(_seconds(match[1], match[2], match.groups()[2:6]))
                break
        rank = next((record[key] for key in _JSON_RANK if type(record.get(key)) is int), -1)
        if 0 <= rank < MAX_RANKS:
            parts.writer = parts.writer._replace(rank=rank)
        parts.text = inner.rstrip("\r\n")
        return True

    def _syslog(self, parts: _Parts) -> bool:
        match = _SYSLOG.match(parts.text)
        if match is None or match[1] not in _MONTHS:
            return False
        parts.note_time(_seconds(str(_MONTHS[match[1]]), match[2], match.groups()[2:6]))
        parts.take(match, stream=False, host=match[7])
        parts.writer = parts.writer._replace(
            stream=f"{parts.writer.stream} {match[7]} {match[8]}[{match[9] or ''}]".strip()
        )
        return True

    def _cri(self, parts: _Parts) -> bool:
        match = _CRI.match(parts.text)
        if match is None:
            return False
        moment = _ISO.match(match[1])
        if moment:
            parts.note_time(_seconds(moment[1], moment[2], moment.groups()[2:6]))
        parts.take(match, stream=False)
        return True

    def _iso(self, parts: _Parts) -> bool:
        match = _ISO.match(parts.text)
        # A line of torchrun's report that is only a time stays.
        if match is None or match.end() == len(parts.text):
            return False
        parts.note_time(_seconds(match[1], match[2], match.groups()[2:6]))
        parts.take(match, stream=False)
        return True

    def _time_only(self, parts: _Parts) -> bool:
        match = _TIME_ONLY.match(parts.text)
        if match is None:
            return False
        parts.take(match, stream=False)
        return True

    def _compose(self, parts: _Parts) -> bool:
        match = _COMPOSE.match(parts.text)
        # Traceback's ``    | `` of exception groups has no name, and tables no second bar.
        if match is None or "|" in parts.text[match.end() : match.end() + 40]:
            return False
        parts.take(match, host=match[1])
        return True

    def _kubectl(self, parts: _Parts) -> bool:
        match = _KUBECTL.match(parts.text)
        if match is None:
            return False
        parts.take(match, host=match[1])
        return True

    def _mpi(self, parts: _Parts) -> bool:
        match = _MPI.match(parts.text)
        if match is None:
            return False
        parts.take(match, task=int(match[1]))
        return True

    def _torchrun(self, parts: _Parts) -> bool:
        match = _TORCHRUN.match(parts.text)
        if match is None or _RANK.match(parts.text):
            return False
        parts.take(match)
        return True

    def _srun(self, parts: _Parts) -> bool:
        match = _SRUN.match(parts.text)
        if match is None or parts.writer.task >= 0:
            return False
        parts.take(match, task=int(match[1]))
        return True

    def _address(self, parts: _Parts) -> bool:
        match = _ADDRESS.match(parts.text)
        if match is None:
            return False
        parts.take(match, host=match[1])
        return True

    def _learnt_host(self, parts: _Parts) -> bool:
        match = _TOKEN.match(parts.text)
        if match is None or match[1] not in self._hosts:
            return False
        parts.take(match, host=match[1])
        return True

    def _worker(self, parts: _Parts) -> bool:
        match = _WORKER.match(parts.text)
        if match is None:
            return False
        parts.take(match, worker=match[1].lstrip("_"), pid=int(match[2] or -1))
        return True

    def _sglang(self, parts: _Parts) -> bool:
        match = _SGLANG.match(parts.text)
        if match is None:
            return False
        parts.note_time(_seconds(match[1], match[2], match.groups()[2:6]))
        worker = match[7].replace(" ", "_")
        parts.take(match, stream=False, worker=worker)
        parts.writer = parts.writer._replace(stream=f"{parts.writer.stream} {worker}".strip())
        return True

    def _ray(self, parts: _Parts) -> bool:
        match = _RAY.match(parts.text)
        if match is None:
            return False
        parts.take(match, pid=int(match[2]), host=match[3] or parts.writer.host)
        return True

    def _composer(self, parts: _Parts) -> bool:
        match = _COMPOSER.match(parts.text)
        if match is None or int(match[1]) >= MAX_RANKS:
            return False
        parts.take(match, rank=int(match[1]), pid=int(match[2]))
        return True

    def _stream_name(self, parts: _Parts) -> bool:
        match = _STREAM.match(parts.text)
        if match is None:
            return False
        parts.take(match, stream=False)
        return True

    def _level(self, parts: _Parts) -> bool:
        match = _LEVEL.match(parts.text)
        # ``ERROR:torch.distributed.elastic...`` is the message of a logger, and stays.
        if match is None or not match[0].endswith((" ", "]")) or match.end() == len(parts.text):
            return False
        if match[1]:
            parts.note_time(_seconds(match[1], match[2], match.groups()[2:6]))
        parts.take(match, stream=False)
        return True

    def _take_rank(self, parts: _Parts) -> None:
        """Take torch's own prefix off, with what stands before it, and note glog's time."""
        if "\n" in parts.text:
            return
        match = _RANK.search(parts.text[:_FAR])
        if match:
            before = parts.text[: match.start()].strip()
            rank = int(match[1]) if int(match[1]) < MAX_RANKS else -1
            stream = f"{parts.writer.stream} {before}".strip()
            parts.writer = parts.writer._replace(stream=stream, rank=rank, by_torch=rank >= 0)
            parts.text = parts.text[match.end() :]
        moment = _GLOG.match(parts.text)
        if moment and int(moment[1]) <= 12:
            parts.note_time(_seconds(moment[1], moment[2], moment.groups()[2:6]))


_Step = Callable[[Prefixes, _Parts], bool]
# The order matters where one prefix could be taken for another: a time before a host, torchrun's
# and mpirun's numbers before srun's, and a learnt host last.
_STEPS: tuple[_Step, ...] = (
    Prefixes._json,
    Prefixes._sglang,
    Prefixes._cri,
    Prefixes._syslog,
    Prefixes._iso,
    Prefixes._kubectl,
    Prefixes._mpi,
    Prefixes._torchrun,
    Prefixes._worker,
    Prefixes._ray,
    Prefixes._composer,
    Prefixes._address,
    Prefixes._stream_name,
    Prefixes._level,
    Prefixes._srun,
    Prefixes._time_only,
    Prefixes._learnt_host,
    Prefixes._compose,
)


def _json_text(record: dict[str, Any]) -> str | None:
    """Return the line that a collector's record holds."""
    for key in _JSON_TEXT:
        value = record.get(key)
        if isinstance(value, str):
            return value
        if isinstance(value, dict):
            inner = _json_text(value)
            if inner is not None:
                return inner
    payload = record.get("jsonPayload")
    return _json_text(payload) if isinstance(payload, dict) else None


def _json_host(record: dict[str, Any]) -> str:
    """Return the host or pod that a collector's record names; empty if it names none."""
    for key in _JSON_HOST:
        value = record.get(key)
        if isinstance(value, str) and len(value) < 254:
            return value
        if isinstance(value, dict):
            inner = _json_host(
                {**value, **value.get("labels", {})}
                if isinstance(value.get("labels", {}), dict)
                else value
            )
            if inner:
                return inner
    return ""
