// The state of a call site that XLA owns, for handlers that read the raw call frame.
//
// A state's type S has a static `id` and a static `kName`, the type's name. XLA hands it out when
// it asks a handler for its metadata, as a target is registered with a backend: that needs no
// private API and doesn't disturb the backend, as registering a type before it exists would.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "xla/ffi.h"
#include "xla/guard.h"

namespace callgate::xla_ffi {

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
      if (error == nullptr) add_traits(*frame, traits);
      return error;
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

  static void add_traits(const XLA_FFI_CallFrame& frame, XLA_FFI_Handler_Traits traits) noexcept {
    auto* asked = reinterpret_cast<XLA_FFI_Metadata_Extension*>(frame.extension_start);
    asked->metadata->traits |= traits;
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
