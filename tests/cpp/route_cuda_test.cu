// Every kernel of the router step against the header on the host, bit for bit, without Python or
// XLA: the program for compute-sanitizer. Needs a GPU:
//
//   nvcc -O2 -std=c++17 --fmad=false -arch=native -Xcompiler -ffp-contract=off -Iffi
//     tests/cpp/route_cuda_test.cu ffi/route/route_*_cuda.cu -o route_cuda_test
//   ./route_cuda_test
//   compute-sanitizer --tool memcheck ./route_cuda_test 9  # every ninth case: it is slow
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "cuda_test.h"
#include "route/route.h"
#include "route/route_launch.h"

namespace {

using namespace jax_moe_det;  // NOLINT: a test program

struct Case {
  int num_tokens, num_experts, topk, num_groups, group_topk, group_values;
  ScoreKind kind;
  bool bias, masked, replay, plain, aux, z, d_weights;
  int values;  // 0 random, 1 few distinct ones (ties), 2 special ones
  int batch;
  bool shared_logits;  // and a bias for each item
};

float RandomValue(int values, uint32_t* state) {
  const float uniform = static_cast<float>(Next(state)) * 0x1p-24f;
  if (values == 1) return static_cast<float>(Next(state) % 5) * 0.5f - 1.0f;
  if (values == 2 && Next(state) % 64 == 0) {
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
    const float special[] = {kInfinity, -kInfinity, kNan, -kNan, 0.0f,   -0.0f,
                             1e-40f,    -1e-40f,    3e4f, -3e4f, 100.0f, -100.0f};
    return special[Next(state) % 12];
  }
  return (uniform + static_cast<float>(Next(state)) * 0x1p-24f - 1.0f) * 6.0f;
}

template <class T>
int Wrong(const char* what, const std::vector<T>& got, const std::vector<T>& want) {
  if (got.empty() || std::memcmp(got.data(), want.data(), got.size() * sizeof(T)) == 0) return 0;
  size_t different = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    different += std::memcmp(&got[i], &want[i], sizeof(T)) != 0;
  }
  std::printf("  %s: %zu of %zu differ\n", what, different, got.size());
  return 1;
}

struct Scratch {
  internal::RouteScratch route;
  float aux[kMaxExperts];
};

