// SPDX-License-Identifier: Apache-2.0
// Floating-point formats that C++ has no type for, and the rounding modes of PTX.
#pragma once

#include <bit>
#include <cfenv>
#include <cmath>
#include <cstdint>
#include <limits>

namespace vgpu::ptx {

enum class Rounding : std::uint8_t { kNearest, kZero, kDown, kUp, kNearestAway };

// A format: how many bits its exponent and its fraction have, and what its top exponent means.
struct Format {
  int exponent, fraction;
  bool has_infinity;  // otherwise only all ones are NaN (e4m3)
};
inline constexpr Format kHalfFormat{5, 10, true};
inline constexpr Format kBrainFormat{8, 7, true};
inline constexpr Format kTf32Format{8, 10, true};
inline constexpr Format kE4M3Format{4, 3, false};
inline constexpr Format kE5M2Format{5, 2, true};

// What a value beyond the largest finite one becomes.
enum class Overflow : std::uint8_t { kInfinity, kSaturate };

namespace detail {

// A non-negative number with a fraction of a unit, to an integer.
inline double rounded(double value, Rounding rounding, bool negative) {
  double low = std::floor(value), rest = value - low;
  if (rest == 0) return low;
  switch (rounding) {
    case Rounding::kZero: return low;
    case Rounding::kDown: return negative ? low + 1 : low;
    case Rounding::kUp: return negative ? low : low + 1;
    case Rounding::kNearestAway: return rest >= 0.5 ? low + 1 : low;
    case Rounding::kNearest: break;
  }
  if (rest != 0.5) return rest > 0.5 ? low + 1 : low;
  return std::fmod(low, 2) == 0 ? low : low + 1;
}

}  // namespace detail

// The number in the format, its bits at the bottom. One rounding, from a double.
inline std::uint32_t pack(double value, Format format, Rounding rounding = Rounding::kNearest,
                          Overflow overflow = Overflow::kInfinity) {
  const bool negative = std::signbit(value);
  const std::uint32_t sign = (negative ? 1U : 0U) << (format.exponent + format.fraction);
  const std::uint32_t top = ((1U << format.exponent) - 1) << format.fraction;
  const std::uint32_t ones = (1U << format.fraction) - 1;
  const std::uint32_t nan = format.has_infinity ? (top | ones) : (top | ones);
  const std::uint32_t largest = format.has_infinity ? top - 1 : (top | ones) - 1;
  if (std::isnan(value)) return nan;
  const int bias = (1 << (format.exponent - 1)) - 1;
  std::uint32_t beyond = format.has_infinity ? top : nan;
  if (overflow == Overflow::kSaturate) beyond = largest;
  double magnitude = std::fabs(value);
  if (std::isinf(magnitude)) return sign | beyond;
  if (magnitude == 0) return sign;
  int exponent = std::max(std::ilogb(magnitude), 1 - bias);
  double units =
      detail::rounded(std::ldexp(magnitude, format.fraction - exponent), rounding, negative);
  // A carry into the exponent is an addition, as is the step from subnormal to normal numbers.
  auto bits = static_cast<std::uint64_t>(exponent + bias - 1) << format.fraction;
  bits += static_cast<std::uint64_t>(units);
  if (bits <= largest) return sign | static_cast<std::uint32_t>(bits);
  bool towards = rounding == Rounding::kZero || (rounding == Rounding::kDown && !negative) ||
                 (rounding == Rounding::kUp && negative);
  return sign | (towards ? largest : beyond);
}

inline double unpack(std::uint32_t bits, Format format) {
  const std::uint32_t ones = (1U << format.fraction) - 1;
  const std::uint32_t fraction = bits & ones;
  const std::uint32_t exponent = (bits >> format.fraction) & ((1U << format.exponent) - 1);
  const bool top = exponent == (1U << format.exponent) - 1;
  const bool negative = ((bits >> (format.exponent + format.fraction)) & 1U) != 0;
  const int bias = (1 << (format.exponent - 1)) - 1;
  double value = 0;
  if (top && format.has_infinity) {
    value = fraction == 0 ? std::numeric_limits<double>::infinity()
                          : std::numeric_limits<double>::quiet_NaN();
  } else if (top && fraction == ones) {
    value = std::numeric_limits<double>::quiet_NaN();
  } else if (exponent == 0) {
    value = std::ldexp(static_cast<double>(fraction), 1 - bias - format.fraction);
  } else {
    value = std::ldexp(static_cast<double>(fraction + ones + 1),
                       static_cast<int>(exponent) - bias - format.fraction);
  }
  return negative ? -value : value;
}

// f16 and bf16: bits that convert to float exactly, and back with one rounding. (An operation of
// two of them, done in float, and rounded here is rounded correctly: float has more than twice
// their digits and two more.)
struct Half {
  std::uint16_t bits = 0;
  static Half from(double value) { return {static_cast<std::uint16_t>(pack(value, kHalfFormat))}; }
  static Half from(float value) {
    std::uint32_t word = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t sign = (word >> 16) & 0x8000U;
    word &= 0x7FFFFFFFU;
    if (word > 0x7F800000U) return {0x7FFF};
    if (word >= 0x47800000U) return {static_cast<std::uint16_t>(sign | 0x7C00U)};
    if (word < 0x38800000U) {  // subnormal: the addition rounds
      float shifted = std::bit_cast<float>(word) + 0.5F;
      return {
          static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x3F000000U))};
    }
    word += 0xC8000FFFU + ((word >> 13) & 1U);
    return {static_cast<std::uint16_t>(sign | (word >> 13))};
  }
  float get() const {
    const std::uint32_t sign = (bits & 0x8000U) << 16;
    const std::uint32_t exponent = (bits >> 10) & 31U, fraction = bits & 1023U;
    if (exponent == 31) return std::bit_cast<float>(sign | 0x7F800000U | fraction << 13);
    if (exponent != 0) return std::bit_cast<float>(sign | (exponent + 112) << 23 | fraction << 13);
    float value = static_cast<float>(fraction) * 0x1p-24F;
    return sign != 0 ? -value : value;
  }
};

struct Brain {
  std::uint16_t bits = 0;
  static Brain from(double value) {
    return {static_cast<std::uint16_t>(pack(value, kBrainFormat))};
  }
  static Brain from(float value) {
    const auto word = std::bit_cast<std::uint32_t>(value);
    if ((word & 0x7FFFFFFFU) > 0x7F800000U) return {0x7FFF};
    return {static_cast<std::uint16_t>((word + 0x7FFFU + ((word >> 16) & 1U)) >> 16)};
  }
  float get() const { return std::bit_cast<float>(std::uint32_t{bits} << 16); }
};

// Two of them in 32 bits; the first in the lower half.
template <typename T>
struct Pair {
  T low, high;
};

// The host's arithmetic rounds so while it lives.
class RoundingScope {
 public:
  explicit RoundingScope(Rounding rounding) : changes_(rounding != Rounding::kNearest) {
    if (!changes_) return;
    before_ = std::fegetround();
    std::fesetround(rounding == Rounding::kZero   ? FE_TOWARDZERO
                    : rounding == Rounding::kDown ? FE_DOWNWARD
                                                  : FE_UPWARD);
  }
  ~RoundingScope() {
    if (changes_) std::fesetround(before_);
  }
  RoundingScope(const RoundingScope&) = delete;

 private:
  bool changes_;
  int before_ = 0;
};

// .ftz: subnormal numbers of 32 bits are zero.
inline float flushed(float value) {
  return std::fabs(value) < 0x1p-126F ? std::copysign(0.0F, value) : value;
}

}  // namespace vgpu::ptx
