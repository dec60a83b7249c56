// A call of a CPU handler, and what the tests expect of one that is refused.
#ifndef JAX_MOE_DET_TESTS_CPP_HANDLER_CALL_H_
#define JAX_MOE_DET_TESTS_CPP_HANDLER_CALL_H_

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/cpp/ffi_mock.h"
#include "xla/ffi/api/ffi.h"

namespace jax_moe_det::testing {

// Tests change a valid one.
struct HandlerCall {
  XLA_FFI_Handler* handler;
  std::vector<Array> operands;
  std::vector<Array> results;
  Attributes attributes;

  Outcome Run(TaskPool& pool) {
    for (Array& result : results) result.Fill(0xa5);
    return Call(handler, pool, operands, results, attributes);
  }

  Outcome Run() {
    RunningPool pool(1);
    return Run(pool);
  }
};

inline void ExpectUntouched(const HandlerCall& call, const Outcome& outcome) {
  for (const Array& result : call.results) {
    Array untouched = result;
    untouched.Fill(0xa5);
    EXPECT_TRUE(result == untouched) << "a refused call wrote a result: " << outcome.message;
  }
}

// Every message names the op and the operand, says what was given and what is needed.
inline void ExpectRefused(HandlerCall call, const std::vector<std::string>& parts) {
  const Outcome outcome = call.Run();
  EXPECT_EQ(outcome.code, XLA_FFI_Error_Code_INVALID_ARGUMENT) << outcome.message;
  for (const std::string& part : parts) {
    EXPECT_NE(outcome.message.find(part), std::string::npos) << part << " in " << outcome.message;
  }
  ExpectUntouched(call, outcome);
}

// The FFI library's own refusals: it chooses code and words.
inline void ExpectFailed(HandlerCall call, const std::string& part) {
  const Outcome outcome = call.Run();
  EXPECT_FALSE(outcome.ok());
  EXPECT_NE(outcome.message.find(part), std::string::npos) << part << " in " << outcome.message;
  ExpectUntouched(call, outcome);
}

}  // namespace jax_moe_det::testing

#endif  // JAX_MOE_DET_TESTS_CPP_HANDLER_CALL_H_
