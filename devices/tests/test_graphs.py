"""Stream capture and graphs, against CUDA's documentation."""

from __future__ import annotations

from runtime import RUNTIME
from simulated_devices.testing import Jobs

CAPTURE = (
    RUNTIME
    + """
UNSUPPORTED, INVALIDATED, MERGE, UNMATCHED, UNJOINED, ISOLATION, IMPLICIT, CAPTURED, WRONG_THREAD = range(900, 909)
GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
def begin(s, mode=GLOBAL): ok(rt.cudaStreamBeginCapture(s, mode))
def end(s): g = c_void_p(); return rt.cudaStreamEndCapture(s, byref(g)), g
def status(s): v = c_int(); ok(rt.cudaStreamIsCapturing(s, byref(v))); return v.value
"""
)


def test_capture_and_replay(jobs: Jobs) -> None:
    """Captured work does not run until its graph is launched, and then runs once for each launch, in order."""
    jobs.run(
        1,
        CAPTURE
        + """
s, ran = stream(NON_BLOCKING), []
begin(s); assert status(s) == 1
for i in range(3): host(s, lambda i=i: ran.append(i))
code, g = end(s); ok(code); assert status(s) == 0 and ran == []
x = c_void_p(); ok(rt.cudaGraphInstantiateWithFlags(byref(x), g, c_uint64(0))); ok(rt.cudaGraphDestroy(g))
for _ in range(2): ok(rt.cudaGraphLaunch(x, s))
ok(rt.cudaStreamSynchronize(s)); assert ran == [0, 1, 2, 0, 1, 2]
ok(rt.cudaGraphExecDestroy(x))
""",
    )


def test_forks_must_be_joined(jobs: Jobs) -> None:
    """A stream joins a capture by waiting for an event of it, and must be joined before the capture ends."""
    jobs.run(
        1,
        CAPTURE
        + """
a, b, ran = stream(NON_BLOCKING), stream(NON_BLOCKING), []
for joined in (True, False):
    fork, join = event(), event()
    begin(a); record(fork, a); ok(rt.cudaStreamWaitEvent(b, fork, 0)); assert status(b) == 1
    host(b, lambda: ran.append("b"))
    if joined: record(join, b); ok(rt.cudaStreamWaitEvent(a, join, 0))
    code, g = end(a)
    assert (code == SUCCESS) if joined else code in (UNJOINED, INVALIDATED), code
    assert status(a) == status(b) == 0
begin(a); fork = event(); record(fork, a); ok(rt.cudaStreamWaitEvent(b, fork, 0)); assert end(b)[0] == UNMATCHED; end(a)
begin(a, RELAXED); record(fork, a); assert rt.cudaEventQuery(fork) == CAPTURED == rt.cudaEventSynchronize(fork); ok(end(a)[0])
""",
    )


def test_calls_that_a_capture_forbids(jobs: Jobs) -> None:
    """Synchronising a capturing stream, and allocating during a global capture, make the capture invalid."""
    jobs.run(
        1,
        CAPTURE
        + """
s, p = stream(NON_BLOCKING), c_void_p()
for forbidden in (lambda: rt.cudaStreamSynchronize(s), lambda: rt.cudaStreamQuery(s), lambda: rt.cudaDeviceSynchronize(), lambda: rt.cudaMalloc(byref(p), c_size_t(1))):
    begin(s); assert forbidden() == UNSUPPORTED; assert status(s) == 2
    assert rt.cudaLaunchHostFunc(s, HOST(lambda _: None), None) == INVALIDATED
    code, g = end(s); assert code == INVALIDATED and not g.value
begin(s, RELAXED); ok(rt.cudaMalloc(byref(p), c_size_t(1))); ok(end(s)[0])
result = []
def elsewhere(): result.append(rt.cudaMalloc(byref(p), c_size_t(1)))
for mode, expected in ((GLOBAL, UNSUPPORTED), (THREAD_LOCAL, SUCCESS)):
    begin(s, mode); t = threading.Thread(target=elsewhere); t.start(); t.join(); assert result.pop() == expected, mode; end(s)
begin(s, THREAD_LOCAL); t = threading.Thread(target=lambda: result.append(end(s)[0])); t.start(); t.join(); assert result.pop() == WRONG_THREAD; ok(end(s)[0])
mode = c_int(RELAXED); ok(rt.cudaThreadExchangeStreamCaptureMode(byref(mode))); assert mode.value == GLOBAL
begin(s); ok(rt.cudaMalloc(byref(p), c_size_t(1))); ok(end(s)[0])
""",
    )


