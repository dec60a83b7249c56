// The fold of a slot's lanes inside a thread (see slots.h).
#ifndef JAX_MOE_DET_FFI_CORE_FOLD_HALVES_CUH_
#define JAX_MOE_DET_FFI_CORE_FOLD_HALVES_CUH_

#include <cuda_runtime.h>

namespace jax_moe_det {

// Sum of leaves kFirst, kFirst + kStep, ... below kCount, folded by halves: the last addition joins
// the even and the odd leaves. Depth first, so that only log2(kCount) sums are alive.
template <int kCount, int kVec, int kFirst = 0, int kStep = 1, class Leaf>
__device__ __forceinline__ void FoldHalves(const Leaf& leaf, float* sum) {
  if constexpr (kStep == kCount) {
    leaf(kFirst, sum);
  } else {
    float other[kVec];
    FoldHalves<kCount, kVec, kFirst, 2 * kStep>(leaf, sum);
    FoldHalves<kCount, kVec, kFirst + kStep, 2 * kStep>(leaf, other);
#pragma unroll
    for (int c = 0; c < kVec; ++c) sum[c] = sum[c] + other[c];
  }
}

}  // namespace jax_moe_det

#endif  // JAX_MOE_DET_FFI_CORE_FOLD_HALVES_CUH_
