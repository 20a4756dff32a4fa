// libcublas: handles, and products of matrices of floats on the CPU in the order of the handle's stream.
//
// torch's own products do not come here as long as the library of aten kernels is loaded, which computes
// them with the CPU's libraries. These loops are plain and slow; they serve programs that call cuBLAS.
#include "../abi/cuda.h"
#include "../runtime/bridge.h"

namespace {

struct Handle {
  cudaStream_t stream = nullptr;
  int math = 0, pointer_mode = 0, multiprocessors = 0;
};

// A batch of column-major matrices.
template <class T>
struct Matrix {
  T* data;
  int leading;
  long long stride;
  T& at(long long batch, int row, int column) const {
    return data[batch * stride + static_cast<long long>(column) * leading + row];
  }
};

template <class T>
int multiply(Handle* handle, bool transpose_a, bool transpose_b, int m, int n, int k, T alpha, Matrix<const T> a,
             Matrix<const T> b, T beta, Matrix<T> c, int batches) {
  auto run = [=] {
    for (int batch = 0; batch < batches; ++batch)
      for (int column = 0; column < n; ++column)
        for (int row = 0; row < m; ++row) {
          T sum = 0;
          for (int i = 0; i < k; ++i)
            sum += (transpose_a ? a.at(batch, i, row) : a.at(batch, row, i)) *
                   (transpose_b ? b.at(batch, column, i) : b.at(batch, i, column));
          T& out = c.at(batch, row, column);
          out = alpha * sum + (beta == T(0) ? T(0) : beta * out);  // with a zero beta, the output is not read
        }
  };
  return simulated::enqueue(handle->stream, true, {nullptr, run}) == cudaSuccess
             ? 0
             : 13 /* CUBLAS_STATUS_EXECUTION_FAILED */;
}

}  // namespace

CUDA_API int cublasCreate_v2(Handle** out) {
  *out = new Handle;
  return 0;
}
CUDA_API int cublasDestroy_v2(Handle* handle) {
  delete handle;
  return 0;
}
CUDA_API int cublasSetStream_v2(Handle* handle, cudaStream_t stream) {
  handle->stream = stream;
  return 0;
}
CUDA_API int cublasGetStream_v2(Handle* handle, cudaStream_t* out) {
  *out = handle->stream;
  return 0;
}
CUDA_API int cublasSetWorkspace_v2(Handle*, void*, size_t) { return 0; }
CUDA_API int cublasSetSmCountTarget(Handle* handle, int count) {
  handle->multiprocessors = count;
  return 0;
}
CUDA_API int cublasGetSmCountTarget(Handle* handle, int* out) {
  *out = handle->multiprocessors;
  return 0;
}
CUDA_API int cublasGetMathMode(Handle* handle, int* out) {
  *out = handle->math;
  return 0;
}
CUDA_API int cublasSetMathMode(Handle* handle, int mode) {
  handle->math = mode;
  return 0;
}
CUDA_API int cublasGetPointerMode_v2(Handle* handle, int* out) {
  *out = handle->pointer_mode;
  return 0;
}
CUDA_API int cublasSetPointerMode_v2(Handle* handle, int mode) {
  handle->pointer_mode = mode;
  return 0;
}
CUDA_API int cublasSgemm_v2(Handle* handle, int ta, int tb, int m, int n, int k, const float* alpha, const float* a,
                            int lda, const float* b, int ldb, const float* beta, float* c, int ldc) {
  return multiply<float>(handle, ta, tb, m, n, k, *alpha, {a, lda, 0}, {b, ldb, 0}, *beta, {c, ldc, 0}, 1);
}
CUDA_API int cublasDgemm_v2(Handle* handle, int ta, int tb, int m, int n, int k, const double* alpha, const double* a,
                            int lda, const double* b, int ldb, const double* beta, double* c, int ldc) {
  return multiply<double>(handle, ta, tb, m, n, k, *alpha, {a, lda, 0}, {b, ldb, 0}, *beta, {c, ldc, 0}, 1);
}
CUDA_API int cublasSgemmStridedBatched(Handle* handle, int ta, int tb, int m, int n, int k, const float* alpha,
                                       const float* a, int lda, long long sa, const float* b, int ldb, long long sb,
                                       const float* beta, float* c, int ldc, long long sc, int batches) {
  return multiply<float>(handle, ta, tb, m, n, k, *alpha, {a, lda, sa}, {b, ldb, sb}, *beta, {c, ldc, sc}, batches);
}
CUDA_API int cublasDgemmStridedBatched(Handle* handle, int ta, int tb, int m, int n, int k, const double* alpha,
                                       const double* a, int lda, long long sa, const double* b, int ldb, long long sb,
                                       const double* beta, double* c, int ldc, long long sc, int batches) {
  return multiply<double>(handle, ta, tb, m, n, k, *alpha, {a, lda, sa}, {b, ldb, sb}, *beta, {c, ldc, sc}, batches);
}
