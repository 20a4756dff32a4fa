// The recorder of one ring, from start to stop, and its thread, which writes the native heartbeat
// and looks at the process (pulse.h).
#pragma once

#include <sys/prctl.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_set>
#include <vector>

#include "callsite.h"
#include "clock.h"
#include "device_ops.h"
#include "device_times.h"
#include "groups.h"
#include "layout.h"
#include "marks.h"
#include "ops.h"
#include "pulse.h"
#include "ring.h"
#include "wake.h"

namespace rankcall {
namespace {

// Each op has a kernel of its own, an instance of a template, so the number is fixed when the recorder is
// compiled. torch 2.15 has fewer than half as many ops. More of them would not be recorded.
constexpr size_t kMaxOps = 64;

// The ops in front of which a kernel stands; filled once, before the kernels are installed.
Op g_ops[kMaxOps];
size_t g_op_count = 0;

// Counts the forks between this process and the one that loaded the module.
std::atomic<uint32_t> g_forks{0};

class Recorder {
 public:
  Recorder(char* base, const Geometry& geometry)
      : ring(base, geometry), groups(ring), device_times(ring), marks(geometry.capacity) {
    ring.tell([](void* told, uint64_t index) { static_cast<Marks*>(told)->ended(index); }, &marks);
  }

  Ring ring;
  Groups groups;
  DeviceOps device_ops;
  DeviceTimes device_times;
  Marks marks;
  Pulse pulse;
  uint32_t variants[kMaxOps] = {};  // side-table ids of the ops' names
  uint8_t dtypes[256] = {};
  bool call_sites = true;

  // Whether this is a forked child of the process that records: the ring is its parent's.
  bool is_inherited() const { return forks_ != g_forks.load(std::memory_order_relaxed); }

  void run() {
    thread_ = std::thread([this] {
      prctl(PR_SET_NAME, "rankcall");  // pthread_setname_np would need a new C library in wheels
      beat();
    });
  }

  // End the native thread. It never blocks, but a machine may not run it: it is then left behind.
  void stop() {
    ring.close();
    std::unique_lock<std::mutex> lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
    if (changed_.wait_for(lock, std::chrono::seconds(1), [this] { return stopped_; })) {
      lock.unlock();
      thread_.join();
    } else {
      thread_.detach();
    }
    ring.finish_late();
  }
  // Write down how many elements each tensor of a coalesced op has, once per shape hash.
  void note_shapes(uint32_t hash, const c10::IValue& tensors) {
    {
      std::lock_guard<std::mutex> lock(shapes_mutex_);
      if (shapes_.size() >= kMaxShapes || !shapes_.insert(hash).second) return;
    }
    std::string json = "{\"hash\": " + std::to_string(hash) + ", \"numels\": [";
    std::vector<int64_t> numels;
    each_tensor(tensors, [&](const at::Tensor& tensor) {
      if (numels.size() == kMaxNumels) return;
      json += (numels.empty() ? "" : ", ") + std::to_string(tensor.numel());
      numels.push_back(tensor.numel());
    });
    ring.append(layout::kEntrySizes, json + "]}");
    marks.add_numels(hash, std::move(numels));
  }
 private:
  void beat() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!stopping_) {
      const int64_t began_ns = now_ns();
      ring.field<int64_t>(layout::kNativeHeartbeat).store(began_ns, std::memory_order_relaxed);
      ring.finish_late();
      const int64_t planned_ns = pulse.next_ns();
      changed_.wait_for(lock, std::chrono::nanoseconds(planned_ns));
      if (stopping_) break;
      const uint32_t thread = ring.field<uint32_t>(layout::kTrainThread).load(std::memory_order_relaxed);
      lock.unlock();  // it reads files of /proc
      pulse.look(planned_ns, now_ns() - began_ns, thread);
      lock.lock();
    }
    stopped_ = true;
    changed_.notify_all();
  }

  // As in the fallback: a program whose sizes change at each step would fill the side tables.
  static constexpr size_t kMaxShapes = 1024, kMaxNumels = 1024;
  std::mutex shapes_mutex_;
  std::unordered_set<uint32_t> shapes_;
  std::thread thread_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ = false, stopped_ = false;
  const uint32_t forks_ = g_forks.load();
};

CallSites g_call_sites;
std::atomic<Recorder*> g_active{nullptr};  // null while nothing is recorded

// What an op's end has to know of its issue.
struct Issued {
  Recorder* recorder = nullptr;
  uint64_t index = 0;
  std::shared_ptr<Group> receiver;  // the group of a receive from any source, which is counted at its end
  Spans::Owned span;
  c10::intrusive_ptr<c10d::Backend> back_end;  // of a collective on a device, for the time of the call
  int64_t tag = 0;
  uint64_t block = 0;  // the correlation number of its record
  std::optional<c10::Stream> stream;  // on a device: the caller's; none if it is captured, or not known
  uint32_t group = 0;
  bool p2p = false;
  bool is_synchronous = false;  // the caller's argument async_op is false
  bool on_device = false;  // runs on a device, which the host only enqueues it on
  bool captured = false;   // goes into a graph, so it does not run now
  bool first = false;      // the first op of its group
};

}  // namespace
}  // namespace rankcall