template <class Logit>
int RunCase(const Case& c, Scratch* scratch) {
  uint32_t state = static_cast<uint32_t>(c.num_tokens * 31 + c.num_experts * 7 + c.topk);
  const int n = c.num_experts;
  const int k = c.topk;
  const int64_t logits_rows = c.shared_logits ? c.num_tokens : c.batch * c.num_tokens;
  const int64_t rows = int64_t{c.batch} * c.num_tokens;
  std::vector<Logit> logits(logits_rows * n);
  for (Logit& x : logits) Set(RandomValue(c.values, &state), &x);
  std::vector<float> bias(c.batch * n);
  for (float& b : bias) b = RandomValue(c.values, &state) * 0.05f;
  std::vector<char> mask(logits_rows);
  for (char& m : mask) m = Next(&state) % 4 != 0;
  std::vector<int32_t> replay(logits_rows * k);
  for (int32_t& r : replay) r = static_cast<int32_t>(Next(&state) % (n + 2)) - 1;
  std::vector<Logit> d_weights(rows * k);
  for (Logit& d : d_weights) Set(RandomValue(0, &state), &d);
  std::vector<float> d_losses = {1.5f, -0.75f};

  DeviceArray<Logit> device_logits(logits);
  DeviceArray<float> device_bias(bias);
  DeviceArray<char> device_mask(mask);
  DeviceArray<int32_t> device_replay(replay);
  DeviceArray<Logit> device_d_weights(d_weights);
  DeviceArray<float> device_d_losses(d_losses);

  RoutePass pass = {};
  pass.logits_type = TypeOf<Logit>();
  pass.logits_batched = pass.valid_mask_batched = pass.replay_batched = !c.shared_logits;
  pass.expert_bias_batched = true;
  pass.batch = c.batch;
  pass.num_tokens = c.num_tokens;
  pass.num_experts = n;
  pass.rows_per_slot = RowsPerSlot(c.num_tokens);
  pass.num_slots = kSlots;
  pass.options.kind = c.kind;
  pass.options.topk = k;
  pass.options.num_groups = c.num_groups;
  pass.options.group_topk = c.group_topk;
  pass.options.group_values = c.group_values;
  pass.options.scaling_factor = 2.5f;
  pass.options.eps = 1e-20f;
  const AuxLossScale scale = {
      n, k, 0.01, {TotalType::kStatic, static_cast<double>(c.num_tokens), nullptr, false}};
  const double z_loss_coeff = 0.003;

  std::vector<Logit> weights(rows * k);
  std::vector<int32_t> indices(rows * k), counts(c.batch * n), plain(c.batch * n);
  std::vector<float> sums(c.batch * kSlots * n), z_partials(c.batch * kSlots),
      aux_partials(c.batch * kSlots), aux_loss(c.batch), z_loss(c.batch);
  std::vector<Logit> d_logits(rows * n);
  DeviceArray<Logit> device_weights(weights);
  DeviceArray<int32_t> device_indices(indices), device_counts(counts), device_plain(plain);
  DeviceArray<float> device_sums(sums), device_z_partials(z_partials),
      device_aux_partials(aux_partials), device_aux_loss(aux_loss), device_z_loss(z_loss),
      device_stats(3 * rows);
  DeviceArray<Logit> device_d_logits(d_logits);
  Check(cudaMemset(device_counts.data(), 0xff, counts.size() * 4), "poison");
  Check(cudaMemset(device_plain.data(), 0xff, plain.size() * 4), "poison");
  Check(cudaMemset(device_weights.data(), 0xff, weights.size() * sizeof(Logit)), "poison");
  Check(cudaMemset(device_indices.data(), 0xff, indices.size() * 4), "poison");
  Check(cudaMemset(device_sums.data(), 0xff, sums.size() * 4), "poison");
  Check(cudaMemset(device_d_logits.data(), 0xff, d_logits.size() * sizeof(Logit)), "poison");

  RoutePass on_device = pass;
  on_device.logits = device_logits.data();
  on_device.expert_bias = c.bias ? device_bias.data() : nullptr;
  on_device.valid_mask = c.masked ? reinterpret_cast<const bool*>(device_mask.data()) : nullptr;
  on_device.replay = c.replay ? device_replay.data() : nullptr;
  on_device.weights = device_weights.data();
  on_device.indices = device_indices.data();
  on_device.counts = device_counts.data();
  on_device.plain = c.plain ? device_plain.data() : nullptr;
  on_device.column_sums = c.aux ? device_sums.data() : nullptr;
  on_device.z_partials = c.z ? device_z_partials.data() : nullptr;
  on_device.row_stats = device_stats.data();
  Check(LaunchRoutePass(nullptr, on_device), "LaunchRoutePass");
  RoutePartials partials = {
      device_sums.data(),
      {CountType::kInt32, c.plain ? device_plain.data() : device_counts.data(), true},
      c.batch,
      kSlots,
      n,
      device_aux_partials.data()};
  if (c.aux) Check(LaunchRoutePartials(nullptr, partials), "LaunchRoutePartials");
  RouteFinal final_sum = {c.aux ? device_aux_partials.data() : nullptr,
                          c.z ? device_z_partials.data() : nullptr,
                          c.batch,
                          kSlots,
                          scale,
                          z_loss_coeff,
                          device_aux_loss.data(),
                          device_z_loss.data()};
  Check(LaunchRouteFinal(nullptr, final_sum), "LaunchRouteFinal");

  RouteBwd bwd = {};
  bwd.logits_type = pass.logits_type;
  bwd.logits_batched = bwd.valid_mask_batched = pass.logits_batched;
  bwd.indices_batched = bwd.d_weights_batched = true;
  bwd.batch = c.batch;
  bwd.num_tokens = c.num_tokens;
  bwd.num_experts = n;
  bwd.distinct = !c.replay;
  bwd.options = pass.options;
  bwd.scale = scale;
  bwd.z_loss_coeff = z_loss_coeff;
  RouteBwd bwd_on_device = bwd;
  bwd_on_device.logits = on_device.logits;
  bwd_on_device.indices = device_indices.data();
  bwd_on_device.d_weights = c.d_weights ? device_d_weights.data() : nullptr;
  bwd_on_device.valid_mask = on_device.valid_mask;
  bwd_on_device.counts = partials.counts;
  bwd_on_device.d_aux_loss = c.aux ? device_d_losses.data() : nullptr;
  bwd_on_device.d_z_loss = c.z ? device_d_losses.data() + 1 : nullptr;
  bwd_on_device.d_logits = device_d_logits.data();
  Check(LaunchRouteBwd(nullptr, bwd_on_device), "LaunchRouteBwd");
  Check(cudaDeviceSynchronize(), "run");

  RoutePass on_host = pass;
  on_host.logits = logits.data();
  on_host.expert_bias = c.bias ? bias.data() : nullptr;
  on_host.valid_mask = c.masked ? reinterpret_cast<const bool*>(mask.data()) : nullptr;
  on_host.replay = c.replay ? replay.data() : nullptr;
  on_host.weights = weights.data();
  on_host.indices = indices.data();
  on_host.counts = counts.data();
  on_host.plain = c.plain ? plain.data() : nullptr;
  on_host.column_sums = c.aux ? sums.data() : nullptr;
  on_host.z_partials = c.z ? z_partials.data() : nullptr;
  for (int64_t i = 0; i < c.batch * kSlots; ++i) {
    RouteSlot<Logit>(on_host, i / kSlots, i % kSlots, &scratch->route);
  }
  const AuxLossCounts host_counts = {CountType::kInt32, c.plain ? plain.data() : counts.data(),
                                     true};
  for (int64_t i = 0; c.aux && i < c.batch * kSlots; ++i) {
    aux_partials[i] = PartialFromColumnSums(sums.data() + i * n, n, host_counts, i / kSlots * n);
  }
  RouteFinal host_final = final_sum;
  host_final.aux_partials = c.aux ? aux_partials.data() : nullptr;
  host_final.z_partials = c.z ? z_partials.data() : nullptr;
  host_final.aux_loss = aux_loss.data();
  host_final.z_loss = z_loss.data();
  for (int64_t b = 0; b < c.batch; ++b) RouteLosses(host_final, b);
  RouteBwd bwd_on_host = bwd;
  bwd_on_host.counts = host_counts;
  bwd_on_host.d_aux_loss = c.aux ? d_losses.data() : nullptr;
  bwd_on_host.d_z_loss = c.z ? d_losses.data() + 1 : nullptr;
  for (int64_t index = 0; index < rows; ++index) {
    const int64_t item = index / c.num_tokens;
    const int64_t row = c.shared_logits ? index % c.num_tokens : index;
    const RouteCotangent cotangent = RouteCotangents(bwd_on_host, item, scratch->aux);
    RouteBwdRow(logits.data() + row * n, indices.data() + index * k,
                c.d_weights ? d_weights.data() + index * k : nullptr, !c.masked || mask[row] != 0,
                cotangent, n, pass.options, &scratch->route.row, d_logits.data() + index * n);
  }

  int wrong = Wrong("weights", device_weights.Download(), weights) +
              Wrong("indices", device_indices.Download(), indices) +
              Wrong("counts", device_counts.Download(), counts) +
              Wrong("aux_loss", device_aux_loss.Download(), aux_loss) +
              Wrong("z_loss", device_z_loss.Download(), z_loss) +
              Wrong("d_logits", device_d_logits.Download(), d_logits);
  if (c.plain) wrong += Wrong("plain counts", device_plain.Download(), plain);
  if (c.aux) wrong += Wrong("aux partials", device_aux_partials.Download(), aux_partials);
  if (c.z) wrong += Wrong("z partials", device_z_partials.Download(), z_partials);
  if (wrong == 0) return 0;
  std::printf(
      "FAILED: %d x %d, %d-byte logits, topk %d, kind %d, groups %d/%d of %d values, bias %d, "
      "masked %d, replay %d, plain %d, aux %d, z %d, d_weights %d, values %d, batch %d, shared "
      "%d\n",
      c.num_tokens, n, static_cast<int>(sizeof(Logit)), k, static_cast<int>(c.kind), c.num_groups,
      c.group_topk, c.group_values, c.bias, c.masked, c.replay, c.plain, c.aux, c.z, c.d_weights,
      c.values, c.batch, c.shared_logits);
  return 1;
}

