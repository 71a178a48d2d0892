// XLA's future API in C, so that settling never throws and needs no std::function of XLA's wrapper.
#include "xla/future.h"

namespace callgate::xla_ffi {

Promise::Promise(const XLA_FFI_Api* api) : api_(api) {
  XLA_FFI_Future_Create_Args args{XLA_FFI_Future_Create_Args_STRUCT_SIZE, nullptr, nullptr};
  if (XLA_FFI_Error* error = api->XLA_FFI_Future_Create(&args)) {
    settled_.store(true, std::memory_order_relaxed);  // no other thread knows of the promise yet
    std::string message = ::xla::ffi::internal::GetErrorMessage(api, error);
    ::xla::ffi::internal::DestroyError(api, error);
    throw Error(ErrorCode::kInternal, "XLA gave no future: " + message);
  }
  future_ = args.future;
}

bool Promise::succeed(const std::function<void()>& publish) {
  if (!claim()) return false;
  publish();
  XLA_FFI_Future_SetAvailable_Args args{XLA_FFI_Future_SetAvailable_Args_STRUCT_SIZE, nullptr,
                                        future_};
  if (XLA_FFI_Error* error = api_->XLA_FFI_Future_SetAvailable(&args)) {
    ::xla::ffi::internal::DestroyError(api_, error);
  }
  return true;
}

bool Promise::fail(ErrorCode code, const std::string& message) {
  if (!claim()) return false;
  XLA_FFI_Future_SetError_Args args{XLA_FFI_Future_SetError_Args_STRUCT_SIZE, nullptr, future_,
                                    make_error(api_, code, message)};
  if (XLA_FFI_Error* error = api_->XLA_FFI_Future_SetError(&args)) {
    ::xla::ffi::internal::DestroyError(api_, error);
  }
  return true;
}

}  // namespace callgate::xla_ffi
