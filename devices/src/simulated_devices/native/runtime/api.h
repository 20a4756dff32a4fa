// What the files that implement the runtime's functions share.
#pragma once
#include "../abi/cuda.h"
#include "capture.h"
#include "engine.h"

namespace simulated {

// Returns from a function of the runtime if the device has failed, or with the first error of a list.
#define RETURN_STANDING_ERROR()                                              \
  do {                                                                       \
    if (cudaError_t standing = standing_error()) return set_error(standing); \
  } while (0)
#define RETURN_ON_ERROR(call)                                \
  do {                                                       \
    if (cudaError_t error = (call)) return set_error(error); \
  } while (0)
// Returns if a capture that goes on forbids the call, which makes that capture invalid.
#define RETURN_IF_CAPTURED() RETURN_ON_ERROR(check_unsafe_call(__func__))

// Defines `name` as a stream that the handle names, or returns from the function.
#define STREAM_OR_RETURN(name, handle)       \
  StreamPtr name = Engine::get().of(handle); \
  if (!name) return set_error(cudaErrorInvalidResourceHandle)

cudaError_t copy(void* destination, const void* source, size_t size, cudaStream_t stream, bool synchronous);

}  // namespace simulated
