// The state of a call site that XLA owns, for handlers that read the raw call frame.
//
// A state's type S has a static `id`. XLA hands it out when it asks a handler for its metadata, as
// a target is registered with a backend: that needs no private API and doesn't disturb the backend,
// as registering a type before it exists would.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "xla/ffi.h"

namespace callgate::xla_ffi {

// Adds to what a handler says of itself, in a frame that asks for metadata.
inline void add_traits(const XLA_FFI_CallFrame& frame, XLA_FFI_Handler_TraitsBits traits) noexcept {
  auto* asked = reinterpret_cast<XLA_FFI_Metadata_Extension*>(frame.extension_start);
  asked->metadata->traits |= static_cast<XLA_FFI_Handler_Traits>(traits);
}

template <class S>
class StateOf {
 public:
  // True for a frame that asks for metadata; `error` is then what to return. `name` is the type's.
  // `gives_state`: the handler is that of the instantiate stage.
  static bool answer_metadata(XLA_FFI_CallFrame* frame, std::string_view name, bool gives_state,
                              XLA_FFI_Error*& error) {
    if (frame->extension_start == nullptr ||
        frame->extension_start->type != XLA_FFI_Extension_Metadata) [[likely]] {
      return false;
    }
    error = register_type(frame->api, name);
    if (error == nullptr) error = gives_state ? kGives(frame) : kTakes(frame);
    return true;
  }

  static XLA_FFI_Error* register_type(const XLA_FFI_Api* api, std::string_view name) {
    static std::mutex mutex;  // several programs may be loaded at once
    std::lock_guard lock(mutex);
    if (S::id.type_id != 0) return nullptr;
    return ::xla::ffi::Ffi::RegisterTypeId(api, name, &S::id, &kInfo);
  }

  // Hands the state of the site to XLA, in the instantiate stage.
  static XLA_FFI_Error* give(const XLA_FFI_CallFrame& frame, std::unique_ptr<S> state) {
    XLA_FFI_State_Set_Args args{XLA_FFI_State_Set_Args_STRUCT_SIZE, nullptr, frame.ctx,
                                XLA_FFI_ExecutionStage_INSTANTIATE, &S::id,  state.get()};
    XLA_FFI_Error* error = frame.api->XLA_FFI_State_Set(&args);
    if (error == nullptr) state.release();  // NOLINT: XLA's now
    return error;
  }

  // The state of the site that the frame calls. Throws Error where there is none.
  static S& get(const XLA_FFI_CallFrame& frame) {
    XLA_FFI_State_Get_Args args{XLA_FFI_State_Get_Args_STRUCT_SIZE, nullptr, frame.ctx,
                                XLA_FFI_ExecutionStage_INSTANTIATE, &S::id,  nullptr};
    if (XLA_FFI_Error* error = frame.api->XLA_FFI_State_Get(&args)) [[unlikely]] {
      std::string message = ::xla::ffi::internal::GetErrorMessage(frame.api, error);
      ::xla::ffi::internal::DestroyError(frame.api, error);
      throw Error(ErrorCode::kInternal, "no state for the call site: " + message);
    }
    return *static_cast<S*>(args.state);
  }

 private:
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
