// Allocation, copies and memory pools.
#include <cstring>
#include <string>

#include "api.h"
#include "memory.h"

namespace simulated {

// CUDA's rules for copies (API synchronization behavior): from pageable memory the source is read before
// the call returns; to pageable memory the call returns when the copy is complete; between pinned memory
// and a device, and between devices, an asynchronous copy does not wait.
cudaError_t copy(void* destination, const void* source, size_t size, cudaStream_t handle, bool synchronous) {
  RETURN_STANDING_ERROR();
  if (!size) return cudaSuccess;
  if (!destination || !source) return set_error(cudaErrorInvalidValue);
  STREAM_OR_RETURN(stream, handle);
  Engine& engine = Engine::get();
  engine.make_context(stream->device);
  bool capturing = stream->capture != nullptr;
  if (synchronous) RETURN_ON_ERROR(check_not_capturing(stream, "cudaMemcpy"));
  Operation operation;
  operation.kind = Operation::Copy;
  if (Memory::get().is_pageable(source) && !capturing && !engine.idle(stream) && !synchronous) {
    auto staged = std::make_shared<std::string>(static_cast<const char*>(source), size);
    operation.run = [=] { memcpy(destination, staged->data(), size); };
  } else {
    operation.run = [=] { memmove(destination, source, size); };
    // The source may change as soon as this function returns, hence the wait.
    if (Memory::get().is_pageable(source) || Memory::get().is_pageable(destination)) synchronous = !capturing;
  }
  RETURN_ON_ERROR(engine.enqueue(stream, std::move(operation)));
  if (synchronous) {
    engine.synchronize(stream);
    RETURN_STANDING_ERROR();
  }
  return cudaSuccess;
}

namespace {

cudaError_t set(void* pointer, int value, size_t size, cudaStream_t handle) {
  RETURN_STANDING_ERROR();
  if (!size) return cudaSuccess;
  STREAM_OR_RETURN(stream, handle);
  Engine::get().make_context(stream->device);
  Operation operation;
  operation.kind = Operation::Copy;
  operation.run = [=] { memset(pointer, value, size); };
  return set_error(Engine::get().enqueue(stream, std::move(operation)));
}

cudaError_t allocate_in_order(void** out, size_t size, cudaMemPool_t pool, cudaStream_t handle) {
  RETURN_STANDING_ERROR();
  STREAM_OR_RETURN(stream, handle);
  Engine::get().make_context(stream->device);
  if (!pool) pool = Memory::get().default_pool(stream->device);
  return set_error(Memory::get().allocate(out, size, reinterpret_cast<Pool*>(pool)->device, pool));
}

}  // namespace
}  // namespace simulated

using namespace simulated;

