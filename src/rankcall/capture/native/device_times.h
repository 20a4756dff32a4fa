// How long ops take on a device: opt-in (RANKCALL_DEVICE_TIMES=1), and not yet tried on hardware.
//
// An event is recorded on the caller's stream when an op is issued, and one when the caller has
// waited for the op's Work: the stream then stands behind the op. Threads that issue later ops look
// which pairs of each stream have been reached, a millisecond after the last look at the earliest. No
// thread of ours touches a device, so no device context is made and no thread's current device
// changes; an issuing thread whose stream is being captured into a graph touches no event. Nothing is
// synchronised. A pair of events that has been read is used again for a later op.
#pragma once

#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <thread>
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
  // CUDA cannot capture the default stream, and to ask about a stream torch sets the device twice.
  const bool never_captured = device.is_cuda() && stream == c10::Stream(c10::Stream::DEFAULT, device);
  if (!never_captured && is_capturing(guard, stream, 0)) return std::nullopt;
  return stream;
}

// dlsym moved into libc itself in glibc 2.34. By its older version, a module that was compiled on a newer system
// also runs on those for which torch's own wheels are made.
#if defined(__GLIBC__) && defined(__x86_64__)
__asm__(".symver dlsym,dlsym@GLIBC_2.2.5");
#elif defined(__GLIBC__) && defined(__aarch64__)
__asm__(".symver dlsym,dlsym@GLIBC_2.17");
#endif

// While one lives, this thread may ask for events beside a capture. CUDA invalidates a capture in its
// default mode if any thread asks for any event, unless that thread has left the mode. Ours are never
// captured, so that no answer can depend on the graph.
class BesideCaptures {
 public:
  // Without it, nothing may be asked: with ROCm, for example, where leaving the mode does not help.
  static bool possible(c10::Device device) { return !device.is_cuda() || exchange(); }

  BesideCaptures() { swap(); }
  ~BesideCaptures() {
    try {
      swap();
    } catch (...) {
    }
  }
  BesideCaptures(const BesideCaptures&) = delete;
  BesideCaptures& operator=(const BesideCaptures&) = delete;

 private:
  using Exchange = int (*)(int*);
  // Null in a process without CUDA.
  static Exchange exchange() {
    static const auto function =
        reinterpret_cast<Exchange>(dlsym(RTLD_DEFAULT, "cudaThreadExchangeStreamCaptureMode"));
    return function;
  }
  void swap() {
    if (exchange() && exchange()(&mode_) != 0) throw std::runtime_error("CUDA keeps its capture mode");
  }

  static constexpr int kRelaxed = 2;  // cudaStreamCaptureModeRelaxed
  int mode_ = kRelaxed;               // what the thread has next: after the first swap, what it had before
};

class Spans;

// Two events, and the op that they are recorded around.
struct Span {
  Span(c10::Device device, Spans& home) : device(device), home(&home) {}
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;
  ~Span() {
    for (void* event : {begin, end})
      if (event) guard().destroyEvent(event, device.index());
  }

  void record(void*& event, const c10::Stream& stream) {
    guard().record(&event, stream, device.index(), c10::EventFlag::BACKEND_DEFAULT);
  }
  bool is_over() const { return guard().queryEvent(end); }
  double ms_since(void* event) const { return guard().elapsedTime(event, end, device.index()); }

  const c10::Device device;
  Spans* const home;
  void *begin = nullptr, *end = nullptr;  // made when they are first recorded
  uint64_t index = 0;                     // of the op's record
  std::optional<c10::Stream> stream;      // on which `begin` was recorded
  uint64_t ends_before = 0;               // how many ends had been recorded by then
  uint64_t number = 0;                    // of its own end

 private:
  c10::impl::VirtualGuardImpl guard() const { return c10::impl::VirtualGuardImpl(device.type()); }
};

