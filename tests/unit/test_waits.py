"""Every wait in the package has a deadline, or stands in a table with the reason why it may not.

``waits.py`` finds them. To fix a failure here, give the wait a deadline (``rankcall.background``
has calls, joins and locks with one), or name it below with a reason that a reviewer can check.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from waits import Wait, cpp_waits, python_waits

import rankcall

ROOT = Path(rankcall.__file__).parent


# The tables: file, kind and text of each wait, and below, indented, the reason.

# Locks whose critical sections hold no I/O and no user code: they are free again in microseconds.
LOCKS = """
capture/declared.py: lock: _lock
    writes two fields of a mapped file
_registry.py: lock: self._lock
    looks up and sets dictionary entries
ring/writer.py: lock: self._lock
    writes a record into a mapped file
store/_install.py: lock: _lock
    sets attributes of two modules
store/_member.py: lock: _deciding
    sets two flags
trace/live.py: lock: self._turned
    counts turns
trace/sinks/prometheus.py: lock: self._lock
    adds numbers up
rpc/api.py: lock: torch_rpc._init_counter_lock
    torch's own, over a counter
capture/native/groups.h: lock: mutex_
    a table look-up
capture/native/marks.h: lock: mutex_
    copies a shared pointer
_whole.py: lock: _fence
    nothing is done under it: it orders reads
capture/native/device_ops.h: lock: mutex_
    adds a note, or takes them all
capture/native/device_times.h: lock: mutex_
    queries events that were recorded, which does not block; times are opt-in
capture/native/recorder.h: lock: mutex_ | shapes_mutex_
    sets a flag, or looks up a shape
capture/native/ring.h: lock: tables_mutex_
    copies an entry
capture/native/ring.h: lock: late_mutex_
    adds an end, or takes them all
rpc/native/agent.cpp: lock: devices_mutex_
    reads or swaps a map
rpc/native/send.cpp: lock: devices_mutex_
    reads a map
rpc/native/arena.h: lock: mutex_
    updates lists of blocks
rpc/native/calls.h: lock: mutex_
    updates a map of calls
rpc/native/crew.h: lock: mutex_ | lock
    updates queues; tasks run unlocked
rpc/native/peer.h: lock: mutex_
    updates a map of peers
"""

# Waits that end for a reason that their own line does not show.
WAITS = """
background.py: atexit: atexit.register
    the one place: it gives exits a budget
capture/delivery.py: lock: self._lock
    held while the recorder is built, which has a deadline; exits use background.holding()
capture/session.py: lock: _state.lock
    held while the recorder is built, which has a deadline; exits use background.holding()
capture/hostnames.py: store: store.set | store.check | store.get | store.multi_get
    inside init_process_group, which has just used the same store, or on the trace thread,
    for which callers wait with a deadline
capture/python/waited.py: result: self._inner.result
    delegates the user's own call
capture/python/waited.py: synchronize: self._inner.synchronize
    delegates the user's own call
capture/native/waited.h: wait: inner_
    delegates the user's own call
capture/native/waited.h: synchronize: inner_
    delegates the user's own call
capture/native/callsite.h: gil: PyGILState_Ensure
    once for each new line; the thread issues ops from Python and takes the GIL anyway
capture/native/ring.h: yield: sched_yield
    at most 1,000 times
capture/native/kernels.h: yield: sched_yield
    at most 2 ms, at the first op of a group on a device
capture/native/recorder.h: join: thread_
    wait_for has seen its last line
capture/keeper.py: wait: self._wanted.wait
    a daemon thread of its own, woken at the end of the recording
cli/diagnose.py: sleep: True
    the user asked to watch until Ctrl-C
join/batches.py: wait: Exchange([*facts, *join.settings()], join.group, join.device).wait
join/batches.py: wait: Exchange([count], shared.group, shared.device).wait
join/batches.py: wait: self._look_ahead().wait
    the job's own collective: it ends as that of any program, by the group's timeout
