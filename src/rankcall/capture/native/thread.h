// The recorder's state of a thread, in one block: a kernel looks up thread-local storage once.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace rankcall {

struct Thread {
  uint32_t id = 0;  // of the kernel's; 0: not asked yet
  uint64_t correlation = 0;
  const void* group_key = nullptr;  // the process group met last, and its state
  void* group = nullptr;
  uint64_t group_generation = 0;
  const void* call_frame = nullptr;  // of the last public call that issues several ops
  const void* call_code = nullptr;   // of its function
  intptr_t call_offset = 0;          // of its instruction that issued the last one
  uint64_t backward_moment = ~0ull;  // the moment of the last search for the caller of backward()
  uint32_t backward_site = 0;

  uint32_t thread_id() {
    if (!id) id = static_cast<uint32_t>(syscall(SYS_gettid));
    return id;
  }
};

inline Thread& this_thread() {
  thread_local Thread thread;
  return thread;
}

}  // namespace rankcall
