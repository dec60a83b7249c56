// The order in which a column of T values is summed. A function of the shape alone: no launch
// shape, thread count or device enters.
//
//   slots   rows are cut into at most kSlots runs of RowsPerSlot(T) consecutive rows;
//   lanes   row r of slot s belongs to lane (r - s * R) mod NumLanes(columns);
//   chunks  a lane adds kChunk of its rows in float32 from +0, ascending, then adds that chunk to
//           a float64 lane sum, and rounds the lane sum once to float32;
//   fold    lanes fold in float32 by halves: lane i takes lane i + h, for h = L/2, L/4, ..., 1.
//
// A masked or missing row adds +0 in its place. A sum that starts at +0 is never -0, so adding +0
// changes nothing: absent rows, lanes and columns may be skipped. What was measured to choose
// these numbers is in benchmarks/results/README.md.
#ifndef JAX_MOE_DET_FFI_CORE_SLOTS_H_
#define JAX_MOE_DET_FFI_CORE_SLOTS_H_

#include <cstdint>

#include "core/numerics.h"

namespace jax_moe_det {

constexpr int kSlots = 256;
constexpr int kChunk = 4;
constexpr int kMaxLanes = 128;
constexpr int kDotLanes = 256;  // a dot over columns adds column e to lane e mod kDotLanes

MOE_HOST_DEVICE int64_t RowsPerSlot(int64_t num_tokens) {
  return (num_tokens + kSlots - 1) / kSlots;
}

MOE_HOST_DEVICE int NumLanes(int64_t num_columns) {
  return num_columns > 128 ? 16 : num_columns > 32 ? 32 : num_columns > 16 ? 64 : kMaxLanes;
}

// Sum of n = 2^k values over a tree of adjacent pairs (strides 1, 2, 4, ...); overwrites them.
template <class Float>
MOE_HOST_DEVICE Float FoldAdjacentPairs(Float* values, int n) {
  for (int stride = 1; stride < n; stride *= 2) {
    for (int i = 0; i + stride < n; i += 2 * stride) values[i] = values[i] + values[i + stride];
  }
  return values[0];
}

}  // namespace jax_moe_det

#endif  // JAX_MOE_DET_FFI_CORE_SLOTS_H_
