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

__all__ = ["Collected", "Line", "Prefixes", "Step", "Writer", "plain"]

_MOST_PREFIXES = 8  # one after the other; a line with more is a forgery
_FAR = 200  # characters before ``[rank3]:``: a time, a pod, the name of an actor
_MOST_JSON = 1 << 16  # characters of a line of JSON; Docker, for one, cuts lines at 16 KiB
_NUMBERS = {"rank", "task", "pid"}
_FIELDS = _NUMBERS | {"stream", "host", "worker"}


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
        alone: Whether its stream has the lines of one process only, and not those of a pod or node.
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
    alone: bool = False


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


class Collected(NamedTuple):
    """A line without a collector's prefixes, and what these told."""

    text: str
    writer: Writer
    time: float
    resolution: float


@dataclass
class _Parts:
    """A line on the way: what is left of it, and what its prefixes have told so far."""

    text: str
    writer: Writer
    time: float = 0.0
    resolution: float = 0.0

    def take(self, match: re.Match[str]) -> bool:
        """Take a prefix off, with what its groups tell; return False if its rank cannot be one."""
        fields: dict[str, Any] = {}
        for name in match.re.groupindex.keys() & _FIELDS:
            fields[name] = int(match[name] or -1) if name in _NUMBERS else match[name] or ""
        if fields.get("rank", -1) >= MAX_RANKS:
            return False
        if fields.get("pid", -1) >= 0:
            fields["task"] = -1  # the task has started several processes of a framework
        fields["host"] = fields.get("host") or self.writer.host
        stream = " ".join(fields.get("stream", "").split())
        fields["stream"] = f"{self.writer.stream} {stream}".strip()
        if "worker" in fields:
            fields["worker"] = fields["worker"].replace(" ", "_")
        self.writer = self.writer._replace(**fields)
        self.note_time(_moment(match))
        self.text = self.text[match.end() :]
        return True

    def note_time(self, moment: tuple[float, float]) -> None:
        """Note the time of the line; the innermost prefix with a time is the program's own."""
        if moment[1]:
            self.time, self.resolution = moment


_COLOUR = re.compile(r"\x1b(?:\[[0-9;?]*[A-Za-z]|\][^\x07\x1b]{0,200}(?:\x07|\x1b\\))")
_REPEATED = re.compile(r" ?\[repeated \d+x across cluster\](?: \([^)]*\))?\s*$")

_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_CLOCK = r"(?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)(?:[.,](?P<part>\d{1,9}))?"
_DATE = r"(?P<month>\d\d)[-/](?P<day>\d\d)"
# 2026-03-14T09:02:36.123Z, 2026-03-14 09:02:36,123, 03-14 09:02:36
_ISO = re.compile(
    rf"\[?(?:\d{{4}}[-/])?{_DATE}[T ]{_CLOCK}(?:Z|[+-]\d\d:?\d\d)?\]?(?: UTC)?"
    r"(?:[:|,]|\s-(?=\s))?\s*"
)
_ONLY_TIME = re.compile(rf"(?:^|\s)(?:{_ISO.pattern})$")
_SRUN = re.compile(r"(?P<stream>\s*(?P<task>\d{1,7}):)(?: |$)")
_LEVEL = re.compile(
    r" ?\[?(?:ERROR|WARNING|WARN|INFO|DEBUG|CRITICAL|FATAL|TRACE)\]?"
    rf"(?:\s+{_DATE} {_CLOCK})?\s*(?:[:|]|-(?=\s))?\s*(?:\[[\w./-]{{1,120}}:\d{{1,6}}\]\s?)?"
)
# torch writes ``[rank3]:`` before its messages; some versions garble the bracket.
_RANK = re.compile(r"\[rank(\d{1,7})\[?\]:\s?")
_GLOG = re.compile(rf"\[?[EWIFD](?P<month>1[0-2]|0?[1-9])(?P<day>\d\d) {_CLOCK} ")

