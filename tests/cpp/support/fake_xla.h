// SPDX-License-Identifier: Apache-2.0
// An XLA without XLA: the part of XLA_FFI_Api that callgate's handlers use, and call frames made of
// the public C structs.
//
// XLA's opaque types are defined here, so only test programs may include this file. A `Program` is
// one call site of one executable: it owns the state that instantiate made, as XLA does, and every
// `execute` gets a frame of its own that dies before `execute` returns. Misuse of the interface (an
// error that is never destroyed, a future that is settled twice) is counted or ends the test.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <source_location>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "fake_attributes.h"
#include "xla/ffi/api/c_api.h"
#include "xla/handlers.h"

struct XLA_FFI_Error {
  std::string message;
  XLA_FFI_Error_Code code = XLA_FFI_Error_Code_OK;
};

struct XLA_FFI_Future {
  std::mutex mutex;
  std::condition_variable changed;
  int settled = 0;
  XLA_FFI_Error error;
};

struct XLA_FFI_ExecutionContext {
  std::int32_t device = 3;   // negative: this XLA has none
  std::int64_t run = 77;     // as above
  std::int64_t threads = 1;  // of its pool, which starts one for each task; negative: no pool
  void* stream = nullptr;    // of a GPU's program
  std::function<void*(std::size_t bytes)> allocate;  // scratch memory on it; null for none
  std::function<void(void*)> free;
  void* state = nullptr;
  XLA_FFI_TypeId state_type = {0};

  std::mutex mutex;  // guards what follows
  std::vector<std::thread> pool;

  void join() {
    std::vector<std::thread> started;
    {
      std::lock_guard lock(mutex);
      started.swap(pool);
    }
    for (std::thread& thread : started) thread.join();
  }
};

namespace callgate::fake {

// The status that came back through the interface; the error itself is destroyed.
struct Status {
  XLA_FFI_Error_Code code = XLA_FFI_Error_Code_OK;
  std::string message;
  bool ok() const { return code == XLA_FFI_Error_Code_OK; }
};

struct Type {
  std::int64_t id;
  XLA_FFI_TypeInfo info;
};

// XLA's state for the whole process.
struct Runtime {
  std::mutex mutex;
  std::map<std::string, Type, std::less<>> types;
  std::list<XLA_FFI_Future> futures;  // none is freed: a late settler must find its future
  std::atomic<int> live_errors{0};
  std::atomic<bool> has_futures{true};

