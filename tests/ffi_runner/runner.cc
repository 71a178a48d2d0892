// SPDX-License-Identifier: Apache-2.0
// See runner_api.h: XLA_FFI_Api as far as handlers on a GPU use it, and call frames made of the
// public C structs.
//
// Sites are used by one thread at a time; what handlers call
// may come from any.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "runner_api.h"
#include "runner_attributes.h"
#include "xla/ffi/api/c_api.h"

struct XLA_FFI_Error {
  std::string message;
  XLA_FFI_Error_Code code = XLA_FFI_Error_Code_OK;
};

struct XLA_FFI_Future {
  bool settled = false;
  XLA_FFI_Error error;
};

namespace runner {

struct Site {
  XLA_FFI_Handler *instantiate, *prepare, *initialize, *execute;
  Dictionary attributes;
  // The state of each stage that may give one.
  std::map<int, std::pair<std::int64_t, void*>> states;
  std::vector<std::uint64_t> scratch;
  std::mutex mutex;  // guards scratch: handlers may ask on threads of their own
};

namespace {

// A frame's `ctx`: an opaque struct of XLA's, whose name depends on the version.
struct Context {
  Site* site = nullptr;
  Run run{};
};
using Opaque = decltype(XLA_FFI_CallFrame::ctx);

Context& context_of(Opaque opaque) { return *reinterpret_cast<Context*>(opaque); }

// XLA's state for the whole process; never destroyed.
struct Runtime {
  std::mutex mutex;
  std::condition_variable settled;
  std::map<std::string, std::int64_t> types;
  std::map<std::int64_t, void (*)(void*)> deleters;
  std::list<XLA_FFI_Future> futures;
  std::atomic<std::size_t> live_errors{0}, leaked_states{0};
  std::uint64_t (*allocate)(int, std::size_t) = nullptr;
  void (*release)(std::uint64_t) = nullptr;
};

Runtime& runtime() {
  static auto* runtime = new Runtime();
  return *runtime;
}

XLA_FFI_Error* make_error(XLA_FFI_Error_Code code, std::string message) {
  runtime().live_errors.fetch_add(1, std::memory_order_relaxed);  // a count, read when all is done
  return new XLA_FFI_Error{std::move(message), code};
}

std::pair<int, std::string> take(XLA_FFI_Error* error) {
  if (error == nullptr) return {};
  std::unique_ptr<XLA_FFI_Error> owned(error);
  runtime().live_errors.fetch_sub(1, std::memory_order_relaxed);  // as above
  return {owned->code, owned->message};
}

// Ids of our own are large: in this process XLA itself gives out small ones.
XLA_FFI_Error* register_type(XLA_FFI_Type_Register_Args* args) {
  std::lock_guard lock(runtime().mutex);
  std::string name(args->name.ptr, args->name.len);
  auto next = static_cast<std::int64_t>(1'000'000 + runtime().types.size());
  auto [it, added] = runtime().types.try_emplace(name, next);
  if (args->type_id->type_id != 0) it->second = args->type_id->type_id;
  args->type_id->type_id = it->second;
  if (args->type_info != nullptr) runtime().deleters[it->second] = args->type_info->deleter;
  return nullptr;
}

XLA_FFI_Error* set_state(XLA_FFI_State_Set_Args* args) {
  auto [it, added] = context_of(args->ctx).site->states.try_emplace(
      args->stage, std::pair{args->type_id->type_id, args->state});
  if (added) return nullptr;
  return make_error(XLA_FFI_Error_Code_FAILED_PRECONDITION, "the stage's state is set already");
}

XLA_FFI_Error* get_state(XLA_FFI_State_Get_Args* args) {
  const auto& states = context_of(args->ctx).site->states;
  auto it = states.find(args->stage);
  if (it == states.end() || it->second.first != args->type_id->type_id)
    return make_error(XLA_FFI_Error_Code_NOT_FOUND, "no state of this type is set");
  args->state = it->second.second;
  return nullptr;
}

XLA_FFI_Error* allocate(XLA_FFI_DeviceMemory_Allocate_Args* args) {
  if (args->alignment > 16) {  // as XLA does
    return make_error(XLA_FFI_Error_Code_INVALID_ARGUMENT,
                      "Unsupported alignment: " + std::to_string(args->alignment));
  }
  Runtime& all = runtime();
  std::uint64_t memory =
      all.allocate == nullptr ? 0 : all.allocate(context_of(args->ctx).run.device, args->size);
  if (memory == 0) return make_error(XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "no device memory");
  std::lock_guard lock(context_of(args->ctx).site->mutex);
  context_of(args->ctx).site->scratch.push_back(memory);
  args->data = reinterpret_cast<void*>(memory);
  return nullptr;
}

XLA_FFI_Error* create_future(XLA_FFI_Future_Create_Args* args) {
  std::lock_guard lock(runtime().mutex);
  args->future = &runtime().futures.emplace_back();
  return nullptr;
}

XLA_FFI_Error* settle(XLA_FFI_Future& future, std::pair<int, std::string> status) {
  std::lock_guard lock(runtime().mutex);
  future.settled = true;
  future.error = {std::move(status.second), static_cast<XLA_FFI_Error_Code>(status.first)};
  runtime().settled.notify_all();
  return nullptr;
}

std::pair<int, std::string> wait(XLA_FFI_Future& future) {
  std::unique_lock lock(runtime().mutex);
  bool settled =
      runtime().settled.wait_for(lock, std::chrono::seconds(120), [&] { return future.settled; });
  if (!settled) return {XLA_FFI_Error_Code_DEADLINE_EXCEEDED, "the future was never settled"};
  return {future.error.code, future.error.message};
}

XLA_FFI_Error* none(const char* what) {
  return make_error(XLA_FFI_Error_Code_UNIMPLEMENTED, std::string("not on a GPU: ") + what);
}

// Renamed, and given the code, by later versions of XLA.
template <class Api>
void set_error_text(Api& api) {
  if constexpr (requires { api.XLA_FFI_Error_GetDetails; }) {
    api.XLA_FFI_Error_GetDetails = [](auto* args) {
      args->message = args->error->message.c_str();
      if (args->struct_size >= sizeof(*args)) args->errc = args->error->code;
    };
  } else {
    api.XLA_FFI_Error_GetMessage = [](auto* args) { args->message = args->error->message.c_str(); };
  }
}

const XLA_FFI_Api* api() {
  static const XLA_FFI_Api table = [] {
    XLA_FFI_Api api{};
    api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
    api.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR,
                       XLA_FFI_API_MINOR};
    api.XLA_FFI_Error_Create = [](XLA_FFI_Error_Create_Args* args) {
      return make_error(args->errc, args->message);
    };
    set_error_text(api);
    api.XLA_FFI_Error_Destroy = [](XLA_FFI_Error_Destroy_Args* args) { take(args->error); };
    api.XLA_FFI_Type_Register = register_type;
    api.XLA_FFI_State_Set = set_state;
    api.XLA_FFI_State_Get = get_state;
    api.XLA_FFI_Stream_Get = [](XLA_FFI_Stream_Get_Args* args) -> XLA_FFI_Error* {
      args->stream = context_of(args->ctx).run.stream;
      return nullptr;
    };
    api.XLA_FFI_DeviceMemory_Allocate = allocate;
    // Stream-ordered: what was enqueued may still use it. See runner_release_scratch().
    api.XLA_FFI_DeviceMemory_Free = [](XLA_FFI_DeviceMemory_Free_Args*) -> XLA_FFI_Error* {
      return nullptr;
    };
    api.XLA_FFI_ThreadPool_NumThreads = [](XLA_FFI_ThreadPool_NumThreads_Args*) {
      return none("a thread pool");
    };
    api.XLA_FFI_ThreadPool_Schedule = [](XLA_FFI_ThreadPool_Schedule_Args*) {
      return none("a thread pool");
    };
    api.XLA_FFI_Future_Create = create_future;
    api.XLA_FFI_Future_SetAvailable = [](XLA_FFI_Future_SetAvailable_Args* args) {
      return settle(*args->future, {});
    };
    api.XLA_FFI_Future_SetError = [](XLA_FFI_Future_SetError_Args* args) {
      return settle(*args->future, take(args->error));
    };
    api.XLA_FFI_RunId_Get = [](XLA_FFI_RunId_Get_Args* args) -> XLA_FFI_Error* {
      args->run_id = context_of(args->ctx).run.id;
      return nullptr;
    };
    api.XLA_FFI_DeviceOrdinal_Get = [](XLA_FFI_DeviceOrdinal_Get_Args* args) -> XLA_FFI_Error* {
      args->device_ordinal = context_of(args->ctx).run.device;
      return nullptr;
    };
    return api;
  }();
  return &table;
}

// One side of a frame: buffers and what points to them.
struct Side {
  Side(const Array* arrays, std::size_t count, bool with_memory) {
    buffers.reserve(count);
    for (std::size_t i = 0; i < count; ++i) {
      const Array& array = arrays[i];
      buffers.push_back({XLA_FFI_Buffer_STRUCT_SIZE, nullptr,
                         static_cast<XLA_FFI_DataType>(array.dtype),
                         with_memory ? array.data : nullptr, array.rank, array.dims});
      pointers.push_back(&buffers.back());
    }
  }
  std::vector<XLA_FFI_Buffer> buffers;
  std::vector<void*> pointers;
};

// A frame that dies when the handler has returned.
class Frame {
 public:
  Frame(XLA_FFI_ExecutionStage stage, Context* context, XLA_FFI_Attrs* attributes, Side& operands,
        Side& results)
      : arg_types_(operands.buffers.size(), XLA_FFI_ArgType_BUFFER),
        ret_types_(results.buffers.size(), XLA_FFI_RetType_BUFFER) {
    frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
    frame.api = api();
    frame.ctx = reinterpret_cast<Opaque>(context);
    frame.stage = stage;
    frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, static_cast<std::int64_t>(arg_types_.size()),
                  arg_types_.data(), operands.pointers.data()};
    frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, static_cast<std::int64_t>(ret_types_.size()),
                  ret_types_.data(), results.pointers.data()};
    if (attributes != nullptr) {
      frame.attrs = *attributes;
    } else {
      frame.attrs.struct_size = XLA_FFI_Attrs_STRUCT_SIZE;
    }
  }
  XLA_FFI_CallFrame frame{};

 private:
  std::vector<XLA_FFI_ArgType> arg_types_;
  std::vector<XLA_FFI_RetType> ret_types_;
};

