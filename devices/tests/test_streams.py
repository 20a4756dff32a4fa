"""Streams, events and host functions, each against what CUDA's documentation says."""

from __future__ import annotations

from runtime import RUNTIME
from simulated_devices.testing import Jobs


def test_a_stream_is_a_queue(jobs: Jobs) -> None:
    """Operations of a stream run in the order in which they were enqueued, one after the other."""
    jobs.run(
        1,
        RUNTIME
        + """
s, order = stream(), []
gate = Gate(s)
for i in range(100): host(s, lambda i=i: order.append(i))
assert rt.cudaStreamQuery(s) == NOT_READY and order == []
gate.open(); ok(rt.cudaStreamSynchronize(s))
assert order == list(range(100)) and rt.cudaStreamQuery(s) == SUCCESS
""",
    )


def test_streams_run_beside_each_other(jobs: Jobs) -> None:
    """Streams that are not ordered by anything do not wait for each other."""
    jobs.run(
        1,
        RUNTIME
        + """
a, b = stream(NON_BLOCKING), stream(NON_BLOCKING)
gate = Gate(a)
host(b, lambda: say("b runs")); ok(rt.cudaStreamSynchronize(b))
assert rt.cudaStreamQuery(a) == NOT_READY
gate.open(); ok(rt.cudaStreamSynchronize(a))
""",
    )


def test_legacy_stream_waits_for_blocking_streams(jobs: Jobs) -> None:
    """Work in the legacy default stream begins only when earlier work in all blocking streams has ended."""
    jobs.run(
        1,
        RUNTIME
        + """
blocking, free = stream(), stream(NON_BLOCKING)
first, second = Gate(blocking), Gate(free)
e = event(); record(e, LEGACY)
assert not done(e)
first.open(); wait_until(lambda: done(e))     # and not for the non-blocking stream
assert rt.cudaStreamQuery(free) == NOT_READY
second.open()
""",
    )


def test_blocking_streams_wait_for_the_legacy_stream(jobs: Jobs) -> None:
    """Work in a blocking stream that is enqueued after work in the legacy stream begins when that has ended."""
    jobs.run(
        1,
        RUNTIME
        + """
blocking, free = stream(), stream(NON_BLOCKING)
gate = Gate(None)                             # the null stream is the legacy stream
held, passes = event(), event()
record(held, blocking); record(passes, free)
wait_until(lambda: done(passes))
assert not done(held)
gate.open(); wait_until(lambda: done(held))
""",
    )


def test_per_thread_default_streams(jobs: Jobs) -> None:
    """Each thread has a default stream of its own, which waits for the legacy stream but not for other threads'."""
    jobs.run(
        1,
        RUNTIME
        + """
gate = Gate(PER_THREAD)
def other():
    e = event(); record(e, PER_THREAD); assert done(e); passed.append(True)
passed = []
thread = threading.Thread(target=other); thread.start(); thread.join()
assert passed
e = event(); record(e, LEGACY); assert not done(e)   # it is a blocking stream
gate.open(); ok(rt.cudaStreamSynchronize(PER_THREAD)); wait_until(lambda: done(e))
""",
    )


def test_events_order_streams(jobs: Jobs) -> None:
    """cudaStreamWaitEvent waits for the last recording before the call, and for nothing if there is none."""
    jobs.run(
        1,
        RUNTIME
        + """
a, b, c = stream(NON_BLOCKING), stream(NON_BLOCKING), stream(NON_BLOCKING)
e = event()
assert done(e)                                  # an event that was never recorded is complete
ok(rt.cudaStreamWaitEvent(b, e, 0)); ok(rt.cudaStreamSynchronize(b))
gate = Gate(a); record(e, a)
ok(rt.cudaStreamWaitEvent(b, e, 0))
order = []
host(b, lambda: order.append("b"))
later = Gate(c); record(e, c)                   # recording again does not change what b waits for
host(a, lambda: order.append("a"))
assert rt.cudaStreamQuery(b) == NOT_READY and order == []
gate.open(); ok(rt.cudaStreamSynchronize(b)); assert not done(e)
later.open(); ok(rt.cudaEventSynchronize(e)); ok(rt.cudaStreamSynchronize(a)); assert sorted(order) == ["a", "b"]
ok(rt.cudaEventDestroy(e))
""",
    )