  static Runtime& instance() {
    static auto* runtime = new Runtime();
    return *runtime;
  }
};

inline XLA_FFI_Error* make_error(XLA_FFI_Error_Code code, std::string message) {
  Runtime::instance().live_errors.fetch_add(1);
  return new XLA_FFI_Error{std::move(message), code};
}

inline Status take(XLA_FFI_Error* error) {
  if (error == nullptr) return {};
  std::unique_ptr<XLA_FFI_Error> owner(error);
  Runtime::instance().live_errors.fetch_sub(1);
  return {error->code, error->message};
}

inline XLA_FFI_Error* register_type(XLA_FFI_Type_Register_Args* args) {
  auto& runtime = Runtime::instance();
  std::lock_guard lock(runtime.mutex);
  std::string name(args->name.ptr, args->name.len);
  auto next = static_cast<std::int64_t>(runtime.types.size()) + 1;
  auto [it, added] = runtime.types.try_emplace(name, Type{next, *args->type_info});
  if (!added && args->type_id->type_id != it->second.id) {
    return make_error(XLA_FFI_Error_Code_ALREADY_EXISTS, "type '" + name + "' is registered");
  }
  args->type_id->type_id = it->second.id;
  return nullptr;
}

inline XLA_FFI_Error* set_state(XLA_FFI_State_Set_Args* args) {
  if (args->ctx->state != nullptr) {
    return make_error(XLA_FFI_Error_Code_FAILED_PRECONDITION, "the state is set already");
  }
  args->ctx->state = args->state;
  args->ctx->state_type = *args->type_id;
  return nullptr;
}

inline XLA_FFI_Error* get_state(XLA_FFI_State_Get_Args* args) {
  const XLA_FFI_ExecutionContext& ctx = *args->ctx;
  if (ctx.state == nullptr || ctx.state_type.type_id != args->type_id->type_id) {
    return make_error(XLA_FFI_Error_Code_NOT_FOUND, "no state of this type is set");
  }
  args->state = ctx.state;
  return nullptr;
}

inline XLA_FFI_Error* create_future(XLA_FFI_Future_Create_Args* args) {
  auto& runtime = Runtime::instance();
  if (!runtime.has_futures) {
    return make_error(XLA_FFI_Error_Code_UNIMPLEMENTED, "futures are not supported");
  }
  std::lock_guard lock(runtime.mutex);
  args->future = &runtime.futures.emplace_back();
  return nullptr;
}

inline void settle(XLA_FFI_Future& future, Status status) {
  std::lock_guard lock(future.mutex);
  ++future.settled;
  future.error = {std::move(status.message), status.code};
  future.changed.notify_all();
}

// The table that every frame points to.
inline const XLA_FFI_Api* api() {
  static const XLA_FFI_Api table = [] {
    XLA_FFI_Api api{};
    api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
    api.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR,
                       XLA_FFI_API_MINOR};
    api.XLA_FFI_Error_Create = [](XLA_FFI_Error_Create_Args* args) {
      return make_error(args->errc, args->message);
    };
    api.XLA_FFI_Error_GetMessage = [](XLA_FFI_Error_GetMessage_Args* args) {
      args->message = args->error->message.c_str();
    };
    api.XLA_FFI_Error_Destroy = [](XLA_FFI_Error_Destroy_Args* args) { take(args->error); };
    api.XLA_FFI_Type_Register = register_type;
    api.XLA_FFI_State_Set = set_state;
    api.XLA_FFI_State_Get = get_state;
    api.XLA_FFI_ExecutionContext_Get = [](XLA_FFI_ExecutionContext_Get_Args*) {
      return make_error(XLA_FFI_Error_Code_NOT_FOUND, "no user data");
    };
    api.XLA_FFI_Future_Create = create_future;
    api.XLA_FFI_Future_SetAvailable = [](XLA_FFI_Future_SetAvailable_Args* args) {
      settle(*args->future, {});
      return static_cast<XLA_FFI_Error*>(nullptr);
    };
    api.XLA_FFI_Future_SetError = [](XLA_FFI_Future_SetError_Args* args) {
      settle(*args->future, take(args->error));
      return static_cast<XLA_FFI_Error*>(nullptr);
    };
    api.XLA_FFI_RunId_Get = [](XLA_FFI_RunId_Get_Args* args) -> XLA_FFI_Error* {
      if (args->ctx->run < 0) return make_error(XLA_FFI_Error_Code_UNIMPLEMENTED, "no run id");
      args->run_id = args->ctx->run;
      return nullptr;
    };
    api.XLA_FFI_DeviceOrdinal_Get = [](XLA_FFI_DeviceOrdinal_Get_Args* args) -> XLA_FFI_Error* {
      if (args->ctx->device < 0) return make_error(XLA_FFI_Error_Code_UNIMPLEMENTED, "no device");
      args->device_ordinal = args->ctx->device;
      return nullptr;
    };
    api.XLA_FFI_Stream_Get = [](XLA_FFI_Stream_Get_Args* args) -> XLA_FFI_Error* {
      if (args->ctx->stream == nullptr) {
        return make_error(XLA_FFI_Error_Code_UNIMPLEMENTED, "no stream");
      }
      args->stream = args->ctx->stream;
      return nullptr;
    };
    api.XLA_FFI_DeviceMemory_Allocate =
        [](XLA_FFI_DeviceMemory_Allocate_Args* args) -> XLA_FFI_Error* {
      if (args->alignment > 16) {  // as XLA does
        return make_error(XLA_FFI_Error_Code_INVALID_ARGUMENT,
                          "Unsupported alignment: " + std::to_string(args->alignment));
      }
      args->data = args->ctx->allocate ? args->ctx->allocate(args->size) : nullptr;
      if (args->data != nullptr) return nullptr;
      return make_error(XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "out of memory");
    };
    api.XLA_FFI_DeviceMemory_Free = [](XLA_FFI_DeviceMemory_Free_Args* args) {
      args->ctx->free(args->data);
      return static_cast<XLA_FFI_Error*>(nullptr);
    };
    api.XLA_FFI_ThreadPool_NumThreads =
        [](XLA_FFI_ThreadPool_NumThreads_Args* args) -> XLA_FFI_Error* {
      if (args->ctx->threads < 0) return make_error(XLA_FFI_Error_Code_UNIMPLEMENTED, "no pool");
      *args->num_threads = args->ctx->threads;
      return nullptr;
    };
    api.XLA_FFI_ThreadPool_Schedule = [](XLA_FFI_ThreadPool_Schedule_Args* args) -> XLA_FFI_Error* {
      if (args->ctx->threads < 0) return make_error(XLA_FFI_Error_Code_UNIMPLEMENTED, "no pool");
      std::lock_guard lock(args->ctx->mutex);
      args->ctx->pool.emplace_back(args->task, args->data);
      return nullptr;
    };
    return api;
  }();
  return &table;
}

