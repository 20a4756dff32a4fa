// How long ops take on a device: opt-in (RANKCALL_DEVICE_TIMES=1), and not yet tried on hardware.
//
// An event is recorded on the caller's stream when an op is issued, and one when the caller has
// waited for the op's Work: the stream then stands behind the op. Threads that issue later ops look
// whether the oldest pair of each stream has been reached. No thread of ours touches a device, so
// no device context is made and no thread's current device changes; an issuing thread whose stream
// is being captured into a graph touches no event. Nothing is synchronised.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "ring.h"

namespace rankcall {

template <typename Guard>
auto is_capturing(const Guard& guard, const c10::Stream& stream, int) -> decltype(guard.isStreamCapturing(stream)) {
  return guard.isStreamCapturing(stream);
}
template <typename Guard>
bool is_capturing(const Guard&, const c10::Stream&, long) {
  return false;  // a torch that cannot say
}

// The caller's current stream on a device; nothing if it is being captured, or there is no such device.
inline std::optional<c10::Stream> stream_to_time(c10::Device device) {
  if (!c10::impl::hasDeviceGuardImpl(device.type())) return std::nullopt;
  const c10::impl::VirtualGuardImpl guard(device.type());
  if (!device.has_index()) device = guard.getDevice();
  const c10::Stream stream = guard.getStream(device);
  if (is_capturing(guard, stream, 0)) return std::nullopt;
  return stream;
}

class DeviceTimes {
 public:
  struct Span {
    Span(c10::Device device, uint64_t index)
        : device(device),
          begin(device.type(), c10::EventFlag::BACKEND_DEFAULT),
          end(device.type(), c10::EventFlag::BACKEND_DEFAULT),
          index(index) {}
    const c10::Device device;
    c10::Event begin, end;
    const uint64_t index;
  };

  explicit DeviceTimes(Ring& ring) : ring_(ring) {}

  void turn_on() { on_ = true; }
  uint64_t failures() const { return failures_.load(); }

  // Record the first event. Null if times are off, the stream is captured, or too much is timed.
  std::shared_ptr<Span> begin(c10::Device device, uint64_t index) noexcept {
    if (!on_) return nullptr;
    try {
      const auto stream = stream_to_time(device);
      if (!stream || !look()) return nullptr;
      auto span = std::make_shared<Span>(stream->device(), index);
      span->begin.record(*stream);
      return span;
    } catch (...) {
      failed();
      return nullptr;
    }
  }

  // Record the second event: the caller has waited for the op.
  void end(const std::shared_ptr<Span>& span) noexcept {
    try {
      const auto stream = stream_to_time(span->device);
      if (!stream) return;
      span->end.record(*stream);
      std::lock_guard<std::mutex> lock(mutex_);
      streams_[{span->device.index(), stream->id()}].timed.push_back(span);
      timed_++;
    } catch (...) {
      failed();
    }
  }

 private:
  struct Stream {
    std::deque<std::shared_ptr<Span>> timed;
    std::shared_ptr<Span> last;  // the one that ended last
  };

  // Look at the oldest op of each stream. False if too many are still to be seen.
  bool look() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [id, stream] : streams_) {
      while (!stream.timed.empty() && stream.timed.front()->end.query()) {
        std::shared_ptr<Span> span = std::move(stream.timed.front());
        stream.timed.pop_front();
        timed_--;
        // The stream may have reached the op only when the one before had ended.
        double ms = span->begin.elapsedTime(span->end);
        if (stream.last) ms = std::min(ms, stream.last->end.elapsedTime(span->end));
        if (ms >= 0) ring_.note_device_ms(span->index, ms);
        stream.last = std::move(span);
      }
    }
    return timed_ < kMost;
  }

  void failed() {
    if (failures_.fetch_add(1) + 1 >= kMostFailures) on_ = false;
  }

  // Pairs of events that are not reached yet. Each op that is issued looks at all streams, and a device
  // that hangs must not make events without end.
  static constexpr size_t kMost = 1024;
  // A device that refuses so often refuses for good, and each refusal throws, which takes long.
  static constexpr uint64_t kMostFailures = 16;

  Ring& ring_;
  std::atomic<bool> on_{false};
  std::atomic<uint64_t> failures_{0};
  std::mutex mutex_;
  std::map<std::pair<int, int64_t>, Stream> streams_;
  size_t timed_ = 0;
};

}  // namespace rankcall
