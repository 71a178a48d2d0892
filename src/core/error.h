// SPDX-License-Identifier: Apache-2.0
// The one way in which set-up and calls fail: an `Error` is thrown, and says what was expected,
// what came and where. Handlers make XLA's errors of it (xla/ffi.h).
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>
#include <string_view>

namespace callgate {

// Kinds of failure: the absl status codes that XLA reports them as.
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

  // With a text that is complete as it is.
  static Error verbatim(ErrorCode code, const std::string& text) { return {text, code}; }
  ErrorCode code() const noexcept { return code_; }

 private:
  Error(const std::string& text, ErrorCode code) : std::runtime_error(text), code_(code) {}

  ErrorCode code_;
};

// `text` with each byte that is not of a character in UTF-8 written as "\xff".
std::string valid_utf8(std::string_view text);

}  // namespace callgate
