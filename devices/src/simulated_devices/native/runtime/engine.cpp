#include "engine.h"

#include <dlfcn.h>
#include <pthread.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <thread>

#include "../common/faults.h"
#include "../common/settings.h"
#include "capture.h"
#include "interpreter.h"

namespace simulated {

thread_local int current_device = 0;

namespace {

thread_local cudaError_t last_error = cudaSuccess;

int count_visible(int all) {
  const char* visible = getenv("CUDA_VISIBLE_DEVICES");
  if (!visible) return all;
  // As CUDA does, stop at the first entry that names no device.
  int count = 0;
  for (const char* at = visible; *at;) {
    char* end = nullptr;
    long ordinal = strtol(at, &end, 10);
    bool uuid = end == at && at[0] == 'G';  // GPU-...: taken for a device, since all are alike
    if (end == at && !uuid) break;
    if (!uuid && (ordinal < 0 || ordinal >= all)) break;
    ++count;
    while (*at && *at != ',') ++at;
    if (*at == ',') ++at;
  }
  return std::min(count, all);
}

// Each thread has a per-thread default stream on each device; it is made when the thread first uses it.
struct PerThreadStreams {
  StreamPtr streams[MAX_DEVICES];
  ~PerThreadStreams() {
    for (auto& stream : streams)
      if (stream) Engine::get().destroy(stream);
  }
};

void sleep_us(double microseconds) {
  if (microseconds > 0) std::this_thread::sleep_for(std::chrono::duration<double, std::micro>(microseconds));
}

}  // namespace

double now_ms() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1e3 + now.tv_nsec / 1e6;
}

cudaError_t set_error(cudaError_t error) {
  // A query of unfinished work returns NotReady, which CUDA also keeps as the last error.
  if (error != cudaSuccess) last_error = error;
  return error;
}

cudaError_t take_error(bool keep) {
  if (cudaError_t standing = standing_error()) return standing;  // a sticky error is never cleared
  cudaError_t error = last_error;
  if (!keep) last_error = cudaSuccess;
  return error;
}

cudaError_t standing_error() {
  Engine& engine = Engine::get();
  if (engine.forked_with_context()) return cudaErrorInitializationError;
  return static_cast<cudaError_t>(engine.device(current_device).sticky.load(std::memory_order_relaxed));
}

bool Point::reached() const { return !stream || stream->ended >= number; }

Engine& Engine::get() {
  static auto* engine = new Engine;  // never destroyed: streams' threads outlive static destructors
  return *engine;
}

Engine::Engine() : device_count_(count_visible(settings().devices)) {
  // CUDA cannot be used in a child of a process that has used it. The child also has none of the threads.
  pthread_atfork(nullptr, nullptr, [] {
    Engine& engine = Engine::get();
    for (int i = 0; i < MAX_DEVICES; ++i)
      if (engine.devices_[i].has_context) engine.forked_ = true;
  });
}

void Engine::make_context(int ordinal) {
  if (devices_[ordinal].has_context.exchange(true)) return;
  std::call_once(first_context_, [this] {
    FaultBoard::get().follow([this] { on_faults_changed(); });
    // Runs before the static destructors of torch's libraries, which are loaded by now.
    std::atexit([] { Engine::get().stop(); });
  });
  load_aten_once();
}

void Engine::stop() {
  if (forked_) return;
  std::unique_lock<std::mutex> hold(lock_);
  stopping_ = true;
  ++host_waiters_;
  // A kernel that runs now must not meet destroyed globals of torch. One that hangs is left behind.
  host_.wait_for(hold, std::chrono::seconds(1), [this] { return running_kernels_ == 0; });
}

StreamPtr Engine::create(int device, unsigned flags, int priority) {
  auto stream = std::make_shared<Stream>();
  stream->device = device;
  stream->flags = flags;
  stream->priority = priority;
  stream->id = next_id_++;
  std::lock_guard<std::mutex> hold(lock_);
  streams_[reinterpret_cast<cudaStream_t>(stream.get())] = stream;
  if (stream->blocking()) blocking_.push_back(stream);
  return stream;
}

