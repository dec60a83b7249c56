// exp, log1p and the router's score functions, with the same bits on every platform: IEEE add,
// multiply, fused multiply-add, divide, square root, compares, selects and integer moves, in one
// order. No libm, no approximate instruction.
//
// Errors are the largest over all 2^32 inputs (benchmarks/exact_math_exhaustive.cu prints them),
// relative to float64 where that is a normal float32:
//
//   function           relative  ulp   below the normal float32
//   Exp                 7.8e-8   0.90  within 0.9 of 2^-149
//   ExpNonPositive      7.8e-8   0.90  +0 below 2^-126.5
//   Log1p               9.4e-8   1.27  x
//   Sigmoid             2.1e-7   2.8   +0 below 2^-126.5
//   SigmoidSlope        3.4e-7   5.1   +0 below 2^-126.5; 5.5e-8 absolute anywhere
//   SqrtSoftplus        1.3e-7   1.7   +0 below 2^-126.5
//   SqrtSoftplusSlope   2.9e-7   3.9   half the score
//
// NaN gives the canonical NaN, but for ExpNonPositive. Finite arguments give finite results, but
// for Exp's overflow and Log1p's domain.
#ifndef JAX_MOE_DET_FFI_CORE_EXACT_MATH_H_
#define JAX_MOE_DET_FFI_CORE_EXACT_MATH_H_

#include <cstdint>

#include "core/numerics.h"

