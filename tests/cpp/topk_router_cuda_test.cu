// Every kernel of the router against the header on the host, bit for bit, without Python or XLA:
// the program for compute-sanitizer. Needs a GPU:
//
//   nvcc -O2 -std=c++17 --fmad=false -arch=native -Xcompiler -ffp-contract=off -Iffi
//     tests/cpp/topk_router_cuda_test.cu ffi/topk_router/topk_router_*_cuda.cu
//     -o topk_router_cuda_test
//   ./topk_router_cuda_test
//   compute-sanitizer --tool memcheck ./topk_router_cuda_test 9  # every ninth case: it is slow
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "cuda_test.h"
#include "topk_router/topk_router.h"
#include "topk_router/topk_router_launch.h"

namespace {

using namespace jax_moe_det;  // NOLINT: a test program

struct Case {
  int num_tokens, num_experts, topk, num_groups, group_topk, group_values;
  ScoreKind kind;
  bool aux_scores, bitmap, bias, masked;
  int values;  // 0 random, 1 few distinct ones (ties), 2 special ones
  int batch;
  bool shared_logits;  // and a bias for each item
};

float RandomValue(int values, uint32_t* state) {
  const float uniform = static_cast<float>(Next(state)) * 0x1p-24f;
  if (values == 1) return static_cast<float>(Next(state) % 5) * 0.5f - 1.0f;
  if (values == 2 && Next(state) % 16 == 0) {
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
    const float special[] = {kInfinity, -kInfinity, kNan, -kNan, 0.0f,   -0.0f,
                             1e-40f,    -1e-40f,    3e4f, -3e4f, 100.0f, -100.0f};
    return special[Next(state) % 12];
  }
  return (uniform + static_cast<float>(Next(state)) * 0x1p-24f - 1.0f) * 6.0f;
}

template <class Logit>
int RunCase(const Case& c, internal::TopkRouterScratch* scratch) {
  uint32_t state = static_cast<uint32_t>(c.num_tokens * 31 + c.num_experts * 7 + c.topk);
  const int n = c.num_experts;
  const int64_t logits_rows = c.shared_logits ? c.num_tokens : c.batch * c.num_tokens;
  const int64_t rows = int64_t{c.batch} * c.num_tokens;
  std::vector<Logit> logits(logits_rows * n);
  for (Logit& x : logits) Set(RandomValue(c.values, &state), &x);
  std::vector<float> bias(c.batch * n);
  for (float& b : bias) b = RandomValue(c.values, &state) * 0.05f;
  std::vector<char> mask(logits_rows);
  for (char& m : mask) m = Next(&state) % 4 != 0;

  TopkRouterOptions options = {};
  options.kind = c.kind;
  options.aux_scores = c.aux_scores;
  options.bitmap = c.bitmap;
  options.topk = c.topk;
  options.num_groups = c.num_groups;
  options.group_topk = c.group_topk;
  options.group_values = c.group_values;
  options.scaling_factor = c.aux_scores ? 1.0f : 2.5f;
  options.eps = 1e-20f;
  const int map_bytes = MapBytes(n, c.bitmap);
  const size_t out_size = c.aux_scores ? sizeof(float) : sizeof(Logit);
  std::vector<char> d_out_bytes(rows * n * out_size);
  for (int64_t i = 0; i < rows * n; ++i) {
    const float value = RandomValue(c.values == 2 ? 2 : 0, &state);
    if (c.aux_scores) {
      std::memcpy(d_out_bytes.data() + i * out_size, &value, sizeof(value));
    } else {
      Logit rounded;
      Set(value, &rounded);
      std::memcpy(d_out_bytes.data() + i * out_size, &rounded, sizeof(rounded));
    }
  }

  DeviceArray<Logit> device_logits(logits);
  DeviceArray<float> device_bias(bias);
  DeviceArray<char> device_mask(mask);
  DeviceArray<char> device_d_out(d_out_bytes);
  DeviceArray<char> device_out(rows * n * out_size);
  DeviceArray<uint8_t> device_map(rows * map_bytes);
  DeviceArray<Logit> device_d_logits(rows * n);
  Check(cudaMemset(device_out.data(), 0xff, rows * n * out_size), "poison");
  Check(cudaMemset(device_map.data(), 0xff, rows * map_bytes), "poison");
  Check(cudaMemset(device_d_logits.data(), 0xff, rows * n * sizeof(Logit)), "poison");

  TopkRouterFwd fwd = {};
  fwd.logits_type = TypeOf<Logit>();
  fwd.logits = device_logits.data();
  fwd.logits_batched = !c.shared_logits;
  fwd.expert_bias = c.bias ? device_bias.data() : nullptr;
  fwd.expert_bias_batched = true;
  fwd.valid_mask = c.masked ? reinterpret_cast<const bool*>(device_mask.data()) : nullptr;
  fwd.valid_mask_batched = !c.shared_logits;
  fwd.batch = c.batch;
  fwd.num_tokens = c.num_tokens;
  fwd.num_experts = n;
  fwd.options = options;
  fwd.out = device_out.data();
  fwd.routing_map = device_map.data();
  Check(LaunchTopkRouterFwd(nullptr, fwd), "LaunchTopkRouterFwd");

  TopkRouterBwd bwd = {};
  bwd.logits_type = fwd.logits_type;
  bwd.logits = fwd.logits;
  bwd.logits_batched = fwd.logits_batched;
  bwd.d_out = device_d_out.data();
  bwd.d_out_batched = true;
  bwd.routing_map = c.aux_scores ? nullptr : device_map.data();
  bwd.routing_map_batched = true;
  bwd.valid_mask = c.aux_scores ? fwd.valid_mask : nullptr;
  bwd.valid_mask_batched = fwd.valid_mask_batched;
  bwd.batch = c.batch;
  bwd.num_tokens = c.num_tokens;
  bwd.num_experts = n;
  bwd.options = options;
  bwd.d_logits = device_d_logits.data();
  Check(LaunchTopkRouterBwd(nullptr, bwd), "LaunchTopkRouterBwd");
  Check(cudaDeviceSynchronize(), "run");

  const std::vector<char> out = device_out.Download();
  const std::vector<uint8_t> map = device_map.Download();
  const std::vector<Logit> d_logits = device_d_logits.Download();
  std::vector<char> want_out(n * out_size);
  std::vector<uint8_t> want_map(map_bytes);
  std::vector<Logit> want_d_logits(n);
  int wrong_out = 0, wrong_map = 0, wrong_d_logits = 0;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t logits_row = c.shared_logits ? row % c.num_tokens : row;
    const float* row_bias = c.bias ? bias.data() + row / c.num_tokens * n : nullptr;
    const bool valid = !c.masked || mask[logits_row];
    const Logit* x = logits.data() + logits_row * n;
    TopkRouterFwdRow(x, row_bias, valid, n, options, scratch, want_out.data(), want_map.data());
    TopkRouterBwdRow(x, d_out_bytes.data() + row * n * out_size,
                     c.aux_scores ? nullptr : want_map.data(), valid, n, options, scratch,
                     want_d_logits.data());
    wrong_out += std::memcmp(want_out.data(), out.data() + row * n * out_size, n * out_size) != 0;
    wrong_map += std::memcmp(want_map.data(), map.data() + row * map_bytes, map_bytes) != 0;
    wrong_d_logits +=
        std::memcmp(want_d_logits.data(), d_logits.data() + row * n, n * sizeof(Logit)) != 0;
  }
  if (wrong_out + wrong_map + wrong_d_logits == 0) return 0;
  std::printf(
      "FAILED: %d x %d, %d-byte logits, topk %d, kind %d, groups %d/%d of %d values, aux %d, bits "
      "%d, bias %d, masked %d, values %d, batch %d, shared %d: wrong rows: out %d, map %d, "
      "d_logits %d\n",
      c.num_tokens, n, static_cast<int>(sizeof(Logit)), c.topk, static_cast<int>(c.kind),
      c.num_groups, c.group_topk, c.group_values, c.aux_scores, c.bitmap, c.bias, c.masked,
      c.values, c.batch, c.shared_logits, wrong_out, wrong_map, wrong_d_logits);
  return 1;
}

