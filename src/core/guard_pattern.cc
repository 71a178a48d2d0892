// See the header.
#include "core/guard_pattern.h"

#include <algorithm>
#include <cstdint>
#include <string_view>

namespace callgate {
namespace {

// What bytes are chosen from: not 0, 1 and 255, which kernels write most.
constexpr std::size_t kLetters = 252;
using Alphabet = std::array<std::uint8_t, kLetters>;

Alphabet any_byte() noexcept {
  Alphabet letters{};
  // Neighbours differ in many bits; 0xa5 comes first. 37 and 252 have no common factor.
  for (std::size_t i = 0; i < kLetters; ++i)
    letters[i] = static_cast<std::uint8_t>(2 + (163 + 37 * i) % kLetters);
  return letters;
}

// The NaNs of a type of one byte.
std::string_view nans(DType dtype) noexcept {
  switch (dtype) {
    case DType::kF8E5M2: return "\x7d\xfd\x7e\xfe\x7f\xff";
    case DType::kF8E4M3:
    case DType::kF8E3M4: return "\x7d\xfd\x7e\xfe\x7f\xff\x79\xf9\x7a\xfa\x7b\xfb";
    case DType::kF8E4M3FN: return "\x7f\xff";
    case DType::kF8E4M3B11FNUZ:
    case DType::kF8E4M3FNUZ:
    case DType::kF8E5M2FNUZ: return "\x80";
    case DType::kF8E8M0FNU: return "\xff";
    default: return {};
  }
}

// Puts these letters first; none is there twice.
void lead_with(Alphabet& letters, std::string_view first) noexcept {
  for (std::size_t i = 0; i < first.size(); ++i) {
    auto letter = static_cast<std::uint8_t>(first[i]);
    auto there = std::ranges::find(letters, letter);
    if (there != letters.end()) *there = letters[i];
    letters[i] = letter;
  }
}

// The low bytes of bfloat16's NaNs, and their sign: those that signal come first.
std::uint8_t bf16_low(std::size_t letter) noexcept {
  std::size_t nan = letter % (kLetters / 2);
  return static_cast<std::uint8_t>(nan < 63 ? 0x81 + (36 + nan) % 63 : 0xc1 + (nan - 63));
}

}  // namespace

std::size_t element_bytes(DType dtype) noexcept {
  return std::max<std::size_t>(static_cast<std::size_t>(bits(dtype)) / 8, 1);
}

GuardPattern::GuardPattern(DType dtype, Fill fill, std::size_t number) noexcept
    : width(element_bytes(dtype)),
      period(width <= 2 ? 2 * width : width),  // of small types two elements tell more numbers
      rare(fill == Fill::kRare && (width >= 4 || (width == 2 && is_inexact(dtype)))) {
  bool small = width <= 2;
  Alphabet letters = any_byte();
  if (width == 1) lead_with(letters, nans(dtype));
  // Two digits; where the first one differs so does the second.
  std::size_t low = number % kLetters;
  std::size_t high = (number / kLetters + (small ? 1 : 5) * low) % kLetters;
  auto put = [&](std::size_t place, int byte) { bytes[place] = static_cast<std::byte>(byte); };
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    bool second = (small ? i / width : i) % 2 != 0;
    std::size_t letter = (second ? high : low) + (fill == Fill::kRare ? 0 : kLetters / 2);
    put(i, letters[letter % kLetters]);
  }
  if (!is_inexact(dtype) || width == 1) return;
  // The last bytes of each number make it a NaN, or keep it from being one.
  std::size_t real = dtype == DType::kC64 ? 4 : dtype == DType::kC128 ? 8 : width;
  for (std::size_t end = real; end <= bytes.size(); end += real) {
    if (fill == Fill::kOther) {
      put(end - 1, 0x5c);
    } else if (dtype == DType::kBF16) {
      std::size_t digit = end % 4 == 0 ? high : low;
      put(end - 2, bf16_low(digit));
      put(end - 1, digit < kLetters / 2 ? 0x7f : 0xff);
    } else if (dtype == DType::kF16) {
      put(end - 1, 0x7d);
    } else {
      put(end - 2, real == 4 ? 0xa5 : 0xf5);
      put(end - 1, 0x7f);
    }
  }
}

}  // namespace callgate