# Prefixes that a pattern describes whole. The groups ``rank``, ``task``, ``pid``, ``worker`` and
# ``host`` are those of the writer; ``stream`` is what is the same in all lines of one writer.
_SGLANG = (
    rf"\[\d{{4}}-{_DATE} {_CLOCK} "
    r"(?P<stream>(?P<worker>[DPET]P\d{1,7}(?: [DPET]P\d{1,7}){0,3}))\] ?"
)
_CRI = rf"\d{{4}}-{_DATE}T{_CLOCK}\S{{0,20}} (?:stdout|stderr) [FP] "
_SYSLOG = (
    rf"(?P<month>{'|'.join(_MONTHS)}) (?P<day>[ \d]\d) {_CLOCK} "
    r"(?P<stream>(?P<host>[\w.-]{1,253}) [\w./@-]{1,100}(?:\[\d{1,10}\])?): "
)
_KUBECTL = r"(?P<stream>\[pod/(?P<host>[\w.-]{1,253})(?:/[\w.-]{1,253})?\]) ?"
_MPI = (
    r"(?P<stream>\[(?:\d+,)?(?:mpirank:)?(?P<task>\d{1,7})(?:,(?P<host>[\w.-]{1,253}))?\]"
    r"<std(?:err|out)>:)\s?"
)
# A user may choose another form, for example the host and the number within the node.
_TORCHRUN = (
    r"(?!\[rank\d{1,7}\[?\]:)"
    r"(?P<stream>\[(?:[A-Za-z_][A-Za-z_\-]*\d+|[A-Za-z][\w.-]{0,253}:\d{1,3})\]:)\s?"
)
_WORKER_NAME = (
    r"\((?:(?:Vllm)?Worker|worker_)[_ ]*(?:rank=(?P<rank>\d{1,7})|(?P<worker>[A-Za-z0-9_]{0,40}))"
    r"(?: pid=(?P<pid>\d{1,10}))?\)"
)
_WORKER = rf"(?P<stream>{_WORKER_NAME}) ?"
_RAY = (
    r"(?P<stream>\((?:[\w.<>-]{1,200}(?:\((?:[^()]|\([^()]{0,80}\)){0,80}\))?)?\s?pid=(?P<pid>\d{1,10})"
    r"(?:, ip=(?P<host>[\w.:-]{1,100}))?\)) ?"
)
# SkyPilot counts nodes, and the pid is that of a command, which may start several ranks.
_SKYPILOT = (
    r"(?P<stream>\((?P<host>[\w.-]{1,120}), rank=\d{1,7}, pid=\d{1,10}(?:, ip=[\w.:-]{1,100})?\)) ?"
)
_DETERMINED = (
    r"(?:<>\s{1,20}\[[\d: -]{19}\] )?"
    r"(?P<stream>[\da-f]{8}(?: \[rank=(?P<rank>\d{1,7})\])? \|\|)(?: |$)"
)
_COMPOSER = r"(?P<stream>rank(?P<rank>\d{1,7})\[(?P<pid>\d{1,10})\]\[\w{1,80}\]:) (?:[A-Z]{4,8}: )?"
_ADDRESS = (
    r"(?P<stream>(?P<host>\d{1,3}(?:\.\d{1,3}){3}|\[?[0-9a-f]{0,4}(?::[0-9a-f]{0,4}){2,7}\]?):) ?"
)
_STREAM = r"\[?(?:stdout|stderr|STDOUT|STDERR)\]?(?::|\s)\s?"
# tqdm's, if no carriage return stands between it and a message: not all programs and collectors
# write one.
_BAR = re.compile(
    r"(?:[^|\r\n]{0,80}: {1,3}| {0,3})\d{1,3}%\|[^|\r\n]{0,300}\| {0,3}[\d.,/?kMGT]{3,40}"
    r"(?: \[[^\]\r\n<]{0,100}<[^\]\r\n]{0,200}\])? ?"
)
_TIME_ONLY = rf"\[?{_CLOCK}\]?\s+"
# Traceback's ``    | `` of exception groups has no name, and tables have a second bar. Compose may
# run in a container of Compose: then a second name with a number follows.
_COMPOSE = (
    r"(?P<stream>(?P<host>[A-Za-z0-9][\w.-]{0,120})\s+\|)"
    r"(?= ?[\w.-]{1,120}-\d{1,4} +\| |(?! ?.{0,39}(?<!\|)\|(?!\|))) ?"
)

