// Devices, errors, versions and access between devices.
#include <dlfcn.h>

#include <cstdio>
#include <cstring>

#include "../common/settings.h"
#include "api.h"

namespace simulated {
namespace {

bool exists(int device) { return device >= 0 && device < Engine::get().device_count(); }

// The figures are those of an A100, the smallest device for which torch's newest builds have all code.
constexpr int MULTIPROCESSORS = 108, MAJOR = 8, MINOR = 0;
constexpr size_t SHARED_PER_BLOCK = 48 << 10, SHARED_OPTIN = 163 << 10, SHARED_PER_MULTIPROCESSOR = 164 << 10;

void fill(cudaDeviceProp* out, int device) {
  memset(out, 0, sizeof *out);
  snprintf(out->name, sizeof out->name, "Simulated device");
  memcpy(&out->uuid, "simulated-devic", 15);
  out->uuid.bytes[15] = static_cast<char>(device);
  out->totalGlobalMem = settings().memory;
  out->sharedMemPerBlock = SHARED_PER_BLOCK;
  out->sharedMemPerBlockOptin = SHARED_OPTIN;
  out->sharedMemPerMultiprocessor = SHARED_PER_MULTIPROCESSOR;
  out->regsPerBlock = out->regsPerMultiprocessor = 65536;
  out->warpSize = 32;
  out->maxThreadsPerBlock = 1024;
  out->maxThreadsPerMultiProcessor = 2048;
  out->maxBlocksPerMultiProcessor = 32;
  out->maxThreadsDim[0] = out->maxThreadsDim[1] = 1024;
  out->maxThreadsDim[2] = 64;
  out->maxGridSize[0] = 2147483647;
  out->maxGridSize[1] = out->maxGridSize[2] = 65535;
  out->major = MAJOR;
  out->minor = MINOR;
  out->multiProcessorCount = MULTIPROCESSORS;
  out->textureAlignment = 512;
  out->pciBusID = device + 1;
  out->l2CacheSize = 40 << 20;
  out->memoryBusWidth = 5120;
  out->asyncEngineCount = 3;
  out->concurrentKernels = out->unifiedAddressing = out->canMapHostMemory = out->cooperativeLaunch = 1;
  out->streamPrioritiesSupported = out->hostRegisterSupported = out->memoryPoolsSupported = 1;
}

// CUDA's numbers of the attributes that torch and its libraries ask for.
int attribute(int number, int device) {
  switch (number) {
    case 1: return 1024;  // MaxThreadsPerBlock
    case 2:
    case 3: return 1024;        // MaxBlockDimX, Y
    case 4: return 64;          // MaxBlockDimZ
    case 5: return 2147483647;  // MaxGridDimX
    case 6:
    case 7: return 65535;             // MaxGridDimY, Z
    case 8: return SHARED_PER_BLOCK;  // MaxSharedMemoryPerBlock
    case 10: return 32;               // WarpSize
    case 12:
    case 82: return 65536;                      // MaxRegistersPerBlock, PerMultiprocessor
    case 13: return 1410000;                    // ClockRate, kHz
    case 14: return 512;                        // TextureAlignment
    case 16: return MULTIPROCESSORS;            // MultiProcessorCount
    case 33: return device + 1;                 // PciBusId
    case 38: return 40 << 20;                   // L2CacheSize
    case 39: return 2048;                       // MaxThreadsPerMultiProcessor
    case 75: return MAJOR;                      // ComputeCapabilityMajor
    case 76: return MINOR;                      // ComputeCapabilityMinor
    case 81: return SHARED_PER_MULTIPROCESSOR;  // MaxSharedMemoryPerMultiprocessor
    case 97: return SHARED_OPTIN;               // MaxSharedMemoryPerBlockOptin
    case 106: return 32;                        // MaxBlocksPerMultiprocessor
    case 19:
    case 31:
    case 41:
    case 78:
    case 95:
    case 99:
    case 115: return 1;  // what the device can do
    default: return 0;
  }
}

}  // namespace
}  // namespace simulated

using namespace simulated;

// --- Errors ---

CUDA_API cudaError_t cudaGetLastError() { return take_error(false); }
CUDA_API cudaError_t cudaPeekAtLastError() { return take_error(true); }
#define SIMULATED_NAME(number, name, text) \
  case name: return #name;
#define SIMULATED_TEXT(number, name, text) \
  case name: return text;
