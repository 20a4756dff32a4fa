// The part of the CUDA runtime's binary interface that these libraries implement.
//
// A user's machine has no CUDA toolkit, and the wheels that torch installs do not always bring its
// headers. Therefore the types and constants are declared here, from CUDA's documentation. The test
// test_abi.py compares them with the real headers wherever it finds those.
#pragma once
#include <cstddef>
#include <cstdint>

#ifndef SIMULATED_CUDA_MAJOR
#define SIMULATED_CUDA_MAJOR 13
#endif
#ifndef SIMULATED_CUDA_VERSION
#define SIMULATED_CUDA_VERSION (SIMULATED_CUDA_MAJOR * 1000)
#endif

// The functions with which torch's libraries are linked; everything else stays hidden.
#define CUDA_API extern "C" __attribute__((visibility("default")))

// Number, name and text of each error that can come from these libraries.
#define SIMULATED_CUDA_ERRORS(X)                                                                              \
  X(0, cudaSuccess, "no error")                                                                               \
  X(1, cudaErrorInvalidValue, "invalid argument")                                                             \
  X(2, cudaErrorMemoryAllocation, "out of memory")                                                            \
  X(3, cudaErrorInitializationError, "initialization error")                                                  \
  X(17, cudaErrorInvalidDevicePointer, "invalid device pointer")                                              \
  X(21, cudaErrorInvalidMemcpyDirection, "invalid copy direction for memcpy")                                 \
  X(46, cudaErrorDevicesUnavailable, "CUDA-capable device(s) is/are busy or unavailable")                     \
  X(52, cudaErrorMissingConfiguration, "__global__ function call is not configured")                          \
  X(98, cudaErrorInvalidDeviceFunction, "invalid device function")                                            \
  X(100, cudaErrorNoDevice, "no CUDA-capable device is detected")                                             \
  X(101, cudaErrorInvalidDevice, "invalid device ordinal")                                                    \
  X(200, cudaErrorInvalidKernelImage, "device kernel image is invalid")                                       \
  X(214, cudaErrorECCUncorrectable, "uncorrectable ECC error encountered")                                    \
  X(217, cudaErrorPeerAccessUnsupported, "peer access is not supported between these two devices")            \
  X(220, cudaErrorNvlinkUncorrectable, "uncorrectable NVLink error detected during the execution")            \
  X(400, cudaErrorInvalidResourceHandle, "invalid resource handle")                                           \
  X(401, cudaErrorIllegalState, "the operation cannot be performed in the present state")                     \
  X(500, cudaErrorSymbolNotFound, "named symbol not found")                                                   \
  X(600, cudaErrorNotReady, "device not ready")                                                               \
  X(700, cudaErrorIllegalAddress, "an illegal memory access was encountered")                                 \
  X(702, cudaErrorLaunchTimeout, "the launch timed out and was terminated")                                   \
  X(704, cudaErrorPeerAccessAlreadyEnabled, "peer access is already enabled")                                 \
  X(705, cudaErrorPeerAccessNotEnabled, "peer access has not been enabled")                                   \
  X(710, cudaErrorAssert, "device-side assert triggered")                                                     \
  X(712, cudaErrorHostMemoryAlreadyRegistered, "part or all of the requested memory range is already mapped") \
  X(713, cudaErrorHostMemoryNotRegistered, "pointer does not correspond to a registered memory region")       \
  X(719, cudaErrorLaunchFailure, "unspecified launch failure")                                                \
  X(800, cudaErrorNotPermitted, "operation not permitted")                                                    \
  X(801, cudaErrorNotSupported, "operation not supported")                                                    \
  X(900, cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing")               \
  X(901, cudaErrorStreamCaptureInvalidated, "operation failed due to a previous error during capture")        \
  X(902, cudaErrorStreamCaptureMerge, "operation would result in a merge of separate capture sequences")      \
  X(903, cudaErrorStreamCaptureUnmatched, "capture was not ended in the same stream as it began")             \
  X(904, cudaErrorStreamCaptureUnjoined, "capturing stream has unjoined work")                                \
  X(905, cudaErrorStreamCaptureIsolation, "dependency created on uncaptured work in another stream")          \
  X(906, cudaErrorStreamCaptureImplicit,                                                                      \
    "operation would make the legacy stream depend on a capturing blocking stream")                           \
  X(907, cudaErrorCapturedEvent, "operation not permitted on an event last recorded in a capturing stream")   \
  X(908, cudaErrorStreamCaptureWrongThread,                                                                   \
    "attempt to terminate a thread-local capture sequence from another thread")                               \
  X(999, cudaErrorUnknown, "unknown error")

#define SIMULATED_AS_ENUM(number, name, text) name = number,
enum cudaError_t : int { SIMULATED_CUDA_ERRORS(SIMULATED_AS_ENUM) };
#undef SIMULATED_AS_ENUM

using cudaStream_t = struct CUstream_st*;
using cudaEvent_t = struct CUevent_st*;
using cudaGraph_t = struct CUgraph_st*;
using cudaGraphExec_t = struct CUgraphExec_st*;
using cudaGraphNode_t = struct CUgraphNode_st*;
using cudaMemPool_t = struct CUmemPoolHandle_st*;
using cudaUserObject_t = struct CUuserObject_st*;
using cudaKernel_t = struct CUkern_st*;
using cudaLibrary_t = struct CUlib_st*;
using cudaHostFn_t = void (*)(void*);
using cudaStreamCallback_t = void (*)(cudaStream_t, cudaError_t, void*);

// The two handles that name a default stream whatever the compilation mode of the caller.
inline const cudaStream_t cudaStreamLegacy = reinterpret_cast<cudaStream_t>(0x1);
inline const cudaStream_t cudaStreamPerThread = reinterpret_cast<cudaStream_t>(0x2);

constexpr unsigned cudaStreamNonBlocking = 1;
constexpr unsigned cudaEventBlockingSync = 1, cudaEventDisableTiming = 2, cudaEventInterprocess = 4;
constexpr unsigned cudaEventRecordExternal = 1, cudaEventWaitExternal = 1;

enum cudaMemcpyKind : int {
  cudaMemcpyHostToHost,
  cudaMemcpyHostToDevice,
  cudaMemcpyDeviceToHost,
  cudaMemcpyDeviceToDevice,
  cudaMemcpyDefault
};
enum cudaMemoryType : int {
  cudaMemoryTypeUnregistered,
  cudaMemoryTypeHost,
  cudaMemoryTypeDevice,
  cudaMemoryTypeManaged
};
enum cudaStreamCaptureStatus : int {
  cudaStreamCaptureStatusNone,
  cudaStreamCaptureStatusActive,
  cudaStreamCaptureStatusInvalidated
};
enum cudaStreamCaptureMode : int {
  cudaStreamCaptureModeGlobal,
  cudaStreamCaptureModeThreadLocal,
  cudaStreamCaptureModeRelaxed
};
enum cudaDriverEntryPointQueryResult : int {
  cudaDriverEntryPointSuccess,
  cudaDriverEntryPointSymbolNotFound,
  cudaDriverEntryPointVersionNotSufficent
};
enum cudaMemPoolAttr : int {
  cudaMemPoolReuseFollowEventDependencies = 1,
  cudaMemPoolReuseAllowOpportunistic,
  cudaMemPoolReuseAllowInternalDependencies,
  cudaMemPoolAttrReleaseThreshold,
  cudaMemPoolAttrReservedMemCurrent,
  cudaMemPoolAttrReservedMemHigh,
  cudaMemPoolAttrUsedMemCurrent,
  cudaMemPoolAttrUsedMemHigh
};

struct dim3 {
  unsigned x, y, z;
};
struct uint3 {
  unsigned x, y, z;
};
struct cudaUUID_t {
  char bytes[16];
};
struct cudaIpcMemHandle_t {
  char reserved[64];
};
struct cudaIpcEventHandle_t {
  char reserved[64];
};
struct cudaMemLocation {
  int type, id;
};
struct cudaMemPoolProps {
  int allocType, handleTypes;
  cudaMemLocation location;
  void* win32SecurityAttributes;
  size_t maxSize;
  unsigned short usage;
  unsigned char reserved[54];
};
struct cudaPointerAttributes {
  cudaMemoryType type;
  int device;
  void *devicePointer, *hostPointer;
  long reserved[8];  // CUDA 12 ends before it; callers of CUDA 12 must not have it written
};
struct cudaFuncAttributes {
  size_t sharedSizeBytes, constSizeBytes, localSizeBytes;
  int maxThreadsPerBlock, numRegs, ptxVersion, binaryVersion, cacheModeCA, maxDynamicSharedSizeBytes;
  int preferredShmemCarveout, clusterDimMustBeSet, requiredClusterWidth, requiredClusterHeight, requiredClusterDepth;
  int clusterSchedulingPolicyPreference, nonPortableClusterSizeAllowed, reserved[16];
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  void* attrs;
  unsigned numAttrs;
};

// Fields that CUDA 13 dropped stand in SIMULATED_CUDA12.
#if SIMULATED_CUDA_MAJOR < 13
#define SIMULATED_CUDA12(field) field
#else
#define SIMULATED_CUDA12(field)
#endif
struct cudaDeviceProp {
  char name[256];
  cudaUUID_t uuid;
  char luid[8];
  unsigned luidDeviceNodeMask;
  size_t totalGlobalMem, sharedMemPerBlock;
  int regsPerBlock, warpSize;
  size_t memPitch;
  int maxThreadsPerBlock, maxThreadsDim[3], maxGridSize[3];
  SIMULATED_CUDA12(int clockRate;)
  size_t totalConstMem;
  int major, minor;
  size_t textureAlignment, texturePitchAlignment;
  SIMULATED_CUDA12(int deviceOverlap;)
  int multiProcessorCount;
  SIMULATED_CUDA12(int kernelExecTimeoutEnabled;)
  int integrated, canMapHostMemory;
  SIMULATED_CUDA12(int computeMode;)
  int maxTexture1D, maxTexture1DMipmap;
  SIMULATED_CUDA12(int maxTexture1DLinear;)
  int maxTexture2D[2], maxTexture2DMipmap[2], maxTexture2DLinear[3], maxTexture2DGather[2];
  int maxTexture3D[3], maxTexture3DAlt[3], maxTextureCubemap, maxTexture1DLayered[2], maxTexture2DLayered[3];
  int maxTextureCubemapLayered[2], maxSurface1D, maxSurface2D[2], maxSurface3D[3], maxSurface1DLayered[2];
  int maxSurface2DLayered[3], maxSurfaceCubemap, maxSurfaceCubemapLayered[2];
  size_t surfaceAlignment;
  int concurrentKernels, ECCEnabled, pciBusID, pciDeviceID, pciDomainID, tccDriver, asyncEngineCount, unifiedAddressing;
  SIMULATED_CUDA12(int memoryClockRate;)
  int memoryBusWidth, l2CacheSize, persistingL2CacheMaxSize, maxThreadsPerMultiProcessor, streamPrioritiesSupported;
  int globalL1CacheSupported, localL1CacheSupported;
  size_t sharedMemPerMultiprocessor;
  int regsPerMultiprocessor, managedMemory, isMultiGpuBoard, multiGpuBoardGroupID, hostNativeAtomicSupported;
  SIMULATED_CUDA12(int singleToDoublePrecisionPerfRatio;)
  int pageableMemoryAccess, concurrentManagedAccess, computePreemptionSupported, canUseHostPointerForRegisteredMem;
  int cooperativeLaunch;
  SIMULATED_CUDA12(int cooperativeMultiDeviceLaunch;)
  size_t sharedMemPerBlockOptin;
  int pageableMemoryAccessUsesHostPageTables, directManagedMemAccessFromHost, maxBlocksPerMultiProcessor;
  int accessPolicyMaxWindowSize;
  size_t reservedSharedMemPerBlock;
  int hostRegisterSupported, sparseCudaArraySupported, hostRegisterReadOnlySupported, timelineSemaphoreInteropSupported;
  int memoryPoolsSupported, gpuDirectRDMASupported;
  unsigned gpuDirectRDMAFlushWritesOptions;
  int gpuDirectRDMAWritesOrdering;
  unsigned memoryPoolSupportedHandleTypes;
  int deferredMappingCudaArraySupported, ipcEventSupported, clusterLaunch, unifiedFunctionPointers;
  int deviceNumaConfig, deviceNumaId, mpsEnabled, hostNumaId;
  unsigned gpuPciDeviceID, gpuPciSubsystemID;
  int hostNumaMultinodeIpcSupported, reserved[56];
};
#undef SIMULATED_CUDA12
