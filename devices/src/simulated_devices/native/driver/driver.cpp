// libcuda.so.1: the driver's functions that torch calls. Those that are not here are generated; they
// return CUDA_ERROR_NOT_SUPPORTED, which has the runtime's number, and are named once.
#include <cstring>

#include "../abi/cuda.h"
#include "../runtime/bridge.h"

using CUresult = int;  // the driver's error numbers are the runtime's, for all that occur here
using CUdeviceptr = unsigned long long;

extern "C" cudaError_t cudaDeviceGetAttribute(int*, int, int);
extern "C" cudaError_t cudaGetDevice(int*);
extern "C" cudaError_t cudaGetDeviceProperties(cudaDeviceProp*, int);
extern "C" cudaError_t cudaSetDevice(int);
extern "C" cudaError_t cudaGetDeviceCount(int*);
extern "C" const char* cudaGetErrorString(cudaError_t);
extern "C" const char* cudaGetErrorName(cudaError_t);

namespace {
constexpr CUresult SUCCESS = 0, INVALID_VALUE = 1, INVALID_CONTEXT = 201, NOT_FOUND = 500;
// A device has one context, its primary one, which is named by the address of an element of this.
char contexts[64];
void* context_of(int device) { return &contexts[device]; }
}  // namespace

CUDA_API CUresult cuInit(unsigned) { return SUCCESS; }
CUDA_API CUresult cuDriverGetVersion(int* out) {
  *out = SIMULATED_CUDA_VERSION;
  return SUCCESS;
}
CUDA_API CUresult cuGetErrorString(CUresult error, const char** out) {
  *out = cudaGetErrorString(static_cast<cudaError_t>(error));
  return SUCCESS;
}
CUDA_API CUresult cuGetErrorName(CUresult error, const char** out) {
  *out = cudaGetErrorName(static_cast<cudaError_t>(error));
  return SUCCESS;
}

// The driver's log has nothing to say.
CUDA_API CUresult cuLogsRegisterCallback(void*, void*, void** handle) {
  *handle = nullptr;
  return SUCCESS;
}
CUDA_API CUresult cuLogsUnregisterCallback(void*) { return SUCCESS; }

CUDA_API CUresult cuDeviceGet(int* out, int ordinal) {
  *out = ordinal;
  return SUCCESS;
}
CUDA_API CUresult cuDeviceGetCount(int* out) { return cudaGetDeviceCount(out); }
CUDA_API CUresult cuDeviceGetAttribute(int* out, int attribute, int device) {
  return cudaDeviceGetAttribute(out, attribute, device);
}

CUDA_API CUresult cuDeviceGetUuid(cudaUUID_t* out, int device) {
  cudaDeviceProp properties;
  CUresult result = cudaGetDeviceProperties(&properties, device);
  if (result == SUCCESS) *out = properties.uuid;
  return result;
}
CUDA_API CUresult cuDeviceGetUuid_v2(cudaUUID_t* out, int device) { return cuDeviceGetUuid(out, device); }

CUDA_API CUresult cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
  *flags = 0;
  *active = simulated_has_context(device);
  return SUCCESS;
}
CUDA_API CUresult cuDevicePrimaryCtxRetain(void** out, int device) {
  *out = context_of(device);
  return SUCCESS;
}
CUDA_API CUresult cuDevicePrimaryCtxRelease(int) { return SUCCESS; }
CUDA_API CUresult cuCtxGetCurrent(void** out) {
  int device = 0;
  cudaGetDevice(&device);
  *out = simulated_has_context(device) ? context_of(device) : nullptr;
  return SUCCESS;
}
CUDA_API CUresult cuCtxSetCurrent(void* context) {
  if (!context) return SUCCESS;
  long device = static_cast<char*>(context) - contexts;
  return device < 0 || device >= 64 ? INVALID_CONTEXT : cudaSetDevice(static_cast<int>(device));
}
CUDA_API CUresult cuCtxGetDevice(int* out) { return cudaGetDevice(out); }

CUDA_API CUresult cuMemGetAddressRange_v2(CUdeviceptr* base, size_t* size, CUdeviceptr pointer) {
  void* start = nullptr;
  size_t bytes = 0;
  int device = 0;
  if (!simulated_find(reinterpret_cast<void*>(pointer), &start, &bytes, &device)) return NOT_FOUND;
  if (base) *base = reinterpret_cast<CUdeviceptr>(start);
  if (size) *size = bytes;
  return SUCCESS;
}
CUDA_API CUresult cuMemGetAddressRange(CUdeviceptr* base, size_t* size, CUdeviceptr pointer) {
  return cuMemGetAddressRange_v2(base, size, pointer);
}

CUDA_API CUresult cuPointerGetAttribute(void* out, int attribute, CUdeviceptr pointer) {
  constexpr int CONTEXT = 1, MEMORY_TYPE = 2, DEVICE_POINTER = 3, HOST_POINTER = 4, BUFFER_ID = 7, DEVICE_ORDINAL = 9;
  void* start = nullptr;
  size_t bytes = 0;
  int device = 0;
  if (!simulated_find(reinterpret_cast<void*>(pointer), &start, &bytes, &device)) return INVALID_VALUE;
  switch (attribute) {
    case CONTEXT: *static_cast<void**>(out) = context_of(device < 0 ? 0 : device); return SUCCESS;
    case MEMORY_TYPE: *static_cast<unsigned*>(out) = device < 0 ? 1 : 2; return SUCCESS;
    case DEVICE_POINTER:
    case HOST_POINTER: *static_cast<CUdeviceptr*>(out) = pointer; return SUCCESS;
    case BUFFER_ID:
      *static_cast<unsigned long long*>(out) = reinterpret_cast<unsigned long long>(start);
      return SUCCESS;
    case DEVICE_ORDINAL: *static_cast<int*>(out) = device; return SUCCESS;
    default: return INVALID_VALUE;
  }
}
