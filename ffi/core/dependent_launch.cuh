// Programmatic dependent launch: a kernel becomes resident while the one before it on the stream
// still runs, and waits for its results by itself. Code of compute capability 9.0 and up.
#ifndef JAX_MOE_DET_FFI_CORE_DEPENDENT_LAUNCH_CUH_
#define JAX_MOE_DET_FFI_CORE_DEPENDENT_LAUNCH_CUH_

#include <cuda_runtime.h>

namespace jax_moe_det {

// The next kernel may start; what it reads it still waits for.
__device__ __forceinline__ void LetDependentsStart() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Everything of the kernels before is written.
__device__ __forceinline__ void WaitForPrecedingKernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Launches `kernel` as a dependent of the kernel before it. Code for older devices knows no wait:
// it starts when the kernel before has ended.
template <class... Parameters, class... Arguments>
cudaError_t LaunchDependent(cudaStream_t stream, void (*kernel)(Parameters...), dim3 grid,
                            dim3 block, size_t shared, const Arguments&... arguments) {
  cudaFuncAttributes code;
  const cudaError_t status = cudaFuncGetAttributes(&code, kernel);
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = code.ptxVersion >= 90 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace jax_moe_det

#endif  // JAX_MOE_DET_FFI_CORE_DEPENDENT_LAUNCH_CUH_
