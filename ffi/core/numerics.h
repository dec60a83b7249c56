// Exact operations that mean the same bits under g++, clang and nvcc: conversions, NaN, rounding.
//
// Hosts compile with -ffp-contract=off, nvcc with --fmad=false, so a*b+c below is two roundings
// everywhere; where one rounding is wanted, the code says Fma.
#ifndef JAX_MOE_DET_FFI_CORE_NUMERICS_H_
#define JAX_MOE_DET_FFI_CORE_NUMERICS_H_

#include <cstdint>
#include <cstring>

// Forced, so that the copies compiled for wider vectors (see aux_loss_cpu.cc) hold the whole loop.
#define MOE_HOST inline __attribute__((always_inline))
#if defined(__CUDACC__)
#define MOE_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define MOE_HOST_DEVICE MOE_HOST
#endif

namespace jax_moe_det {

// Storage of the two 16-bit formats. Arithmetic happens in float32 only.
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

// Dtypes of scores and logits, and of their gradients.
enum class ScoreType { kFloat32, kBFloat16, kFloat16 };

template <class To, class From>
MOE_HOST_DEVICE To BitCast(From from) {
  static_assert(sizeof(To) == sizeof(From), "BitCast needs equal sizes");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

// One rounding on every platform. Without a fused instruction the host calls libm's fma, which is
// right but slow.
MOE_HOST_DEVICE double Fma(double a, double b, double c) {
#if defined(__CUDA_ARCH__)
  return __fma_rn(a, b, c);
#else
  return __builtin_fma(a, b, c);
#endif
}

// x86 makes 0xffc00000 where CUDA makes 0x7fffffff; every NaN that an operation computes leaves as
// 0x7fc00000.
MOE_HOST_DEVICE float CanonicalNan(float x) { return x == x ? x : BitCast<float>(0x7fc00000u); }

MOE_HOST_DEVICE float ToFloat(float x) { return x; }

MOE_HOST_DEVICE float ToFloat(BFloat16 x) {
  return BitCast<float>(static_cast<uint32_t>(x.bits) << 16);
}

// Exponent and mantissa move to their float32 places, then one exact multiply by 2^112 repairs the
// exponent bias for normal and subnormal values alike.
MOE_HOST_DEVICE float ToFloat(Float16 x) {
#if defined(__CUDA_ARCH__)
  float out;  // exact, in one instruction
  asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(x.bits));
  return out;
#else
  const uint32_t magnitude = static_cast<uint32_t>(x.bits & 0x7fffu) << 13;
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t finite = BitCast<uint32_t>(BitCast<float>(magnitude) * 0x1p112f);
  const uint32_t special = magnitude | 0x7f800000u;  // infinity or NaN, payload kept
  return BitCast<float>((magnitude >= 0x0f800000u ? special : finite) | sign);
#endif
}

// Rounds to float32 with the lowest bit set when inexact ("round to odd"), so that a second
// rounding to at most 22 bits is as good as one.
MOE_HOST_DEVICE uint32_t RoundToOddBits(double x) {
  const float nearest = static_cast<float>(x);
  uint32_t bits = BitCast<uint32_t>(nearest);
  const double back = static_cast<double>(nearest);
  if (back != x && x == x) {
    const double magnitude = x < 0 ? -x : x;
    const double rounded = back < 0 ? -back : back;
    if (rounded > magnitude) bits -= 1;  // back to the truncated value
    bits |= 1;
  }
  return bits;
}

MOE_HOST_DEVICE void RoundTo(double x, float* out) { *out = CanonicalNan(static_cast<float>(x)); }

namespace internal {

// From the bits of a float32, which may have been rounded to odd before.
MOE_HOST_DEVICE BFloat16 NearestBFloat16(uint32_t bits) {
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

MOE_HOST_DEVICE Float16 NearestFloat16(uint32_t bits) {
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude >= 0x477ff000u) {  // at least 65520: infinity
    half = 0x7c00u;
  } else if (magnitude >= 0x38800000u) {  // normal: rebias the exponent by 112, nearest even
    half = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  } else if (magnitude < 0x33000000u) {  // below half of the smallest subnormal
    half = 0;
  } else {  // subnormal: shift the full mantissa, nearest even
    const uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
    const uint32_t shift = 126u - (magnitude >> 23);
    const uint32_t kept = mantissa >> shift;
    const uint32_t rest = mantissa & ((1u << shift) - 1u);
    const uint32_t tie = 1u << (shift - 1u);
    half = kept + ((rest > tie || (rest == tie && (kept & 1u))) ? 1u : 0u);
  }
  return {static_cast<uint16_t>(half | sign)};
}

}  // namespace internal

MOE_HOST_DEVICE void RoundTo(double x, BFloat16* out) {
  *out = x == x ? internal::NearestBFloat16(RoundToOddBits(x)) : BFloat16{0x7fc0};
}

MOE_HOST_DEVICE void RoundTo(double x, Float16* out) {
  *out = x == x ? internal::NearestFloat16(RoundToOddBits(x)) : Float16{0x7e00};
}

MOE_HOST_DEVICE void RoundTo(float x, float* out) { *out = CanonicalNan(x); }

MOE_HOST_DEVICE void RoundTo(float x, BFloat16* out) {
  *out = x == x ? internal::NearestBFloat16(BitCast<uint32_t>(x)) : BFloat16{0x7fc0};
}

MOE_HOST_DEVICE void RoundTo(float x, Float16* out) {
  *out = x == x ? internal::NearestFloat16(BitCast<uint32_t>(x)) : Float16{0x7e00};
}

}  // namespace jax_moe_det

#endif  // JAX_MOE_DET_FFI_CORE_NUMERICS_H_
