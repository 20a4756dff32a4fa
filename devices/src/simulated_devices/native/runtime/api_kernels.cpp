// Kernels, the symbols of device code, and occupancy.
#include <cxxabi.h>
#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <string>
#include <unordered_map>
#include <vector>

#include "../common/settings.h"
#include "api.h"
#include "engine.h"
#include "kernels.h"
#include "memory.h"

namespace simulated {
namespace {

struct Symbols {
  std::mutex lock;
  std::unordered_map<const void*, const char*> kernels;  // by the address of the host's stub: mangled name
  std::unordered_map<const void*, size_t> variables;     // by the address of the host's shadow: size
  std::unordered_map<const void*, void*> variable_memory;
};
Symbols& symbols() {
  static auto* all = new Symbols;
  return *all;
}

struct CallConfiguration {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};
thread_local std::vector<CallConfiguration> call_configurations;

std::string demangled(const char* name) {
  int status = 0;
  char* text = abi::__cxa_demangle(name, nullptr, nullptr, &status);
  std::string result = text ? text : name;
  free(text);
  return result;
}

cudaError_t launch(const void* host, cudaStream_t handle) {
  if (cudaError_t error = standing_error()) return set_error(error);
  const char* name = nullptr;
  {
    Symbols& all = symbols();
    std::lock_guard<std::mutex> hold(all.lock);
    auto found = all.kernels.find(host);
    if (found != all.kernels.end()) name = found->second;
  }
  if (name && settings().trace)
    say_once(name, "the kernel %.300s is not computed; what it writes stays as it was", demangled(name).c_str());
  StreamPtr stream = Engine::get().of(handle);
  if (!stream) return set_error(cudaErrorInvalidResourceHandle);
  Engine::get().make_context(stream->device);
  Operation operation;
  operation.kind = Operation::Kernel;
  operation.run = [] {};
  return set_error(Engine::get().enqueue(stream, std::move(operation)));
}

}  // namespace

void load_aten_kernels() {
  const std::string& path = settings().aten;
  // A program that uses CUDA without torch has nothing to override.
  if (path.empty() || !dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD)) return;
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    say("aten ops are not computed: %s", dlerror());
    return;
  }
  auto install = reinterpret_cast<void (*)()>(dlsym(library, "simulated_aten_install"));
  if (install) install();
}

}  // namespace simulated

using namespace simulated;

// --- Registration, called by the static constructors of torch's libraries. ---

CUDA_API void** __cudaRegisterFatBinary(void*) { return new void*[1]{nullptr}; }
CUDA_API void __cudaRegisterFatBinaryEnd(void**) {}
CUDA_API void __cudaUnregisterFatBinary(void**) {}
CUDA_API char __cudaInitModule(void**) { return 1; }
CUDA_API void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*,
                                     dim3*, int*) {
  std::lock_guard<std::mutex> hold(symbols().lock);
  symbols().kernels[host] = name;
}
CUDA_API void __cudaRegisterVar(void**, char* host, char*, const char*, int, size_t size, int, int) {
  std::lock_guard<std::mutex> hold(symbols().lock);
  symbols().variables[host] = size;
}
CUDA_API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  call_configurations.push_back({grid, block, shared, stream});
  return 0;
}
CUDA_API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  if (call_configurations.empty()) return set_error(cudaErrorMissingConfiguration);
  CallConfiguration last = call_configurations.back();
  call_configurations.pop_back();
  *grid = last.grid;
  *block = last.block;
  *shared = last.shared;
  *static_cast<cudaStream_t*>(stream) = last.stream;
  return cudaSuccess;
}
CUDA_API cudaError_t __cudaGetKernel(cudaKernel_t* out, const void* host) {
  *out = reinterpret_cast<cudaKernel_t>(const_cast<void*>(host));
  return cudaSuccess;
}

// --- Launches ---

CUDA_API cudaError_t cudaLaunchKernel(const void* kernel, dim3, dim3, void**, size_t, cudaStream_t stream) {
  return launch(kernel, stream);
}
CUDA_API cudaError_t cudaLaunchCooperativeKernel(const void* kernel, dim3, dim3, void**, size_t, cudaStream_t stream) {
  return launch(kernel, stream);
}
CUDA_API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, size_t, cudaStream_t stream) {
  return launch(kernel, stream);
}
CUDA_API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void**) {
  return launch(kernel, config->stream);
}
CUDA_API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* out, const void*) {
  memset(out, 0, sizeof *out);
  out->maxThreadsPerBlock = 1024;
  out->numRegs = 32;
  out->binaryVersion = out->ptxVersion = 80;
  out->maxDynamicSharedSizeBytes = 48 << 10;
  return cudaSuccess;
}
CUDA_API cudaError_t cudaFuncSetAttribute(const void*, int, int) { return cudaSuccess; }
CUDA_API cudaError_t cudaFuncSetCacheConfig(const void*, int) { return cudaSuccess; }
CUDA_API cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t, int, int, int) { return cudaSuccess; }
CUDA_API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* out, const void*, int, size_t) {
  *out = 2;
  return cudaSuccess;
}
CUDA_API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* out, const void*, int, size_t,
                                                                            unsigned) {
  *out = 2;
  return cudaSuccess;
}

// --- Variables of device code ---

CUDA_API cudaError_t cudaGetSymbolAddress(void** out, const void* symbol) {
  Symbols& all = symbols();
  std::lock_guard<std::mutex> hold(all.lock);
  void*& memory = all.variable_memory[symbol];
  if (!memory) {
    auto known = all.variables.find(symbol);
    if (known == all.variables.end()) return set_error(cudaErrorSymbolNotFound);
    if (cudaError_t error = Memory::get().allocate(&memory, known->second, current_device)) return set_error(error);
  }
  *out = memory;
  return cudaSuccess;
}
CUDA_API cudaError_t cudaMemcpyToSymbol(const void* symbol, const void* source, size_t size, size_t offset,
                                        cudaMemcpyKind) {
  void* memory = nullptr;
  if (cudaError_t error = cudaGetSymbolAddress(&memory, symbol)) return error;
  memcpy(static_cast<char*>(memory) + offset, source, size);
  return cudaSuccess;
}
