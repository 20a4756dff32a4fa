"""What the Python capture writes at the issue of an op: its arguments, its line, its group."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from rankcall.capture.interface import installed_folders, skipped_folders
from rankcall.record import MAX_DIMS, NO_RANK, OPS, REDUCE_OPS, TABLE, op_of_variant
from rankcall.ring import CallSite, Group, UserLine
from rankcall.ring.writer import PythonRing

# Read the arguments of a c10d op by its schema. Corresponds to ``native/ops.h``.


_SEND, _RECV = OPS.index("send"), OPS.index("recv")


@dataclass
class Op:
    """One c10d op: its code, and the positions of its arguments (None: it has no such argument)."""

    name: str
    overload: Any
    code: int
    process_group: int
    returns_work: bool
    positions: dict[str, int]
    p2p: bool
    message: str  # what message_bytes counts: one of ops.MESSAGES
    peer: int | None
    outgoing: bool  # its peer is the destination
    reads: int | None = None
    writes: int | None = None
    other_tensor: int | None = None


class Sizes(NamedTuple):
    """Bytes of an argument's tensors, and the tensors."""

    bytes: int
    tensors: list[torch.Tensor]


NOTHING = Sizes(0, [])


def c10d_ops() -> list[Op]:
    """Return every c10d op that takes a process group, as the running torch declares it."""
    ops = []
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("c10d::"):
            op = _describe(torch._C._get_schema(*name.partition(".")[::2]))
            if op is not None:
                ops.append(op)
    return ops


def _describe(schema: Any) -> Op | None:
    positions = {argument.name: at for at, argument in enumerate(schema.arguments)}
    if "process_group" not in positions:
        return None
    name = schema.name.removeprefix("c10d::")
    returns = schema.returns
    code = OPS.index(op_of_variant(name))
    row = TABLE[code]
    op = Op(
        name=name,
        overload=getattr(torch.ops.c10d, name).default,
        code=code,
        process_group=positions["process_group"],
        returns_work=bool(returns) and "Work" in returns[-1].type.annotation_str,
        positions=positions,
        p2p=row.waits == "peer",
        message=row.message,
        peer=positions.get("dst", positions.get("src")),
        outgoing="dst" in positions,
    )
    for argument in schema.arguments:
        at = positions[argument.name]
        if "Tensor" not in argument.type.annotation_str or argument.name == "sparse_indices":
            continue
        if argument.name.startswith("output"):
            op.writes = at
        elif argument.name.startswith("input"):
            op.reads = at
        elif argument.name == "tensors":  # in place, but for a send and a receive
            op.reads = None if op.code == _RECV else at
            op.writes = None if op.code == _SEND else at
        else:
            op.other_tensor = at
    return op