CUDA_API const char* cudaGetErrorName(cudaError_t error) {
  switch (error) { SIMULATED_CUDA_ERRORS(SIMULATED_NAME) }
  return "unrecognized error code";
}
CUDA_API const char* cudaGetErrorString(cudaError_t error) {
  switch (error) { SIMULATED_CUDA_ERRORS(SIMULATED_TEXT) }
  return "unrecognized error code";
}

// --- Devices ---

CUDA_API cudaError_t cudaGetDeviceCount(int* out) {
  if (Engine::get().forked_with_context()) return set_error(cudaErrorInitializationError);
  Engine::get().load_aten_once();
  *out = Engine::get().device_count();
  return *out ? cudaSuccess : set_error(cudaErrorNoDevice);
}
CUDA_API cudaError_t cudaGetDevice(int* out) {
  *out = current_device;
  return cudaSuccess;
}
CUDA_API cudaError_t cudaSetDevice(int device) {
  if (Engine::get().forked_with_context()) return set_error(cudaErrorInitializationError);
  if (!exists(device)) return set_error(cudaErrorInvalidDevice);
  current_device = device;
  Engine::get().make_context(device);  // since CUDA 12
  return cudaSuccess;
}
CUDA_API cudaError_t cudaDeviceSynchronize() {
  RETURN_STANDING_ERROR();
  RETURN_IF_CAPTURED();
  Engine::get().synchronize_device(current_device);
  RETURN_STANDING_ERROR();
  return cudaSuccess;
}
CUDA_API cudaError_t cudaDriverGetVersion(int* out) {
  *out = SIMULATED_CUDA_VERSION;
  return cudaSuccess;
}
CUDA_API cudaError_t cudaRuntimeGetVersion(int* out) {
  *out = SIMULATED_CUDA_VERSION;
  return cudaSuccess;
}
CUDA_API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* out, int device) {
  if (!exists(device)) return set_error(cudaErrorInvalidDevice);
  fill(out, device);
  return cudaSuccess;
}
#if SIMULATED_CUDA_MAJOR < 13
CUDA_API cudaError_t cudaGetDeviceProperties_v2(cudaDeviceProp* out, int device) {
  return cudaGetDeviceProperties(out, device);
}
#endif
CUDA_API cudaError_t cudaDeviceGetAttribute(int* out, int number, int device) {
  if (!exists(device)) return set_error(cudaErrorInvalidDevice);
  *out = attribute(number, device);
  return cudaSuccess;
}
CUDA_API cudaError_t cudaDeviceGetPCIBusId(char* out, int size, int device) {
  if (!exists(device)) return set_error(cudaErrorInvalidDevice);
  snprintf(out, size, "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}
CUDA_API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}
CUDA_API cudaError_t cudaProfilerStart() { return cudaSuccess; }
CUDA_API cudaError_t cudaProfilerStop() { return cudaSuccess; }

// --- Access between devices ---

CUDA_API cudaError_t cudaDeviceCanAccessPeer(int* out, int device, int peer) {
  if (!exists(device) || !exists(peer)) return set_error(cudaErrorInvalidDevice);
  *out = device != peer;
  return cudaSuccess;
}
CUDA_API cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
  RETURN_STANDING_ERROR();
  if (!exists(peer) || peer == current_device) return set_error(cudaErrorInvalidDevice);
  if (flags) return set_error(cudaErrorInvalidValue);
  Engine::get().make_context(current_device);
  uint64_t before = Engine::get().device(current_device).peers.fetch_or(1ull << peer);
  return before >> peer & 1 ? set_error(cudaErrorPeerAccessAlreadyEnabled) : cudaSuccess;
}
CUDA_API cudaError_t cudaDeviceDisablePeerAccess(int peer) {
  RETURN_STANDING_ERROR();
  if (!exists(peer)) return set_error(cudaErrorInvalidDevice);
  uint64_t before = Engine::get().device(current_device).peers.fetch_and(~(1ull << peer));
  return before >> peer & 1 ? cudaSuccess : set_error(cudaErrorPeerAccessNotEnabled);
}

// --- The driver's functions that torch asks for by name. They are in libcuda.so.1, which is preloaded. ---

CUDA_API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** out, unsigned, unsigned long long,
                                                      cudaDriverEntryPointQueryResult* status) {
  *out = dlsym(RTLD_DEFAULT, name);
  if (!*out && settings().trace) say_once(name, "the driver's function %s is not there", name);
  if (status) *status = *out ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
CUDA_API cudaError_t cudaGetDriverEntryPoint(const char* name, void** out, unsigned long long flags,
                                             cudaDriverEntryPointQueryResult* status) {
  return cudaGetDriverEntryPointByVersion(name, out, SIMULATED_CUDA_VERSION, flags, status);
}
