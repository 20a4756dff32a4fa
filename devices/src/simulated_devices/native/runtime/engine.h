// Streams, events and the order in which the work of a device runs.
//
// A stream is a queue of operations and a counter of those that have ended. Everything that CUDA
// calls ordering is a wait for a point, the n-th operation of some stream: an event is a point, the
// legacy default stream waits for the points that the blocking streams have reached, and so on.
//
// An operation that cannot block runs in the calling thread if its stream is idle, because a hand-over
// to another thread costs more than most kernels here. Everything else runs in the stream's own thread.
#pragma once
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "../abi/cuda.h"
#include "kernels.h"

namespace simulated {

constexpr int MAX_DEVICES = 64;

struct Stream;
struct Capture;
using StreamPtr = std::shared_ptr<Stream>;

// The n-th operation of a stream. It is reached when that operation has ended.
struct Point {
  StreamPtr stream;
  uint64_t number = 0;
  bool reached() const;  // under the engine's lock
};

// One recording of an event.
struct Recording {
  Point point;
  double time_ms = 0;  // valid once the point is reached
};
using RecordingPtr = std::shared_ptr<Recording>;

struct Operation {
  enum Kind { Kernel, Copy, Host, Collective, Mark };
  Kind kind = Kernel;
  std::function<void()> run;      // may be empty
  std::function<bool()> attempt;  // for an operation that may block: does it now if that needs no waiting
  bool may_block = false;
  std::vector<Point> after;  // runs only once all are reached
  RecordingPtr recording;    // gets the time of the end
  uint64_t number = 0;
};

struct Stream {
  enum Role { Legacy, PerThread, Created };
  Role role = Created;
  int device = 0, priority = 0;
  unsigned flags = 0;
  uint64_t id = 0;

  // All below is guarded by the engine's lock.
  std::deque<Operation> queue;
  uint64_t enqueued = 0, ended = 0;
  bool running = false;  // an operation of it runs, in whatever thread
  bool has_thread = false;
  bool destroyed = false;
  std::shared_ptr<Capture> capture;
  std::condition_variable work;

  bool idle() const { return queue.empty() && !running; }
  // Whether it takes part in the legacy default stream's implicit synchronisation.
  bool blocking() const { return role != Legacy && !(flags & cudaStreamNonBlocking); }
};

struct Device {
  std::atomic<bool> has_context{false};
  std::atomic<int> sticky{cudaSuccess};  // the error that every call returns from now on
  std::atomic<int> xid{0};
  StreamPtr legacy;
  std::atomic<uint64_t> peers{0};  // bit i: access to device i is enabled
};

class Engine {
 public:
  static Engine& get();

  Device& device(int ordinal) { return devices_[ordinal]; }
  int device_count() const { return device_count_; }
  // CUDA makes a device's primary context at its first use. With the first one, faults are followed.
  void make_context(int ordinal);
  // Loads the library that computes aten ops. torch asks for the number of devices before it dispatches its
  // first op to one, and that is the moment: an op that is already dispatched would launch a kernel.
  void load_aten_once() { std::call_once(aten_, load_aten_kernels); }
  bool forked_with_context() const { return forked_; }

  // Streams. `of` returns null for a handle that is no stream.
  StreamPtr create(int device, unsigned flags, int priority);
  StreamPtr of(cudaStream_t handle);
  void destroy(const StreamPtr& stream);

  // Adds an operation to a stream, or to the graph that the stream captures.
  cudaError_t enqueue(const StreamPtr& stream, Operation operation);
  void synchronize(const StreamPtr& stream);
  void synchronize_device(int ordinal);
  void wait_for(const Point& point);
  bool idle(const StreamPtr& stream);
  bool would_run_inline(const StreamPtr& stream);  // a kernel that is enqueued now
  // The point after all that is enqueued in the stream now.
  Point now(const StreamPtr& stream);

  // Makes the device fail from now on: what is queued never runs, and every call returns `error`.
  void fail_device(int ordinal, cudaError_t error, int xid, const char* why);

  std::mutex& lock() { return lock_; }

 private:
  Engine();
  void add_implicit_waits(const StreamPtr& stream, Operation& operation);
  bool ready(const Operation& operation) const;
  bool runs_inline(const StreamPtr& stream, const Operation& operation) const;
  void execute(const StreamPtr& stream, Operation& operation);
  void end(const StreamPtr& stream, Operation& operation);
  void work(StreamPtr stream);
  void start_thread(const StreamPtr& stream);
  void on_faults_changed();
  void stop();

  std::mutex lock_;
  std::condition_variable host_;  // threads of the program that wait for a stream or an event
  int host_waiters_ = 0;
  std::unordered_set<Stream*> held_back_;  // streams whose next operation waits for another stream
  std::unordered_map<cudaStream_t, StreamPtr> streams_;
  std::vector<std::weak_ptr<Stream>> blocking_;  // those that the legacy stream waits for
  Device devices_[MAX_DEVICES];
  int device_count_;
  std::atomic<bool> forked_{false};
  std::atomic<bool> stopping_{false};
  std::atomic<int> running_kernels_{0};
  std::atomic<uint64_t> next_id_{1};
  std::once_flag first_context_, aten_;
};

// The device of the calling thread, and the last error of its calls.
extern thread_local int current_device;
cudaError_t set_error(cudaError_t error);  // remembers and returns it
cudaError_t take_error(bool keep);

// Returns the error that every call on the current device returns now, for example after a lost device.
cudaError_t standing_error();

double now_ms();

}  // namespace simulated
