// What the standalone CUDA test programs share.
#ifndef JAX_MOE_DET_TESTS_CPP_CUDA_TEST_H_
#define JAX_MOE_DET_TESTS_CPP_CUDA_TEST_H_

#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "core/numerics.h"

namespace jax_moe_det {

inline void Check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::printf("FAILED: %s: %s\n", what, cudaGetErrorString(status));
  std::exit(1);
}

// Device memory of the right size and one byte (there are empty arrays): an access past it is seen.
template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(size_t n) : n_(n) {
    Check(cudaMalloc(&data_, n * sizeof(T) + 1), "cudaMalloc");
  }
  explicit DeviceArray(const std::vector<T>& host) : DeviceArray(host.size()) {
    Check(cudaMemcpy(data_, host.data(), n_ * sizeof(T), cudaMemcpyHostToDevice), "upload");
  }
  ~DeviceArray() { cudaFree(data_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  T* data() { return static_cast<T*>(data_); }
  std::vector<T> Download() {
    std::vector<T> host(n_);
    Check(cudaMemcpy(host.data(), data_, n_ * sizeof(T), cudaMemcpyDeviceToHost), "download");
    return host;
  }

 private:
  void* data_ = nullptr;
  size_t n_;
};

inline uint32_t Next(uint32_t* state) {
  *state = *state * 1664525u + 1013904223u;
  return *state >> 8;
}

inline void Set(float value, float* out) { *out = value; }
template <class Half>
void Set(float value, Half* out) {
  RoundTo(static_cast<double>(value), out);
}

template <class Score>
ScoreType TypeOf();
template <>
inline ScoreType TypeOf<float>() {
  return ScoreType::kFloat32;
}
template <>
inline ScoreType TypeOf<BFloat16>() {
  return ScoreType::kBFloat16;
}
template <>
inline ScoreType TypeOf<Float16>() {
  return ScoreType::kFloat16;
}

}  // namespace jax_moe_det

#endif  // JAX_MOE_DET_TESTS_CPP_CUDA_TEST_H_