// An array for a frame to point to. The caller keeps `data` alive.
struct Array {
  XLA_FFI_DataType dtype;
  std::vector<std::int64_t> dims;
  void* data;
};

inline Array token() { return {XLA_FFI_DataType_TOKEN, {}, nullptr}; }

// A call frame and all that it points to.
class Frame {
 public:
  Frame(XLA_FFI_ExecutionStage stage, XLA_FFI_ExecutionContext* ctx, std::vector<Array> operands,
        std::vector<Array> results, AttributeMap attributes = {})
      : operands_(std::move(operands)),
        results_(std::move(results)),
        attributes_(std::move(attributes)) {
    describe(operands_);
    describe(results_);
    for (XLA_FFI_Buffer& buffer : buffers_) {
      (pointers_.size() < operands_.size() ? pointers_ : result_pointers_).push_back(&buffer);
    }
    arg_types_.assign(operands_.size(), XLA_FFI_ArgType_BUFFER);
    ret_types_.assign(results_.size(), XLA_FFI_RetType_BUFFER);
    frame_.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
    frame_.api = api();
    frame_.ctx = ctx;
    frame_.stage = stage;
    frame_.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, count(pointers_), arg_types_.data(),
                   pointers_.data()};
    frame_.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, count(result_pointers_), ret_types_.data(),
                   result_pointers_.data()};
    frame_.attrs = attributes_.describe_entries();
  }
  Frame(const Frame&) = delete;
  Frame& operator=(const Frame&) = delete;

  XLA_FFI_CallFrame* get() { return &frame_; }

 private:
  void describe(std::vector<Array>& arrays) {
    for (Array& array : arrays) {
      buffers_.push_back({XLA_FFI_Buffer_STRUCT_SIZE, nullptr, array.dtype, array.data,
                          static_cast<std::int64_t>(array.dims.size()), array.dims.data()});
    }
  }
  static std::int64_t count(const std::vector<void*>& pointers) {
    return static_cast<std::int64_t>(pointers.size());
  }

  std::vector<Array> operands_, results_;
  Attribute attributes_;
  std::list<XLA_FFI_Buffer> buffers_;
  std::vector<XLA_FFI_ArgType> arg_types_;
  std::vector<XLA_FFI_RetType> ret_types_;
  std::vector<void*> pointers_, result_pointers_;
  XLA_FFI_CallFrame frame_{};
};

// The outcome of an execute: at once, or through a future.
struct Execution {
  Status at_once;
  XLA_FFI_Future* future = nullptr;

  // The program's status in the end. Fails the test when the future is not settled in time.
  Status wait(std::chrono::seconds limit = std::chrono::seconds(60)) const {
    if (future == nullptr) return at_once;
    std::unique_lock lock(future->mutex);
    if (!future->changed.wait_for(lock, limit, [this] { return future->settled > 0; })) {
      ADD_FAILURE() << "the future was never settled";
      return {XLA_FFI_Error_Code_UNKNOWN, "never settled"};
    }
    return {future->error.code, future->error.message};
  }

  // How often the future has been settled so far.
  int times_settled() const {
    std::lock_guard lock(future->mutex);
    return future->settled;
  }
};

// One call site of one executable: its name and what else it holds. Its target is `callgate.gate`,
// unless it says otherwise.
class Program {
 public:
  explicit Program(const std::string& name, AttributeMap attributes = {})
      : Program(name, std::move(attributes), &xla_ffi::gate_instantiate, &xla_ffi::gate_execute) {}
  ~Program() {
    context_.join();
    unload();
  }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  XLA_FFI_ExecutionContext& context() { return context_; }

