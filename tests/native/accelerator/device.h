// A simulated accelerator: devices with streams, events, a clock, and a log of all calls.
//
// A stream is a timeline: the moment at which all work that was put on it will be done. An event
// takes that moment over when it is recorded. A stream that waits for an event moves its own moment
// behind the event's, and the wait is logged as a dependency. Nothing runs in the background, so
// the state of the device depends on the calls and on the clock alone.
#pragma once

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

namespace simulated {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 2;
constexpr int kPool = 32;                      // streams in a device's pool, as in c10::cuda
constexpr int kStreams = 256;                  // the default stream, the pool, and torch.Stream()
constexpr int64_t kNever = INT64_MAX / 2;      // the end of what a hung stream was given

struct StreamId {
  int device = 0;
  int stream = 0;
  bool operator<(const StreamId& other) const {
    return device != other.device ? device < other.device : stream < other.stream;
  }
  bool operator==(const StreamId& other) const { return device == other.device && stream == other.stream; }
};

struct Event {
  StreamId on;
  int64_t at = 0;
  bool captured = false;  // recorded on a stream that was being captured
  bool timing = false;
};

// One kind of call by one thread, outside or during a capture.
struct CallKey {
  std::string name;
  int thread = 0;
  std::string thread_name;
  bool during_capture = false;
  bool operator<(const CallKey& other) const {
    return std::tie(name, thread, thread_name, during_capture) <
           std::tie(other.name, other.thread, other.thread_name, other.during_capture);
  }
};

struct Dependency {
  StreamId waiter, awaited;
  std::string reason;  // event, wait, input, communicator
  int64_t at_ns = 0;
  int thread = 0;
  bool stuck = false;  // the awaited work will never end
};

// A captured graph: the work put on each stream meanwhile.
struct Graph {
  std::vector<std::pair<StreamId, int64_t>> work;
};

class Machine {
 public:
  std::recursive_mutex mutex;

  // --- the clock: the host's, unless it is frozen ---
  int64_t now() const {
    const int64_t frozen = frozen_at_.load();
    return (frozen ? frozen : host_ns()) + offset_.load();
  }
  void freeze(bool on) {
    const int64_t seen = now();
    if (on == (frozen_at_.load() != 0)) return;
    const int64_t host = host_ns();
    frozen_at_ = on ? host : 0;
    offset_ = seen - host;
  }
  void advance(int64_t nanoseconds) { offset_ += nanoseconds; }

  // --- streams ---
  int64_t& busy(StreamId id) { return busy_.at(id.device).at(id.stream); }
  int from_pool(int device) { return 1 + next_in_pool_.at(device)++ % kPool; }
  int new_stream(int device) {
    if (next_new_.at(device) >= kStreams) throw std::runtime_error("the simulated device has no more streams");
    return next_new_.at(device)++;
  }
  StreamId current(int device) const { return {device, current_stream_[device]}; }
  void set_current(StreamId id) { current_stream_[id.device] = id.stream; }

  // Put work on a stream. Returns when it begins and ends. Under capture it only goes into the graph.
  std::pair<int64_t, int64_t> put(StreamId id, int64_t nanoseconds) {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    if (is_capturing(id)) {
      graph_.work.emplace_back(id, nanoseconds);
      return {kNever, kNever};
    }
    const int64_t begin = std::max(now(), busy(id));
    const int64_t end = begin >= kNever ? kNever : begin + nanoseconds;
    busy(id) = end;
    return {begin, end};
  }
  // Have a stream wait for a moment in another one's timeline.
  void wait(StreamId waiter, StreamId awaited, int64_t at, bool captured, const char* reason) {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    if (waiter == awaited) return;
    if (captured && capturing_) captured_streams_.insert(waiter);
    else busy(waiter) = std::max(busy(waiter), at);
    dependencies_.push_back({waiter, awaited, reason, now(), static_cast<int>(gettid()), at >= kNever});
  }

  // --- devices: each thread has a current one; using it makes a context there ---
  int device() const { return current_device_; }
  // As in CUDA's guards, setting the device that is current already does nothing.
  void set_device(int device) {
    check_device(device);
    if (device == current_device_) return;
    current_device_ = device;
    note("setDevice");
  }
  static void check_device(int device) {
    if (device < 0 || device >= kDevices) throw std::runtime_error("no such simulated device");
  }

  // --- the log ---
  // A call that the host answers, without the device.
  void note_on_host(const char* name) {
    char thread_name[16] = {};
    pthread_getname_np(pthread_self(), thread_name, sizeof(thread_name));
    std::lock_guard<std::recursive_mutex> lock(mutex);
    calls_[{name, static_cast<int>(gettid()), thread_name, capturing_}]++;
  }
  // A call of the device's driver: the thread's current device gets a context.
  void note(const char* name) {
    note_on_host(name);
    std::lock_guard<std::recursive_mutex> lock(mutex);
    contexts_.insert(current_device_);
  }
  // A call that invalidates a capture of any thread, in CUDA's default (global) capture mode.
  void note_unsafe(const char* name) {
    note(name);
    std::lock_guard<std::recursive_mutex> lock(mutex);
    if (capturing_) unsafe_++;
  }
  std::map<CallKey, long> calls() {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    return calls_;
  }
  std::vector<Dependency> dependencies() {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    return dependencies_;
  }
  std::set<int> contexts() {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    return contexts_;
  }
  void clear_log() {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    calls_.clear();
    dependencies_.clear();
    contexts_.clear();
  }

  // Forget everything: no work on any stream, the host's clock, no capture, no failure, an empty log.
  void reset() {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    frozen_at_ = offset_ = 0;
    for (auto& streams : busy_) streams.fill(0);
    capturing_ = false;
    captured_streams_.clear();
    graph_ = {};
    failing = false;
    clear_log();
  }

