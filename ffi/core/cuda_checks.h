// What CUDA handlers answer.
#ifndef JAX_MOE_DET_FFI_CORE_CUDA_CHECKS_H_
#define JAX_MOE_DET_FFI_CORE_CUDA_CHECKS_H_

#include <cuda_runtime_api.h>

#include <string>

#include "xla/ffi/api/ffi.h"

namespace jax_moe_det {

// The caller's faults were found before any launch: what is left is CUDA's.
inline xla::ffi::Error FromCuda(const char* op, cudaError_t status) {
  if (status == cudaSuccess) return xla::ffi::Error::Success();
  return xla::ffi::Error::Internal(std::string(op) + ": CUDA: " + cudaGetErrorString(status));
}

}  // namespace jax_moe_det

#endif  // JAX_MOE_DET_FFI_CORE_CUDA_CHECKS_H_