  Status load() {
    Frame frame(XLA_FFI_ExecutionStage_INSTANTIATE, &context_, {}, {}, attributes_);
    return take(instantiate_(frame.get()));
  }

  // Destroys the state, as XLA does with the executable.
  void unload() {
    if (context_.state == nullptr) return;
    auto& runtime = Runtime::instance();
    void (*deleter)(void*) = nullptr;
    {
      std::lock_guard lock(runtime.mutex);
      for (const auto& [name, type] : runtime.types) {
        if (type.id == context_.state_type.type_id) deleter = type.info.deleter;
      }
    }
    deleter(std::exchange(context_.state, nullptr));
  }

  Execution execute(std::vector<Array> operands = {}, std::vector<Array> results = {}) {
    Frame frame(XLA_FFI_ExecutionStage_EXECUTE, &context_, std::move(operands), std::move(results),
                attributes_);
    Status status = take(execute_(frame.get()));
    return {std::move(status), frame.get()->future};
  }

  // An execution that has to succeed, or the test fails at the caller's line.
  void run(std::vector<Array> operands = {}, std::vector<Array> results = {},
           std::source_location where = std::source_location::current()) {
    Status status = execute(std::move(operands), std::move(results)).wait();
    if (!status.ok())
      ADD_FAILURE_AT(where.file_name(), static_cast<int>(where.line())) << status.message;
  }

 protected:
  Program(const std::string& name, AttributeMap attributes, XLA_FFI_Handler* instantiate,
          XLA_FFI_Handler* execute)
      : attributes_(std::move(attributes)), instantiate_(instantiate), execute_(execute) {
    attributes_.emplace("name", name);
  }

 private:
  AttributeMap attributes_;
  XLA_FFI_Handler* instantiate_;
  XLA_FFI_Handler* execute_;
  XLA_FFI_ExecutionContext context_;
};

// The same in a GPU's program, on a stream.
class CudaGateProgram : public Program {
 public:
  explicit CudaGateProgram(const std::string& name, void* stream, AttributeMap attributes = {})
      : Program(name, std::move(attributes), &xla_ffi::cuda_gate_instantiate,
                &xla_ffi::cuda_gate_execute) {
    context().stream = stream;
  }
};

// A kernel's call in a GPU's program, on a stream.
class CudaKernelProgram : public Program {
 public:
  CudaKernelProgram(const std::string& name, void* stream, AttributeMap attributes)
      : Program(name, std::move(attributes), &xla_ffi::cuda_kernel_instantiate,
                &xla_ffi::cuda_kernel_execute) {
    context().stream = stream;
  }
};

// One call site of the target `callgate.kernel`, with the attributes given and its name.
class KernelProgram : public Program {
 public:
  explicit KernelProgram(const std::string& name, AttributeMap attributes = {})
      : Program(name, std::move(attributes), &xla_ffi::kernel_instantiate,
                &xla_ffi::kernel_execute) {}
};

// A program that is loaded when it is made; what fails ends the test.
template <typename Kind>
class Loaded : public Kind {
 public:
  using Kind::Kind;

 private:
  bool expect_loaded() {
    Status status = this->load();
    if (!status.ok()) throw std::runtime_error("the program was not loaded: " + status.message);
    return true;
  }
  [[maybe_unused]] bool loaded_ = expect_loaded();
};

// Asks a handler for its metadata, as XLA does when a target is registered.
inline Status query_metadata(XLA_FFI_Handler* handler, XLA_FFI_Metadata& metadata) {
  metadata = {};
  metadata.struct_size = sizeof(XLA_FFI_Metadata);
  XLA_FFI_Metadata_Extension extension{};
  extension.extension_base = {XLA_FFI_Metadata_Extension_STRUCT_SIZE, XLA_FFI_Extension_Metadata,
                              nullptr};
  extension.metadata = &metadata;
  Frame frame(XLA_FFI_ExecutionStage_EXECUTE, nullptr, {}, {});
  frame.get()->extension_start = &extension.extension_base;
  return take(handler(frame.get()));
}

}  // namespace callgate::fake