# What may begin a line of a message without being a host's name: ``ValueError: ...``.
_NO_HOST = re.compile(
    r"(?:\w*(?:Error|Exception|Warning|Interrupt|Exit|Iteration)|Traceback|File|[A-Z]{4,8}|https?"
    r"|E[IJ]\d{4}|srun|slurmstepd|mpirun|rank\d*|Rank|time|host|rank|exitcode|error_file|traceback|Failures)$"
)
_TOKEN = re.compile(r"(?P<stream>(?P<host>[A-Za-z0-9][\w.@-]{1,120}):)\s")
# Words before a colon are hosts only if 60 % of the lines begin with one of those that come again.
# The rest of a wrapped line can begin with a word and a colon, too. It is no host if it has letters
# only and the hosts have not, or if it is rare.
_LIKE_A_HOST, _RARE_SHARE = re.compile(r"[\d.@-]"), 0.25
_LEARN_SHARE, _LEARN_LEAST, _MOST_NAMES = 0.6, 4, 4096
_COMMON_SHARE = 0.95  # of the lines of a log have a collector's prefix

_NUMBER = re.compile(r"\d+")
_JSON_BEGINS = re.compile(r'\{"([\w@.-]{1,80})": ?["\d{]')
_JSON_TEXT = (
    *("log", "message", "msg", "textPayload", "MESSAGE", "body", "line", "event", "text"),
    "@message",
)
_JSON_HOST = ("_HOSTNAME", "hostname", "host", "pod", "pod_name", "node", "kubernetes", "resource")
_JSON_TIME = ("time", "timestamp", "ts", "@timestamp", "asctime")
_JSON_RANK = ("rank", "global_rank")


def _spaces_at_end(before: str, after: str) -> int:
    """Return how many spaces a prefix ends with that was taken off a text."""
    prefix = before.removesuffix(after)
    return len(prefix) - len(prefix.rstrip(" "))


def plain(text: str) -> str:
    """Return a text without a terminal's colours and titles."""
    return _COLOUR.sub("", text) if "\x1b" in text else text


def _moment(match: re.Match[str]) -> tuple[float, float]:
    """Return the time in a prefix, s, and the smallest step of its clock; (0, 0) without a date.

    Months count 31 days: times are only compared within a job, and a job rarely lasts a month.
    """
    fields = match.groupdict()
    month, part = fields.get("month"), fields.get("part") or ""
    if not month:
        return 0.0, 0.0
    days = (_MONTHS.index(month) + 1 if month in _MONTHS else int(month)) * 31 + int(fields["day"])
    seconds = (days * 24 + int(fields["hour"])) * 3600
    seconds += int(fields["minute"]) * 60 + int(fields["second"])
    return seconds + (int(part) / 10 ** len(part) if part else 0.0), 10.0 ** -len(part)


