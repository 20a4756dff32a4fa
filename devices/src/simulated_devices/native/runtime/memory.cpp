#include "memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "../common/faults.h"
#include "../common/settings.h"

namespace simulated {
namespace {

constexpr size_t PAGE = 4096;
constexpr size_t ADDRESSES_PER_BYTE = 4;

size_t rounded(size_t size) { return (size + PAGE - 1) & ~(PAGE - 1); }

// What a handle for another process holds: where that process finds the file of the device's memory.
struct Exported {
  int pid, file, device;
  uint64_t offset, size;
};
static_assert(sizeof(Exported) <= sizeof(cudaIpcMemHandle_t), "a handle has 64 bytes");

}  // namespace

Memory& Memory::get() {
  static auto* memory = new Memory;
  return *memory;
}

Memory::Arena& Memory::arena(int device) {
  Arena& arena = arenas_[device];
  if (arena.base) return arena;
  arena.size = rounded(settings().memory * ADDRESSES_PER_BYTE);
  arena.file = memfd_create("simulated-device", MFD_CLOEXEC);
  if (arena.file < 0 || ftruncate(arena.file, arena.size)) return arena;
  void* base = mmap(nullptr, arena.size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, arena.file, 0);
  if (base == MAP_FAILED) return arena;
  madvise(base, arena.size, MADV_DONTDUMP);  // a core dump would hold all of the device's memory
  arena.base = static_cast<char*>(base);
  arena.gaps[0] = arena.size;
  return arena;
}

bool Memory::take(Arena& arena, size_t size, size_t* offset) {
  for (auto gap = arena.gaps.begin(); gap != arena.gaps.end(); ++gap) {
    if (gap->second < size) continue;
    *offset = gap->first;
    size_t left = gap->second - size;
    arena.gaps.erase(gap);
    if (left) arena.gaps[*offset + size] = left;
    return true;
  }
  return false;
}

void Memory::give_back(Arena& arena, size_t offset, size_t size) {
  fallocate(arena.file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, size);
  auto next = arena.gaps.lower_bound(offset);
  if (next != arena.gaps.end() && offset + size == next->first) {
    size += next->second;
    next = arena.gaps.erase(next);
  }
  if (next != arena.gaps.begin()) {
    auto before = std::prev(next);
    if (before->first + before->second == offset) {
      before->second += size;
      return;
    }
  }
  arena.gaps[offset] = size;
}

cudaError_t Memory::allocate(void** out, size_t size, int device, cudaMemPool_t pool, bool managed) {
  *out = nullptr;
  if (!size) return cudaSuccess;
  size_t whole = rounded(size);
  std::lock_guard<std::mutex> hold(lock_);
  size_t limit = FaultBoard::get().memory_limit(device, settings().memory);
  if (whole > limit || used_[device] > limit - whole) return cudaErrorMemoryAllocation;
  Arena& own = arena(device);
  size_t offset = 0;
  if (!own.base || !take(own, whole, &offset)) return cudaErrorMemoryAllocation;
  used_[device] += whole;
  Block block;
  block.size = whole;
  block.asked = size;
  block.device = device;
  block.managed = managed;
  block.pool = pool;
  if (pool) {
    auto* p = reinterpret_cast<Pool*>(pool);
    p->used += whole;
    p->used_high = std::max(p->used_high, p->used);
    p->reserved_high = std::max(p->reserved_high, p->used);
  }
  *out = own.base + offset;
  blocks_[reinterpret_cast<uintptr_t>(*out)] = block;
  return cudaSuccess;
}

cudaError_t Memory::allocate_pinned(void** out, size_t size) {
  *out = nullptr;
  if (!size) return cudaSuccess;
  size_t whole = rounded(size);
  void* memory = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return cudaErrorMemoryAllocation;
  std::lock_guard<std::mutex> hold(lock_);
  Block block;
  block.size = whole;
  block.asked = size;
  blocks_[reinterpret_cast<uintptr_t>(memory)] = block;
  *out = memory;
  return cudaSuccess;
}

cudaError_t Memory::release(void* pointer, bool pinned) {
  std::lock_guard<std::mutex> hold(lock_);
  auto found = blocks_.find(reinterpret_cast<uintptr_t>(pointer));
  if (found == blocks_.end() || found->second.registered || (found->second.device < 0) != pinned)
    return cudaErrorInvalidValue;
  Block block = found->second;
  blocks_.erase(found);
  if (pinned || block.imported) {
    munmap(pointer, block.size);
    return cudaSuccess;
  }
  used_[block.device] -= block.size;
  if (block.pool) reinterpret_cast<Pool*>(block.pool)->used -= block.size;
  Arena& own = arenas_[block.device];
  give_back(own, static_cast<char*>(pointer) - own.base, block.size);
  return cudaSuccess;
}

cudaError_t Memory::register_host(void* pointer, size_t size) {
  if (!pointer || !size) return cudaErrorInvalidValue;
  std::lock_guard<std::mutex> hold(lock_);
  auto next = blocks_.lower_bound(reinterpret_cast<uintptr_t>(pointer));
  bool overlaps = containing(pointer) != blocks_.end() ||
                  (next != blocks_.end() && next->first < reinterpret_cast<uintptr_t>(pointer) + size);
  if (overlaps) return cudaErrorHostMemoryAlreadyRegistered;
  Block block;
  block.size = block.asked = size;
  block.registered = true;
  blocks_[reinterpret_cast<uintptr_t>(pointer)] = block;
  return cudaSuccess;
}

cudaError_t Memory::unregister_host(void* pointer) {
  std::lock_guard<std::mutex> hold(lock_);
  auto found = blocks_.find(reinterpret_cast<uintptr_t>(pointer));
  if (found == blocks_.end() || !found->second.registered) return cudaErrorHostMemoryNotRegistered;
  blocks_.erase(found);
  return cudaSuccess;
}

std::map<uintptr_t, Block>::iterator Memory::containing(const void* pointer) {
  auto next = blocks_.upper_bound(reinterpret_cast<uintptr_t>(pointer));
  if (next == blocks_.begin()) return blocks_.end();
  --next;
  return reinterpret_cast<uintptr_t>(pointer) < next->first + next->second.size ? next : blocks_.end();
}

bool Memory::find(const void* pointer, Block* block, uintptr_t* base) {
  std::lock_guard<std::mutex> hold(lock_);
  auto found = containing(pointer);
  if (found == blocks_.end()) return false;
  *block = found->second;
  if (base) *base = found->first;
  return true;
}

bool Memory::is_pageable(const void* pointer) {
  std::lock_guard<std::mutex> hold(lock_);
  return containing(pointer) == blocks_.end();
}

void Memory::usage(int device, size_t* free_bytes, size_t* total) {
  std::lock_guard<std::mutex> hold(lock_);
  *total = settings().memory;
  size_t limit = FaultBoard::get().memory_limit(device, settings().memory);
  *free_bytes = limit > used_[device] ? limit - used_[device] : 0;
}

cudaError_t Memory::export_handle(const void* pointer, cudaIpcMemHandle_t* handle) {
  std::lock_guard<std::mutex> hold(lock_);
  auto found = containing(pointer);
  if (found == blocks_.end() || found->second.device < 0 || found->second.imported) return cudaErrorInvalidValue;
  Arena& own = arenas_[found->second.device];
  Exported exported{getpid(), own.file, found->second.device, found->first - reinterpret_cast<uintptr_t>(own.base),
                    found->second.size};
  memset(handle, 0, sizeof *handle);
  memcpy(handle, &exported, sizeof exported);
  return cudaSuccess;
}

cudaError_t Memory::import_handle(const cudaIpcMemHandle_t& handle, void** out) {
  Exported exported;
  memcpy(&exported, &handle, sizeof exported);
  if (exported.pid == getpid()) return cudaErrorInvalidValue;  // CUDA: not in the process that exported it
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", exported.pid, exported.file);
  int file = open(path, O_RDWR | O_CLOEXEC);
  if (file < 0) return cudaErrorInvalidResourceHandle;
  void* memory = mmap(nullptr, exported.size, PROT_READ | PROT_WRITE, MAP_SHARED, file, exported.offset);
  close(file);
  if (memory == MAP_FAILED) return cudaErrorInvalidResourceHandle;
  std::lock_guard<std::mutex> hold(lock_);
  Block block;
  block.size = block.asked = exported.size;
  block.device = exported.device;
  block.imported = true;
  blocks_[reinterpret_cast<uintptr_t>(memory)] = block;
  *out = memory;
  return cudaSuccess;
}

cudaError_t Memory::take(int device, size_t size) {
  std::lock_guard<std::mutex> hold(lock_);
  size_t limit = FaultBoard::get().memory_limit(device, settings().memory);
  if (size > limit || used_[device] > limit - size) return cudaErrorMemoryAllocation;
  used_[device] += size;
  return cudaSuccess;
}

void Memory::give(int device, size_t size) {
  std::lock_guard<std::mutex> hold(lock_);
  used_[device] -= size;
}

void Memory::know(const void* pointer, size_t size, int device) {
  std::lock_guard<std::mutex> hold(lock_);
  Block block;
  block.size = block.asked = size;
  block.device = device;
  block.registered = true;  // not for cudaFree
  blocks_[reinterpret_cast<uintptr_t>(pointer)] = block;
}

void Memory::forget(const void* pointer) {
  std::lock_guard<std::mutex> hold(lock_);
  blocks_.erase(reinterpret_cast<uintptr_t>(pointer));
}

cudaMemPool_t Memory::default_pool(int device) {
  default_pools_[device].device = device;
  return reinterpret_cast<cudaMemPool_t>(&default_pools_[device]);
}

}  // namespace simulated