def test_queries_of_events_beside_a_capture(jobs: Jobs) -> None:
    """To query any event invalidates a global capture of any thread, unless the thread has left the global mode."""
    jobs.run(
        1,
        CAPTURE
        + """
s, other = stream(NON_BLOCKING), stream(NON_BLOCKING); e = event(); record(e, other); ok(rt.cudaStreamSynchronize(other))
result = []
def query(mode):
    previous = c_int(mode); ok(rt.cudaThreadExchangeStreamCaptureMode(byref(previous))); assert previous.value == GLOBAL
    result.append(rt.cudaEventQuery(e))
def elsewhere(mode): t = threading.Thread(target=query, args=(mode,)); t.start(); t.join(); return result.pop()
for mode in (GLOBAL, THREAD_LOCAL, RELAXED):
    for own in (GLOBAL, THREAD_LOCAL, RELAXED):
        forbidden = mode == own == GLOBAL
        begin(s, mode); assert elsewhere(own) == (UNSUPPORTED if forbidden else SUCCESS), (mode, own)
        assert status(s) == (2 if forbidden else 1); end(s)
# What records, and what makes or takes away an event, is no query.
begin(s); record(e, other); ok(rt.cudaEventDestroy(event())); assert status(s) == 1; ok(end(s)[0])
""",
    )


def test_the_legacy_stream_and_captures(jobs: Jobs) -> None:
    """The legacy stream cannot be captured, and work in it would wait for a capturing blocking stream."""
    jobs.run(
        1,
        CAPTURE
        + """
assert rt.cudaStreamBeginCapture(LEGACY, GLOBAL) == UNSUPPORTED
s = stream(); begin(s)
assert rt.cudaLaunchHostFunc(LEGACY, HOST(lambda _: None), None) == IMPLICIT
assert end(s)[0] == INVALIDATED
free = stream(NON_BLOCKING); begin(free); host(LEGACY, lambda: None); ok(end(free)[0])
""",
    )


def test_waiting_for_outside_work_is_refused(jobs: Jobs) -> None:
    """A capturing stream cannot wait for work that is not captured, nor for another capture."""
    jobs.run(
        1,
        CAPTURE
        + """
a, b, c = (stream(NON_BLOCKING) for _ in range(3)); e = event()
gate = Gate(c); record(e, c)
begin(a); assert rt.cudaStreamWaitEvent(a, e, 0) == ISOLATION; assert end(a)[0] == INVALIDATED
gate.open()
e1 = event(); begin(a); begin(b); record(e1, a)
assert rt.cudaStreamWaitEvent(b, e1, 0) == MERGE
assert end(a)[0] == INVALIDATED and end(b)[0] == INVALIDATED
""",
    )


def test_user_objects(jobs: Jobs) -> None:
    """A user object is destroyed when the last graph that owns it is."""
    jobs.run(
        1,
        CAPTURE
        + """
gone = []; destroy = HOST(lambda p: gone.append(p)); s = stream(NON_BLOCKING)
begin(s); host(s, lambda: None); code, g = end(s); o, x = c_void_p(), c_void_p()
ok(rt.cudaUserObjectCreate(byref(o), c_void_p(42), destroy, 1, 1)); ok(rt.cudaGraphRetainUserObject(g, o, 1, 1))
ok(rt.cudaGraphInstantiateWithFlags(byref(x), g, c_uint64(0))); ok(rt.cudaGraphDestroy(g)); assert gone == []
ok(rt.cudaGraphExecDestroy(x)); assert gone == [42]
""",
    )


def test_a_captures_own_handle_keeps_no_graph(jobs: Jobs) -> None:
    """A user object that was given to a graph while it was captured goes with the graph, and not with the thread."""
    jobs.run(
        1,
        CAPTURE
        + """
gone = []; destroy = HOST(lambda p: gone.append(p)); s = stream(NON_BLOCKING)
begin(s); v, g, o, x = c_int(), c_void_p(), c_void_p(), c_void_p()
if hasattr(rt, "cudaStreamGetCaptureInfo_v2"): ok(rt.cudaStreamGetCaptureInfo_v2(s, byref(v), None, byref(g), None, None))
else: ok(rt.cudaStreamGetCaptureInfo(s, byref(v), None, byref(g), None, None, None))
ok(rt.cudaUserObjectCreate(byref(o), c_void_p(42), destroy, 1, 1)); ok(rt.cudaGraphRetainUserObject(g, o, 1, 1))
code, g = end(s); ok(code); ok(rt.cudaGraphInstantiateWithFlags(byref(x), g, c_uint64(0)))
ok(rt.cudaGraphDestroy(g)); assert gone == []
ok(rt.cudaGraphExecDestroy(x)); assert gone == [42]
""",
    )


def test_torch_graphs_with_collectives(jobs: Jobs) -> None:
    """torch.cuda.graph captures kernels and NCCL collectives, and each replay computes with the inputs of then."""
    jobs.run(
        2,
        """
        init()
        x, out = torch.zeros(4, device="cuda"), torch.zeros(4, device="cuda")
        dist.all_reduce(x); torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x * 2
            work = dist.all_reduce(y, async_op=True); work.wait()
            out.copy_(y + 1)
        for step in range(3):
            x.fill_(step + rank); graph.replay(); same(out, [2 * (2 * step + 1) + 1] * 4)
        graph.reset()  # it must not outlive the group: torch 2.15.0 refers to that
        dist.destroy_process_group()
        """,
    )