int answer(const std::pair<int, std::string>& status, char* message, std::size_t capacity) {
  if (capacity == 0) return status.first;
  std::size_t size = std::min(capacity - 1, status.second.size());
  std::memcpy(message, status.second.data(), size);
  message[size] = 0;
  return status.first;
}

void delete_state(std::pair<std::int64_t, void*> state) {
  void (*deleter)(void*) = nullptr;
  {
    std::lock_guard lock(runtime().mutex);
    if (auto it = runtime().deleters.find(state.first); it != runtime().deleters.end())
      deleter = it->second;
  }
  if (deleter != nullptr) return deleter(state.second);
  runtime().leaked_states.fetch_add(1,
                                    std::memory_order_relaxed);  // a count, read when all is done
}

}  // namespace
}  // namespace runner

using runner::Dictionary;
using runner::Site;

RUNNER_API void runner_use_memory(std::uint64_t (*allocate)(int, std::size_t),
                                  void (*release)(std::uint64_t)) {
  runner::runtime().allocate = allocate;
  runner::runtime().release = release;
}
RUNNER_API Site* runner_new_site(void* instantiate, void* prepare, void* initialize,
                                 void* execute) {
  auto handler = [](void* pointer) { return reinterpret_cast<XLA_FFI_Handler*>(pointer); };
  auto site = std::make_unique<Site>();
  site->instantiate = handler(instantiate);
  site->prepare = handler(prepare);
  site->initialize = handler(initialize);
  site->execute = handler(execute);
  return site.release();  // the caller's, until runner_delete_site()
}
RUNNER_API void runner_delete_site(Site* site) {
  std::unique_ptr<Site> owned(site);
  for (const auto& [stage, state] : owned->states) runner::delete_state(state);
  runner_release_scratch(site);
}
RUNNER_API Dictionary* runner_attributes(Site* site) { return &site->attributes; }
RUNNER_API void runner_add_string(Dictionary* to, const char* name, const char* text,
                                  std::size_t size) {
  auto& value = to->values[name];
  value.type = XLA_FFI_AttrType_STRING;
  value.bytes.assign(text, size);
}
RUNNER_API void runner_add_scalar(Dictionary* to, const char* name, int dtype, const void* bytes,
                                  std::size_t size) {
  auto& value = to->values[name];
  value.type = XLA_FFI_AttrType_SCALAR;
  value.dtype = static_cast<XLA_FFI_DataType>(dtype);
  value.bytes.assign(static_cast<const char*>(bytes), size);
}
RUNNER_API void runner_add_array(Dictionary* to, const char* name, int dtype, std::size_t count,
                                 const void* bytes, std::size_t size) {
  runner_add_scalar(to, name, dtype, bytes, size);
  to->values[name].type = XLA_FFI_AttrType_ARRAY;
  to->values[name].count = count;
}
RUNNER_API Dictionary* runner_add_dictionary(Dictionary* to, const char* name) {
  auto& value = to->values[name];
  value.type = XLA_FFI_AttrType_DICTIONARY;
  value.entries = std::make_unique<Dictionary>();
  return value.entries.get();
}