namespace jax_moe_det {

// One rounding on every platform; see Fma.
MOE_HOST_DEVICE float FmaF(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

MOE_HOST_DEVICE float SqrtF(float x) {
#if defined(__CUDA_ARCH__)
  return __fsqrt_rn(x);
#else
  return __builtin_sqrtf(x);
#endif
}

// 1 / x, rounded once, for x in [1, 2^14) or NaN.
MOE_HOST_DEVICE float Reciprocal(float x) {
#if defined(__CUDA_ARCH__)
  // What nvcc makes of 1.0f / x for these x on every architecture, without the range check and the
  // branch around it, which would keep the reciprocals of a row from overlapping.
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return FmaF(r, -FmaF(x, r, -1.0f), r);
#else
  return 1.0f / x;
#endif
}

namespace internal {

// exp(x) = mantissa * 2^k, with 2^k as integer: the low bits of `scale` hold k + 127. For x in
// [-104, 89].
struct ReducedExp {
  float mantissa;  // exp(r), |r| <= ln(2) / 2
  uint32_t scale;
};

// Adding 1.5 * 2^23 + 127 rounds to an integer, and leaves it in the low bits with the bias of
// float32's exponent on top.
constexpr float kRoundToInteger = 0x1.8000fep+23f;
constexpr float kLog2E = 0x1.715476p+0f;
// ln(2) = kLn2 - kLn2Excess, to 2^-54.
constexpr float kLn2 = 0x1.62e430p-1f;
constexpr float kLn2Excess = 0x1.05c610p-29f;

// Cody and Waite's reduction: k = round(x / ln(2)), r = x - k * ln(2) in two fused steps, of which
// the first is exact (kLn2 has 20 bits). Then a polynomial of degree 6 in Horner's order.
MOE_HOST_DEVICE ReducedExp ReduceExp(float x) {
  const float shifted = FmaF(x, kLog2E, kRoundToInteger);
  const float k = shifted - kRoundToInteger;
  float r = FmaF(k, -kLn2, x);
  r = FmaF(k, kLn2Excess, r);
  float p = 0x1.6a21acp-10f;
  p = FmaF(p, r, 0x1.123b6ap-7f);
  p = FmaF(p, r, 0x1.5558fap-5f);
  p = FmaF(p, r, 0x1.555490p-3f);
  p = FmaF(p, r, 0x1.fffffcp-2f);
  p = FmaF(p, r, 1.0f);
  p = FmaF(p, r, 1.0f);
  return {p, BitCast<uint32_t>(shifted)};
}

}  // namespace internal

// The full range: subnormal results rounded once more, infinity from 88.7229 on, +0 below -103.98.
MOE_HOST_DEVICE float Exp(float x) {
  float clamped = x > 89.0f ? 89.0f : x;  // NaN stays
  clamped = clamped < -104.0f ? -104.0f : clamped;
  const internal::ReducedExp reduced = internal::ReduceExp(clamped);
  // 2^k in two factors, both normal: k reaches from -150 to 128. The first product is exact.
  const uint32_t k = reduced.scale - BitCast<uint32_t>(internal::kRoundToInteger);
  const uint32_t half = static_cast<uint32_t>(BitCast<int32_t>(k) >> 1);
  const float low = BitCast<float>((half + 127u) << 23);
  const float high = BitCast<float>((k - half + 127u) << 23);
  return CanonicalNan(reduced.mantissa * low * high);
}

// Exp for x <= 0, and for speed: one scaling, so that +0 replaces what is below 2^-126.5 (x below
// about -87.68); elsewhere the bits of Exp. -infinity gives +0. NaN gives a NaN of any bits: a
// caller makes it canonical where it leaves the operation, once for a whole product.
MOE_HOST_DEVICE float ExpNonPositive(float x) {
  // From here down k + 127 is 0, and so is the scale; far below it would wrap.
  constexpr float kCut = -88.03f;
#if defined(__CUDA_ARCH__)
  float clamped;  // one instruction; NaN stays
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(clamped) : "f"(x), "f"(kCut));
#else
  const float clamped = x < kCut ? kCut : x;  // NaN stays
#endif
  const internal::ReducedExp reduced = internal::ReduceExp(clamped);
  return reduced.mantissa * BitCast<float>(reduced.scale << 23);
}

// log(1 + x), of every x >= -1: -infinity at -1, NaN below, x itself at +-0.
//
// 1 + x = (1 + m) * 2^e with m in [-1/4, 1/2], and m = x * 2^-e + (2^-e - 1) without the rounding
// of 1 + x; the result is e * ln(2) plus a polynomial of degree 10 in m.
MOE_HOST_DEVICE float Log1p(float x) {
  // e << 23, as the exponent of 1 + x relative to that of 3/4.
  const uint32_t e = (BitCast<uint32_t>(x + 1.0f) - 0x3f400000u) & 0xff800000u;
  const int32_t e_signed = BitCast<int32_t>(e);
  // 2^-e in two factors, both normal: e reaches 128.
  const uint32_t half = static_cast<uint32_t>(e_signed >> 1) & 0xff800000u;
  const float low = BitCast<float>(0x3f800000u - half);
  const float high = BitCast<float>(0x3f800000u - (e - half));
  const float four_scale = BitCast<float>(0x40800000u - e);
  const float m = x * low * high + (0.25f * four_scale - 1.0f);
  float p = -0x1.71bc28p-5f;
  p = FmaF(p, m, 0x1.ace4c6p-4f);
  p = FmaF(p, m, -0x1.0d99b2p-3f);
  p = FmaF(p, m, 0x1.288260p-3f);
  p = FmaF(p, m, -0x1.54eddep-3f);
  p = FmaF(p, m, 0x1.99698ap-3f);
  p = FmaF(p, m, -0x1.000048p-2f);
  p = FmaF(p, m, 0x1.5555a4p-2f);
  p = FmaF(p, m, -0.5f);
  const float log1p_m = FmaF(p, m * m, m);
  // ln(2) in a head of 9 bits, whose product with e is exact, and a tail.
  const float e_float = static_cast<float>(e_signed) * 0x1p-23f;
  const float sum = e_float * 0x1.63p-1f + (log1p_m + e_float * -0x1.bd0106p-13f);
  float y = e == 0 ? log1p_m : sum;
  y = x > 0x1.fffffep+127f ? x : y;
  y = x < -1.0f ? BitCast<float>(0x7fc00000u) : y;
  y = x == -1.0f ? BitCast<float>(0xff800000u) : y;
  y = x == 0.0f ? x : y;
  return CanonicalNan(y);
}

namespace internal {

// log(1 + z) for z in [0, 1]: no reduction, a polynomial of degree 9 (3.3e-8 relative).
MOE_HOST_DEVICE float Log1pUnit(float z) {
  float p = 0x1.5fa0dap-8f;
  p = FmaF(p, z, -0x1.eca398p-6f);
  p = FmaF(p, z, 0x1.44707ap-4f);
  p = FmaF(p, z, -0x1.19af8ep-3f);
  p = FmaF(p, z, 0x1.884554p-3f);
  p = FmaF(p, z, -0x1.fd1368p-3f);
  p = FmaF(p, z, 0x1.5535dep-2f);
  p = FmaF(p, z, -0x1.ffff14p-2f);
  return FmaF(p, z * z, z);
}

MOE_HOST_DEVICE float MinusAbs(float x) {
  return BitCast<float>(BitCast<uint32_t>(x) | 0x80000000u);
}

// Below this, sqrt(log(1 + exp(x))) is exp(x / 2) to a relative exp(x) / 4 = 5e-10. It must be so
// long before exp(x) underflows, at -87: the square root is normal down to x = -174.6.
constexpr float kSoftplusTail = -20.0f;

// What SqrtSoftplus and its slope share.
struct Softplus {
  uint32_t tail;  // all ones where x < kSoftplusTail, else 0; either for NaN
  float exp;      // exp(-|x|); in the tail exp(x / 2)
  float root;     // sqrt(log(1 + exp(x))), but for the tail
};

// `a` where the mask is ones. Written with bits, since compilers make a branch of a ?: with much to
// compute on one side, and a loop with that branch does not vectorise (8 times slower).
MOE_HOST_DEVICE float Select(uint32_t mask, float a, float b) {
  return BitCast<float>((BitCast<uint32_t>(a) & mask) | (BitCast<uint32_t>(b) & ~mask));
}

MOE_HOST_DEVICE Softplus ReduceSoftplus(float x) {
  const uint32_t tail = static_cast<uint32_t>(BitCast<int32_t>(x - kSoftplusTail) >> 31);
  const float exp = ExpNonPositive(Select(tail, 0.5f * x, MinusAbs(x)));
  // log(1 + exp(x)) = max(x, 0) + log(1 + exp(-|x|)).
  return {tail, exp, SqrtF((x > 0.0f ? x : 0.0f) + Log1pUnit(exp))};
}

}  // namespace internal

// 1 / (1 + exp(-x)). Raw: NaN gives a NaN of any bits, as ExpNonPositive does.
MOE_HOST_DEVICE float SigmoidRaw(float x) {
  const float z = ExpNonPositive(internal::MinusAbs(x));
  const float r = Reciprocal(1.0f + z);
  return x >= 0.0f ? r : z * r;
}

MOE_HOST_DEVICE float Sigmoid(float x) { return CanonicalNan(SigmoidRaw(x)); }

// s * (1 - s) for s = Sigmoid(x), as exp(-|x|) / (1 + exp(-|x|))^2: without the cancellation of
// 1 - s, so that it keeps its relative error where s rounds to 1.
MOE_HOST_DEVICE float SigmoidSlopeRaw(float x) {
  const float z = ExpNonPositive(internal::MinusAbs(x));
  const float r = Reciprocal(1.0f + z);
  return z * r * r;
}

MOE_HOST_DEVICE float SigmoidSlope(float x) { return CanonicalNan(SigmoidSlopeRaw(x)); }

// sqrt(log(1 + exp(x))): sqrt(x) for large x, exp(x / 2) for very negative x.
MOE_HOST_DEVICE float SqrtSoftplus(float x) {
  const internal::Softplus softplus = internal::ReduceSoftplus(x);
  return CanonicalNan(internal::Select(softplus.tail, softplus.exp, softplus.root));
}

// Sigmoid(x) / (2 * SqrtSoftplus(x)), with one division; in the tail half the score.
MOE_HOST_DEVICE float SqrtSoftplusSlope(float x) {
  const internal::Softplus softplus = internal::ReduceSoftplus(x);
  const float z = softplus.exp;
  const float numerator = x >= 0.0f ? 1.0f : z;
  const float denominator =
      internal::Select(softplus.tail, 2.0f, (1.0f + z) * (2.0f * softplus.root));
  return CanonicalNan(numerator / denominator);
}

}  // namespace jax_moe_det

#endif  // JAX_MOE_DET_FFI_CORE_EXACT_MATH_H_
