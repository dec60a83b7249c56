// The one total order by which experts, groups and capacity rank: higher value first, then lower
// index. Values are compared as integers, which is exact and has no special cases.
#ifndef JAX_MOE_DET_FFI_CORE_SELECTION_KEY_H_
#define JAX_MOE_DET_FFI_CORE_SELECTION_KEY_H_

#include <cstdint>

#include "core/numerics.h"

namespace jax_moe_det {

// The key of what may not be chosen. No value has it: the lowest, -infinity, has 0x007fffff.
constexpr uint32_t kExcludedKey = 0;

// Orders as the values do, with -0 below +0 and every NaN equal and above +infinity: the float32's
// integer, with the sign bit flipped for positive values and every bit for negative ones.
MOE_HOST_DEVICE uint32_t SelectionKey(float value) {
  const uint32_t bits = BitCast<uint32_t>(CanonicalNan(value));
  return bits ^ ((bits >> 31) != 0 ? 0xffffffffu : 0x80000000u);
}

// SelectionKey's inverse, for keys of values; a NaN comes back canonical.
MOE_HOST_DEVICE float SelectionValue(uint32_t key) {
  return BitCast<float>(key ^ ((key >> 31) != 0 ? 0x80000000u : 0xffffffffu));
}

MOE_HOST_DEVICE bool RanksBefore(uint32_t key, int32_t index, uint32_t other_key,
                                 int32_t other_index) {
  return key > other_key || (key == other_key && index < other_index);
}

// Key and index (not negative) in one integer: RanksBefore is its "greater than".
MOE_HOST_DEVICE uint64_t RankedKey(uint32_t key, int32_t index) {
  return static_cast<uint64_t>(key) << 32 | (0xffffffffu - static_cast<uint32_t>(index));
}

}  // namespace jax_moe_det

#endif  // JAX_MOE_DET_FFI_CORE_SELECTION_KEY_H_