join/context.py: wait: Exchange(self.own.pack(), self.group, self.device).wait
    the job's own collective: it ends as that of any program, by the group's timeout
join/exchange.py: collective: dist.all_reduce
    the job's own collective: it ends as that of any program, by the group's timeout
join/exchange.py: wait: self._work.wait
    the job's own collective: it ends as that of any program, by the group's timeout
join/lightning.py: wait: Exchange([own], group, device_of(group)).wait
    the job's own collective: it ends as that of any program, by the group's timeout
join/protocol.py: collective: dist.all_reduce
    the job's own collective: it ends as that of any program, by the group's timeout
join/shadow.py: collective: dist.all_reduce
    the job's own collective: it ends as that of any program, by the group's timeout
join/shadow.py: wait: future.wait
    the job's own collective: it ends as that of any program, by the group's timeout
join/error_channel.py: store: self._own.check | self._own.delete_key | self._own.get
join/error_channel.py: store: self._own.set
join/error_channel.py: store: self._store.add | self._store.check | self._store.compare_set
join/error_channel.py: store: self._store.get | self._store.multi_set | self._store.set
join/error_channel.py: store: store.clone | store.delete_key
    on the listening thread, or on a helper thread: the caller waits for it with a deadline
store/_barrier.py: wait: one.wait
    Meeting.wait ends at its call's deadline
store/_connection.py: store: store.clone
    on a helper thread: the caller waits for it with a deadline
store/_hosts.py: store: self._house.store.delete_key | self._house.store.set
    this process hosts that store
store/_link.py: store: self._client.get
    a connection with a receive timeout
testing/_inject.py: sleep: math.isinf(fault.seconds)
    a planned fault: the test asked for a hang
testing/_inject.py: wait: work.wait
    the faulty op would have waited for it, too
trace/sinks/otel.py: shutdown: provider.shutdown
    on the trace thread: callers wait for it with a deadline
trace/sinks/prometheus.py: shutdown: server.shutdown
    on the trace thread: callers wait for it with a deadline; the server looks twice
    a second
watch/_exchange.py: store: store.add | store.check | store.compare_set | store.delete_key
watch/_exchange.py: store: store.get | store.set
    on a helper thread: the caller waits for it with a deadline
watch/_judge.py: store: store.clone
    on a helper thread: the caller waits for it with a deadline
rpc/_members.py: store: self._store.append | self._store.check | self._store.compare_set
rpc/_members.py: store: self._store.get | self._store.set
    on a helper thread: the caller waits for it with a deadline
rpc/_place.py: flock: fcntl.flock
    its own new file, which others only try to lock
rpc/_roll.py: store: self._store.set | store.add | store.compare_set | store.get | store.set
rpc/_roll.py: store: store.wait
    on a helper thread: the caller waits for it with a deadline
rpc/backends/_tensorpipe_dynamic.py: store: self._store.check | self._store.delete_key
rpc/backends/_tensorpipe_dynamic.py: store: self._store.get | self._store.set
    on a helper thread: the caller waits for it with a deadline
rpc/backends/_tensorpipe_dynamic.py: wait: answer.wait
    a call with a timeout
rpc/backends/_tensorpipe_dynamic.py: lock: self._lock
    updates the local agent
rpc/backends/_zmq_dynamic.py: wait: answer.wait
    a call with a timeout
rpc/backends/zmq.py: wait: answer.wait
    a call with a timeout
rpc/backends/zmq.py: socket: probe.connect
    a datagram socket: it sends nothing
rpc/backends/zmq.py: resolver: socket.getaddrinfo
    inside init_rpc; the resolver has its own timeouts
rpc/native/agent.cpp: gil: gil_scoped_acquire
    without a lock, in setting up and taking down
rpc/native/agent.cpp: join: deadlines_thread_ | peers_thread_
    both threads look for the end five times a second
rpc/native/agent.cpp: lock: peer->mutex
    held over a send that does not block
rpc/native/agent.cpp: term: zmq_.ctx_term
    all sockets are closed; the linger is 0.5 s
