// What is recorded into one ring, from start to stop, and the thread that beats its heart meanwhile.
#pragma once

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_set>
#include <vector>

#include "callsite.h"
#include "device.h"
#include "groups.h"
#include "layout.h"
#include "marks.h"
#include "ops.h"
#include "ring.h"
#include "wake.h"

namespace rankcall {
namespace {

constexpr size_t kMaxOps = 64;

class Recorder {
 public:
  Recorder(char* base, const Geometry& geometry)
      : ring(base, geometry), groups(ring), devices(ring), marks(geometry.capacity) {
    ring.tell([](void* told, uint64_t index) { static_cast<Marks*>(told)->ended(index); }, &marks);
  }

  Ring ring;
  Groups groups;
  DeviceTimes devices;
  Marks marks;
  Op ops[kMaxOps];
  uint8_t dtypes[256] = {};
  bool call_sites = true;

  void run() {
    thread_ = std::thread([this] { beat(); });
    pthread_setname_np(thread_.native_handle(), "rankcall");
  }
  void stop() {
    ring.close();
    ring.note_closed_head();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_one();
    thread_.join();
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
  // An op on a device is outstanding: poll it soon.
  void device_busy() {
    if (!polling_.exchange(true)) {
      std::lock_guard<std::mutex> lock(mutex_);
      changed_.notify_one();
    }
  }

 private:
  void beat() {
    std::unique_lock<std::mutex> lock(mutex_);
    int64_t beaten = 0;
    while (!stopping_) {
      const int64_t now = now_ns();
      if (now - beaten > 400'000'000) {
        beaten = now;
        ring.field<int64_t>(layout::kNativeHeartbeat).store(now, std::memory_order_relaxed);
      }
      polling_ = false;
      lock.unlock();
      const bool outstanding = devices.poll();
      if (outstanding) wake(1);
      lock.lock();
      if (outstanding) polling_ = true;
      if (stopping_) break;
      changed_.wait_for(lock, outstanding ? std::chrono::milliseconds(1) : std::chrono::milliseconds(500));
    }
  }

  static constexpr size_t kMaxShapes = 1024, kMaxNumels = 1024;
  std::mutex shapes_mutex_;
  std::unordered_set<uint32_t> shapes_;
  std::thread thread_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ = false;
  std::atomic<bool> polling_{false};
};

CallSites g_call_sites;
std::atomic<Recorder*> g_active{nullptr};  // null while nothing is recorded

// What an op's end has to know of its issue.
struct Issued {
  Recorder* recorder = nullptr;
  uint64_t index = 0;
  Group* group = nullptr;
  DeviceTimes::Span* span = nullptr;
  bool any_source = false;
  int64_t tag = 0;
};

}  // namespace
}  // namespace rankcall
