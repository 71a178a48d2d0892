// SPDX-License-Identifier: Apache-2.0
// PTX as words.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace vgpu::ptx {

enum class TokenKind : std::uint8_t {
  kName,       // %r1, label, foo$bar
  kDirective,  // .reg, .b32, .shared::cta: without the dot
  kInteger,
  kFloat,  // 1.5, 0f3F800000, 0d...
  kText,   // "..."
  kSign,   // one character, or << >> == != <= >= && ||
  kEnd,
};

struct Token {
  TokenKind kind = TokenKind::kEnd;
  std::string_view text;  // of the source; a directive's without its dot
  std::uint64_t integer = 0;
  double number = 0;
  // How a float was written: 4 for 0f, 8 for 0d and decimals.
  std::uint8_t float_bytes = 8;
  std::uint32_t line = 0;
  bool glued = false;  // nothing stands between it and the word before
};

// Throws Error. The tokens point into the text, and the last one is kEnd.
std::vector<Token> tokens_of(std::string_view text);

}  // namespace vgpu::ptx
