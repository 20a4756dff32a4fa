"""Every wait in the package has a deadline, or stands in a table with the reason why it may not.

``waits.py`` finds them. To fix a failure here, give the wait a deadline (``rankcall.background``
has calls, joins and locks with one), or name it below with a reason that a reviewer can check.
"""

from __future__ import annotations

import functools
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
capture/recording.py: lock: self._end_lock
    copies a list, or adds to it
capture/named_phases.py: lock: _lock
    updates a dictionary of a few names or threads
cli/stderr.py: lock: self._lock
    copies what the ranks wrote to stderr, never waiting for a reader of it
capture/phases.py: lock: _lock
    writes two fields of a mapped file
job/call_deadline.py: lock: self._lock
    sets the timeouts of the process's groups
job/placement.py: lock: self._lock
    sets an attribute
ring/writer.py: lock: self._lock
    writes a record into a mapped file
store/installing.py: lock: _lock
    sets attributes of two modules
c10d/calls.py: lock: _deciding_lock
    sets a flag, swaps a tuple or shuts a socket down
events/dispatch.py: lock: self._lock
    copies the newest records out of a mapped file
events/dispatch.py: lock: self._turned
    counts turns
trace/sinks/prometheus.py: lock: self._lock
    adds numbers up
capture/native/groups.h: lock: mutex_
    a table look-up
capture/native/marks.h: lock: mutex_
    copies a shared pointer
record.py: lock: _fence
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
rpc/backends/zmq/dynamic_group.py: lock: self._lock
    updates a dictionary of members
rpc/native/agent.cpp: lock: devices_mutex_
    reads or swaps a map
rpc/native/messages.cpp: lock: devices_mutex_
    reads a map
rpc/native/agent.cpp: lock: connections_mutex_
    changes fields of peers; begins or ends a connection, which does not block; stops the sockets
rpc/native/messages.cpp: lock: connections_mutex_
    queues the frames of a message, which does not block
rpc/native/calls.h: lock: mutex_
    updates a map of calls
rpc/native/peers.h: lock: mutex_
    updates a map of peers
rpc/native/shared_memory.h: lock: mutex_
    updates lists of blocks; makes, maps or unlinks a file in memory
rpc/native/wire.h: lock: mutex_
    copies a chunk of at most 64 KiB, and allocates the memory for a part
rpc/native/worker_pool.h: lock: mutex_ | lock
    updates queues; tasks run unlocked
"""

# Waits that end for a reason that their own line does not show.
WAITS = """
background.py: atexit: atexit.register
    the one place: it gives exits a budget
hooks.py: lock: self._lock
    held while the recorder is built, which has a deadline
capture/session.py: lock: _state.lock
    held while the recorder is built, which has a deadline; exits use background.holding()
capture/native/trial.py: collective: dist.all_reduce
    on the fake group, which waits for nobody, in a process that is ended at a deadline
capture/hosts.py: store: store.set | store.check | store.get | store.multi_get
    inside init_process_group, which has just used the same store, or on the trace thread,
    for which callers wait with a deadline
capture/fallback/completion.py: result: self._inner.result
    delegates the user's own call
capture/fallback/completion.py: synchronize: self._inner.synchronize
    delegates the user's own call
capture/native/work_proxy.h: wait: inner_
    delegates the user's own call
capture/native/work_proxy.h: synchronize: inner_
    delegates the user's own call
capture/native/callsite.h: gil: PyGILState_Ensure
    once for each new line; the thread issues ops from Python and takes the GIL anyway
capture/native/ring.h: yield: sched_yield
    at most 1,000 times
capture/native/kernels.h: yield: sched_yield
    at most 2 ms, at the first op of a group on a device
capture/native/recorder.h: lock: lock
    the mutex_ above, again, after a look at files of /proc
capture/native/pulse.h: read: read
    files of /proc, which the kernel answers from memory
capture/native/recorder.h: join: thread_
    wait_for has seen its last line
capture/own_ring.py: wait: self._wanted.wait
    a daemon thread of its own, woken at the end of the recording
job/departure.py: wait: self._wake.wait
    a daemon thread of its own, woken when the process ends
cli/exec.py: wait: child[0].wait
    the user's command, which takes as long as it takes
serve/shared_look.py: lock: self._folding
    a coroutine's lock; its owner makes the rows of one viewer's choice, for all with the same
serve/app.py: lock: self._turn
    a coroutine's lock; its owner waits for stacks or profiles of ranks, which has a deadline
serve/app.py: wait: self.closing.wait
    inside wait_for, which bounds it
serve/downloads.py: acquire: self._turn.acquire
    inside wait_for, which bounds it
serve/__init__.py: sleep: not server.should_exit
    the user asked for the page until Ctrl-C
serve/shared_look.py: result: next(iter(done)).result | task.result
    of a task that has ended
join/rank_group.py: collective: dist.all_reduce
    the job's own collective: it ends as that of any program, by the group's timeout
join/rank_group.py: wait: self._work.wait
    the job's own collective: it ends as that of any program, by the group's timeout
join/shadow.py: collective: dist.all_reduce
    the job's own collective: it ends as that of any program, by the group's timeout
join/shadow.py: wait: future.wait
    the job's own collective: it ends as that of any program, by the group's timeout
