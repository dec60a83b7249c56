// What a module's registration table is made of.
#ifndef JAX_MOE_DET_FFI_CORE_REGISTRATION_H_
#define JAX_MOE_DET_FFI_CORE_REGISTRATION_H_

#include <nanobind/nanobind.h>

#include "xla/ffi/api/ffi.h"

namespace jax_moe_det {

inline void AddTarget(nanobind::dict& targets, const char* name, XLA_FFI_Handler* handler) {
  targets[name] = nanobind::capsule(reinterpret_cast<void*>(handler));
}

}  // namespace jax_moe_det

#endif  // JAX_MOE_DET_FFI_CORE_REGISTRATION_H_
