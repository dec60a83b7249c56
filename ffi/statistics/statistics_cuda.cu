// CUDA kernels of the statistics: a block per batch item, a thread per lane.
#include <cuda_runtime.h>

#include <cstdint>

#include "statistics/statistics.h"
#include "statistics/statistics_launch.h"

namespace jax_moe_det {
namespace {

constexpr unsigned kMaxGrid = 0x7fffffff;

// Folds the lanes' sums as FoldLoad does; every thread has the result.
template <class T>
__device__ LoadSums<CountSum<T>> BlockLoad(const T* counts, int64_t num_experts) {
  __shared__ LoadSums<CountSum<T>> lanes[kStatisticsLanes];
  const int lane = threadIdx.x;
  if (lane < num_experts) lanes[lane] = LaneLoad(counts, num_experts, lane);
  for (int used = kStatisticsLanes / 2; used > 0; used /= 2) {
    __syncthreads();
    if (lane < used && lane + used < num_experts) {
      lanes[lane] = Join(lanes[lane], lanes[lane + used]);
    }
  }
  __syncthreads();
  const LoadSums<CountSum<T>> sums = lanes[0];
  __syncthreads();  // read by all before the next item writes
  return sums;
}

// As FoldEntropy.
template <class T>
__device__ double BlockEntropy(const T* counts, int64_t num_experts, double total) {
  __shared__ double lanes[kStatisticsLanes];
  const int lane = threadIdx.x;
  lanes[lane] = LaneEntropy(counts, num_experts, lane, total);
  for (int used = kStatisticsLanes / 2; used > 0; used /= 2) {
    __syncthreads();
    if (lane < used) lanes[lane] = lanes[lane] + lanes[lane + used];
  }
  __syncthreads();
  const double entropy = lanes[0];
  __syncthreads();
  return entropy;
}

template <class T>
__global__ void __launch_bounds__(kStatisticsLanes) RoutingStatsKernel(RoutingStatsOp op) {
  const int64_t n = op.num_experts;
  for (int64_t item = blockIdx.x; item < op.batch; item += gridDim.x) {
    const T* counts = static_cast<const T*>(op.counts.data) + (op.counts.batched ? item * n : 0);
    const auto sums = BlockLoad(counts, n);
    const double total = ToDouble(sums.total);
    const double entropy = BlockEntropy(counts, n, total);
    for (int64_t e = threadIdx.x; e < n; e += kStatisticsLanes) {
      op.load[item * n + e] = Load(counts[e], total);
    }
    if (threadIdx.x == 0) {
      Summarize(sums, n, entropy, op.summary + item * 4);
      op.dead[item] = sums.dead;
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kStatisticsLanes) ExpertBiasUpdateKernel(ExpertBiasUpdate op) {
  const int64_t n = op.num_experts;
  for (int64_t item = blockIdx.x; item < op.batch; item += gridDim.x) {
    const T* counts = static_cast<const T*>(op.counts.data) + (op.counts.batched ? item * n : 0);
    const float* bias = op.bias + (op.bias_batched ? item * n : 0);
    const float rate = op.rate[op.rate_batched ? item : 0];
    const auto total = BlockLoad(counts, n).total;
    for (int64_t e = threadIdx.x; e < n; e += kStatisticsLanes) {
      op.out[item * n + e] = UpdatedBias(bias[e], counts[e], total, n, rate);
    }
  }
}

template <class Op>
cudaError_t Launch(cudaStream_t stream, const Op& op, void (*int32)(Op), void (*int64)(Op),
                   void (*float32)(Op)) {
  if (op.batch == 0) return cudaSuccess;
  void (*kernel)(Op) = op.counts.type == CountType::kInt32   ? int32
                       : op.counts.type == CountType::kInt64 ? int64
                                                             : float32;
  const int64_t grid = op.batch < kMaxGrid ? op.batch : kMaxGrid;
  kernel<<<static_cast<unsigned>(grid), kStatisticsLanes, 0, stream>>>(op);
  return cudaGetLastError();
}

}  // namespace

cudaError_t LaunchRoutingStats(cudaStream_t stream, const RoutingStatsOp& op) {
  return Launch(stream, op, RoutingStatsKernel<int32_t>, RoutingStatsKernel<int64_t>,
                RoutingStatsKernel<float>);
}

cudaError_t LaunchExpertBiasUpdate(cudaStream_t stream, const ExpertBiasUpdate& op) {
  return Launch(stream, op, ExpertBiasUpdateKernel<int32_t>, ExpertBiasUpdateKernel<int64_t>,
                ExpertBiasUpdateKernel<float>);
}

}  // namespace jax_moe_det