c10d/connection.py: store: self._client.add | self._client.append | self._client.check
c10d/connection.py: store: self._client.compare_set | self._client.delete_key
c10d/connection.py: store: self._client.list_keys | self._client.multi_get | self._client.set
    on a connection whose socket has a time limit, or on a helper thread: the caller waits
    for it with a deadline
c10d/own_connections.py: store: store.clone
    on a helper thread: the caller waits for it with a deadline
testing/injection.py: sleep: math.isinf(fault.seconds)
    a planned fault: the test asked for a hang
testing/injection.py: wait: work.wait
    the faulty op would have waited for it, too
recovery/rendezvous.py: store: self.store().compare_set
    as the next one: torch makes its own requests to that store a moment later
recovery/rendezvous.py: store: self.store().add | self.store().set | store.check | store.get
    in torchrun's agent between two attempts, on torch's store of the rendezvous, whose requests
    torch gives 60 s (read_timeout); torch makes its own there a moment later
recovery/links.py: store: store.add | store.set | store.check | store.multi_get
    the same store, at the same time
recovery/links.py: socket: connection.recv
    the socket's timeout ends with the deadline of the transfer
recovery/links.py: socket: self._socket.accept
    a daemon thread of its own, woken when the agent closes the socket
recovery/links.py: sleep: True
    the same thread, while it has no file descriptor left
recovery/links.py: socket: probe.connect
    a datagram socket: it sends nothing
recovery/links.py: resolver: socket.getaddrinfo
    torch has looked up the same name to reach the store; the resolver has its own timeouts
recovery/rendezvous.py: shutdown: self._handler.shutdown
    torch's own call when its agent ends, passed on; torch gives it 30 s (close_timeout)
trace/sinks/otel.py: shutdown: provider.shutdown
    on the trace thread: callers wait for it with a deadline
trace/sinks/prometheus_endpoint.py: shutdown: server.shutdown
    on the trace thread: callers wait for it with a deadline; the server looks twice
    a second
rpc/backends/zmq/worker_dir.py: flock: fcntl.flock
    its own new file, which others hold only while they remove what a killed worker left
rpc/backends/zmq/addresses.py: socket: probe.connect
    a datagram socket: it sends nothing
c10d/own_connections.py: resolver: socket.getaddrinfo
    on a helper thread, for which the caller waits so many seconds
rpc/native/process_state.h: read: read
    a file of /proc: the kernel answers at once
rpc/backends/zmq/addresses.py: resolver: socket.getaddrinfo
    inside init_rpc; the resolver has its own timeouts
rpc/backends/zmq/dynamic_group.py: wait: answer.wait
    a call with a timeout
rpc/backends/zmq/static_start.py: wait: answer.wait
    a call with a timeout
rpc/native/agent.cpp: gil: gil_scoped_acquire
    without a lock, to tell of a lost worker, and in setting up and taking down
rpc/native/agent.cpp: join: deadlines_thread_ | connections_thread_
    both threads look for the end five times a second
rpc/native/agent.h: gil: PyGILState_Ensure
    a new worker thread
rpc/native/calls.h: wait: earlier_
    a thread of its own, woken by each call and the end
rpc/native/messages.cpp: gil: gil_scoped_acquire
    takes note of a newcomer, without a lock
rpc/native/sockets.h: recv: zmq_.msg_recv
    a worker thread; ended by ctx_shutdown
rpc/native/sockets.h: term: zmq_.ctx_term
    all sockets are closed; the linger is 0.5 s
rpc/native/tensors.h: synchronize: getStream(device)
    the user's call needs the data on the host
rpc/native/worker_pool.h: join: thread
    after wait_for has seen all of them end
rpc/native/worker_pool.h: wait: waiting_
    a worker thread, woken by each task and the end
"""

# Waits that are wrong, and have not been mended yet: the table is to become empty.
DEFECTS = """
"""


@functools.cache
def _found() -> frozenset[Wait]:
    return frozenset(_package())


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


NAMED = [wait for table in (LOCKS, WAITS, DEFECTS) for wait in _named(table)]


def test_every_wait_has_a_deadline() -> None:
    """No wait is without a deadline, but for those that the tables name."""
    unbounded = sorted(_found() - set(NAMED))
    listed = "\n".join(f"{file}: {kind}: {text}" for file, kind, text in unbounded)
    assert not unbounded, f"give each a deadline, or name it with a reason:\n{listed}"


def test_the_tables_name_what_exists() -> None:
    """A wait that is gone or has a deadline by now is named no longer, and none is named twice."""
    gone = sorted(set(NAMED) - _found())
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
    assert [reported.kind for reported in python_waits("x.py", wait)] == [kind]
    assert list(python_waits("x.py", bounded)) == []


@pytest.mark.parametrize(("kind", "wait", "bounded"), PLANTED_CPP)
def test_the_scan_finds_waits_in_cpp(kind: str, wait: str, bounded: str) -> None:
    """It reports a wait without a deadline, and neither comments nor strings."""
    assert [reported.kind for reported in cpp_waits("x.h", wait)] == [kind]
    assert list(cpp_waits("x.h", bounded)) == []


def test_joining_text_is_no_wait() -> None:
    """``str.join`` takes an argument, as a join with a timeout does."""
    assert list(python_waits("x.py", "', '.join(names)\nos.path.join(a, b)")) == []
