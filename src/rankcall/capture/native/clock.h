// The clock that records are timed by.
#pragma once

#include <cstdint>
#include <ctime>

namespace rankcall {

inline int64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1000000000ll + time.tv_nsec;
}

}  // namespace rankcall
