#include "bridge.h"

#include "../common/faults.h"
#include "api.h"
#include "memory.h"

using namespace simulated;

extern "C" {

cudaError_t simulated_enqueue(cudaStream_t handle, int is_kernel, int (*attempt)(void*), void (*run)(void*),
                              void (*drop)(void*), void* data) {
  std::shared_ptr<void> owner(data, drop);
  RETURN_STANDING_ERROR();
  STREAM_OR_RETURN(stream, handle);
  Engine::get().make_context(stream->device);
  Operation operation;
  operation.kind = is_kernel ? Operation::Kernel : Operation::Collective;
  operation.may_block = !is_kernel;
  operation.run = [owner, run] { run(owner.get()); };
  if (attempt) operation.attempt = [owner, attempt] { return attempt(owner.get()) != 0; };
  return set_error(Engine::get().enqueue(stream, std::move(operation)));
}

int simulated_runs_inline(cudaStream_t handle) {
  StreamPtr stream = Engine::get().of(handle);
  return stream && Engine::get().would_run_inline(stream);
}

int simulated_is_capturing(cudaStream_t handle) {
  StreamPtr stream = Engine::get().of(handle);
  if (!stream) return 0;
  std::lock_guard<std::mutex> hold(Engine::get().lock());
  return stream->capture != nullptr;
}

int simulated_has_context(int device) {
  return device >= 0 && device < MAX_DEVICES && Engine::get().device(device).has_context;
}

int simulated_device_of(cudaStream_t handle) {
  StreamPtr stream = Engine::get().of(handle);
  return stream ? stream->device : current_device;
}

void simulated_fail_device(int device, int error, const char* why) {
  Engine::get().fail_device(device, static_cast<cudaError_t>(error), 0, why);
}

int simulated_find(const void* pointer, void** base, size_t* size, int* device) {
  Block block;
  uintptr_t start = 0;
  if (!Memory::get().find(pointer, &block, &start)) return 0;
  *base = reinterpret_cast<void*>(start);
  *size = block.asked;
  *device = block.device;
  return 1;
}

cudaError_t simulated_take_memory(int device, size_t size) {
  Engine::get().make_context(device);
  return Memory::get().take(device, size);
}
void simulated_give_memory(int device, size_t size) { Memory::get().give(device, size); }
void simulated_know_range(const void* pointer, size_t size, int device) { Memory::get().know(pointer, size, device); }
void simulated_forget_range(const void* pointer) { Memory::get().forget(pointer); }

int simulated_stalls_nccl(int device, long long op) { return FaultBoard::get().stalls_nccl(device, op); }
int simulated_breaks_network(int device, long long op) { return FaultBoard::get().breaks_network(device, op); }
int simulated_stalls_link(int rank, int peer) { return FaultBoard::get().stalls_link(rank, peer); }
int simulated_stalls_init() { return FaultBoard::get().stalls_init(); }

}  // extern "C"