std::vector<Case> AllCases() {
  std::vector<Case> cases;
  uint32_t state = 1;
  constexpr int kSizes[] = {1,   2,   5,   8,   17,  31,  33,  60,  64,  65,   96,
                            100, 128, 130, 160, 256, 257, 384, 512, 516, 1000, 2304};
  for (int n : kSizes) {
    for (int topk : {1, 2, 8, 10, 31, 32, 36, 200}) {
      if (topk > n) continue;
      for (int values = 0; values < 3; ++values) {
        for (int kind = 0; kind < 4; ++kind) {
          Case c = {};
          c.num_experts = n;
          c.topk = topk;
          c.kind = static_cast<ScoreKind>(kind);
          c.values = values;
          const int tokens[] = {0, 1, 37, 300, 1000, 5000};
          const int most = n > 300 || topk > 31 ? 3 : n > 64 ? 5 : 6;
          c.num_tokens = tokens[Next(&state) % most];
          // Enough rows for a second chunk in a lane, at few experts.
          if (n <= 33 && c.num_tokens == 5000) c.num_tokens = n <= 17 ? 140000 : 40000;
          if (n == 256 && c.num_tokens == 1000) c.num_tokens = 18000;
          c.bias = Next(&state) % 2 == 0;
          c.masked = Next(&state) % 3 == 0;
          c.replay = Next(&state) % 4 == 0;
          c.aux = Next(&state) % 4 != 0;
          c.plain = c.aux && Next(&state) % 3 == 0;
          c.z = Next(&state) % 2 == 0;
          c.d_weights = Next(&state) % 4 != 0;
          c.batch = c.num_tokens < 2000 && Next(&state) % 3 == 0 ? 3 : 1;
          c.shared_logits = c.batch == 3 && Next(&state) % 2 == 0;
          c.num_groups = c.group_topk = c.group_values = 1;
          cases.push_back(c);
          for (int groups : {2, 4, 8, 16}) {
            if (n % groups != 0 || Next(&state) % 2 == 0) continue;
            const int size = n / groups;
            const int fewest = (topk + size - 1) / size;
            c.num_groups = groups;
            c.group_topk = fewest + static_cast<int>(Next(&state) % (groups - fewest + 1));
            const int rule = static_cast<int>(Next(&state) % 3);
            if (rule == 0 && topk % c.group_topk != 0) continue;
            c.group_values = rule == 0 ? topk / c.group_topk : rule == 1 ? (size > 1 ? 2 : 1) : 1;
            cases.push_back(c);
          }
        }
      }
    }
  }
  // Calls with kernels of their own (route_common.cuh), with a second chunk in each lane.
  for (int n : {64, 128, 256, 512}) {
    for (int kind = 0; kind < 3; ++kind) {
      for (int values = 0; values < 3; ++values) {
        Case c = {};
        c.num_experts = n;
        c.num_tokens = n <= 128 ? 33000 : 17000;
        c.topk = values == 1 ? 8 : 6;
        c.kind = static_cast<ScoreKind>(kind);
        c.values = values;
        c.bias = kind == 2 || values == 1;
        c.masked = values == 2;
        c.aux = c.d_weights = true;
        c.z = kind < 2 && values == 0;
        c.batch = 1;
        c.num_groups = values == 1 ? 8 : 1;
        c.group_topk = values == 1 ? 4 : 1;
        c.group_values = values == 1 ? 2 : 1;
        cases.push_back(c);
      }
    }
  }
  return cases;
}

}  // namespace

int main(int argc, char** argv) {
  const size_t stride = argc > 1 ? std::atoi(argv[1]) : 1;
  const auto scratch = std::make_unique<Scratch>();
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
