// SPDX-License-Identifier: Apache-2.0
// UTF-8 in the texts of native code.
#include "core/error.h"

#include <cstdint>

namespace callgate {
namespace {

// The number of bytes of the text's first character; 0 if the text begins with no character.
// https://www.unicode.org/versions/latest/core-spec/chapter-3/ table 3-7.
std::size_t utf8_character(std::string_view text) noexcept {
  auto byte = [&](std::size_t i) { return i < text.size() ? text[i] & 0xff : 0; };
  int first = byte(0), second = byte(1);
  if (first < 0x80) return 1;
  if (first < 0xc2 || first > 0xf4) return 0;
  std::size_t length = first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
  // Excludes overlong forms, UTF-16 surrogates, and code points beyond the last one.
  int low = first == 0xe0 ? 0xa0 : first == 0xf0 ? 0x90 : 0x80;
  int high = first == 0xed ? 0x9f : first == 0xf4 ? 0x8f : 0xbf;
  if (second < low || second > high) return 0;
  for (std::size_t i = 2; i < length; ++i)
    if ((byte(i) & 0xc0) != 0x80) return 0;
  return length;
}

}  // namespace

std::string valid_utf8(std::string_view text) {
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