def test_elapsed_time(jobs: Jobs) -> None:
    """Elapsed times are those between the recordings; without timing, or unfinished, they are refused."""
    jobs.run(
        1,
        RUNTIME
        + """
s = stream(NON_BLOCKING)
start, end, untimed, never = event(), event(), event(2), event()
record(start, s); gate = Gate(s); record(end, s); record(untimed, s)
ms = c_float()
assert rt.cudaEventElapsedTime(byref(ms), start, end) == NOT_READY
begin = time.monotonic(); gate.reached.wait()
wait_until(lambda: time.monotonic() > begin + 0.05)
gate.open(); ok(rt.cudaEventSynchronize(end))
ok(rt.cudaEventElapsedTime(byref(ms), start, end)); assert ms.value >= 50, ms.value
ok(rt.cudaEventElapsedTime(byref(ms), end, start)); assert ms.value <= -50
assert rt.cudaEventElapsedTime(byref(ms), start, untimed) == 400
assert rt.cudaEventElapsedTime(byref(ms), start, never) == 400
""",
    )


def test_events_belong_to_a_device(jobs: Jobs) -> None:
    """An event is recorded in streams of its own device only; any stream may wait for it."""
    jobs.run(
        1,
        RUNTIME
        + """
e = event(); ok(rt.cudaSetDevice(1)); other = stream(NON_BLOCKING)
assert rt.cudaEventRecord(e, other) == 400
ok(rt.cudaStreamWaitEvent(other, e, 0)); ok(rt.cudaStreamSynchronize(other))
""",
    )


def test_synchronising_a_device_waits_for_all_its_streams(jobs: Jobs) -> None:
    """cudaDeviceSynchronize waits for every stream of the current device, and for no other device's."""
    jobs.run(
        1,
        RUNTIME
        + """
mine = stream(NON_BLOCKING)
ok(rt.cudaSetDevice(1)); theirs = stream(NON_BLOCKING); standing = Gate(theirs); ok(rt.cudaSetDevice(0))
gate, ended = Gate(mine), []
thread = threading.Thread(target=lambda: (ok(rt.cudaDeviceSynchronize()), ended.append(1)))
thread.start(); gate.reached.wait(); assert not ended
gate.open(); thread.join(30); assert ended and rt.cudaStreamQuery(theirs) == NOT_READY
standing.open()
""",
    )


def test_destroying_a_stream_does_not_wait(jobs: Jobs) -> None:
    """cudaStreamDestroy returns at once; what is queued still runs, and the handle is no longer valid."""
    jobs.run(
        1,
        RUNTIME
        + """
s, ran = stream(NON_BLOCKING), threading.Event()
gate = Gate(s); host(s, ran.set)
ok(rt.cudaStreamDestroy(s))
assert rt.cudaStreamQuery(s) == 400 and not ran.is_set()
gate.open(); assert ran.wait(30)
assert rt.cudaStreamDestroy(LEGACY) == 400
""",
    )


def test_priorities_and_identities(jobs: Jobs) -> None:
    """Priorities are clamped to the range, and each stream has an identity of its own."""
    jobs.run(
        1,
        RUNTIME
        + """
least, greatest = c_int(), c_int(); ok(rt.cudaDeviceGetStreamPriorityRange(byref(least), byref(greatest)))
assert (least.value, greatest.value) == (0, -5)
s = c_void_p(); ok(rt.cudaStreamCreateWithPriority(byref(s), 1, -100))
p, flags = c_int(), c_uint(); ok(rt.cudaStreamGetPriority(s, byref(p))); assert p.value == -5
ok(rt.cudaStreamGetFlags(s, byref(flags))); assert flags.value == 1
ids = set()
for handle in (s, stream(), LEGACY, PER_THREAD):
    i = c_uint64(); ok(rt.cudaStreamGetId(handle, byref(i))); ids.add(i.value)
assert len(ids) == 4
""",
    )


def test_torch_streams(jobs: Jobs) -> None:
    """torch's own streams and events: the host runs ahead, and what is computed follows the streams' order."""
    jobs.run(
        1,
        RUNTIME
        + """
x = torch.ones(1000, device="cuda"); side = torch.cuda.Stream()
gate = Gate(c_void_p(torch.cuda.current_stream().cuda_stream))
y = x * 2 + 1; z = y.sum()                        # enqueued behind the gate
fence = torch.cuda.Event(); fence.record(); assert not fence.query()
with torch.cuda.stream(side):
    side.wait_event(fence); w = y + z
last = torch.cuda.Event(); last.record(side); assert not last.query()
gate.open(); last.synchronize()
same(w, [3.0 * 1000 + 3] * 1000)
""",
    )


def test_fork_after_use_is_refused(jobs: Jobs) -> None:
    """A child that was forked after its parent had used CUDA gets cudaErrorInitializationError, as CUDA says."""
    jobs.run(
        1,
        RUNTIME
        + """
malloc(4096)
child = os.fork()
if child == 0:
    os._exit(0 if rt.cudaDeviceSynchronize() == 3 and rt.cudaSetDevice(0) == 3 else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
""",
    )
