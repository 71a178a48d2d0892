// Small floats, from one table of their formats.
// https://github.com/openxla/stablehlo/blob/main/docs/spec.md#types names them all.
#include "channel/sinks/elements.h"

#include <bit>
#include <cmath>
#include <limits>

namespace callgate {
namespace {

// Which bit patterns are no numbers.
enum class Specials {
  kIeee,          // the greatest exponent: infinities and NaNs
  kAllOnes,       // all ones, of either sign, is NaN; no infinities
  kNegativeZero,  // what would be negative zero is NaN; no infinities
  kNone,
};

struct Format {
  int exponent_bits, mantissa_bits, bias;
  Specials specials;
};

constexpr Format format_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::kF16: return {5, 10, 15, Specials::kIeee};
    case DType::kBF16: return {8, 7, 127, Specials::kIeee};
    case DType::kF8E5M2: return {5, 2, 15, Specials::kIeee};
    case DType::kF8E4M3: return {4, 3, 7, Specials::kIeee};
    case DType::kF8E3M4: return {3, 4, 3, Specials::kIeee};
    case DType::kF8E4M3FN: return {4, 3, 7, Specials::kAllOnes};
    case DType::kF8E4M3B11FNUZ: return {4, 3, 11, Specials::kNegativeZero};
    case DType::kF8E5M2FNUZ: return {5, 2, 16, Specials::kNegativeZero};
    case DType::kF8E4M3FNUZ: return {4, 3, 8, Specials::kNegativeZero};
    default: return {2, 1, 1, Specials::kNone};  // float4_e2m1fn
  }
}

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

}  // namespace

float widen_float(DType dtype, std::uint32_t raw) noexcept {
  if (dtype == DType::kBF16) return std::bit_cast<float>(raw << 16);  // the upper half of a float32
  if (dtype == DType::kF8E8M0FNU) {                                   // a power of two, no sign
    return raw == 0xff ? kNan : std::ldexp(1.0F, static_cast<int>(raw) - 127);
  }
  const Format format = format_of(dtype);
  const std::uint32_t exponents = (1U << format.exponent_bits) - 1;
  const std::uint32_t mantissas = (1U << format.mantissa_bits) - 1;
  const std::uint32_t exponent = (raw >> format.mantissa_bits) & exponents;
  const std::uint32_t mantissa = raw & mantissas;
  const bool negative = (raw >> (format.exponent_bits + format.mantissa_bits) & 1) != 0;
  const float sign = negative ? -1.0F : 1.0F;
  switch (format.specials) {
    case Specials::kIeee:
      if (exponent != exponents) break;
      return mantissa != 0 ? kNan : sign * std::numeric_limits<float>::infinity();
    case Specials::kAllOnes:
      if (exponent == exponents && mantissa == mantissas) return kNan;
      break;
    case Specials::kNegativeZero:
      if (negative && exponent == 0 && mantissa == 0) return kNan;
      break;
    case Specials::kNone: break;
  }
  // Subnormals have no leading one, and the exponent of the smallest normals.
  const std::uint32_t significand = exponent == 0 ? mantissa : mantissa | (mantissas + 1);
  const int scale = static_cast<int>(exponent == 0 ? 1 : exponent) - format.bias;
  return sign * std::ldexp(static_cast<float>(significand), scale - format.mantissa_bits);
}

}  // namespace callgate
