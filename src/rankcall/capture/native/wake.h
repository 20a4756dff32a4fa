// Wakes the hook dispatcher, which sleeps on an eventfd.
#pragma once

#include <unistd.h>

#include <atomic>
#include <cstdint>

namespace rankcall {
namespace {

// What it wants to be woken for. 0: awake or absent, 1: wants ends, 2: both.
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