std::vector<Case> AllCases() {
  std::vector<Case> cases;
  uint32_t state = 1;
  constexpr int kSizes[] = {1,   2,   5,   8,   31,  33,  60,  64,  65,   96,   100,
                            128, 130, 160, 256, 257, 384, 512, 516, 1000, 2304, 8192};
  for (int n : kSizes) {
    for (int topk : {1, 2, 8, 10, 31, 32, 36, 200, 8192}) {
      if (topk > n && topk != 8192) continue;
      const int k = topk > n ? n : topk;
      for (int values = 0; values < 3; ++values) {
        for (int kind = 0; kind < 4; ++kind) {
          Case c = {};
          c.num_experts = n;
          c.topk = k;
          c.kind = static_cast<ScoreKind>(kind);
          c.values = values;
          c.num_tokens = static_cast<int>(1 + Next(&state) % (n > 600 ? 7 : 70));
          c.aux_scores = kind != 0 && Next(&state) % 4 == 0;
          c.bitmap = Next(&state) % 3 == 0;
          c.bias = !c.aux_scores && Next(&state) % 2 == 0;
          c.masked = Next(&state) % 3 == 0;
          c.batch = Next(&state) % 3 == 0 ? 3 : 1;
          c.shared_logits = c.batch == 3 && Next(&state) % 2 == 0;
          c.num_groups = c.group_topk = c.group_values = 1;
          cases.push_back(c);
          // Groups: of few and of many experts, of all score rules.
          for (int groups : {2, 4, 8, 16, 48}) {
            if (c.aux_scores || n % groups != 0) continue;
            const int size = n / groups;
            const int fewest = (k + size - 1) / size;
            c.num_groups = groups;
            c.group_topk = fewest + static_cast<int>(Next(&state) % (groups - fewest + 1));
            const int rule = static_cast<int>(Next(&state) % 3);
            if (rule == 0 && k % c.group_topk != 0) continue;
            c.group_values = rule == 0 ? k / c.group_topk : rule == 1 ? (size > 1 ? 2 : 1) : 1;
            cases.push_back(c);
          }
        }
      }
    }
  }
  return cases;
}

}  // namespace

int main(int argc, char** argv) {
  const size_t stride = argc > 1 ? std::atoi(argv[1]) : 1;
  const auto scratch = std::make_unique<internal::TopkRouterScratch>();
  const std::vector<Case> cases = AllCases();
  int failed = 0, run = 0;
  for (size_t i = 0; i < cases.size(); i += stride) {
    failed += RunCase<float>(cases[i], scratch.get());
    failed += RunCase<BFloat16>(cases[i], scratch.get());
    failed += RunCase<Float16>(cases[i], scratch.get());
    run += 3;
  }
  std::printf("%d passed, %d failed\n", run - failed, failed);
  return failed > 0;
}
