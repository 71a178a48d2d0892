// The one place that includes XLA's FFI headers.
//
// Between callgate's code and XLA no exception passes: XLA is built without exceptions and would
// not unwind. Nor does glibc's forced unwind: Python up to 3.13 ends a thread with pthread_exit
// when it asks for the GIL of a finalizing interpreter. The thread then stops here for good, as
// Python 3.14 does; the process is about to end.
#pragma once

#include <cxxabi.h>
#include <unistd.h>

#include <cstdio>
#include <exception>
#include <memory>
#include <mutex>
#include <string>

#include "core/call.h"
#include "core/error.h"
#include "xla/ffi/api/ffi.h"

namespace callgate::xla_ffi {

// Both number errors as absl does.
static_assert(XLA_FFI_Error_Code{XLA_FFI_Error_Code_INVALID_ARGUMENT} == 3);
static_assert(int{XLA_FFI_Error_Code_INTERNAL} == static_cast<int>(ErrorCode::kInternal));

// An error that XLA takes ownership of.
inline XLA_FFI_Error* make_error(const XLA_FFI_Api* api, const Error& error) {
  std::string text = valid_utf8(error.what());  // whatever calls the program decodes it
  XLA_FFI_Error_Create_Args args{XLA_FFI_Error_Create_Args_STRUCT_SIZE, nullptr, text.c_str(),
                                 static_cast<XLA_FFI_Error_Code>(error.code())};
  return api->XLA_FFI_Error_Create(&args);
}

// Whether a function of XLA's succeeded, by its error.
inline bool succeeded(const XLA_FFI_Api* api, XLA_FFI_Error* error) noexcept {
  if (error == nullptr) [[likely]]
    return true;
  ::xla::ffi::internal::DestroyError(api, error);
  return false;
}

// XLA's own text.
inline std::string take_message(const XLA_FFI_Api* api, XLA_FFI_Error* error) {
  std::string message = ::xla::ffi::internal::GetErrorMessage(api, error);
  ::xla::ffi::internal::DestroyError(api, error);
  return message;
}

// Throws Error unless it succeeded: "XLA gave no stream: " and XLA's own text.
inline void check(const XLA_FFI_Api* api, XLA_FFI_Error* error, const char* failed) {
  if (error == nullptr) [[likely]]
    return;
  throw Error(ErrorCode::kInternal, failed + take_message(api, error));
}

// What `body` throws goes to `failed`, as an Error.
template <typename Body, typename Failed>
auto guarded(Body&& body, Failed&& failed) -> decltype(body()) {
  try {
    return body();
  } catch (const Error& error) {
    return failed(error);
  } catch (abi::__forced_unwind&) {
    for (;;) pause();
  } catch (const std::exception& error) {
    return failed(Error(ErrorCode::kInternal, error.what()));
  } catch (...) {
    return failed(Error(ErrorCode::kInternal, "unknown C++ exception"));
  }
}

// Has the callee keep a failure that XLA is not told of, for the next who asks.
inline void keep_failure(Callee& callee, const Error& error) {
  // With no memory to keep it in, say.
  guarded([&] { callee.defer(error); },
          [&](const Error&) { std::fprintf(stderr, "%s\n", error.what()); });
}

// Makes a call: `body`. In a program over several devices (`poison_on_error`) an error that one of
// them returns would leave the others waiting in their next collective, until XLA aborts the
// process. So there a failure succeeds for XLA: `poison` marks the results, and the callee keeps
// the failure for the next who asks.
template <typename Body, typename Poison>
void settled(bool poison_on_error, Callee& callee, Body&& body, Poison&& poison) {
  if (!poison_on_error) return body();
  guarded(body, [&](const Error& error) {
    guarded(poison, [](const Error&) {});  // the first failure is the one to tell of
    keep_failure(callee, error);
  });
}

// The state of a call site that XLA owns, for handlers that read the raw call frame.
//
// A state's type S has a static `id` and a static `kName`, the type's name. It is registered when
// XLA asks a handler for its metadata, as a target is registered with a backend: before that, it
// would disturb the backend.
template <class S>
class StateOf {
 public:
  // The handler of the instantiate stage: `make` gives a site's state from its attributes.
  template <typename Make>
  static XLA_FFI_Error* instantiate(XLA_FFI_CallFrame* frame, Make&& make) {
    return guarded_handler(frame, [&]() -> XLA_FFI_Error* {
      XLA_FFI_Error* error = register_type(frame->api);
      if (error != nullptr) return error;
      if (asks_for_metadata(*frame)) return kGives(frame);
      return give(*frame, make(frame->attrs));
    });
  }