def _flatten(value: Any, into: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        into.append(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _flatten(item, into)


def bytes_of(tensor: torch.Tensor) -> int:
    """Return a tensor's payload in bytes; a sparse one's indices and values."""
    if tensor.is_sparse:
        return bytes_of(tensor._indices()) + bytes_of(tensor._values())
    return tensor.nbytes


def sizes_at(arguments: tuple[Any, ...], at: int | None) -> Sizes:
    """Measure the argument at a position."""
    if at is None or at >= len(arguments):
        return NOTHING
    value = arguments[at]
    if type(value) is list and len(value) == 1 and isinstance(value[0], torch.Tensor):
        return Sizes(bytes_of(value[0]), value)
    tensors: list[torch.Tensor] = []
    _flatten(value, tensors)
    return Sizes(sum(bytes_of(tensor) for tensor in tensors), tensors)


def in_and_out(op: Op, arguments: tuple[Any, ...]) -> tuple[Sizes, Sizes]:
    """Return the sizes that an op reads and writes on this rank."""
    inputs = sizes_at(arguments, op.reads)
    return inputs, inputs if op.writes == op.reads else sizes_at(arguments, op.writes)


def message_bytes(
    op: Op, arguments: tuple[Any, ...], ins: Sizes, outs: Sizes, rank: int, size: int
) -> int:
    """Return what a message of this op carries on this rank (docs/records.md)."""
    if op.message == "input":  # most ops
        return ins.bytes
    if op.message == "output":
        return outs.bytes
    if op.message == "gathered":
        return outs.bytes - ins.bytes if outs.tensors else ins.bytes
    if op.message == "scattered":
        return ins.bytes - outs.bytes if ins.tensors else outs.bytes
    if op.message == "exchanged":
        return ins.bytes - _own_slice(op, arguments, ins, rank, size)
    return 1  # "one byte"


def _own_slice(op: Op, arguments: tuple[Any, ...], ins: Sizes, rank: int, size: int) -> int:
    at = op.positions.get("input_split_sizes")
    if at is None:
        return bytes_of(ins.tensors[rank]) if rank < len(ins.tensors) else 0
    splits = arguments[at]
    if not splits:
        return ins.bytes // size if size > 0 else 0
    rows = sum(splits)
    return ins.bytes // rows * splits[rank] if rows > 0 and rank < len(splits) else 0


def shape_of(tensors: list[torch.Tensor]) -> tuple[int, tuple[int, ...]]:
    """Return the first tensor's number of dimensions and its padded shape."""
    if not tensors or tensors[0].is_sparse:
        return 0, (0,) * MAX_DIMS
    dims = tuple(tensors[0].shape[:MAX_DIMS])
    return len(dims), dims + (0,) * (MAX_DIMS - len(dims))


def shape_hash(op: Op, arguments: tuple[Any, ...], tensors: list[torch.Tensor]) -> int:
    """Return a number that tells apart shapes and split sizes; 0 for one tensor without splits."""
    if "input_split_sizes" not in op.positions:
        lists = []
    else:
        names = "output_split_sizes", "input_split_sizes"
        lists = [arguments[op.positions[name]] for name in names]
    if len(tensors) < 2 and not any(lists):
        return 0
    words: list[int] = []
    for tensor in tensors:
        words += [tensor.dim(), *tensor.shape]
    if any(lists):
        for splits in lists:
            words += [-1, *splits]
    state = 0xCBF29CE484222325
    for word in words:
        state = ((state ^ (word & 0xFFFFFFFFFFFFFFFF)) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return (state ^ (state >> 32)) & 0xFFFFFFFF or 1


def reduce_code(op: Op, arguments: tuple[Any, ...]) -> int:
    """Return the code of an op's reduction; 0 if it has none, or one that is not known."""
    at = op.positions.get("reduce_op")
    if at is None:
        return 0
    code = int(arguments[at].op()) + 1  # RedOpType, shifted as in REDUCE_OPS
    return code if code < len(REDUCE_OPS) else 0


def async_code(op: Op, arguments: tuple[Any, ...]) -> int:
    """Return whether an op is asynchronous: 0 no, 1 yes, 2 it has no such argument."""
    at = op.positions.get("async_op")
    if at is None:
        return 2
    return int(arguments[at]) if at < len(arguments) else 1  # the schema's default


# The line that issued an op, for the Python capture: corresponds to ``native/callsite.h``.


_USER, _FRAMEWORK, _CHILD, _HIDDEN, _WRAPPER, _API, _API_OF_MANY, _BACKWARD = range(8)
_WRAPPERS = {
    "wrapper",
    "inner",
    "wrapped",
    "_wrapped_call_impl",
    "_call_impl",
    "decorate_context",
    "_fn",
}
# Frames between the user and torch's context managers and deprecated functions.
_BETWEEN = ("/contextlib.py", "/typing_extensions.py", "/warnings.py")
_PACKAGES = ("/site-packages/", "/dist-packages/")
# Names of programs that came on the command line or were typed: the user's own.
_TYPED = ("<string>", "<stdin>", "<python-input", "<ipython-input")
_MAX_SITES = _MAX_CODES = 1 << 16
_MOST_FRAMES = 400  # between a framework's line and the user's
_OWN_FOLDER = str(Path(__file__).parent) + "/"


class _Code:
    """A code object that is alive: its kind, and its lines that issued ops."""

    __slots__ = ("kind", "numbers", "sites", "through")

    def __init__(self, kind: int) -> None:
        self.kind = kind
        self.sites: dict[tuple[int, str], int] = {}  # by instruction and public function
        # Of a framework's code: the numbers of its lines, by the same key. Of the user's: the sites
        # of pairs of lines, by instruction and the number of the framework's line.
        self.numbers: dict[tuple[int, str], int] = {}
        self.through: dict[tuple[int, int], int] = {}


class CallSites:
    """Finds and numbers call sites. Keeps no code object alive."""

    def __init__(self, add: Callable[[CallSite], int]) -> None:
        self._add = add
        self._skip = tuple(skipped_folders())
        self._installed = tuple(installed_folders())
        # By address: to compare code objects takes long, and those of two files can be equal.
        self._codes: dict[int, _Code] = {}
        self._references: dict[int, weakref.ref[CodeType]] = {}
        self._numbers: dict[CallSite, int] = {}
        self._by_id: dict[int, CallSite] = {}
        self._framework_lines: dict[CallSite, int] = {}
        self._last = _PerThread()

    def find(self, frame: FrameType | None, moment: int) -> tuple[int, bool]:
        """Return the nearest user frame's site, and whether this thread's last op was of one call.

        That is: of one call of a public function that issues several ops, such as
        ``batch_isend_irecv``. ``moment`` changes when a thread of autograd's, without frames of its
        own, has to look again who called ``backward()``.
        """
        api: FrameType | None = None
        many = False
        while frame is not None:
            code = frame.f_code
            known = self._codes.get(id(code)) or self._learn(code)
            kind = known.kind
            if kind <= _CHILD:
                continues = self._continues(api) if many and api is not None else False
                return self._site_of(known, frame, api), continues
            if kind >= _API:
                api, many = frame, kind == _API_OF_MANY
            frame = frame.f_back
        return self._backward_site(moment), False

    def known(self, number: int) -> CallSite | None:
        """Return a site that was found, by its number."""
        return self._by_id.get(number)

    def _learn(self, code: CodeType) -> _Code:
        known = _Code(self._classify(code.co_filename, code.co_name))
        address = id(code)
        if len(self._codes) < _MAX_CODES:
            codes, references = self._codes, self._references

            def forget(_: object) -> None:  # before another object can have this address
                codes.pop(address, None)
                references.pop(address, None)

            references[address] = weakref.ref(code, forget)
            codes[address] = known
        return known

    def _classify(self, file: str, name: str) -> int:
        if file.startswith(("<frozen ", "<eval_with_key>")) or "/torchinductor_" in file:
            return _HIDDEN
        if file.endswith(_BETWEEN):
            return _HIDDEN
        if file.startswith(_OWN_FOLDER):
            return _HIDDEN
        if not file.startswith(self._skip):
            return self._classify_outside(file, name)
        if name == "_engine_run_backward":
            return _BACKWARD
        if name in _WRAPPERS or "c10d_logger.py" in file:
            return _WRAPPER
        if name == "batch_isend_irecv" or "object" in name:
            return _API_OF_MANY
        return _API

    def _classify_outside(self, file: str, name: str) -> int:
        # A child of multiprocessing's begins there; multiprocessing wrote its first line.
        if name == "spawn_main" and "/multiprocessing/" in file:
            return _CHILD
        if name == "main" and "/multiprocessing/forkserver.py" in file:
            return _CHILD
        if file.startswith(self._installed) or any(folder in file for folder in _PACKAGES):
            return _FRAMEWORK
        return _FRAMEWORK if file.startswith("<") and not file.startswith(_TYPED) else _USER

    def _site_of(self, known: _Code, frame: FrameType, api: FrameType | None) -> int:
        name = api.f_code.co_name if api is not None else ""
        key = (frame.f_lasti, name)
        if known.kind == _FRAMEWORK:
            behind = self._user_behind(frame)
            if behind is not None:
                return self._site_of_pair(known, frame, key, *behind)
        site = known.sites.get(key)
        if site is None:
            site = known.sites[key] = self._number_of(_call_site(frame, name))
        return site

    def _user_behind(self, frame: FrameType) -> tuple[_Code, FrameType] | None:
        """Return the user's own frame behind one of a framework."""
        behind = frame.f_back
        for _ in range(_MOST_FRAMES):
            if behind is None:
                return None
            known = self._codes.get(id(behind.f_code)) or self._learn(behind.f_code)
            if known.kind == _USER:
                return known, behind
            if known.kind == _CHILD:
                return None
            behind = behind.f_back
        return None

    def _site_of_pair(
        self, known: _Code, frame: FrameType, key: tuple[int, str], own: _Code, user: FrameType
    ) -> int:
        """Return the site of a framework's line that the user's line led to.

        Code objects made of the same source have the same numbers, so that code that is made anew
        at each step does not fill the tables.
        """
        number = known.numbers.get(key)
        if number is None:
            lines = self._framework_lines
            if len(lines) >= _MAX_SITES:
                return 0
            number = lines.setdefault(_call_site(frame, key[1]), len(lines))
            known.numbers[key] = number
        pair = (user.f_lasti, number)
        site = own.through.get(pair)
        if site is None:
            line = UserLine(user.f_code.co_filename, user.f_lineno, user.f_code.co_name)
            site = self._number_of(_call_site(frame, key[1], line))
            if site:
                own.through[pair] = site
        return site

    def _number_of(self, call_site: CallSite) -> int:
        site = self._numbers.get(call_site)
        if site is None:
            if len(self._numbers) >= _MAX_SITES:
                return 0
            site = self._numbers[call_site] = self._add(call_site)
            self._by_id[site] = call_site
        return site

    def _continues(self, frame: FrameType) -> bool:
        """Tell whether ``frame`` is the call that issued this thread's last op.

        A frame's address is used again by the next call. The opcode-trace flag of a new frame is
        off, and without a tracer it does nothing: it marks the frames that were here before.
        """
        same = frame.f_trace_opcodes and self._last.frame == id(frame)
        frame.f_trace_opcodes = True
        self._last.frame = id(frame)
        return same

    def _backward_site(self, moment: int) -> int:
        """Return the line that called backward(), for ops that autograd's own threads issue."""
        if self._last.moment != moment:
            self._last.moment, self._last.site = moment, self._find_backward()
        return self._last.site

    def _find_backward(self) -> int:
        for frame in sys._current_frames().values():
            backward = False
            api: FrameType | None = None
            walk: FrameType | None = frame
            while walk is not None:
                known = self._codes.get(id(walk.f_code)) or self._learn(walk.f_code)
                if known.kind <= _CHILD:
                    if backward:
                        return self._site_of(known, walk, api)
                    break
                backward |= known.kind == _BACKWARD
                api = walk if known.kind >= _API else api
                walk = walk.f_back
        return 0


def _call_site(frame: FrameType, api: str, user: UserLine | None = None) -> CallSite:
    code = frame.f_code
    return CallSite(code.co_filename, frame.f_lineno, code.co_name, api, user)


class _PerThread(threading.local):
    """The last public call that issues several ops, and the last look for the backward call."""

    frame = 0
    moment = -1
    site = 0


_MOST_COUNTERS = 8192  # of sends and receives, in a group
_MOST_GROUPS = 16384  # that were announced and not met
_LOOK_EVERY = 256  # groups met between two looks for those that are gone


@dataclass
class GroupState:
    """A process group, its side-table id and sequence counters."""

    group: Group
    id: int
    rank: int
    size: int
    alive: Callable[[], dist.ProcessGroup | None]  # a weak reference to it
    collectives: int = 0
    is_met: bool = False  # an op was issued on it
    # Messages of each (peer, tag, whether this rank is the source). A program may use a new tag for
    # every message, so the counters are bounded: those that were not used for long start anew.
    _recent: dict[tuple[int, int, bool], int] = field(default_factory=dict)
    _older: dict[tuple[int, int, bool], int] = field(default_factory=dict)

    def next_p2p(self, peer: int, tag: int, outgoing: bool) -> int:
        """Return the next number for (source, destination, tag)."""
        key = (peer, tag, outgoing)
        if key not in self._recent and len(self._recent) >= _MOST_COUNTERS:
            self._older, self._recent = self._recent, {}
        number = self.count_p2p(*key) + 1
        self._recent[key] = number
        return number

    def count_p2p(self, peer: int, tag: int, outgoing: bool) -> int:
        """Return the last number for (source, destination, tag)."""
        key = (peer, tag, outgoing)
        return self._recent.get(key) or self._older.get(key, 0)

    def ends_on_host(self, device: str) -> bool:
        """Tell whether ops on a kind of device are over when their Work says so.

        Such a back end copies to the host and back. Others only enqueue an op.
        """
        parts = self.group.backend.split(",")
        by_device = dict(part.split(":", 1) for part in parts if ":" in part)
        return by_device.get(device, parts[0]) in ("gloo", "mpi")


class Groups:
    """The groups of one ring, by the names torch gave them."""

    def __init__(self, ring: PythonRing) -> None:
        self._ring = ring
        self._announced: dict[str, tuple[Group, int]] = {}
        self._states: dict[str, GroupState] = {}

    def announce(self, group: Group) -> int:
        """Write a group down and return its id; the next new one of that name is it.

        Its counters start anew.
        """
        number = self._ring.group(group)
        if len(self._announced) >= _MOST_GROUPS:
            self._announced.clear()  # groups that no op was issued on
        self._announced[group.name] = group, number
        self._states.pop(group.name, None)
        return number

    def announced(self) -> list[Group]:
        """Return the groups that were announced, of those of one name the last."""
        met = [state.group for state in list(self._states.values())]
        return met + [group for group, _ in list(self._announced.values())]

    def state_of(self, group: dist.ProcessGroup) -> GroupState:
        """Return the state of a group that an op is issued on."""
        try:
            name = str(group.group_name)
        except RuntimeError:
            name = "unnamed"  # made by hand, not through torch.distributed
        state = self._states.get(name)
        if state is None:
            announced = self._announced.pop(name, None)
            if announced is None:
                unknown = Group(name, 0, _backend_of(group), "", ())
                announced = unknown, self._ring.group(unknown)
            if len(self._states) % _LOOK_EVERY == _LOOK_EVERY - 1:
                self._states = {
                    name: old_state for name, old_state in self._states.items() if old_state.alive()
                }
            state = GroupState(*announced, group.rank(), group.size(), weakref.ref(group))
            self._states[name] = state
        return state


def _backend_of(group: dist.ProcessGroup) -> str:
    try:
        return group.name()
    except RuntimeError:
        return "custom"


def number_p2p(op: Op, args: tuple[Any, ...], group: GroupState) -> tuple[int, int, int, bool]:
    """Return seq, peer and tag of a send or receive, and whether its source is yet to be known."""
    tag = args[op.positions["tag"]]
    if op.peer is None:
        return 0, NO_RANK, tag, True
    peer = args[op.peer]
    return group.next_p2p(peer, tag, op.outgoing), peer, tag, False


class Numbered(NamedTuple):
    """An op that is about to be issued, as its record will have it. For planted faults."""

    name: str  # of its group
    description: str
    size: int
    seq: int
    peer: int  # global rank, -1 without one


def number_ahead(op: Op, args: tuple[Any, ...], groups: Groups) -> Numbered:
    """Return the number that an op will get, without giving it away."""
    process_group = dist.ProcessGroup.unbox(args[op.process_group])
    group = groups.state_of(process_group)
    name, text = str(process_group.group_name), str(process_group.group_desc)
    if not op.p2p:
        return Numbered(name, text, group.size, group.collectives + 1, NO_RANK)
    local = NO_RANK if op.peer is None else args[op.peer]
    seq = group.count_p2p(local, args[op.positions["tag"]], op.outgoing) + 1
    peer = NO_RANK if op.peer is None else dist.get_global_rank(process_group, local)
    return Numbered(name, text, group.size, seq, peer)
