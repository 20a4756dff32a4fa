// The part of NCCL's binary interface that these libraries implement, from NCCL's documentation.
#pragma once
#include <climits>

#include "cuda.h"

#ifndef SIMULATED_NCCL_VERSION
#define SIMULATED_NCCL_VERSION 23007
#endif

struct ncclComm;
using ncclComm_t = ncclComm*;
struct ncclUniqueId {
  char internal[128];
};

enum ncclResult_t : int {
  ncclSuccess,
  ncclUnhandledCudaError,
  ncclSystemError,
  ncclInternalError,
  ncclInvalidArgument,
  ncclInvalidUsage,
  ncclRemoteError,
  ncclInProgress,
  ncclTimeout
};
enum ncclDataType_t : int {
  ncclInt8,
  ncclUint8,
  ncclInt32,
  ncclUint32,
  ncclInt64,
  ncclUint64,
  ncclFloat16,
  ncclFloat32,
  ncclFloat64,
  ncclBfloat16,
  ncclFloat8e4m3,
  ncclFloat8e5m2,
  ncclNumTypes
};
using ncclRedOp_t = int;  // larger than the enumeration: operators made by the user are numbered after it
enum : int { ncclSum, ncclProd, ncclMax, ncclMin, ncclAvg, ncclNumOps };
enum ncclScalarResidence_t : int { ncclScalarDevice, ncclScalarHostImmediate };

constexpr int NCCL_SPLIT_NOCOLOR = -1, NCCL_SHRINK_ABORT = 1;
constexpr int NCCL_CONFIG_UNDEF_INT = INT_MIN;
constexpr unsigned NCCL_API_MAGIC = 0xcafebeef;

// The beginning of the structure, which no version of NCCL has changed. Later fields are not read.
struct ncclConfig_t {
  size_t size;
  unsigned magic, version;
  int blocking;
};
