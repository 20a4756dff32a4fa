// When ops began and ended on a device, in host time, without making anything wait.
//
// An event before the op and one behind it are recorded on the device's streams; a native thread
// polls them. A reference event whose host time is known turns event distances into host times.
// Any failure here switches device times off for the process; recording goes on without them.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <ctime>
#include <memory>
#include <mutex>
#include <vector>

#include "ring.h"

namespace rankcall {

inline int64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1000000000ll + time.tv_nsec;
}

class DeviceTimes {
 public:
  struct Span {
    Span(c10::Device device)
        : device(device),
          begin(device.type(), c10::EventFlag::BACKEND_DEFAULT),
          end(device.type(), c10::EventFlag::BACKEND_DEFAULT) {}
    c10::Device device;
    c10::Event begin, end;
    uint64_t index = 0;
    uint64_t seq = 0;
    bool began = false;
    Outcome outcome{};
  };

  explicit DeviceTimes(Ring& ring) : ring_(ring) {}

  // Record the first event on the caller's stream. Null where device times are not to be had: no
  // such device, a stream that is being captured into a graph, or an earlier failure.
  Span* begin(c10::Device device) noexcept {
    if (device.is_cpu() || broken_.load(std::memory_order_relaxed)) return nullptr;
    try {
      if (!c10::impl::hasDeviceGuardImpl(device.type())) return nullptr;
      const c10::impl::VirtualGuardImpl guard(device.type());
      if (!device.has_index()) device = guard.getDevice();
      const c10::Stream stream = guard.getStream(device);
      if (is_capturing(guard, stream, 0)) return nullptr;
      std::unique_ptr<Span> span = take(device);
      span->begin.record(stream);
      return span.release();
    } catch (...) {
      broken_ = true;
      return nullptr;
    }
  }

  // Record the second event on the caller's stream and have the span watched. False on failure.
  bool end(Span* span, const Outcome& outcome) noexcept {
    span->outcome = outcome;
    try {
      const c10::impl::VirtualGuardImpl guard(span->device.type());
      span->end.record(guard.getStream(span->device));
      std::lock_guard<std::mutex> lock(mutex_);
      watched_.emplace_back(span);
      return true;
    } catch (...) {
      broken_ = true;
      return false;
    }
  }

  // Look at all spans once; true while some are outstanding. For the native thread only.
  bool poll() noexcept {
    std::vector<std::unique_ptr<Span>> spans;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      spans.swap(watched_);
    }
    if (spans.empty()) return false;
    std::vector<std::unique_ptr<Span>> waiting;
    for (auto& span : spans) {
      if (!settled(*span)) waiting.push_back(std::move(span));
      else give(std::move(span));
    }
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& span : waiting) watched_.push_back(std::move(span));
    return !watched_.empty();
  }

 private:
  struct Reference {
    c10::Event event;
    c10::Device device;
    int64_t host_ns;
  };

  template <typename Guard>
  static auto is_capturing(const Guard& guard, const c10::Stream& stream, int)
      -> decltype(guard.isStreamCapturing(stream)) {
    return guard.isStreamCapturing(stream);
  }
  template <typename Guard>
  static bool is_capturing(const Guard&, const c10::Stream&, long) {
    return false;  // a torch that cannot say
  }

  std::unique_ptr<Span> take(c10::Device device) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (size_t i = free_.size(); i-- > 0;) {
      if (free_[i]->device == device) {
        std::unique_ptr<Span> span = std::move(free_[i]);
        free_.erase(free_.begin() + static_cast<std::ptrdiff_t>(i));
        span->began = false;
        return span;
      }
    }
    return std::make_unique<Span>(device);
  }

  void give(std::unique_ptr<Span> span) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (free_.size() < 4096) free_.push_back(std::move(span));
  }

  bool settled(Span& span) noexcept {
    try {
      if (!span.began && span.begin.query()) {
        span.began = true;
        span.outcome.started_ns = host_time(span.begin, span.device);
        ring_.start(span.index, span.outcome.started_ns);
      }
      if (!span.began || !span.end.query()) return false;
      span.outcome.device_ms = span.begin.elapsedTime(span.end);
      span.outcome.has_device_ms = true;
      span.outcome.completed_ns = span.outcome.started_ns + static_cast<int64_t>(span.outcome.device_ms * 1e6);
    } catch (...) {
      broken_ = true;
      span.outcome.completed_ns = now_ns();
    }
    ring_.finish(span.index, span.outcome);
    return true;
  }

  int64_t host_time(const c10::Event& event, c10::Device device) {
    Reference& reference = reference_for(device);
    return reference.host_ns + static_cast<int64_t>(reference.event.elapsedTime(event) * 1e6);
  }

  // Distances are floats of milliseconds: a young reference keeps them exact to a microsecond.
  Reference& reference_for(c10::Device device) {
    constexpr int64_t kRenewNs = 10'000'000'000;
    for (auto& reference : references_) {
      if (reference.device != device) continue;
      if (now_ns() - reference.host_ns > kRenewNs) anchor(reference);
      return reference;
    }
    references_.push_back({c10::Event(device.type(), c10::EventFlag::BACKEND_DEFAULT), device, 0});
    anchor(references_.back());
    return references_.back();
  }

  // Only this thread waits, on a stream of its own, for an event on an otherwise idle stream.
  static void anchor(Reference& reference) {
    const c10::impl::VirtualGuardImpl guard(reference.device.type());
    reference.event.record(guard.getNewStream(reference.device));
    reference.event.synchronize();
    reference.host_ns = now_ns();
  }

  Ring& ring_;
  std::atomic<bool> broken_{false};
  std::mutex mutex_;
  std::vector<std::unique_ptr<Span>> watched_, free_;
  std::vector<Reference> references_;
};

}  // namespace rankcall
