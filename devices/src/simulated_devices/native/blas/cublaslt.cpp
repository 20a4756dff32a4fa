// libcublasLt: it takes every description of a product and knows no algorithm for any, whereupon torch
// falls back to cuBLAS.
#include "../abi/cuda.h"

CUDA_API int cublasLtCreate(void** out) {
  static char handle;
  *out = &handle;
  return 0;
}
CUDA_API int cublasLtDestroy(void*) { return 0; }
CUDA_API size_t cublasLtGetVersion() { return SIMULATED_CUDA_MAJOR * 10000 + 100; }

// Descriptions are written into structures of the caller's, or are handles that nobody looks into.
static char description;
CUDA_API int cublasLtMatmulDescCreate(void** out, int, int) {
  *out = &description;
  return 0;
}
CUDA_API int cublasLtMatmulDescDestroy(void*) { return 0; }
CUDA_API int cublasLtMatmulDescSetAttribute(void*, int, const void*, size_t) { return 0; }
CUDA_API int cublasLtMatrixLayoutCreate(void** out, int, unsigned long, unsigned long, long) {
  *out = &description;
  return 0;
}
CUDA_API int cublasLtMatrixLayoutDestroy(void*) { return 0; }
CUDA_API int cublasLtMatrixLayoutSetAttribute(void*, int, const void*, size_t) { return 0; }
CUDA_API int cublasLtMatmulPreferenceCreate(void** out) {
  *out = &description;
  return 0;
}
CUDA_API int cublasLtMatmulPreferenceDestroy(void*) { return 0; }
CUDA_API int cublasLtMatmulPreferenceSetAttribute(void*, int, const void*, size_t) { return 0; }
CUDA_API int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void*, int* found) {
  *found = 0;
  return 0;
}
