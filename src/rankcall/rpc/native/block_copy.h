// The copy of a buffer into a block of shared memory.
//
// The block's last reader may still have its lines in a cache. If that cache is not ours too, as on
// processors with several caches of the last level, each ordinary store has to take its line from
// there, and a copy can take ten times as long. Stores that stream to memory do not, but the reader
// then has to read from memory. So a copy that was slow makes the next ones stream.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace rankcall {

// Copies with stores that bypass the caches, where the processor has them.
inline void copy_streaming(char* to, const char* from, std::size_t bytes) {
#if defined(__SSE2__)
  if (reinterpret_cast<uintptr_t>(to) % sizeof(__m128i) == 0) {
    for (; bytes >= sizeof(__m128i); bytes -= sizeof(__m128i)) {
      auto part = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
      _mm_stream_si128(reinterpret_cast<__m128i*>(to), part);
      to += sizeof(__m128i);
      from += sizeof(__m128i);
    }
    _mm_sfence();  // before the message that names the block
  }
#endif
  std::memcpy(to, from, bytes);
}

// Many threads may use one.
class BlockCopy {
 public:
  void operator()(char* to, const char* from, std::size_t bytes) {
    if (to_stream_.load(std::memory_order_relaxed) > 0) {
      to_stream_.fetch_sub(1, std::memory_order_relaxed);
      copy_streaming(to, from, bytes);
      return;
    }
    auto began = std::chrono::steady_clock::now();
    std::memcpy(to, from, bytes);
    judge(bytes, std::chrono::steady_clock::now() - began);
  }

  // An ordinary copy was slow if it moved less than 5 GB/s: measured were 28 GB/s while the caches
  // were shared, and 2 to 3 while they were not. One in 64 is ordinary, to look again. To stream
  // always was tried as well: a reader that does share the cache then takes 1.7 times as long.
  void judge(std::size_t bytes, std::chrono::nanoseconds took) {
    if (std::size_t(took.count()) > bytes / 5) to_stream_.store(63, std::memory_order_relaxed);
  }

  bool streams() const { return to_stream_.load(std::memory_order_relaxed) > 0; }

 private:
  std::atomic<int> to_stream_{0};
};

}  // namespace rankcall