// The spans of a process that wait for their next op. They belong to no recorder, so that a program
// that turns recording on and off has no more of them than one that leaves it on.
class Spans {
 public:
  struct GiveBack {
    void operator()(Span* span) const noexcept {
      Spans* spans = current().load();
      if (span->home == spans) spans->give_back(span);
      // Else it is a forked child's copy of its parent's, whose events the child must not touch.
    }
  };
  using Owned = std::unique_ptr<Span, GiveBack>;

  // The spans of this process; null until times are turned on, and again in a forked child.
  static std::atomic<Spans*>& current() {
    static std::atomic<Spans*> spans{nullptr};
    return spans;
  }

  Owned take(c10::Device device) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto& free = free_[{device.type(), device.index()}];
      if (!free.empty()) {
        Owned span(free.back());
        free.pop_back();
        count_--;
        return span;
      }
    }
    return Owned(new Span(device, *this));
  }

 private:
  void give_back(Span* span) noexcept {
    try {
      std::lock_guard<std::mutex> lock(mutex_);
      if (count_ < kMost) {
        free_[{span->device.type(), span->device.index()}].push_back(span);
        count_++;
        return;
      }
    } catch (...) {  // no memory
    }
    delete span;
  }

  // As many as a recorder times at once. A program may hold more Works that it has not waited for.
  static constexpr size_t kMost = 1024;

  std::mutex mutex_;
  std::map<std::pair<c10::DeviceType, int>, std::vector<Span*>> free_;
  size_t count_ = 0;
};

class DeviceTimes {
 public:
  explicit DeviceTimes(Ring& ring) : ring_(ring) {}

  // With the GIL held.
  void turn_on() {
    if (!Spans::current().load()) Spans::current().store(new Spans);
    spans_ = Spans::current().load();
    on_ = true;
  }
  uint64_t failures() const { return failures_.load(); }

  // Record the first event. Null if times are off, or too much is timed.
  Spans::Owned begin(const c10::Stream& stream, uint64_t index, int64_t now_ns) noexcept {
    if (!on_ || !BesideCaptures::possible(stream.device())) return nullptr;
    Spans::Owned span;
    try {
      if (!look(now_ns)) return nullptr;
      span = spans_->take(stream.device());
      span->index = index;
      span->stream = stream;
      span->ends_before = ends_.load(std::memory_order_acquire);
      span->record(span->begin, stream);
      return span;
    } catch (...) {
      failed(std::move(span));
      return nullptr;
    }
  }

  // Record the second event on the stream of the first, which stands behind the op.
  void end(Spans::Owned span) noexcept {
    const c10::Stream stream = *span->stream;
    end(std::move(span), stream);
  }

  // The same on the current stream, which the caller has had wait for the op.
  void end_here(Spans::Owned span) noexcept {
    try {
      if (const auto stream = stream_to_time(span->device)) end(std::move(span), *stream);
    } catch (...) {
      failed(std::move(span));
    }
  }

 private:
  struct Stream {
    std::deque<Spans::Owned> timed;
    Spans::Owned last;       // the one that ended last
    std::thread::id thread;  // that recorded the last end
    bool is_shared = false;  // several threads record ends, which may not stand in their order here
    uint64_t last_end() const { return last ? last->number : 0; }
  };
  using Streams = std::map<std::pair<int, int64_t>, Stream>;

  void end(Spans::Owned span, const c10::Stream& stream) noexcept {
    try {
      span->record(span->end, stream);
      std::lock_guard<std::mutex> lock(mutex_);
      span->number = ends_.fetch_add(1, std::memory_order_release) + 1;
      if (span->stream != stream) span->ends_before = 0;  // its begin says nothing about this stream
      Stream& place = at(stream);
      const auto me = std::this_thread::get_id();
      place.is_shared |= place.thread != std::thread::id() && place.thread != me;
      place.thread = me;
      place.timed.push_back(std::move(span));
      timed_.fetch_add(1, std::memory_order_relaxed);
    } catch (...) {
      failed(std::move(span));
    }
  }

