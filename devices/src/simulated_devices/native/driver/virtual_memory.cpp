// The driver's virtual memory management: addresses are reserved, memory is made, and one is mapped to the
// other. torch's expandable segments are built on it.
#include <sys/mman.h>
#include <unistd.h>

#include <map>
#include <mutex>

#include "../abi/cuda.h"
#include "../runtime/bridge.h"

using CUresult = int;
using CUdeviceptr = unsigned long long;

namespace {

constexpr CUresult SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2;
constexpr size_t GRANULARITY = 2 << 20;  // of today's devices

// The beginning of CUmemAllocationProp.
struct Properties {
  int type, handle_types;
  cudaMemLocation location;
};

// Memory of a device, which lives as long as its handle or a mapping of it.
struct Physical {
  int file;
  size_t size;
  int device;
  int references = 1;
};

std::mutex& lock() {
  static auto* own = new std::mutex;
  return *own;
}
std::map<CUdeviceptr, Physical*>& mappings() {  // guarded by the lock
  static auto* all = new std::map<CUdeviceptr, Physical*>;
  return *all;
}

void release(Physical* physical) {
  if (--physical->references) return;
  close(physical->file);
  simulated_give_memory(physical->device, physical->size);
  delete physical;
}

void* address(CUdeviceptr pointer) { return reinterpret_cast<void*>(pointer); }

}  // namespace

CUDA_API CUresult cuMemGetAllocationGranularity(size_t* out, const Properties*, int) {
  *out = GRANULARITY;
  return SUCCESS;
}
CUDA_API CUresult cuMemAddressReserve(CUdeviceptr* out, size_t size, size_t, CUdeviceptr, unsigned long long) {
  void* range = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED) return OUT_OF_MEMORY;
  *out = reinterpret_cast<CUdeviceptr>(range);
  return SUCCESS;
}
CUDA_API CUresult cuMemAddressFree(CUdeviceptr pointer, size_t size) {
  return munmap(address(pointer), size) ? INVALID_VALUE : SUCCESS;
}
CUDA_API CUresult cuMemCreate(Physical** out, size_t size, const Properties* properties, unsigned long long) {
  if (!size || size % GRANULARITY) return INVALID_VALUE;
  const int device = properties->location.id;
  if (simulated_take_memory(device, size)) return OUT_OF_MEMORY;
  int file = memfd_create("simulated-memory", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(size))) {
    if (file >= 0) close(file);
    simulated_give_memory(device, size);
    return OUT_OF_MEMORY;
  }
  *out = new Physical{file, size, device};
  return SUCCESS;
}
CUDA_API CUresult cuMemRelease(Physical* physical) {
  std::lock_guard<std::mutex> hold(lock());
  release(physical);
  return SUCCESS;
}
CUDA_API CUresult cuMemMap(CUdeviceptr pointer, size_t size, size_t offset, Physical* physical, unsigned long long) {
  if (offset + size > physical->size) return INVALID_VALUE;
  std::lock_guard<std::mutex> hold(lock());
  void* mapped = mmap(address(pointer), size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, physical->file,
                      static_cast<off_t>(offset));
  if (mapped == MAP_FAILED) return INVALID_VALUE;
  ++physical->references;
  mappings()[pointer] = physical;
  simulated_know_range(address(pointer), size, physical->device);
  return SUCCESS;
}
CUDA_API CUresult cuMemSetAccess(CUdeviceptr, size_t, const void*, size_t) {
  return SUCCESS;
}  // every device reaches all memory
CUDA_API CUresult cuMemUnmap(CUdeviceptr pointer, size_t size) {
  std::lock_guard<std::mutex> hold(lock());
  // One call may unmap several neighbouring mappings.
  for (auto at = mappings().lower_bound(pointer); at != mappings().end() && at->first < pointer + size;
       at = mappings().erase(at)) {
    simulated_forget_range(address(at->first));
    release(at->second);
  }
  // The addresses stay reserved.
  mmap(address(pointer), size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  return SUCCESS;
}
