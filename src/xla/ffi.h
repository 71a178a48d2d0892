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
    case ErrorCode::kAborted: return ::xla::ffi::ErrorCode::kAborted;
    case ErrorCode::kInternal: break;
  }
  return ::xla::ffi::ErrorCode::kInternal;
}

// An error that XLA takes ownership of.
inline XLA_FFI_Error* make_error(const XLA_FFI_Api* api, ErrorCode code,
                                 const std::string& message) {
  std::string text = valid_utf8(message);  // whatever calls the program decodes it
  XLA_FFI_Error_Create_Args args{XLA_FFI_Error_Create_Args_STRUCT_SIZE, nullptr, text.c_str(),
                                 static_cast<XLA_FFI_Error_Code>(to_xla(code))};
  return api->XLA_FFI_Error_Create(&args);
}

}  // namespace callgate::xla_ffi
