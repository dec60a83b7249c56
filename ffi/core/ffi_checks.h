// Operand checks, written once for both platforms. Python checks first, with the caller's words;
// these are the second line, for raw calls of a target.
//
// Every message has the form "op: what: got ..., wanted ...".
#ifndef JAX_MOE_DET_FFI_CORE_FFI_CHECKS_H_
#define JAX_MOE_DET_FFI_CORE_FFI_CHECKS_H_

#include <cstdint>
#include <initializer_list>
#include <sstream>
#include <string>

#include "core/numerics.h"
#include "xla/ffi/api/ffi.h"

namespace jax_moe_det {

namespace ffi = xla::ffi;

#define JAX_MOE_DET_RETURN_IF_ERROR(expr) \
  do {                                    \
    ::xla::ffi::Error error = (expr);     \
    if (error.failure()) return error;    \
  } while (false)

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

// Checks [1 or batch, core...] and sets *batched.
inline ffi::Error CheckShape(const char* op, const char* what, const ffi::AnyBuffer& buffer,
                             int64_t batch, std::initializer_list<int64_t> core, bool* batched) {
  const auto dims = buffer.dimensions();
  bool same = dims.size() == core.size() + 1 && (dims[0] == batch || dims[0] == 1);
  size_t i = 1;
  std::string wanted = "[" + std::to_string(batch) + " or 1";
  for (const int64_t size : core) {
    same = same && dims[i++] == size;
    wanted += ", " + std::to_string(size);
  }
  if (!same) return InvalidArgument(op, what, ShapeString(dims), wanted + "]");
  *batched = dims[0] == batch;
  return ffi::Error::Success();
}

inline ffi::Error CheckType(const char* op, const char* what, const ffi::AnyBuffer& buffer,
                            ffi::DataType wanted) {
  if (buffer.element_type() == wanted) return ffi::Error::Success();
  return InvalidArgument(op, what, buffer.element_type(), TypeString(wanted));
}

// A result [batch, core...].
inline ffi::Error CheckResult(const char* op, const char* what, const ffi::AnyBuffer& buffer,
                              ffi::DataType type, int64_t batch,
                              std::initializer_list<int64_t> core) {
  bool batched = false;
  JAX_MOE_DET_RETURN_IF_ERROR(CheckType(op, what, buffer, type));
  JAX_MOE_DET_RETURN_IF_ERROR(CheckShape(op, what, buffer, batch, core, &batched));
  if (batched) return ffi::Error::Success();
  return InvalidArgument(op, what, ShapeString(buffer.dimensions()),
                         std::to_string(batch) + " items");
}

inline bool ParseScoreType(ffi::DataType type, ScoreType* out) {
  switch (type) {
    case ffi::DataType::F32:
      *out = ScoreType::kFloat32;
      return true;
    case ffi::DataType::BF16:
      *out = ScoreType::kBFloat16;
      return true;
    case ffi::DataType::F16:
      *out = ScoreType::kFloat16;
      return true;
    default:
      return false;
  }
}

}  // namespace jax_moe_det

#endif  // JAX_MOE_DET_FFI_CORE_FFI_CHECKS_H_