StreamPtr Engine::of(cudaStream_t handle) {
  if (handle == nullptr || handle == cudaStreamLegacy) {
    std::lock_guard<std::mutex> hold(lock_);
    StreamPtr& legacy = devices_[current_device].legacy;
    if (!legacy) {
      legacy = std::make_shared<Stream>();
      legacy->role = Stream::Legacy;
      legacy->device = current_device;
      legacy->id = next_id_++;
      streams_[reinterpret_cast<cudaStream_t>(legacy.get())] = legacy;
    }
    return legacy;
  }
  if (handle == cudaStreamPerThread) {
    static thread_local PerThreadStreams own;
    StreamPtr& stream = own.streams[current_device];
    if (!stream) {
      stream = create(current_device, 0, 0);
      stream->role = Stream::PerThread;
    }
    return stream;
  }
  std::lock_guard<std::mutex> hold(lock_);
  auto found = streams_.find(handle);
  return found == streams_.end() ? nullptr : found->second;
}

void Engine::destroy(const StreamPtr& stream) {
  // Returns at once; what is queued still runs, and the thread that runs it keeps the stream.
  std::lock_guard<std::mutex> hold(lock_);
  stream->destroyed = true;
  streams_.erase(reinterpret_cast<cudaStream_t>(stream.get()));
  blocking_.erase(std::remove_if(blocking_.begin(), blocking_.end(),
                                 [&](auto& other) {
                                   auto kept = other.lock();
                                   return !kept || (kept == stream && kept->idle());
                                 }),
                  blocking_.end());
  stream->work.notify_all();
}

void Engine::add_implicit_waits(const StreamPtr& stream, Operation& operation) {
  // CUDA: the legacy stream's work begins when all earlier work in blocking streams has ended, and later
  // work in blocking streams begins when the legacy stream's has.
  if (stream->role == Stream::Legacy) {
    for (auto& weak : blocking_) {
      StreamPtr other = weak.lock();
      if (other && other->device == stream->device && other->ended < other->enqueued)
        operation.after.push_back({other, other->enqueued});
    }
  } else if (stream->blocking()) {
    const StreamPtr& legacy = devices_[stream->device].legacy;
    if (legacy && legacy->ended < legacy->enqueued) operation.after.push_back({legacy, legacy->enqueued});
  }
}

bool Engine::ready(const Operation& operation) const {
  return std::all_of(operation.after.begin(), operation.after.end(),
                     [](const Point& point) { return point.reached(); });
}

bool Engine::runs_inline(const StreamPtr& stream, const Operation& operation) const {
  if (!stream->idle() || !ready(operation) || stopping_) return false;
  if (operation.kind == Operation::Mark) return true;
  if (FaultBoard::get().stalls_everything(stream->device) || FaultBoard::get().slowness(stream->device) > 1)
    return false;
  if (operation.kind == Operation::Kernel && settings().kernel_us > 0) return false;
  return !operation.may_block || operation.attempt;
}

cudaError_t Engine::enqueue(const StreamPtr& stream, Operation operation) {
  std::unique_lock<std::mutex> hold(lock_);
  if (stream->capture) return stream->capture->add(stream, std::move(operation));
  // Work in the legacy stream would wait for a blocking stream that captures, which never runs.
  if (stream->role == Stream::Legacy && !captures_allow_legacy_work(stream->device))
    return cudaErrorStreamCaptureImplicit;
  add_implicit_waits(stream, operation);
  operation.number = ++stream->enqueued;
  if (runs_inline(stream, operation)) {
    stream->running = true;
    hold.unlock();
    bool done = true;
    if (operation.attempt) done = operation.attempt();
    else execute(stream, operation);
    hold.lock();
    if (done) {
      end(stream, operation);
      return cudaSuccess;
    }
    stream->running = false;
    stream->queue.push_front(std::move(operation));  // before whatever another thread has added meanwhile
  } else {
    stream->queue.push_back(std::move(operation));
  }
  start_thread(stream);
  return cudaSuccess;
}

void Engine::start_thread(const StreamPtr& stream) {
  if (!stream->has_thread) {
    stream->has_thread = true;
    std::thread(&Engine::work, this, stream).detach();
  } else {
    stream->work.notify_one();
  }
}

void Engine::execute(const StreamPtr& stream, Operation& operation) {
  if (!operation.run || operation.kind == Operation::Mark) {
    if (operation.run) operation.run();
    return;
  }
  int ordinal = stream->device;
  if (devices_[ordinal].sticky != cudaSuccess && operation.kind != Operation::Host) return;
  FaultBoard& faults = FaultBoard::get();
  while (faults.stalls_everything(ordinal) && !stopping_ && devices_[ordinal].sticky == cudaSuccess) sleep_us(2000);
  double begin = now_ms();
  bool kernel = operation.kind == Operation::Kernel;
  if (kernel) ++running_kernels_;
  operation.run();
  if (kernel) --running_kernels_;
  double took_us = (now_ms() - begin) * 1e3;
  if (kernel && took_us < settings().kernel_us) {
    sleep_us(settings().kernel_us - took_us);
    took_us = settings().kernel_us;
  }
  // A kernel here takes less than on a device; 10 us, a launch's usual cost, is the least that is slowed down.
  double slowness = faults.slowness(ordinal);
  if (slowness > 1 && operation.kind != Operation::Host) sleep_us((slowness - 1) * std::max(took_us, 10.0));
}

