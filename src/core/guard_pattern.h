// What a memory check fills memory with: bytes that computations hardly ever make, and other ones
// for each array, so that what is copied from beside one array to beside another is seen. Each
// array of a call has a number; 0 stands for what all results start with. Under two numbers no byte
// of a pattern that tells them is the same: the common loop that goes one element too far, y[i] =
// x[i], puts the other's pattern where it doesn't belong, however far it goes. Types of one and two
// bytes can't do that for more than 252 numbers; from there on every second element does.
//
// In floating-point types of two bytes and more the rare pattern is a signalling NaN with a payload
// (of bfloat16 a quiet one from the 64th on), so that reads outside show. Types of one byte
// have too few NaNs to tell arrays by: the first numbers have them, the rest other values.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "core/dtype.h"

namespace callgate {

// Bytes of an element; 1 for types of which several are in a byte.
inline std::size_t element_bytes(DType dtype) noexcept {
  return static_cast<std::size_t>(std::max(bits(dtype) / 8, 1));
}

struct GuardPattern {
  // A kernel without effects runs with both: they have no byte that tells arrays in common.
  enum class Fill { kRare, kOther };

  GuardPattern(DType dtype, Fill fill, std::size_t number) noexcept
      : width(element_bytes(dtype)),
        period(width <= 2 ? 2 * width : width),  // of small types two elements tell more numbers
        rare(fill == Fill::kRare && (width >= 4 || (width == 2 && is_inexact(dtype)))) {
    bool small = width <= 2;
    Alphabet letters = alphabet(dtype);
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
        // The low bytes of its NaNs, and their sign: those that signal come first.
        std::size_t digit = end % 4 == 0 ? high : low, nan = digit % (kLetters / 2);
        put(end - 2, static_cast<int>(nan < 63 ? 0x81 + (36 + nan) % 63 : 0xc1 + (nan - 63)));
        put(end - 1, digit < kLetters / 2 ? 0x7f : 0xff);
      } else if (dtype == DType::kF16) {
        put(end - 1, 0x7d);
      } else {
        put(end - 2, real == 4 ? 0xa5 : 0xf5);
        put(end - 1, 0x7f);
      }
    }
  }

  // The byte that belongs to a place, counted from a multiple of `period`.
  std::byte at(std::size_t place) const noexcept { return bytes[place % period]; }
  std::array<std::byte, 16> bytes{};
  std::size_t width;   // of an element
  std::size_t period;  // of the pattern
  bool rare;           // hardly any computation's value

 private:
  // What bytes are chosen from: not 0, 1 and 255, which kernels write most.
  static constexpr std::size_t kLetters = 252;
  using Alphabet = std::array<std::uint8_t, kLetters>;

  // None is there twice. The NaNs of a type of one byte come first.
  static Alphabet alphabet(DType dtype) noexcept {
    Alphabet letters{};
    // Neighbours differ in many bits; 0xa5 comes first. 37 and 252 have no common factor.
    for (std::size_t i = 0; i < kLetters; ++i)
      letters[i] = static_cast<std::uint8_t>(2 + (163 + 37 * i) % kLetters);
    std::string_view first = nans(dtype);
    for (std::size_t i = 0; i < first.size(); ++i) {
      auto letter = static_cast<std::uint8_t>(first[i]);
      auto* there = std::ranges::find(letters, letter);
      if (there != letters.end()) *there = letters[i];
      letters[i] = letter;
    }
    return letters;
  }

  static std::string_view nans(DType dtype) noexcept {
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
};

}  // namespace callgate