RUNNER_API int runner_instantiate(Site* site, char* message, std::size_t capacity) {
  if (site->instantiate == nullptr) return 0;
  runner::Context context{site, {}};
  runner::Side none(nullptr, 0, false);
  runner::Frame frame(XLA_FFI_ExecutionStage_INSTANTIATE, &context, site->attributes.describe(),
                      none, none);
  return runner::answer(runner::take(site->instantiate(&frame.frame)), message, capacity);
}
RUNNER_API int runner_execute(Site* site, const runner::Array* operands, std::size_t operand_count,
                              const runner::Array* results, std::size_t result_count,
                              const runner::Run* run, char* message, std::size_t capacity) {
  runner::Context context{site, *run};
  XLA_FFI_Attrs* attributes = site->attributes.describe();
  // States of these stages are made anew for each execution.
  for (int stage : {XLA_FFI_ExecutionStage_PREPARE, XLA_FFI_ExecutionStage_INITIALIZE}) {
    if (auto state = site->states.extract(stage); !state.empty())
      runner::delete_state(state.mapped());
  }
  struct {
    XLA_FFI_Handler* handler;
    XLA_FFI_ExecutionStage stage;
  } stages[] = {{site->prepare, XLA_FFI_ExecutionStage_PREPARE},
                {site->initialize, XLA_FFI_ExecutionStage_INITIALIZE},
                {site->execute, XLA_FFI_ExecutionStage_EXECUTE}};
  for (auto [handler, stage] : stages) {
    if (handler == nullptr) continue;
    bool with_memory = stage != XLA_FFI_ExecutionStage_PREPARE;
    runner::Side in(operands, operand_count, with_memory), out(results, result_count, with_memory);
    runner::Frame frame(stage, &context, attributes, in, out);
    auto status = runner::take(handler(&frame.frame));
    if (status.first == 0 && frame.frame.future != nullptr)
      status = runner::wait(*frame.frame.future);
    if (status.first != 0) return runner::answer(status, message, capacity);
  }
  return 0;
}
RUNNER_API void runner_release_scratch(Site* site) {
  std::lock_guard lock(site->mutex);
  for (std::uint64_t memory : site->scratch) runner::runtime().release(memory);
  site->scratch.clear();
}
RUNNER_API int runner_traits(void* handler) {
  XLA_FFI_Metadata metadata{};
  metadata.struct_size = sizeof(XLA_FFI_Metadata);
  XLA_FFI_Metadata_Extension extension{};
  extension.extension_base.struct_size = XLA_FFI_Metadata_Extension_STRUCT_SIZE;
  using Type = decltype(extension.extension_base.type);
  extension.extension_base.type = static_cast<Type>(1);  // metadata, in every version
  extension.metadata = &metadata;
  runner::Side none(nullptr, 0, false);
  runner::Frame frame(XLA_FFI_ExecutionStage_EXECUTE, nullptr, nullptr, none, none);
  frame.frame.extension_start = &extension.extension_base;
  auto status = runner::take(reinterpret_cast<XLA_FFI_Handler*>(handler)(&frame.frame));
  return status.first != 0 ? -1 : static_cast<int>(metadata.traits);
}
RUNNER_API std::size_t runner_live_errors() {
  return runner::runtime().live_errors.load(std::memory_order_relaxed);  // a count
}
RUNNER_API std::size_t runner_leaked_states() {
  return runner::runtime().leaked_states.load(std::memory_order_relaxed);  // a count
}