rpc/native/calls.h: wait: earlier_
    a thread of its own, woken by each call and the end
rpc/native/crew.h: join: each
    after wait_for has seen all of them end
rpc/native/crew.h: wait: waiting_
    a worker thread, woken by each task and the end
rpc/native/python_thread.h: gil: PyGILState_Ensure
    a new worker thread
rpc/native/receive.cpp: gil: gil_scoped_acquire
    runs the user's function
rpc/native/receive.cpp: poll: zmq_.poll
    ended by ctx_shutdown
rpc/native/receive.cpp: recv: zmq_.msg_recv
    after poll; ended by ctx_shutdown
rpc/native/send.cpp: lock: peer.mutex
    held over a send that does not block
rpc/native/tensors.h: synchronize: getStream(device)
    the user's call needs the data on the host
rpc/native/watch.cpp: gil: gil_scoped_acquire
    tells of a lost worker
rpc/native/watch.cpp: lock: peer->mutex
    held over a close that does not block
"""

# Waits that are wrong, and have not been mended yet: the table is to become empty.
DEFECTS = """
rpc/_members.py: lock: self._lock
    C2: held over requests of a store
rpc/backends/_zmq_dynamic.py: lock: self._lock
    C2: held over calls of the agent
"""


def _package() -> Iterator[Wait]:
    for path in sorted(ROOT.rglob("*")):
        name = str(path.relative_to(ROOT))
        if path.suffix == ".py":
            yield from python_waits(name, path.read_text())
        elif path.suffix in (".h", ".cpp"):
            yield from cpp_waits(name, path.read_text())


def _named(table: str) -> Iterator[Wait]:
    for line in table.splitlines():
        if line and not line.startswith((" ", "#")):
            file, kind, texts = line.split(": ", 2)
            yield from (Wait(file, kind, text) for text in texts.split(" | "))


FOUND = frozenset(_package())
NAMED = [wait for table in (LOCKS, WAITS, DEFECTS) for wait in _named(table)]


def test_every_wait_has_a_deadline() -> None:
    """No wait is without a deadline, but for those that the tables name."""
    unbounded = sorted(FOUND - set(NAMED))
    listed = "\n".join(f"{file}: {kind}: {text}" for file, kind, text in unbounded)
    assert not unbounded, f"give each a deadline, or name it with a reason:\n{listed}"


def test_the_tables_name_what_exists() -> None:
    """A wait that is gone or has a deadline by now is named no longer, and none is named twice."""
    gone = sorted(set(NAMED) - FOUND)
    listed = "\n".join(f"{file}: {kind}: {text}" for file, kind, text in gone)
    assert not gone, f"remove from the tables:\n{listed}"
    assert len(NAMED) == len(set(NAMED))


@pytest.mark.parametrize("table", [LOCKS, WAITS, DEFECTS])
def test_each_has_a_reason(table: str) -> None:
    """A reason follows each wait, or each group of waits in one file."""
    lines = [line for line in table.splitlines() if line and not line.startswith("#")]
    for line, following in pairwise([*lines, ""]):
        if not line.startswith(" "):
            shared = following.startswith(line.partition(":")[0])
            assert following.startswith("    ") or shared, line


# Each line is a wait that must be found: the kind, and code with and without a deadline.
PLANTED = (
    ("join", "thread.join()", "thread.join(2.0)"),
    ("join", "thread.join(timeout=None)", "thread.join(timeout=2)"),
    ("wait", "event.wait()", "event.wait(1.0)"),
    ("wait", "process.wait()", "process.wait(timeout=3)"),
    ("wait_for", "condition.wait_for(ready)", "condition.wait_for(ready, 2)"),
    ("acquire", "mine.acquire()", "mine.acquire(timeout=1)"),
    ("lock", "with self._lock: pass", "with holding(self._lock, 2.0): pass"),
    ("lock", "mine = threading.Condition()\nwith mine: pass", "with mine: pass"),
    ("result", "future.result()", "future.result(timeout=3)"),
    ("communicate", "process.communicate()", "process.communicate(timeout=3)"),
    ("subprocess", "subprocess.run(['x'])", "subprocess.run(['x'], timeout=3)"),
    ("subprocess", "subprocess.check_output(['x'])", "subprocess.check_output(['x'], timeout=3)"),
    ("process", "os.waitpid(pid, 0)", "os.waitpid(pid, os.WNOHANG)"),
    ("select", "select.select([fd], [], [])", "select.select([fd], [], [], 0.5)"),
    ("select", "selector.select()", "selector.select(0.5)"),
    ("flock", "fcntl.flock(fd, fcntl.LOCK_EX)", "fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)"),
    ("socket", "sock.connect(address)", "socket.create_connection(address, 3)"),
    ("socket", "sock.recv(1)", "sock.recv(1, socket.MSG_DONTWAIT)"),
    ("socket", "server.accept()", "server.settimeout(3)"),
    ("queue", "queue.get()", "queue.get(timeout=1)"),
    ("queue", "self._queue.put(item)", "self._queue.put(item, timeout=1)"),
    ("store", "store.get('key')", "bounded(get_key)"),
    ("store", "self._store.add('n', 1)", "self._count.add(1)"),
    ("store", "store.wait(['key'])", "store.wait(['key'], left)"),
    ("synchronize", "torch.cuda.synchronize()", "event.query()"),
    ("collective", "dist.barrier()", "store_barrier(left)"),
    (
        "sleep",
        "while not done():\n    time.sleep(1)",
        "while not done() and time.monotonic() < deadline:\n    time.sleep(1)",
    ),
    ("shutdown", "server.shutdown()", "connection.shutdown(socket.SHUT_RDWR)"),
    ("resolver", "socket.getfqdn()", "socket.gethostname()"),
    ("atexit", "atexit.register(close)", "background.at_exit(close)"),
)
PLANTED_CPP = (
    ("join", "thread_.join();", "thread_.detach();"),
    ("wait", "changed_.wait(lock);", "changed_.wait_for(lock, patience);"),
    ("lock", "std::lock_guard<std::mutex> guard(mutex_);", "mutex_.try_lock();"),
    ("lock", "std::unique_lock lock(mutex_);", "std::unique_ptr<int> lock;"),
    ("lock", "mutex_.lock();", "mutex_.unlock();"),
    ("synchronize", "event.synchronize();", "event.query();"),
    ("yield", "while (busy) sched_yield();", "return;"),
    ("sleep", "usleep(10);", "// usleep(10);"),
    ("gil", "PyGILState_Ensure();", 'error("PyGILState_Ensure");'),
    ("poll", "zmq_.poll(items, 2, -1);", "zmq_.poll(items, 2, 200);"),
    ("recv", "zmq_.msg_recv(frame, socket, 0);", "zmq_.msg_recv(frame, socket, kDontWait);"),
    ("term", "zmq_.ctx_term(context);", "zmq_.ctx_shutdown(context);"),
    ("flock", "flock(fd, LOCK_EX);", "close(fd);"),
)


@pytest.mark.parametrize(("kind", "wait", "bounded"), PLANTED)
def test_the_scan_finds_waits_in_python(kind: str, wait: str, bounded: str) -> None:
    """It reports a wait without a deadline, and nothing that has one."""
    assert [found.kind for found in python_waits("x.py", wait)] == [kind]
    assert list(python_waits("x.py", bounded)) == []


@pytest.mark.parametrize(("kind", "wait", "bounded"), PLANTED_CPP)
def test_the_scan_finds_waits_in_cpp(kind: str, wait: str, bounded: str) -> None:
    """It reports a wait without a deadline, and neither comments nor strings."""
    assert [found.kind for found in cpp_waits("x.h", wait)] == [kind]
    assert list(cpp_waits("x.h", bounded)) == []


def test_joining_text_is_no_wait() -> None:
    """``str.join`` takes an argument, as a join with a timeout does."""
    assert list(python_waits("x.py", "', '.join(names)\nos.path.join(a, b)")) == []
