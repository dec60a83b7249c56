// Operand checks, written once for both platforms. Python checks first, with the caller's words;
// these are the second line, for raw calls of a target.
//
// Every message has the form "op: what: got ..., wanted ...".
#ifndef JAX_MOE_DET_FFI_CORE_FFI_CHECKS_H_
#define JAX_MOE_DET_FFI_CORE_FFI_CHECKS_H_

#include <cstdint>
#include <sstream>
#include <string>

#include "xla/ffi/api/ffi.h"

namespace jax_moe_det {

namespace ffi = xla::ffi;

inline std::string ShapeString(ffi::Span<const int64_t> dims) {
  std::string out = "[";
  for (size_t i = 0; i < dims.size(); ++i) {
    out += (i == 0 ? "" : ", ") + std::to_string(dims[i]);
  }
  return out + "]";
}

inline std::string TypeString(ffi::DataType type) {
  std::ostringstream out;
  out << type;
  return out.str();
}

inline std::string Text(const std::string& text) { return text; }
inline std::string Text(ffi::DataType type) { return TypeString(type); }
inline std::string Text(int64_t number) { return std::to_string(number); }
inline std::string Text(double number) { return std::to_string(number); }

// Anything that has a Text: an operand's shape, a number, a dtype.
template <class Got>
ffi::Error InvalidArgument(const char* op, const char* what, const Got& got,
                           const std::string& wanted) {
  return ffi::Error::InvalidArgument(std::string(op) + ": " + what + ": got " + Text(got) +
                                     ", wanted " + wanted);
}

// An operand is [leading..., core...] with `num_core` core dimensions. Sets *batched: does it hold
// one item per batch item? False where the leading dimensions hold neither 1 nor `batch` items, or
// there are too few dimensions.
inline bool ParseBatched(ffi::Span<const int64_t> dims, size_t num_core, int64_t batch,
                         bool* batched) {
  if (dims.size() < num_core) return false;
  int64_t items = 1;
  for (size_t i = 0; i + num_core < dims.size(); ++i) items *= dims[i];
  *batched = items == batch;
  return items == batch || items == 1;
}

}  // namespace jax_moe_det

#endif  // JAX_MOE_DET_FFI_CORE_FFI_CHECKS_H_