class Prefixes:
    """Reads the prefixes of the lines of one log.

    Args:
        file: The index of the log.
        head: Some of its first lines, from which prefixes that are not known are learnt.
    """

    def __init__(self, file: int, head: Iterable[str] = ()) -> None:
        self._file = file
        self._hosts: frozenset[str] = frozenset()
        texts = list(head)
        begins = (self._opening(text) for text in texts)
        keys = Counter(match[1] for match in begins if match is not None)
        self._first_key = next((key for key, _ in keys.most_common(1)), "")
        self._hosts = self._learnt(texts)

    def _learnt(self, head: Iterable[str]) -> frozenset[str]:
        """Return the words that stand before most lines, each followed by a colon: hosts' names."""
        words: Counter[str] = Counter()
        lines = 0
        for text in head:
            parts = self._parts(text, whole=False)
            lines += bool(parts.text.strip())
            match = _TOKEN.match(parts.text)
            if match and not _NO_HOST.match(match["host"]):
                words[match["host"]] += 1
        first, most = next(iter(words.most_common(1)), ("", 0))
        are_hosts = bool(_LIKE_A_HOST.search(first))
        common = {
            word
            for word, count in words.items()
            if count > 1
            and (_LIKE_A_HOST.search(word) if are_hosts else count >= _RARE_SHARE * most)
        }
        covered = sum(words[word] for word in common)
        # If all lines begin with one that looks like a host, a few are enough.
        least = min(_LEARN_LEAST, lines) if are_hosts else _LEARN_LEAST
        if covered < max(least, _LEARN_SHARE * lines) or len(common) > _MOST_NAMES:
            return frozenset()
        return frozenset(common)

    def collector(self, texts: Sequence[str]) -> list[Step]:
        """Return the steps that take off what a collector put before (nearly) all of some lines."""
        # A time or a bar alone is taken for a line. Here, it is the prefix of an empty one.
        lines = [
            _Parts(text, Writer(self._file))
            for text in map(plain, texts)
            if text.strip() and not _ONLY_TIME.search(text) and not _BAR.fullmatch(text)
        ]
        steps: list[Step] = []
        while len(steps) < _MOST_PREFIXES:
            step = self._common_step(lines)
            if step is None:
                break
            steps.append(step)
            for parts in lines:
                self._take(step, parts)
        return steps

    def _common_step(self, lines: Sequence[_Parts]) -> Step | None:
        enough = _COMMON_SHARE * len(lines)
        for step in _STEPS:
            gaps: list[int] = []
            for index, parts in enumerate(lines):
                if len(gaps) + len(lines) - index < enough:
                    break  # as nearly all steps do, after a few lines
                gap = self._gap(step, _Parts(parts.text, parts.writer))
                gaps += [gap] if gap >= 0 else []
            if gaps and len(gaps) >= enough:
                return self._with_gap(step, min(gaps))
        return None

    def _gap(self, step: Step, parts: _Parts) -> int:
        """Take a prefix off; return how many spaces it ends with, or -1 if there is none."""
        before = parts.text
        return _spaces_at_end(before, parts.text) if self._take(step, parts) else -1

    def _with_gap(self, step: Step, least: int) -> Step:
        """Return a step that leaves all spaces to the line but those before every line.

        A line may be the rest of one that was wrapped before a space.
        """

        def spaced(prefixes: Prefixes, parts: _Parts) -> bool:
            gap = prefixes._gap(step, parts)
            parts.text = " " * (gap - least) + parts.text
            return gap >= 0

        return spaced

    def _take(self, step: Step, parts: _Parts) -> bool:
        return "\n" not in parts.text and step(self, parts)

    def collected(self, text: str, steps: Sequence[Step]) -> Collected:
        """Return a line without the prefixes of a collector, and what these told."""
        parts = _Parts(plain(text), Writer(self._file))
        for step in steps:
            self._take(step, parts)
        text = _REPEATED.sub("", parts.text) if "[repeated" in parts.text else parts.text
        return Collected(text, parts.writer, parts.time, parts.resolution)

    def read(self, number: int, text: str, before: Collected | None = None) -> list[Line]:
        """Return the line without its prefixes; several if a collector put them into one record.

        ``before``: What a collector's prefixes have told, if they are taken off already.
        """
        lines = []
        if before is None:
            parts = self._parts(text, whole=True)
        else:
            parts = self._strip(_Parts(text, before.writer, before.time, before.resolution))
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

    def is_open_record(self, text: str, following: str = "") -> bool:
        """Whether a line is the beginning of a collector's record in JSON, without its end.

        If another prefix stands before the record, it would stand before the ``following`` line,
        too, if that were a line of its own.
        """
        record = self._opening(text)
        if record is None or record[1] != self._first_key or _is_json(record.string):
            return False
        before = plain(text).removesuffix(record.string)
        # A time at its beginning says nothing: it may be the rest of one in the record.
        has_prefix = _shape(following).startswith(_shape(before)) or bool(
            self._parts(following, whole=False).writer.stream
        )
        return not before or not has_prefix

    def _opening(self, text: str) -> re.Match[str] | None:
        """Return the beginning of a record in JSON, which other prefixes may stand before.

        A host may be one of them, also if too few lines begin with one to learn it: the others are
        rests of records.
        """
        if "{" not in text:
            return None
        inner = self._parts(text, whole=False).text
        host = _TOKEN.match(inner)
        return (
            _JSON_BEGINS.match(text)
            or _JSON_BEGINS.match(inner)
            or (_JSON_BEGINS.match(inner[host.end() :]) if host else None)
        )

    def has_prefix(self, text: str) -> bool:
        """Whether a line begins with a prefix, so that it does not continue the line before it."""
        record = _JSON_BEGINS.match(text)
        if record and record[1] == self._first_key:  # its end may be in the next line
            return True
        parts = self._parts(text, whole=True)
        is_known = parts.writer.stream or parts.resolution or parts.writer.rank >= 0
        return bool(is_known or _BAR.match(text))

    def _parts(self, text: str, *, whole: bool) -> _Parts:
        return self._strip(_Parts(plain(text), Writer(self._file)), learn=not whole)

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
                parts.note_time(_moment(match))
                break
        rank = next((record[key] for key in _JSON_RANK if type(record.get(key)) is int), -1)
        if 0 <= rank < MAX_RANKS:
            parts.writer = parts.writer._replace(rank=rank)
        parts.text = inner.rstrip("\r\n")
        return True

    def _iso(self, parts: _Parts) -> bool:
        match = _ISO.match(parts.text)
        # A line of torchrun's report that is only a time stays.
        return match is not None and match.end() < len(parts.text) and parts.take(match)

    def _srun(self, parts: _Parts) -> bool:
        match = _SRUN.match(parts.text)
        return match is not None and parts.writer.task < 0 and parts.take(match)

    def _carriage(self, parts: _Parts) -> bool:
        """Take off what the text after a carriage return has overwritten."""
        _, carriage, parts.text = parts.text.rpartition("\r")
        return bool(carriage)

    def _bar(self, parts: _Parts) -> bool:
        match = _BAR.match(parts.text)
        return match is not None and match.end() < len(parts.text) and parts.take(match)

    def _learnt_host(self, parts: _Parts) -> bool:
        match = _TOKEN.match(parts.text)
        return match is not None and match["host"] in self._hosts and parts.take(match)

    def _level(self, parts: _Parts) -> bool:
        match = _LEVEL.match(parts.text)
        # ``ERROR:torch.distributed.elastic...`` is the message of a logger, and stays.
        if match is None or not match[0].endswith((" ", "]")):
            return False
        return match.end() < len(parts.text) and parts.take(match)

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
        if moment:
            parts.note_time(_moment(moment))


