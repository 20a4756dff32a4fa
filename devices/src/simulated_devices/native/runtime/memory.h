// Memory of devices and pinned memory of the host.
//
// The memory of a device is a sparse, unnamed file that is mapped once. It is a file so that another
// process can map it too (CUDA IPC), and the mapping is several times as large as the device's memory,
// so that fragmentation of addresses never fails an allocation that the device has room for.
#pragma once
#include <cstdint>
#include <map>
#include <mutex>

#include "../abi/cuda.h"
#include "engine.h"

namespace simulated {

struct Block {
  size_t size = 0;  // as it counts against the device's memory
  size_t asked = 0;
  int device = -1;  // -1: memory of the host
  bool managed = false;
  bool imported = false;  // of another process
  bool registered = false;
  cudaMemPool_t pool = nullptr;
};

struct Pool {
  int device = 0;
  uint64_t release_threshold = 0, used = 0, used_high = 0, reserved_high = 0;
  int reuse[3] = {1, 1, 1};
};

class Memory {
 public:
  static Memory& get();

  cudaError_t allocate(void** out, size_t size, int device, cudaMemPool_t pool = nullptr, bool managed = false);
  cudaError_t allocate_pinned(void** out, size_t size);
  cudaError_t release(void* pointer, bool pinned);
  cudaError_t register_host(void* pointer, size_t size);
  cudaError_t unregister_host(void* pointer);

  bool find(const void* pointer, Block* block, uintptr_t* base);
  bool is_pageable(const void* pointer);
  void usage(int device, size_t* free_bytes, size_t* total);

  cudaError_t export_handle(const void* pointer, cudaIpcMemHandle_t* handle);
  cudaError_t import_handle(const cudaIpcMemHandle_t& handle, void** out);

  // For memory that the driver's virtual memory management maps: its size counts, and pointers into it are known.
  cudaError_t take(int device, size_t size);
  void give(int device, size_t size);
  void know(const void* pointer, size_t size, int device);
  void forget(const void* pointer);

  cudaMemPool_t default_pool(int device);
  std::mutex& lock() { return lock_; }

 private:
  struct Arena {
    int file = -1;
    char* base = nullptr;
    size_t size = 0;
    std::map<size_t, size_t> gaps;  // free ranges: offset and size
  };
  Arena& arena(int device);
  bool take(Arena& arena, size_t size, size_t* offset);
  void give_back(Arena& arena, size_t offset, size_t size);
  std::map<uintptr_t, Block>::iterator containing(const void* pointer);

  std::mutex lock_;
  std::map<uintptr_t, Block> blocks_;
  Arena arenas_[MAX_DEVICES];
  size_t used_[MAX_DEVICES] = {};
  Pool default_pools_[MAX_DEVICES];
};

}  // namespace simulated
