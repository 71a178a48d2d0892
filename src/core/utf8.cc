// See the header. https://www.unicode.org/versions/latest/core-spec/chapter-3/ table 3-7.
#include "core/utf8.h"

#include <cstddef>
#include <cstdint>

namespace callgate {
namespace {

std::uint8_t byte_at(std::string_view text, std::size_t i) noexcept {
  return i < text.size() ? static_cast<std::uint8_t>(text[i]) : 0;
}

// Bytes of the character that the text begins with; 0 where it begins with none.
std::size_t character(std::string_view text) noexcept {
  std::uint8_t first = byte_at(text, 0), second = byte_at(text, 1);
  if (first < 0x80) return 1;
  if (first < 0xc2 || first > 0xf4) return 0;
  std::size_t length = first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
  // No longer form than needed, no half of a pair of UTF-16, nothing beyond the last character.
  std::uint8_t low = first == 0xe0 ? 0xa0 : first == 0xf0 ? 0x90 : 0x80;
  std::uint8_t high = first == 0xed ? 0x9f : first == 0xf4 ? 0x8f : 0xbf;
  if (second < low || second > high) return 0;
  for (std::size_t i = 2; i < length; ++i) {
    if ((byte_at(text, i) & 0xc0) != 0x80) return 0;
  }
  return length;
}

}  // namespace

std::string valid_utf8(std::string_view text) {
  constexpr const char* kDigits = "0123456789abcdef";
  std::string valid;
  while (!text.empty()) {
    std::size_t length = character(text);
    if (length == 0) {
      std::uint8_t byte = byte_at(text, 0);
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
