// Kernels of torch's libraries. Their code is for a GPU and cannot run here: what torch computes is
// computed by the library of aten kernels instead (see aten/), and a kernel that is launched all the
// same leaves its output as it was.
#pragma once
#include "../abi/cuda.h"

namespace simulated {

// Loads the library that computes aten ops on the CPU, if there is one and if torch is in this process.
void load_aten_kernels();

}  // namespace simulated
