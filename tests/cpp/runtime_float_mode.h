// The float mode in which XLA's CPU runtime calls handlers and runs tasks: flush to zero, and on
// x86 denormals are zero.
#ifndef JAX_MOE_DET_TESTS_CPP_RUNTIME_FLOAT_MODE_H_
#define JAX_MOE_DET_TESTS_CPP_RUNTIME_FLOAT_MODE_H_

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace jax_moe_det::testing {

// Sets the runtime's mode for a scope.
class RuntimeFloatMode {
 public:
  RuntimeFloatMode() : saved_(Get()) { Set(kMode); }
  ~RuntimeFloatMode() { Set(saved_); }
  RuntimeFloatMode(const RuntimeFloatMode&) = delete;
  RuntimeFloatMode& operator=(const RuntimeFloatMode&) = delete;

  // Sticky exception flags aside.
  static bool IsSet() { return (Get() & ~kFlags) == (kMode & ~kFlags); }

 private:
#if defined(__x86_64__)
  static constexpr uint64_t kMode = 0x9fe2;
  static constexpr uint64_t kFlags = 0x3f;
  static uint64_t Get() { return _mm_getcsr(); }
  static void Set(uint64_t mode) { _mm_setcsr(static_cast<unsigned>(mode)); }
#else
  static constexpr uint64_t kMode = uint64_t{1} << 24;  // FPCR.FZ
  static constexpr uint64_t kFlags = 0;                 // they stand in FPSR
  static uint64_t Get() {
    uint64_t mode;
    asm volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
  }
  static void Set(uint64_t mode) { asm volatile("msr fpcr, %0" : : "r"(mode)); }
#endif
  uint64_t saved_;
};

}  // namespace jax_moe_det::testing

#endif  // JAX_MOE_DET_TESTS_CPP_RUNTIME_FLOAT_MODE_H_
