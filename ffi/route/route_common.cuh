// Which calls of the router step have kernels of their own, in which the compiler leaves out what
// they do not need: a kernel for every call has half as many instructions again.
#ifndef JAX_MOE_DET_FFI_ROUTE_ROUTE_COMMON_CUH_
#define JAX_MOE_DET_FFI_ROUTE_ROUTE_COMMON_CUH_

#include <type_traits>

#include "core/numerics.h"
#include "topk_router/topk_router.h"
#include "topk_router/topk_router_row.cuh"

namespace jax_moe_det {

// As the score kind that a kernel is compiled for: any, and any call.
constexpr int kAnyKind = -1;

constexpr int kSoftmaxAfterTopk = static_cast<int>(ScoreKind::kSoftmaxAfterTopk);
constexpr int kSoftmax = static_cast<int>(ScoreKind::kSoftmax);
constexpr int kSigmoid = static_cast<int>(ScoreKind::kSigmoid);

// Float16 logits are rare, and compiling takes time.
template <class Logit>
constexpr bool kHasCommon = !std::is_same_v<Logit, Float16>;

// Rows fill their columns and may be read in vectors, 32 bits count all choices, and only the
// softmax kinds have a z loss.
template <class Columns>
bool IsCommonRow(int64_t num_tokens, int num_experts, bool vector, ScoreKind kind, bool has_z) {
  constexpr int64_t kMostTokens = (1 << 30) / kWarp;
  return vector && num_experts == Columns::kPitch && num_tokens <= kMostTokens &&
         kind != ScoreKind::kSqrtSoftplus && (IsSoftmax(kind) || !has_z);
}

}  // namespace jax_moe_det

#endif  // JAX_MOE_DET_FFI_ROUTE_ROUTE_COMMON_CUH_
