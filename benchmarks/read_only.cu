// A kernel that only reads: the floor that the loss is measured against, timed in the same run.
#include <cuda_runtime.h>

#include <cstdint>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

// 16 bytes a thread, eight loads in flight. The condition is never true of random data; it keeps
// the loads alive.
__global__ void ReadOnlyKernel(const uint4* data, int64_t n, float* out) {
  constexpr int kUnroll = 8;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  unsigned seen = 0;
  for (; i + (kUnroll - 1) * stride < n; i += kUnroll * stride) {
    uint4 loaded[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) loaded[u] = __ldcs(data + i + u * stride);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      seen ^= loaded[u].x ^ loaded[u].y ^ loaded[u].z ^ loaded[u].w;
    }
  }
  for (; i < n; i += stride) {
    const uint4 last = __ldcs(data + i);
    seen ^= last.x ^ last.y ^ last.z ^ last.w;
  }
  if (seen == 0x12345679u) *out = 1.0f;
}

static ffi::Error ReadOnly(cudaStream_t stream, ffi::AnyBuffer data,
                           ffi::Result<ffi::BufferR0<ffi::F32>> out) {
  constexpr int kThreads = 256;
  constexpr int kMaxBlocks = 132 * 4;
  const int64_t n = static_cast<int64_t>(data.size_bytes()) / 16;
  const int64_t wanted = (n + kThreads * 8 - 1) / (kThreads * 8);
  const int blocks = static_cast<int>(wanted < kMaxBlocks ? wanted : kMaxBlocks);
  ReadOnlyKernel<<<blocks, kThreads, 0, stream>>>(static_cast<const uint4*>(data.untyped_data()), n,
                                                  out->typed_data());
  if (cudaGetLastError() != cudaSuccess) return ffi::Error::Internal("read_only: launch failed");
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(ReadOnlyCuda, ReadOnly,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::BufferR0<ffi::F32>>(),
                              {ffi::Traits::kCmdBufferCompatible});
