// Wakes the thread of hooks, which sleeps on an eventfd.
#pragma once

#include <unistd.h>

#include <atomic>
#include <cstdint>

namespace rankcall {
namespace {

// 0: it is awake or absent. 1: wake it at ends. 2: wake it at starts, too.
std::atomic<int> g_sleeping{0};
std::atomic<int> g_wake_fd{-1};

void wake(int least) noexcept {
  if (g_sleeping.load() < least) return;
  if (g_sleeping.exchange(0) == 0) return;
  const uint64_t one = 1;
  [[maybe_unused]] const auto written = write(g_wake_fd.load(), &one, sizeof(one));
}

}  // namespace
}  // namespace rankcall
