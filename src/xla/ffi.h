// The one place that includes XLA's FFI headers, with our error codes mapped to theirs.
#pragma once

#include <string>

#include "core/error.h"
#include "core/utf8.h"
#include "xla/ffi/api/ffi.h"

namespace callgate::xla_ffi {

inline ::xla::ffi::ErrorCode to_xla(ErrorCode code) noexcept {
  switch (code) {
    case ErrorCode::kInvalidArgument: return ::xla::ffi::ErrorCode::kInvalidArgument;
    case ErrorCode::kNotFound: return ::xla::ffi::ErrorCode::kNotFound;
    case ErrorCode::kAlreadyExists: return ::xla::ffi::ErrorCode::kAlreadyExists;
    case ErrorCode::kDeadlineExceeded: return ::xla::ffi::ErrorCode::kDeadlineExceeded;
    case ErrorCode::kResourceExhausted: return ::xla::ffi::ErrorCode::kResourceExhausted;
    case ErrorCode::kAborted: return ::xla::ffi::ErrorCode::kAborted;
    case ErrorCode::kInternal: break;
  }
  return ::xla::ffi::ErrorCode::kInternal;
}

// An error that XLA takes ownership of.
inline XLA_FFI_Error* make_error(const XLA_FFI_Api* api, const Error& error) {
  std::string text = valid_utf8(error.what());  // whatever calls the program decodes it
  XLA_FFI_Error_Create_Args args{XLA_FFI_Error_Create_Args_STRUCT_SIZE, nullptr, text.c_str(),
                                 static_cast<XLA_FFI_Error_Code>(to_xla(error.code()))};
  return api->XLA_FFI_Error_Create(&args);
}

// Whether a function of XLA's succeeded, by the error that it returned.
inline bool succeeded(const XLA_FFI_Api* api, XLA_FFI_Error* error) noexcept {
  if (error == nullptr) [[likely]]
    return true;
  ::xla::ffi::internal::DestroyError(api, error);
  return false;
}

// Throws Error unless it succeeded: "XLA gave no stream: " and XLA's own text.
inline void check(const XLA_FFI_Api* api, XLA_FFI_Error* error, const char* failed) {
  if (error == nullptr) [[likely]]
    return;
  std::string message = ::xla::ffi::internal::GetErrorMessage(api, error);
  ::xla::ffi::internal::DestroyError(api, error);
  throw Error(ErrorCode::kInternal, failed + message);
}

}  // namespace callgate::xla_ffi
