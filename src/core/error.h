// SPDX-License-Identifier: Apache-2.0
// The one error type of setup and calls: `Error` states the expectation, the actual value, and the
// place. Handlers convert it into XLA's errors (xla/ffi.h).
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>
#include <string_view>

namespace callgate {

// Kinds of failure: the absl status codes as which XLA reports them.
enum class ErrorCode {
  kInvalidArgument = 3,
  kDeadlineExceeded = 4,
  kNotFound = 5,
  kAlreadyExists = 6,
  kResourceExhausted = 8,
  kAborted = 10,
  kInternal = 13,
};

class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& where, const std::string& expected,
        const std::string& got)
      : Error(code, where + ": expected " + expected + ", got " + got) {}
  // The same with kInvalidArgument.
  Error(const std::string& where, const std::string& expected, const std::string& got)
      : Error(ErrorCode::kInvalidArgument, where, expected, got) {}
  Error(ErrorCode code, const std::string& message)
      : std::runtime_error("callgate: " + message), code_(code) {}

  // An error whose text is already complete.
  static Error verbatim(ErrorCode code, const std::string& text) { return {text, code}; }
  ErrorCode code() const noexcept { return code_; }

 private:
  Error(const std::string& text, ErrorCode code) : std::runtime_error(text), code_(code) {}

  ErrorCode code_;
};

// `text` with each byte that isn't part of a UTF-8 character written as "\xff".
std::string valid_utf8(std::string_view text);

}  // namespace callgate