CUDA_API cudaError_t cudaMalloc(void** out, size_t size) {
  RETURN_STANDING_ERROR();
  RETURN_IF_CAPTURED();
  Engine::get().make_context(current_device);
  return set_error(Memory::get().allocate(out, size, current_device));
}
CUDA_API cudaError_t cudaMallocManaged(void** out, size_t size, unsigned) {
  RETURN_STANDING_ERROR();
  RETURN_IF_CAPTURED();
  Engine::get().make_context(current_device);
  return set_error(Memory::get().allocate(out, size, current_device, nullptr, true));
}
CUDA_API cudaError_t cudaFree(void* pointer) {
  RETURN_STANDING_ERROR();
  RETURN_IF_CAPTURED();
  Engine::get().make_context(current_device);
  if (!pointer) return cudaSuccess;
  // No work of the device may still use the memory. CUDA synchronises here, too.
  Engine::get().synchronize_device(current_device);
  return set_error(Memory::get().release(pointer, false));
}
CUDA_API cudaError_t cudaHostAlloc(void** out, size_t size, unsigned) {
  RETURN_STANDING_ERROR();
  RETURN_IF_CAPTURED();
  return set_error(Memory::get().allocate_pinned(out, size));
}
CUDA_API cudaError_t cudaMallocHost(void** out, size_t size) { return cudaHostAlloc(out, size, 0); }
CUDA_API cudaError_t cudaFreeHost(void* pointer) {
  RETURN_STANDING_ERROR();
  if (!pointer) return cudaSuccess;
  Engine::get().synchronize_device(current_device);  // copies to it may still go on
  return set_error(Memory::get().release(pointer, true));
}
CUDA_API cudaError_t cudaHostRegister(void* pointer, size_t size, unsigned) {
  RETURN_STANDING_ERROR();
  return set_error(Memory::get().register_host(pointer, size));
}
CUDA_API cudaError_t cudaHostUnregister(void* pointer) {
  RETURN_STANDING_ERROR();
  return set_error(Memory::get().unregister_host(pointer));
}
CUDA_API cudaError_t cudaHostGetDevicePointer(void** out, void* pointer, unsigned) {
  *out = pointer;
  return cudaSuccess;
}
CUDA_API cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total) {
  RETURN_STANDING_ERROR();
  Engine::get().make_context(current_device);
  Memory::get().usage(current_device, free_bytes, total);
  return cudaSuccess;
}
CUDA_API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* out, const void* pointer) {
  RETURN_STANDING_ERROR();
  Block block;
  bool known = Memory::get().find(pointer, &block, nullptr);
  out->type = !known              ? cudaMemoryTypeUnregistered
              : block.managed     ? cudaMemoryTypeManaged
              : block.device >= 0 ? cudaMemoryTypeDevice
                                  : cudaMemoryTypeHost;
  out->device = !known ? -2 : block.device >= 0 ? block.device : current_device;
  out->devicePointer = known ? const_cast<void*>(pointer) : nullptr;
  out->hostPointer = !known || block.device < 0 || block.managed ? const_cast<void*>(pointer) : nullptr;
  return cudaSuccess;
}

// --- Copies ---

CUDA_API cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind) {
  return copy(to, from, size, nullptr, true);
}
CUDA_API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind, cudaStream_t stream) {
  return copy(to, from, size, stream, false);
}
CUDA_API cudaError_t cudaMemcpyPeer(void* to, int, const void* from, int, size_t size) {
  return copy(to, from, size, nullptr, true);
}
CUDA_API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size, cudaStream_t stream) {
  return copy(to, from, size, stream, false);
}
CUDA_API cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                                       size_t height, cudaMemcpyKind, cudaStream_t stream) {
  for (size_t row = 0; row < height; ++row)
    if (cudaError_t error = copy(static_cast<char*>(to) + row * to_pitch,
                                 static_cast<const char*>(from) + row * from_pitch, width, stream, false))
      return error;
  return cudaSuccess;
}
CUDA_API cudaError_t cudaMemset(void* pointer, int value, size_t size) { return set(pointer, value, size, nullptr); }
CUDA_API cudaError_t cudaMemsetAsync(void* pointer, int value, size_t size, cudaStream_t stream) {
  return set(pointer, value, size, stream);
}

// --- Stream-ordered allocation and pools ---

