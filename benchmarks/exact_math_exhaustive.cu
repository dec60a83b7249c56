// core/exact_math.h and core/selection_key.h over all 2^32 inputs: the largest errors against
// float64 on the CPU, and whether CPU and GPU give the same bits. In the repository's root:
//
//   nvcc -O3 -std=c++17 --fmad=false -prec-div=true -prec-sqrt=true -ftz=false -I. -Iffi
//   -gencode=arch=compute_90,code=sm_90 -cudart static -Xcompiler
//   "-O3,-ffp-contract=off,-fno-math-errno,-fno-trapping-math" benchmarks/exact_math_exhaustive.cu
//   -o exact_math_exhaustive
//
//   exact_math_exhaustive [--bits-only] [--stride N] [--threads N] [--baseline]
//
// --bits-only leaves the errors out, which take most of the time; --stride takes every Nth input;
// --baseline runs the CPU copy without AVX2 and FMA. Without a GPU only the CPU's part is printed.
// The exit status is 1 if CPU and GPU differ, or a result is of the wrong class.
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "core/exact_math.h"
#include "core/numerics.h"
#include "core/selection_key.h"
#include "tests/cpp/exact_math_oracle.h"

namespace jax_moe_det {
namespace {

using testing::Checksum;

// The largest errors of one function over a part of the inputs.
using Errors = testing::Errors<double>;

struct SelectionKeyFunction {
  static constexpr const char* kName = "SelectionKey";
  MOE_HOST_DEVICE static float Apply(float x) { return BitCast<float>(SelectionKey(x)); }
};

struct Options {
  bool bits_only = false;
  bool baseline = false;
  uint32_t stride = 1;
  int threads = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
};

// Inputs are i * stride for i below this.
uint64_t NumInputs(uint32_t stride) { return ((uint64_t{1} << 32) + stride - 1) / stride; }

constexpr int kBlock = 2048;

template <class Function>
MOE_HOST_DEVICE void ApplyBlock(uint32_t first, uint32_t stride, float* __restrict results,
                                Checksum* checksum) {
  for (uint32_t i = 0; i < kBlock; ++i) {
    results[i] = Function::Apply(BitCast<float>(first + i * stride));
  }
  Checksum sum = *checksum;
  for (uint32_t i = 0; i < kBlock; ++i) {
    sum.Add(first + i * stride, BitCast<uint32_t>(results[i]));
  }
  *checksum = sum;
}

using BlockFn = void (*)(uint32_t, uint32_t, float*, Checksum*);

template <class Function>
void ApplyBlockBaseline(uint32_t first, uint32_t stride, float* results, Checksum* checksum) {
  ApplyBlock<Function>(first, stride, results, checksum);
}

#if defined(__x86_64__)
template <class Function>
__attribute__((target("avx2,fma"))) void ApplyBlockAvx2(uint32_t first, uint32_t stride,
                                                        float* results, Checksum* checksum) {
  ApplyBlock<Function>(first, stride, results, checksum);
}
#endif

template <class Function>
BlockFn SelectBlock(bool baseline) {
#if defined(__x86_64__)
  if (!baseline && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    return ApplyBlockAvx2<Function>;
  }
#endif
  return ApplyBlockBaseline<Function>;
}

template <class Function>
void AddErrors(uint32_t first, uint32_t stride, int n, const float* results, Errors* errors) {
  for (int i = 0; i < n; ++i) {
    const float x = BitCast<float>(first + static_cast<uint32_t>(i) * stride);
    errors->Add(x, results[i], Function::template Define<double>(x));
  }
}

template <>
void AddErrors<SelectionKeyFunction>(uint32_t, uint32_t, int, const float*, Errors*) {}

// Threads take alternate blocks, since the cost of an oracle depends on the exponent.
template <class Function>
void RunOnCpu(const Options& options, Checksum* checksum, Errors* errors) {
  const uint64_t n = NumInputs(options.stride);
  const BlockFn apply = SelectBlock<Function>(options.baseline);
  std::vector<Checksum> checksums(options.threads);
  std::vector<Errors> all_errors(options.threads);
  std::vector<std::thread> threads;
  for (int t = 0; t < options.threads; ++t) {
    threads.emplace_back([&, t] {
      float results[kBlock];
      Checksum sum;
      Errors worst;
      for (uint64_t i = static_cast<uint64_t>(t) * kBlock; i < n;
           i += static_cast<uint64_t>(options.threads) * kBlock) {
        const uint32_t first = static_cast<uint32_t>(i * options.stride);
        const int valid = static_cast<int>(std::min<uint64_t>(kBlock, n - i));
        if (valid == kBlock) {
          apply(first, options.stride, results, &sum);
        } else {
          for (int j = 0; j < valid; ++j) {
            const uint32_t bits = first + static_cast<uint32_t>(j) * options.stride;
            results[j] = Function::Apply(BitCast<float>(bits));
            sum.Add(bits, BitCast<uint32_t>(results[j]));
          }
        }
        if (!options.bits_only) {
          AddErrors<Function>(first, options.stride, valid, results, &worst);
        }
      }
      checksums[t] = sum;
      all_errors[t] = worst;
    });
  }
  for (int t = 0; t < options.threads; ++t) {
    threads[t].join();
    checksum->Add(checksums[t]);
    errors->Add(all_errors[t]);
  }
}

template <class Function>
__global__ void ChecksumKernel(uint64_t n, uint32_t stride, uint32_t* sums) {
  Checksum sum;
  const uint64_t step = static_cast<uint64_t>(gridDim.x) * blockDim.x;
  for (uint64_t i = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < n;
       i += step) {
    const uint32_t bits = static_cast<uint32_t>(i) * stride;
    sum.Add(bits, BitCast<uint32_t>(Function::Apply(BitCast<float>(bits))));
  }
  atomicAdd(&sums[0], sum.first);
  atomicAdd(&sums[1], sum.second);
}

void Require(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "exact_math_exhaustive: %s\n", cudaGetErrorString(error));
  std::exit(2);
}

template <class Function>
Checksum RunOnGpu(const Options& options) {
  uint32_t* sums;
  uint32_t host[2];
  Require(cudaMalloc(&sums, sizeof(host)));
  Require(cudaMemset(sums, 0, sizeof(host)));
  ChecksumKernel<Function><<<2048, 256>>>(NumInputs(options.stride), options.stride, sums);
  Require(cudaGetLastError());
  Require(cudaMemcpy(host, sums, sizeof(host), cudaMemcpyDeviceToHost));
  Require(cudaFree(sums));
  return {host[0], host[1]};
}

double Seconds() {
  using Clock = std::chrono::steady_clock;
  return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
}

template <class Function>
bool Run(const Options& options, bool has_gpu) {
  Checksum cpu;
  Errors errors;
  const double start = Seconds();
  RunOnCpu<Function>(options, &cpu, &errors);
  const double cpu_seconds = Seconds() - start;
  bool good = errors.wrong_class == 0;
  std::printf("%-18s cpu %016llx (%.1f s)", Function::kName,
              static_cast<unsigned long long>(cpu.Value()), cpu_seconds);
  if (has_gpu) {
    const double gpu_start = Seconds();
    const Checksum gpu = RunOnGpu<Function>(options);
    const bool same = gpu.Value() == cpu.Value();
    std::printf(" gpu %016llx (%.2f s) %s", static_cast<unsigned long long>(gpu.Value()),
                Seconds() - gpu_start, same ? "SAME" : "DIFFERENT");
    good = good && same;
  }
  std::printf("\n");
  if (!options.bits_only && errors.relative > 0) {
    std::printf(
        "%-18s relative %.3g at %.9g (%a), ulp %.3f at %.9g; absolute %.3g; below 2^-126: "
        "absolute %.3g (%.2f of 2^-149); wrong class %lld\n",
        "", errors.relative, static_cast<double>(errors.relative_at),
        static_cast<double>(errors.relative_at), errors.ulps, static_cast<double>(errors.ulps_at),
        errors.absolute, errors.underflow, errors.underflow * 0x1p149,
        static_cast<long long>(errors.wrong_class));
  }
  std::fflush(stdout);
  return good;
}

Options ParseOptions(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const bool has_value = i + 1 < argc && std::atoi(argv[i + 1]) > 0;
    if (std::strcmp(argv[i], "--bits-only") == 0) {
      options.bits_only = true;
    } else if (std::strcmp(argv[i], "--baseline") == 0) {
      options.baseline = true;
    } else if (std::strcmp(argv[i], "--stride") == 0 && has_value) {
      options.stride = static_cast<uint32_t>(std::atoi(argv[++i]));
    } else if (std::strcmp(argv[i], "--threads") == 0 && has_value) {
      options.threads = std::atoi(argv[++i]);
    } else {
      std::fprintf(stderr, "usage: %s [--bits-only] [--stride N] [--threads N] [--baseline]\n",
                   argv[0]);
      std::exit(2);
    }
  }
  return options;
}

int Main(int argc, char** argv) {
  const Options options = ParseOptions(argc, argv);
  int devices = 0;
  const bool has_gpu = cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0;
  std::printf("%llu inputs (stride %u), %d threads%s, %s\n",
              static_cast<unsigned long long>(NumInputs(options.stride)), options.stride,
              options.threads, options.baseline ? " (baseline copy)" : "",
              has_gpu ? "with a GPU" : "no GPU here");
  bool good = true;
  good &= Run<testing::ExpFunction>(options, has_gpu);
  good &= Run<testing::ExpNonPositiveFunction>(options, has_gpu);
  good &= Run<testing::Log1pFunction>(options, has_gpu);
  good &= Run<testing::SigmoidFunction>(options, has_gpu);
  good &= Run<testing::SigmoidSlopeFunction>(options, has_gpu);
  good &= Run<testing::SqrtSoftplusFunction>(options, has_gpu);
  good &= Run<testing::SqrtSoftplusSlopeFunction>(options, has_gpu);
  good &= Run<SelectionKeyFunction>(options, has_gpu);
  return good ? 0 : 1;
}

}  // namespace
}  // namespace jax_moe_det

int main(int argc, char** argv) { return jax_moe_det::Main(argc, argv); }
