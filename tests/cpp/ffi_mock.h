// Calls an XLA FFI handler without XLA: call frame, thread pool and errors made by hand. For unit
// tests and sanitizers.
#ifndef JAX_MOE_DET_TESTS_CPP_FFI_MOCK_H_
#define JAX_MOE_DET_TESTS_CPP_FFI_MOCK_H_

#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "tests/cpp/runtime_float_mode.h"
#include "xla/ffi/api/ffi.h"

namespace jax_moe_det::testing {

// A dense array that owns exactly its bytes: a sanitizer sees any access beside them.
class Array {
 public:
  Array(xla::ffi::DataType type, std::vector<int64_t> dims)
      : type_(type), dims_(std::move(dims)), bytes_(NumElements() * xla::ffi::ByteWidth(type)) {}

  template <class T>
  Array(xla::ffi::DataType type, std::vector<int64_t> dims, const std::vector<T>& values)
      : Array(type, std::move(dims)) {
    const size_t wanted = values.size() * sizeof(T);
    if (wanted != bytes_.size()) std::abort();  // a mistake in the test
    if (wanted > 0) std::memcpy(bytes_.data(), values.data(), wanted);
  }

  template <class T>
  std::vector<T> Values() const {
    std::vector<T> values(bytes_.size() / sizeof(T));
    if (!values.empty()) std::memcpy(values.data(), bytes_.data(), bytes_.size());
    return values;
  }

  // Results start as garbage: nothing may rely on zeroed memory.
  void Fill(unsigned char byte) { bytes_.assign(bytes_.size(), byte); }

  XLA_FFI_Buffer Buffer() {
    return {XLA_FFI_Buffer_STRUCT_SIZE,           nullptr,
            static_cast<XLA_FFI_DataType>(type_), bytes_.data(),
            static_cast<int64_t>(dims_.size()),   dims_.data()};
  }

  xla::ffi::DataType type() const { return type_; }

  bool operator==(const Array& other) const {
    return type_ == other.type_ && dims_ == other.dims_ && bytes_ == other.bytes_;
  }

 private:
  size_t NumElements() const {
    size_t elements = 1;
    for (const int64_t dim : dims_) elements *= static_cast<size_t>(dim);
    return elements;
  }

  xla::ffi::DataType type_;
  std::vector<int64_t> dims_;
  std::vector<unsigned char> bytes_;
};

// What a handler sees as its thread pool.
class TaskPool {
 public:
  virtual ~TaskPool() = default;
  virtual int64_t NumThreads() = 0;
  // False: no pool, the caller must run the task.
  virtual bool Schedule(std::function<void()> task) = 0;
};

// Threads that run tasks with the float mode of XLA's, and check that a task leaves it alone.
class RunningPool final : public TaskPool {
 public:
  explicit RunningPool(int num_threads) {
    for (int i = 0; i < num_threads; ++i) threads_.emplace_back([this] { RunTasks(); });
  }

  ~RunningPool() override { Join(); }

  int64_t NumThreads() override { return static_cast<int64_t>(threads_.size()); }

  bool Schedule(std::function<void()> task) override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    changed_.notify_one();
    return true;
  }

  // Ends the threads. Did every task restore the float mode that it was called with?
  bool JoinAndCheckFloatMode() {
    Join();
    return float_mode_kept_;
  }

 private:
  void Join() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopped_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) {
      if (thread.joinable()) thread.join();
    }
  }

  void RunTasks() {
    const RuntimeFloatMode mode;
    for (;;) {
      std::function<void()> task;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [this] { return stopped_ || !tasks_.empty(); });
        if (tasks_.empty()) return;
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
      task();
      if (!RuntimeFloatMode::IsSet()) {
        std::lock_guard<std::mutex> lock(mutex_);
        float_mode_kept_ = false;
      }
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool stopped_ = false;
  bool float_mode_kept_ = true;
  std::vector<std::thread> threads_;
};

// A pool whose threads are all busy: tasks start when RunAll is called, after the handler returned.
class BusyPool final : public TaskPool {
 public:
  explicit BusyPool(int num_threads) : num_threads_(num_threads) {}
  ~BusyPool() override { RunAll(); }
  int64_t NumThreads() override { return num_threads_; }
  bool Schedule(std::function<void()> task) override {
    tasks_.push_back(std::move(task));
    return true;
  }
  void RunAll() {
    for (const std::function<void()>& task : tasks_) task();
    tasks_.clear();
  }

 private:
  const int num_threads_;
  std::vector<std::function<void()>> tasks_;
};

// A runtime that names a number of threads and has none.
class RefusingPool final : public TaskPool {
 public:
  explicit RefusingPool(int num_threads) : num_threads_(num_threads) {}
  int64_t NumThreads() override { return num_threads_; }
  bool Schedule(std::function<void()>) override { return false; }

 private:
  const int num_threads_;
};

using Attributes = std::map<std::string, std::variant<int64_t, double, float, bool>>;