CUDA_API cudaError_t cudaMallocAsync(void** out, size_t size, cudaStream_t stream) {
  return allocate_in_order(out, size, nullptr, stream);
}
CUDA_API cudaError_t cudaMallocFromPoolAsync(void** out, size_t size, cudaMemPool_t pool, cudaStream_t stream) {
  return allocate_in_order(out, size, pool, stream);
}
CUDA_API cudaError_t cudaFreeAsync(void* pointer, cudaStream_t handle) {
  RETURN_STANDING_ERROR();
  if (!pointer) return cudaSuccess;
  STREAM_OR_RETURN(stream, handle);
  Block block;
  if (!Memory::get().find(pointer, &block, nullptr) || block.device < 0) return set_error(cudaErrorInvalidValue);
  Operation operation;
  operation.kind = Operation::Host;
  operation.run = [pointer] { Memory::get().release(pointer, false); };
  return set_error(Engine::get().enqueue(stream, std::move(operation)));
}
CUDA_API cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* out, int device) {
  if (device < 0 || device >= Engine::get().device_count()) return set_error(cudaErrorInvalidDevice);
  *out = Memory::get().default_pool(device);
  return cudaSuccess;
}
CUDA_API cudaError_t cudaDeviceGetMemPool(cudaMemPool_t* out, int device) {
  return cudaDeviceGetDefaultMemPool(out, device);
}
CUDA_API cudaError_t cudaMemPoolCreate(cudaMemPool_t* out, const cudaMemPoolProps* properties) {
  auto* pool = new Pool;
  pool->device = properties->location.id;
  *out = reinterpret_cast<cudaMemPool_t>(pool);
  return cudaSuccess;
}
CUDA_API cudaError_t cudaMemPoolDestroy(cudaMemPool_t) { return cudaSuccess; }  // its blocks may still name it
CUDA_API cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) {
  return cudaSuccess;
}  // freed memory is given back at once
CUDA_API cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const void*, size_t) {
  return cudaSuccess;
}  // every device reaches all memory
CUDA_API cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t handle, cudaMemPoolAttr attribute, void* value) {
  auto* pool = reinterpret_cast<Pool*>(handle);
  std::lock_guard<std::mutex> hold(Memory::get().lock());
  if (attribute <= cudaMemPoolReuseAllowInternalDependencies) pool->reuse[attribute - 1] = *static_cast<int*>(value);
  else if (attribute == cudaMemPoolAttrReleaseThreshold) pool->release_threshold = *static_cast<uint64_t*>(value);
  // The high-water marks can be set to 0 only, which starts them anew.
  else if (*static_cast<uint64_t*>(value)) return set_error(cudaErrorInvalidValue);
  else if (attribute == cudaMemPoolAttrReservedMemHigh) pool->reserved_high = pool->used;
  else if (attribute == cudaMemPoolAttrUsedMemHigh) pool->used_high = pool->used;
  else return set_error(cudaErrorInvalidValue);
  return cudaSuccess;
}
CUDA_API cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t handle, cudaMemPoolAttr attribute, void* value) {
  auto* pool = reinterpret_cast<Pool*>(handle);
  std::lock_guard<std::mutex> hold(Memory::get().lock());
  switch (attribute) {
    case cudaMemPoolAttrReleaseThreshold: *static_cast<uint64_t*>(value) = pool->release_threshold; break;
    case cudaMemPoolAttrReservedMemCurrent:
    case cudaMemPoolAttrUsedMemCurrent: *static_cast<uint64_t*>(value) = pool->used; break;
    case cudaMemPoolAttrReservedMemHigh: *static_cast<uint64_t*>(value) = pool->reserved_high; break;
    case cudaMemPoolAttrUsedMemHigh: *static_cast<uint64_t*>(value) = pool->used_high; break;
    default: *static_cast<int*>(value) = pool->reuse[attribute - 1];
  }
  return cudaSuccess;
}
CUDA_API cudaError_t cudaDeviceGetGraphMemAttribute(int, int, void* value) {
  *static_cast<uint64_t*>(value) = 0;  // graphs own no memory here
  return cudaSuccess;
}
CUDA_API cudaError_t cudaDeviceSetGraphMemAttribute(int, int, void*) { return cudaSuccess; }

// --- Between processes ---

CUDA_API cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* pointer) {
  return set_error(Memory::get().export_handle(pointer, handle));
}
CUDA_API cudaError_t cudaIpcOpenMemHandle(void** out, cudaIpcMemHandle_t handle, unsigned) {
  return set_error(Memory::get().import_handle(handle, out));
}
CUDA_API cudaError_t cudaIpcCloseMemHandle(void* pointer) { return set_error(Memory::get().release(pointer, false)); }
