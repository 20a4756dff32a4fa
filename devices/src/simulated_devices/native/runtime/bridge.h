// What the other libraries use of the simulated runtime. It is plain C at the border, so that each
// library can bring its own copy of the C++ runtime library.
#pragma once
#include <functional>

#include "../abi/cuda.h"

extern "C" {
// Adds an operation to the stream. `attempt` may be null; it returns nonzero if it has done the operation
// without waiting. `drop` frees `data` once neither the stream nor a graph needs it.
__attribute__((visibility("default"))) cudaError_t simulated_enqueue(cudaStream_t stream, int is_kernel,
                                                                     int (*attempt)(void*), void (*run)(void*),
                                                                     void (*drop)(void*), void* data);
// Whether a kernel that is enqueued now would run in this thread: the stream is idle and nothing holds it back.
__attribute__((visibility("default"))) int simulated_runs_inline(cudaStream_t stream);
__attribute__((visibility("default"))) int simulated_is_capturing(cudaStream_t stream);
__attribute__((visibility("default"))) int simulated_has_context(int device);
__attribute__((visibility("default"))) int simulated_device_of(cudaStream_t stream);
__attribute__((visibility("default"))) void simulated_fail_device(int device, int error, const char* why);
// Where an allocation begins and how large it is; returns 0 if the pointer is in none.
__attribute__((visibility("default"))) int simulated_find(const void* pointer, void** base, size_t* size, int* device);
// Memory that the driver's functions map themselves: it counts against the device's, and pointers into it are known.
__attribute__((visibility("default"))) cudaError_t simulated_take_memory(int device, size_t size);
__attribute__((visibility("default"))) void simulated_give_memory(int device, size_t size);
__attribute__((visibility("default"))) void simulated_know_range(const void* pointer, size_t size, int device);
__attribute__((visibility("default"))) void simulated_forget_range(const void* pointer);
// The faults, which the runtime follows for all libraries. See common/faults.h.
__attribute__((visibility("default"))) int simulated_stalls_nccl(int device, long long op);
__attribute__((visibility("default"))) int simulated_breaks_network(int device, long long op);
__attribute__((visibility("default"))) int simulated_stalls_link(int rank, int peer);
__attribute__((visibility("default"))) int simulated_stalls_init();
}

namespace simulated {

// A closure as the runtime takes it.
struct Closure {
  std::function<bool()> attempt;
  std::function<void()> run;
};

inline cudaError_t enqueue(cudaStream_t stream, bool is_kernel, Closure closure) {
  auto* data = new Closure(std::move(closure));
  int (*attempt)(void*) = [](void* held) -> int { return static_cast<Closure*>(held)->attempt(); };
  void (*run)(void*) = [](void* held) { static_cast<Closure*>(held)->run(); };
  void (*drop)(void*) = [](void* held) { delete static_cast<Closure*>(held); };
  return simulated_enqueue(stream, is_kernel, data->attempt ? attempt : nullptr, run, drop, data);
}

}  // namespace simulated