  // The handler of the execute stage: `run` makes the call, which gets its state by get(), and
  // throws where it fails. What the handler says of itself has `traits`.
  template <typename Run>
  static XLA_FFI_Error* execute(XLA_FFI_CallFrame* frame, Run&& run,
                                XLA_FFI_Handler_Traits traits = 0) {
    if (asks_for_metadata(*frame)) [[unlikely]] {
      XLA_FFI_Error* error = register_type(frame->api);
      if (error == nullptr) error = kTakes(frame);
      if (error != nullptr) return error;
      auto* asked = reinterpret_cast<XLA_FFI_Metadata_Extension*>(frame->extension_start);
      asked->metadata->traits |= traits;
      return nullptr;
    }
    return guarded_handler(frame, [&]() -> XLA_FFI_Error* {
      run(frame);
      return nullptr;
    });
  }

  // The state of the site that the frame calls. Throws Error where there is none.
  static S& get(const XLA_FFI_CallFrame& frame) {
    XLA_FFI_State_Get_Args args{XLA_FFI_State_Get_Args_STRUCT_SIZE, nullptr, frame.ctx,
                                XLA_FFI_ExecutionStage_INSTANTIATE, &S::id,  nullptr};
    check(frame.api, frame.api->XLA_FFI_State_Get(&args), "no state for the call site: ");
    return *static_cast<S*>(args.state);
  }

 private:
  template <typename Body>
  static XLA_FFI_Error* guarded_handler(XLA_FFI_CallFrame* frame, Body&& body) {
    return guarded(body, [frame](const Error& error) { return make_error(frame->api, error); });
  }

  static bool asks_for_metadata(const XLA_FFI_CallFrame& frame) noexcept {
    return frame.extension_start != nullptr &&
           frame.extension_start->type == XLA_FFI_Extension_Metadata;
  }

  static XLA_FFI_Error* register_type(const XLA_FFI_Api* api) {
    static std::mutex mutex;  // several programs may be loaded at once
    std::lock_guard lock(mutex);
    if (S::id.type_id != 0) return nullptr;
    return ::xla::ffi::Ffi::RegisterTypeId(api, S::kName, &S::id, &kInfo);
  }

  static XLA_FFI_Error* give(const XLA_FFI_CallFrame& frame, std::unique_ptr<S> state) {
    XLA_FFI_State_Set_Args args{XLA_FFI_State_Set_Args_STRUCT_SIZE, nullptr, frame.ctx,
                                XLA_FFI_ExecutionStage_INSTANTIATE, &S::id,  state.get()};
    XLA_FFI_Error* error = frame.api->XLA_FFI_State_Set(&args);
    if (error == nullptr) state.release();  // NOLINT: XLA's now
    return error;
  }

  static constexpr XLA_FFI_TypeInfo kInfo = ::xla::ffi::MakeTypeInfo<S>();
  // Typed wrappers, which are only ever asked for what they know of S.
  XLA_FFI_DEFINE_HANDLER(
      kGives, []() -> ::xla::ffi::ErrorOr<std::unique_ptr<S>> { return std::unique_ptr<S>(); },
      ::xla::ffi::Ffi::BindInstantiate());
  XLA_FFI_DEFINE_HANDLER(
      kTakes, [](S*) { return ::xla::ffi::Error::Success(); },
      ::xla::ffi::Ffi::Bind().Ctx<::xla::ffi::State<S>>());
};

}  // namespace callgate::xla_ffi