void Engine::end(const StreamPtr& stream, Operation& operation) {
  if (operation.recording) operation.recording->time_ms = now_ms();
  stream->ended = operation.number;
  stream->running = false;
  if (!stream->queue.empty()) stream->work.notify_one();
  for (Stream* held : held_back_) held->work.notify_one();
  if (host_waiters_) host_.notify_all();
}

void Engine::work(StreamPtr stream) {
  char name[16];
  snprintf(name, sizeof name, "sim-stream-%d", static_cast<int>(stream->id % 1000));
  pthread_setname_np(pthread_self(), name);
  current_device = stream->device;
  std::unique_lock<std::mutex> hold(lock_);
  for (;;) {
    stream->work.wait(hold, [&] { return !stream->running && (!stream->queue.empty() || stream->destroyed); });
    if (stream->queue.empty()) break;
    if (!ready(stream->queue.front())) {
      held_back_.insert(stream.get());
      stream->work.wait(hold, [&] { return ready(stream->queue.front()); });
      held_back_.erase(stream.get());
    }
    Operation operation = std::move(stream->queue.front());
    stream->queue.pop_front();
    stream->running = true;
    operation.after.clear();
    hold.unlock();
    if (!stopping_) execute(stream, operation);
    operation.run = nullptr;  // what it holds is released before anybody sees that it has ended
    operation.attempt = nullptr;
    hold.lock();
    end(stream, operation);
  }
  stream->has_thread = false;
}

void Engine::wait_for(const Point& point) {
  {
    std::lock_guard<std::mutex> hold(lock_);
    if (point.reached()) return;
  }
  // Taken back when lock_ is free again: who has the GIL may want lock_.
  const WithoutGil others_run;
  std::unique_lock<std::mutex> hold(lock_);
  ++host_waiters_;
  // On a failed device nothing is ever reached; the caller returns the device's error.
  auto& failure = devices_[point.stream ? point.stream->device : 0].sticky;
  host_.wait(hold, [&] { return point.reached() || failure != cudaSuccess; });
  --host_waiters_;
}

Point Engine::now(const StreamPtr& stream) {
  std::lock_guard<std::mutex> hold(lock_);
  return {stream, stream->enqueued};
}

bool Engine::idle(const StreamPtr& stream) {
  std::lock_guard<std::mutex> hold(lock_);
  return stream->idle();
}

bool Engine::would_run_inline(const StreamPtr& stream) {
  std::lock_guard<std::mutex> hold(lock_);
  if (stream->capture || devices_[stream->device].sticky != cudaSuccess) return false;
  Operation probe;
  add_implicit_waits(stream, probe);
  return runs_inline(stream, probe);
}

void Engine::synchronize(const StreamPtr& stream) { wait_for(now(stream)); }

void Engine::synchronize_device(int ordinal) {
  std::vector<Point> points;
  {
    std::lock_guard<std::mutex> hold(lock_);
    for (auto& [handle, stream] : streams_)
      if (stream->device == ordinal && stream->ended < stream->enqueued) points.push_back({stream, stream->enqueued});
  }
  for (auto& point : points) wait_for(point);
}

void Engine::fail_device(int ordinal, cudaError_t error, int xid, const char* why) {
  Device& device = devices_[ordinal];
  int none = cudaSuccess;
  if (!device.sticky.compare_exchange_strong(none, error)) return;  // the first error stays
  device.xid = xid;
  say("device %d fails: %s", ordinal, why);
  std::lock_guard<std::mutex> hold(lock_);
  for (auto& [handle, stream] : streams_) stream->work.notify_all();
  host_.notify_all();
}

void Engine::on_faults_changed() {
  for (int ordinal = 0; ordinal < device_count_; ++ordinal) {
    int error = 0, xid = 0;
    if (!FaultBoard::get().lost(ordinal, &error, &xid)) continue;
    char why[64];
    snprintf(why, sizeof why, "Xid %d was ordered", xid);
    fail_device(ordinal, static_cast<cudaError_t>(error), xid, why);
  }
}

}  // namespace simulated