  // --- capture into a graph ---
  void begin_capture(StreamId id) {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    if (capturing_) throw std::runtime_error("a capture is under way");
    capturing_ = true;
    capturing_thread_ = static_cast<int>(gettid());
    unsafe_ = 0;
    graph_ = {};
    captured_streams_ = {id};
  }
  // Returns how many calls invalidated the capture.
  long end_capture() {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    if (!capturing_) throw std::runtime_error("no capture is under way");
    if (capturing_thread_ != static_cast<int>(gettid()))
      throw std::runtime_error("another thread is capturing");
    capturing_ = false;
    captured_streams_.clear();
    return unsafe_;
  }
  bool capturing() {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    return capturing_;
  }
  bool is_capturing(StreamId id) {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    return capturing_ && captured_streams_.count(id) != 0;
  }
  Graph graph() {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    return graph_;
  }

  std::atomic<bool> failing{false};  // creating a timing event raises

  // Block the calling thread until a moment of the device's clock: for ever, if a stream hangs.
  void block_until(int64_t at) const {
    while (now() < at) usleep(100);
  }

 private:
  static int64_t host_ns() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000ll + time.tv_nsec;
  }

  std::atomic<int64_t> frozen_at_{0}, offset_{0};
  std::array<std::array<int64_t, kStreams>, kDevices> busy_{};
  std::array<int, kDevices> next_in_pool_{};
  std::array<int, kDevices> next_new_ = {kPool + 1, kPool + 1};
  std::map<CallKey, long> calls_;
  std::vector<Dependency> dependencies_;
  std::set<int> contexts_;
  std::set<StreamId> captured_streams_;
  bool capturing_ = false;
  int capturing_thread_ = 0;
  long unsafe_ = 0;
  Graph graph_;

  static thread_local int current_device_;
  static thread_local std::array<int, kDevices> current_stream_;
};

thread_local int Machine::current_device_ = 0;
thread_local std::array<int, kDevices> Machine::current_stream_{};

inline Machine& machine() {
  static Machine* instance = new Machine;  // never destroyed: threads use it until the process ends
  return *instance;
}

// The device as torch uses it.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Device at(int index) { return {kType, static_cast<c10::DeviceIndex>(index)}; }
  static int index_of(c10::Device device) { return device.has_index() ? device.index() : machine().device(); }
  static c10::Stream stream_of(StreamId id) { return c10::Stream(c10::Stream::UNSAFE, at(id.device), id.stream); }
  static StreamId id_of(const c10::Stream& stream) { return {stream.device_index(), static_cast<int>(stream.id())}; }

  c10::DeviceType type() const override { return kType; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::Device getDevice() const override { return at(machine().device()); }
  void setDevice(c10::Device device) const override { machine().set_device(index_of(device)); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { machine().set_device(index_of(device)); }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device old = getDevice();
    setDevice(device);
    return old;
  }

  c10::Stream getStream(c10::Device device) const override { return stream_of(machine().current(index_of(device))); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of({index_of(device), 0}); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    machine().note("getStreamFromGlobalPool");
    std::lock_guard<std::recursive_mutex> lock(machine().mutex);
    return stream_of({index_of(device), machine().from_pool(index_of(device))});
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    machine().note("getNewStream");
    std::lock_guard<std::recursive_mutex> lock(machine().mutex);
    return stream_of({index_of(device), machine().new_stream(index_of(device))});
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream old = getStream(stream.device());
    machine().set_current(id_of(stream));
    return old;
  }
  bool isStreamCapturing(const c10::Stream& stream) const override { return machine().is_capturing(id_of(stream)); }
  bool queryStream(const c10::Stream& stream) const override {
    machine().note_unsafe("queryStream");
    std::lock_guard<std::recursive_mutex> lock(machine().mutex);
    return machine().now() >= machine().busy(id_of(stream));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    machine().note_unsafe("synchronizeStream");
    machine().block_until(machine().busy(id_of(stream)));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    machine().note_unsafe("synchronizeDevice");
    for (int stream = 0; stream < kStreams; stream++) machine().block_until(machine().busy({device, stream}));
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag flag) const override {
    const bool timing = flag == c10::EventFlag::BACKEND_DEFAULT;
    machine().note(timing ? "recordTimingEvent" : "recordEvent");
    std::lock_guard<std::recursive_mutex> lock(machine().mutex);
    if (!*event) {
      if (timing && machine().failing) throw std::runtime_error("simulated device error: no event can be made");
      *event = new Event;
    }
    auto* made = static_cast<Event*>(*event);
    const StreamId id = id_of(stream);
    *made = {id, std::max(machine().now(), machine().busy(id)), machine().is_capturing(id), timing};
  }
  void block(void* event, const c10::Stream& stream) const override {
    machine().note("waitEvent");
    if (!event) return;
    const auto* awaited = static_cast<Event*>(event);
    machine().wait(id_of(stream), awaited->on, awaited->at, awaited->captured, "event");
  }
  bool queryEvent(void* event) const override {
    machine().note_unsafe("queryEvent");
    return !event || machine().now() >= static_cast<Event*>(event)->at;
  }
  void synchronizeEvent(void* event) const override {
    machine().note_unsafe("synchronizeEvent");
    if (event) machine().block_until(static_cast<Event*>(event)->at);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    machine().note_unsafe("elapsedTime");
    const auto *from = static_cast<Event*>(first), *to = static_cast<Event*>(second);
    if (!from || !to || !from->timing || !to->timing) throw std::runtime_error("elapsedTime needs two timing events");
    return (to->at - from->at) / 1e6;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override { machine().note("recordStream"); }
};

}  // namespace simulated
