// Restores IEEE arithmetic for a scope. XLA's CPU runtime calls handlers, and runs tasks of its
// pool, with flush-to-zero and denormals-are-zero on (MXCSR 0x9fe2); every thread that computes
// holds one of these.
#ifndef JAX_MOE_DET_FFI_CORE_FLOAT_MODE_H_
#define JAX_MOE_DET_FFI_CORE_FLOAT_MODE_H_

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#elif !defined(__aarch64__)
#error "jax_moe_det: the float mode of this processor is not known; x86-64 and arm64 are"
#endif

namespace jax_moe_det {

class IeeeFloatMode {
 public:
#if defined(__x86_64__)
  IeeeFloatMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~IeeeFloatMode() { _mm_setcsr(saved_); }
#else
  IeeeFloatMode() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(uint64_t{0}));  // round to nearest, no flush, no traps
  }
  ~IeeeFloatMode() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }
#endif
  IeeeFloatMode(const IeeeFloatMode&) = delete;
  IeeeFloatMode& operator=(const IeeeFloatMode&) = delete;

 private:
#if defined(__x86_64__)
  unsigned saved_;
#else
  uint64_t saved_;
#endif
};

}  // namespace jax_moe_det

#endif  // JAX_MOE_DET_FFI_CORE_FLOAT_MODE_H_