  // Note the times of ops that are over. False if too many are still to be seen.
  bool look(int64_t now_ns) {
    const size_t timed = timed_.load(std::memory_order_relaxed);
    if (timed == 0) return true;
    // Between two looks, a burst of ops asks nothing, and the next look asks for the burst at once.
    if (timed < kMost && now_ns - looked_ns_.load(std::memory_order_relaxed) < kBetweenLooksNs) return true;
    std::lock_guard<std::mutex> lock(mutex_);
    looked_ns_.store(now_ns, std::memory_order_relaxed);
    const BesideCaptures beside;
    for (auto& [id, place] : streams_)
      for (size_t over = how_many_are_over(place); over > 0; over--) take_oldest(place);
    return timed_.load(std::memory_order_relaxed) < kMost;
  }

  // A stream comes to its events in their order. So one that is not reached says so of those behind it, and one
  // that is reached of those before it.
  static size_t how_many_are_over(const Stream& place) {
    const auto& timed = place.timed;
    if (timed.empty() || !timed.front()->is_over()) return 0;
    const auto is_over = [](const Spans::Owned& span) { return span->is_over(); };
    if (place.is_shared) return std::find_if_not(timed.begin() + 1, timed.end(), is_over) - timed.begin();
    if (timed.size() == 1 || timed.back()->is_over()) return timed.size();
    return std::partition_point(timed.begin() + 1, timed.end() - 1, is_over) - timed.begin();
  }

  void take_oldest(Stream& place) {
    Spans::Owned span = std::move(place.timed.front());
    place.timed.pop_front();
    timed_.fetch_sub(1, std::memory_order_relaxed);
    double ms = span->ms_since(span->begin);
    // The stream may have reached the op only when the one before had ended. If that one's end was
    // recorded before this one's begin, the begin tells.
    const bool is_behind = place.last_end() > span->ends_before;
    if (is_behind) ms = std::min(ms, span->ms_since(place.last->end));
    // If a stream was forgotten since the begin, it may have been this one, with an end that tells better.
    const bool is_known = is_behind || span->ends_before >= forgotten_;
    if (is_known && ms >= 0) ring_.note_device_ms(span->index, ms);
    place.last = std::move(span);
  }

  Stream& at(const c10::Stream& stream) {
    const std::pair<int, int64_t> key{stream.device_index(), stream.id()};
    const auto known = streams_.find(key);
    if (known != streams_.end()) return known->second;
    if (streams_.size() >= kMostStreams) forget_a_stream();
    return streams_[key];
  }

  // Forget the stream that has been idle for longest. A program may make streams without end.
  void forget_a_stream() {
    auto oldest = streams_.end();
    for (auto at = streams_.begin(); at != streams_.end(); ++at)
      if (at->second.timed.empty() && (oldest == streams_.end() || at->second.last_end() < oldest->second.last_end()))
        oldest = at;
    if (oldest == streams_.end()) return;  // each has ops to be seen, of which there are kMost at most
    forgotten_ = std::max(forgotten_, oldest->second.last_end());
    streams_.erase(oldest);
  }

  // A span whose events were refused is not used again.
  void failed(Spans::Owned span) noexcept {
    delete span.release();
    if (failures_.fetch_add(1) + 1 >= kMostFailures) on_ = false;
  }

  // Pairs of events that are not reached yet. Each look is at all streams, and a device that hangs must
  // not make events without end.
  static constexpr size_t kMost = 1024;
  // Streams without ops to be seen. torch's own come from a pool of 32.
  static constexpr size_t kMostStreams = 64;
  // A device that refuses so often refuses for good, and each refusal throws, which takes long.
  static constexpr uint64_t kMostFailures = 16;
  static constexpr int64_t kBetweenLooksNs = 1'000'000;

  Ring& ring_;
  Spans* spans_ = nullptr;
  std::atomic<bool> on_{false};
  std::atomic<uint64_t> failures_{0};
  std::mutex mutex_;
  Streams streams_;
  std::atomic<size_t> timed_{0};
  std::atomic<int64_t> looked_ns_{0};
  std::atomic<uint64_t> ends_{0};  // that were recorded, on any stream
  uint64_t forgotten_ = 0;  // the latest of them on a stream that is forgotten
};

}  // namespace rankcall
