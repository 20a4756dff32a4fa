// Reductions of NCCL's types on the CPU.
#pragma once
#include <cstddef>
#include <vector>

#include "../abi/nccl.h"

namespace simulated {

// 0 for a type that does not exist.
size_t size_of(ncclDataType_t type);
double scalar(ncclDataType_t type, const void* value);

// Combines the inputs in the order of the ranks, so that all ranks get the same bits. `scale` is what an
// operator multiplies each value with before; `op` is one of NCCL's own.
void reduce(char* out, const std::vector<const char*>& in, size_t count, ncclDataType_t type, int op,
            const double* scale);

}  // namespace simulated
