// Every kernel of the loss against the header on the host, bit for bit, without Python or XLA: the
// program for compute-sanitizer. Needs a GPU:
//
//   nvcc -O2 -std=c++17 --fmad=false -arch=native -Xcompiler -ffp-contract=off -Iffi
//     tests/cpp/aux_loss_cuda_test.cu ffi/aux_loss/aux_loss_cuda.cu -o aux_loss_cuda_test
//   ./aux_loss_cuda_test
//   compute-sanitizer --tool memcheck ./aux_loss_cuda_test 100000  # small shapes only: it is slow
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "aux_loss/aux_loss.h"
#include "aux_loss/aux_loss_launch.h"
#include "cuda_test.h"

namespace {

using namespace jax_moe_det;  // NOLINT: a test program

// The mask is bytes here: std::vector<bool> has no data().
template <class Score>
int RunCase(int64_t batch, int64_t num_tokens, int64_t num_columns, bool masked,
            CountType count_type) {
  uint32_t state = static_cast<uint32_t>(num_tokens * 31 + num_columns * 7 + masked);
  std::vector<Score> probs(batch * num_tokens * num_columns);
  for (Score& p : probs) {
    Set(static_cast<float>(Next(&state)) * 0x1p-24f - (num_columns % 3 == 0 ? 0.5f : 0.0f), &p);
  }
  std::vector<int64_t> counts64(batch * num_columns);
  for (int64_t& c : counts64) c = Next(&state) % 5000;
  std::vector<char> counts;
  for (int64_t c : counts64) {
    const int32_t narrow = static_cast<int32_t>(c);
    const float real = static_cast<float>(c) * 0.5f;
    const char* bytes = count_type == CountType::kInt64   ? reinterpret_cast<const char*>(&c)
                        : count_type == CountType::kInt32 ? reinterpret_cast<const char*>(&narrow)
                                                          : reinterpret_cast<const char*>(&real);
    counts.insert(counts.end(), bytes, bytes + (count_type == CountType::kInt64 ? 8 : 4));
  }
  std::vector<char> mask(batch * num_tokens);
  for (char& m : mask) m = Next(&state) % 4 != 0;

  DeviceArray<Score> d_probs(probs);
  DeviceArray<char> d_counts(counts);
  DeviceArray<char> d_mask(mask);
  DeviceArray<float> d_partials(batch * kSlots);
  DeviceArray<float> d_loss(batch);
  DeviceArray<float> d_atomic(batch);
  DeviceArray<float> d_cotangent(std::vector<float>(1, 1.5f));
  DeviceArray<Score> d_row(batch * num_columns);
  Check(cudaMemset(d_partials.data(), 0xff, batch * kSlots * sizeof(float)), "poison");

  AuxLossPartials p = {};
  p.score_type = TypeOf<Score>();
  p.probs = d_probs.data();
  p.probs_batched = true;
  p.counts = {count_type, d_counts.data(), true};
  p.valid_mask = masked ? reinterpret_cast<const bool*>(d_mask.data()) : nullptr;
  p.valid_mask_batched = true;
  p.batch = batch;
  p.num_tokens = num_tokens;
  p.num_columns = num_columns;
  p.rows_per_slot = RowsPerSlot(num_tokens);
  p.num_slots = kSlots;
  p.partials = d_partials.data();
  const AuxLossScale scale = {
      num_columns, 1, 0.01, {TotalType::kStatic, static_cast<double>(num_tokens), nullptr, false}};
  AuxLossFinal f = {d_partials.data(), batch, kSlots, scale, d_loss.data()};
  AuxLossRow r = {p.counts, d_cotangent.data(), false,       batch, num_columns,
                  scale,    p.score_type,       d_row.data()};
  Check(LaunchAuxLossFwd(nullptr, p, f), "LaunchAuxLossFwd");
  Check(LaunchAuxLossBwd(nullptr, r), "LaunchAuxLossBwd");
  AuxLossFinal atomic = f;
  atomic.loss = d_atomic.data();
  Check(LaunchAuxLossFwdAtomic(nullptr, p, atomic), "LaunchAuxLossFwdAtomic");
  Check(cudaDeviceSynchronize(), "run");

  const std::vector<float> partials = d_partials.Download();
  const std::vector<float> loss = d_loss.Download();
  const std::vector<Score> row = d_row.Download();
  int wrong = 0;
  const AuxLossCounts host_counts = {count_type, counts.data(), true};
  for (int64_t b = 0; b < batch; ++b) {
    std::vector<float> expected(kSlots, 0.0f);
    for (int64_t s = 0; s < kSlots && s * p.rows_per_slot < num_tokens; ++s) {
      const int64_t begin = s * p.rows_per_slot;
      const int64_t rest = num_tokens - begin;
      const int64_t first = b * num_tokens + begin;
      expected[s] =
          SlotPartial(probs.data() + first * num_columns,
                      masked ? reinterpret_cast<const bool*>(mask.data()) + first : nullptr,
                      rest < p.rows_per_slot ? rest : p.rows_per_slot, num_columns, host_counts,
                      b * num_columns);
    }
    const float expected_loss =
        LossFromPartials(expected.data(), kSlots, scale, static_cast<double>(num_tokens));
    wrong += std::memcmp(expected.data(), partials.data() + b * kSlots, kSlots * 4) != 0;
    wrong += std::memcmp(&expected_loss, &loss[b], 4) != 0;
    for (int64_t e = 0; e < num_columns; ++e) {
      const Score element = GradientElement<Score>(scale, static_cast<double>(num_tokens),
                                                   Count(host_counts, b * num_columns + e), 1.5f);
      wrong += std::memcmp(&element, &row[b * num_columns + e], sizeof(Score)) != 0;
    }
  }
  if (wrong > 0) {
    std::printf("FAILED: batch %d, %d x %d, %d-byte scores, masked %d, count type %d\n",
                static_cast<int>(batch), static_cast<int>(num_tokens),
                static_cast<int>(num_columns), static_cast<int>(sizeof(Score)), masked,
                static_cast<int>(count_type));
  }
  return wrong > 0;
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t max_elements = argc > 1 ? std::atoll(argv[1]) : 5000000;
  int failed = 0;
  int cases = 0;
  for (int64_t num_columns : {1,  2,   4,   8,   16,  17,  24,  33,  36,  40,  48,  56,
                              64, 100, 128, 130, 132, 136, 256, 264, 300, 512, 520, 2304}) {
    for (int64_t num_tokens : {0, 1, 2, 255, 257, 4096, 9000, 17000, 40000}) {
      if (num_tokens * num_columns > max_elements) continue;
      for (bool masked : {false, true}) {
        for (CountType type : {CountType::kInt32, CountType::kInt64, CountType::kFloat32}) {
          if (type != CountType::kInt32 && num_tokens != 257) continue;
          const int64_t batch = num_tokens == 257 ? 3 : 1;
          failed += RunCase<float>(batch, num_tokens, num_columns, masked, type);
          failed += RunCase<BFloat16>(batch, num_tokens, num_columns, masked, type);
          failed += RunCase<Float16>(batch, num_tokens, num_columns, masked, type);
          cases += 3;
        }
      }
    }
  }
  std::printf("%d passed, %d failed\n", cases - failed, failed);
  return failed > 0;
}
