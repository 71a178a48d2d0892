// SPDX-License-Identifier: Apache-2.0
// The one way in which set-up and calls fail: an `Error` is thrown, and says what was expected,
// what came and where. Handlers make XLA's errors of it (xla/ffi.h).
#pragma once

#include <cstddef>
#include <cstdint>
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

// Bytes of the character that the text begins with; 0 where it begins with none.
// https://www.unicode.org/versions/latest/core-spec/chapter-3/ table 3-7.
inline std::size_t utf8_character(std::string_view text) noexcept {
  auto byte = [&](std::size_t i) { return i < text.size() ? text[i] & 0xff : 0; };
  int first = byte(0), second = byte(1);
  if (first < 0x80) return 1;
  if (first < 0xc2 || first > 0xf4) return 0;
  std::size_t length = first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
  // No longer form than needed, no half of a pair of UTF-16, nothing beyond the last character.
  int low = first == 0xe0 ? 0xa0 : first == 0xf0 ? 0x90 : 0x80;
  int high = first == 0xed ? 0x9f : first == 0xf4 ? 0x8f : 0xbf;
  if (second < low || second > high) return 0;
  for (std::size_t i = 2; i < length; ++i)
    if ((byte(i) & 0xc0) != 0x80) return 0;
  return length;
}

// `text` with each byte that is not of a character in UTF-8 written as "\xff".
inline std::string valid_utf8(std::string_view text) {
  constexpr const char* kDigits = "0123456789abcdef";
  std::string valid;
  while (!text.empty()) {
    std::size_t length = utf8_character(text);
    if (length == 0) {
      auto byte = static_cast<std::uint8_t>(text[0]);
      valid.append("\\x").append({kDigits[byte / 16], kDigits[byte % 16]});
      length = 1;
    } else {
      valid.append(text.substr(0, length));
    }
    text.remove_prefix(length);
  }
  return valid;
}

}  // namespace callgate