struct Outcome {
  XLA_FFI_Error_Code code;  // OK: success
  std::string message;
  bool ok() const { return code == XLA_FFI_Error_Code_OK; }
};

namespace internal {

inline XLA_FFI_Error* NewError(XLA_FFI_Error_Code code, std::string message) {
  return reinterpret_cast<XLA_FFI_Error*>(new Outcome{code, std::move(message)});
}

// The functions that a handler with a thread pool and without device memory asks for.
inline XLA_FFI_Api MakeApi() {
  XLA_FFI_Api api = {};
  api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
  api.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR,
                     XLA_FFI_API_MINOR};
  api.XLA_FFI_Error_Create = [](XLA_FFI_Error_Create_Args* args) {
    return NewError(args->errc, args->message);
  };
  api.XLA_FFI_Error_GetMessage = [](XLA_FFI_Error_GetMessage_Args* args) {
    args->message = reinterpret_cast<Outcome*>(args->error)->message.c_str();
  };
  api.XLA_FFI_Error_Destroy = [](XLA_FFI_Error_Destroy_Args* args) {
    delete reinterpret_cast<Outcome*>(args->error);
  };
  api.XLA_FFI_ThreadPool_NumThreads =
      [](XLA_FFI_ThreadPool_NumThreads_Args* args) -> XLA_FFI_Error* {
    *args->num_threads = reinterpret_cast<TaskPool*>(args->ctx)->NumThreads();
    return nullptr;
  };
  api.XLA_FFI_ThreadPool_Schedule = [](XLA_FFI_ThreadPool_Schedule_Args* args) {
    const auto run = [task = args->task, data = args->data] { task(data); };
    return reinterpret_cast<TaskPool*>(args->ctx)->Schedule(run)
               ? nullptr
               : NewError(XLA_FFI_Error_Code_UNIMPLEMENTED, "no thread pool");
  };
  return api;
}

inline XLA_FFI_Scalar Scalar(std::variant<int64_t, double, float, bool>& value) {
  constexpr XLA_FFI_DataType kTypes[] = {XLA_FFI_DataType_S64, XLA_FFI_DataType_F64,
                                         XLA_FFI_DataType_F32, XLA_FFI_DataType_PRED};
  return {kTypes[value.index()], std::visit([](auto& held) -> void* { return &held; }, value)};
}

}  // namespace internal

// The caller owns the float mode: see RuntimeFloatMode.
inline Outcome Call(XLA_FFI_Handler* handler, TaskPool& pool, std::vector<Array>& operands,
                    std::vector<Array>& results, Attributes attributes) {
  const XLA_FFI_Api api = internal::MakeApi();

  std::vector<XLA_FFI_Buffer> operand_buffers, result_buffers;
  for (Array& operand : operands) operand_buffers.push_back(operand.Buffer());
  for (Array& result : results) result_buffers.push_back(result.Buffer());
  std::vector<void*> operand_pointers, result_pointers;
  for (XLA_FFI_Buffer& buffer : operand_buffers) operand_pointers.push_back(&buffer);
  for (XLA_FFI_Buffer& buffer : result_buffers) result_pointers.push_back(&buffer);
  std::vector<XLA_FFI_ArgType> operand_types(operands.size(), XLA_FFI_ArgType_BUFFER);
  std::vector<XLA_FFI_RetType> result_types(results.size(), XLA_FFI_RetType_BUFFER);

  // Sorted by name, as the frame demands and a map delivers.
  std::vector<XLA_FFI_ByteSpan> names;
  std::vector<XLA_FFI_Scalar> scalars;
  for (auto& [name, value] : attributes) {
    names.push_back({name.data(), name.size()});
    scalars.push_back(internal::Scalar(value));
  }
  std::vector<XLA_FFI_ByteSpan*> name_pointers;
  std::vector<void*> scalar_pointers;
  for (XLA_FFI_ByteSpan& name : names) name_pointers.push_back(&name);
  for (XLA_FFI_Scalar& scalar : scalars) scalar_pointers.push_back(&scalar);
  std::vector<XLA_FFI_AttrType> attribute_types(attributes.size(), XLA_FFI_AttrType_SCALAR);

  XLA_FFI_CallFrame frame = {};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = &api;
  frame.ctx = reinterpret_cast<XLA_FFI_ExecutionContext*>(&pool);
  frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, static_cast<int64_t>(operands.size()),
                operand_types.data(), operand_pointers.data()};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, static_cast<int64_t>(results.size()),
                result_types.data(), result_pointers.data()};
  frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE,
                 nullptr,
                 static_cast<int64_t>(attributes.size()),
                 attribute_types.data(),
                 name_pointers.data(),
                 scalar_pointers.data()};

  XLA_FFI_Error* error = handler(&frame);
  if (error == nullptr) return {XLA_FFI_Error_Code_OK, ""};
  Outcome* made = reinterpret_cast<Outcome*>(error);
  Outcome outcome = *made;
  delete made;
  return outcome;
}

}  // namespace jax_moe_det::testing

#endif  // JAX_MOE_DET_TESTS_CPP_FFI_MOCK_H_
