// Some ten times a second, without the GIL: did the process stand still, and does its training
// thread wait in the kernel? Needs no torch.
//
// A thread that sleeps wakes on time, unless the whole process was stopped (SIGSTOP, a debugger, a
// frozen cgroup, a machine that paused) or it got no CPU. The kernel counts the latter, so the rest is
// the former. The state D of the training thread, an uninterruptible sleep, mostly is a disk or a
// network file system; it is looked at as a sample.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace rankcall {

class Pulse {
 public:
  static constexpr int64_t kUnknown = -1;

  // How long to sleep until the next look, in ns. It changes, because a program whose steps took as
  // long as a fixed period would always be seen at the same place.
  int64_t next_ns() {
    random_ = random_ * 1664525u + 1013904223u;
    return 70000000 + static_cast<int64_t>(random_ >> 6);  // 70 to 137 ms
  }

  // After a sleep that was to take `planned_ns` and took `slept_ns`.
  void look(int64_t planned_ns, int64_t slept_ns, uint32_t training_thread) {
    const int64_t late_ns = slept_ns - planned_ns;
    if (late_ns > kNoticeNs || ++since_read_ >= kReadEvery) note_lateness(late_ns, planned_ns);
    since_state_ns_ += slept_ns;
    if (++looks_ % 2) return;  // the state costs more than the rest
    note_state(training_thread, since_state_ns_ < kMostNs ? since_state_ns_ : kMostNs);
    since_state_ns_ = 0;
  }

  // So long the process was stopped; so long its training thread was in state D, and in state S.
  // kUnknown: not shown.
  int64_t stopped_ns() const { return stopped_ns_.load(std::memory_order_relaxed); }
  int64_t blocked_ns() const { return blocked_ns_.load(std::memory_order_relaxed); }
  int64_t sleeping_ns() const { return sleeping_ns_.load(std::memory_order_relaxed); }

 private:
  static constexpr int64_t kNoticeNs = 20000000;
  static constexpr int64_t kMostNs = 1000000000;  // that one look at the state stands for
  static constexpr int kReadEvery = 5;

  void note_lateness(int64_t late_ns, int64_t planned_ns) {
    since_read_ = 0;
    char raw[128];
    if (!read("/proc/thread-self/schedstat", raw, sizeof(raw))) return;
    const char* second = std::strchr(raw, ' ');
    if (!second) return;
    const int64_t queued_ns = std::strtoll(second, nullptr, 10);
    const int64_t before_ns = queued_ns_;
    queued_ns_ = queued_ns;
    if (before_ns == kUnknown) {
      stopped_ns_.store(0, std::memory_order_relaxed);
      return;
    }
    // The time in the run queue is that since the last reading, so a stop is rather too short.
    const int64_t unexplained_ns = late_ns - (queued_ns - before_ns);
    // The part of a stop in which this thread would have slept anyway is not seen. On average, a stop
    // begins in the middle of a sleep.
    if (unexplained_ns > kNoticeNs)
      stopped_ns_.fetch_add(unexplained_ns + planned_ns / 2, std::memory_order_relaxed);
  }

  void note_state(uint32_t thread, int64_t since_last_ns) {
    if (!thread) return;
    char path[64], raw[256];
    std::snprintf(path, sizeof(path), "/proc/self/task/%u/stat", thread);
    if (!read(path, raw, sizeof(raw))) return;
    const char* name_end = std::strrchr(raw, ')');  // a name has at most 16 bytes, any bytes
    if (!name_end || name_end[1] != ' ') return;
    for (auto* counter : {&blocked_ns_, &sleeping_ns_})
      if (counter->load(std::memory_order_relaxed) == kUnknown) counter->store(0, std::memory_order_relaxed);
    if (name_end[2] == 'D') blocked_ns_.fetch_add(since_last_ns, std::memory_order_relaxed);
    if (name_end[2] == 'S') sleeping_ns_.fetch_add(since_last_ns, std::memory_order_relaxed);
  }

  // Opened anew each time: a file that stayed open would be left to every process that is forked.
  static bool read(const char* path, char* raw, size_t size) {
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return false;
    const ssize_t got = ::read(fd, raw, size - 1);
    close(fd);
    raw[got > 0 ? got : 0] = 0;
    return got > 0;
  }

  std::atomic<int64_t> stopped_ns_{kUnknown}, blocked_ns_{kUnknown}, sleeping_ns_{kUnknown};
  int64_t queued_ns_ = kUnknown, since_state_ns_ = 0;
  uint32_t random_ = 1, looks_ = 0;
  int since_read_ = kReadEvery;  // read at the first look
};

}  // namespace rankcall