def _described(pattern: str, *, of_process: bool = False) -> Step:
    """Return the step that takes a prefix off which a pattern describes whole.

    ``of_process``: Each process has a prefix of its own.
    """
    compiled = re.compile(pattern)

    def step(_: Prefixes, parts: _Parts) -> bool:
        match = compiled.match(parts.text)
        if match is None or not parts.take(match):
            return False
        if of_process:
            parts.writer = parts.writer._replace(alone=True)
        return True

    return step


def _of_process(pattern: str) -> Step:
    return _described(pattern, of_process=True)


def _ray() -> Step:
    """Return the step that takes Ray's prefix off, and what Ray writes at the end of a line."""
    take = _of_process(_RAY)

    def step(prefixes: Prefixes, parts: _Parts) -> bool:
        is_ray = take(prefixes, parts)
        if is_ray and "[repeated" in parts.text:
            parts.text = _REPEATED.sub("", parts.text)
        return is_ray

    return step


Step = Callable[[Prefixes, _Parts], bool]
# The order matters where one prefix could be taken for another: a time before a host, torchrun's
# and mpirun's numbers before srun's, and a learnt host last.
_STEPS: tuple[Step, ...] = (
    Prefixes._json,
    _of_process(_SGLANG),
    *map(_described, (_CRI, _SYSLOG)),
    Prefixes._iso,
    *map(_described, (_KUBECTL, _SKYPILOT)),
    *map(_of_process, (_MPI, _TORCHRUN, _WORKER)),
    _ray(),
    _of_process(_COMPOSER),
    _described(_DETERMINED),
    *map(_described, (_ADDRESS, _STREAM)),
    Prefixes._level,
    Prefixes._srun,
    _described(_TIME_ONLY),
    Prefixes._learnt_host,
    _described(_COMPOSE),
    Prefixes._carriage,
    Prefixes._bar,
)


def _shape(text: str) -> str:
    """Return a text with all numbers alike."""
    return _NUMBER.sub("0", text)


def _is_json(text: str) -> bool:
    if not text.rstrip().endswith("}"):
        return False
    try:
        json.loads(text[:_MOST_JSON])
    except (ValueError, RecursionError):
        return False
    return True


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
