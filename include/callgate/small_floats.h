// SPDX-License-Identifier: Apache-2.0
// The floating-point types that C++ lacks, as kernels store them: the same text for kernels on the
// CPU and on CUDA. They convert from and to float, and compute in float. C++17; nvcc and NVRTC.
//
// This header has no dependencies, except that NVRTC, which has no standard library, needs the
// integer types defined.
#pragma once

#ifdef __CUDACC__
#define CALLGATE_FLOAT_FUNCTION __host__ __device__ __forceinline__
#else
#define CALLGATE_FLOAT_FUNCTION inline
#endif
#ifndef __CUDACC_RTC__
#include <cstdint>
#include <cstring>
#endif

// C++17, the names that users write, and T(x) for conversions of numbers.
// NOLINTBEGIN(modernize-*, readability-identifier-naming)

namespace callgate {
#ifdef __CUDACC__  // next to CUDA's own types, which callgate/kernel_device.h gives these names
namespace small {
#else
inline namespace kernel_v1 {
#endif

// Storage of the floating-point types that C++ lacks: they convert from and to float, and compute
// in float. The parameters are exponent bits, mantissa bits, the bias, and the special values.
namespace detail {

CALLGATE_FLOAT_FUNCTION float float_of(unsigned bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
#endif
}
CALLGATE_FLOAT_FUNCTION unsigned bits_of(float value) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(value);
#else
  unsigned bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
#endif
}

// kIeee: NaN and infinities. kFinite: NaN as all ones. kUnsignedZero: NaN as -0.
enum class Special { kIeee, kFinite, kUnsignedZero };

template <class Bits, int kExponent, int kMantissa, int kBias, Special kSpecial>
class SmallFloat {
 public:
  SmallFloat() = default;
  CALLGATE_FLOAT_FUNCTION SmallFloat(float value)
      : bits_(encode(value)) {}  // NOLINT: implicit, as float itself
  CALLGATE_FLOAT_FUNCTION operator float() const { return decode(bits_); }  // NOLINT
  CALLGATE_FLOAT_FUNCTION SmallFloat& operator+=(float value) {
    return *this = float(*this) + value;
  }
  CALLGATE_FLOAT_FUNCTION SmallFloat& operator-=(float value) {
    return *this = float(*this) - value;
  }
  CALLGATE_FLOAT_FUNCTION SmallFloat& operator*=(float value) {
    return *this = float(*this) * value;
  }
  CALLGATE_FLOAT_FUNCTION SmallFloat& operator/=(float value) {
    return *this = float(*this) / value;
  }

  CALLGATE_FLOAT_FUNCTION static float decode(Bits bits) {
    constexpr unsigned kExponentMask = (1u << kExponent) - 1, kMantissaMask = (1u << kMantissa) - 1;
    if (kExponent == 8 && kMantissa == 7) return from_bits(unsigned(bits) << 16);
    unsigned all = bits, sign = all >> (kExponent + kMantissa);
    unsigned exponent = all >> kMantissa & kExponentMask, mantissa = all & kMantissaMask;
    if (kSpecial == Special::kUnsignedZero && sign != 0 && exponent == 0 && mantissa == 0)
      return from_bits(0x7fc00000u);
    if (exponent == kExponentMask) {
      if (kSpecial == Special::kIeee)
        return from_bits(sign << 31 | 0x7f800000u | mantissa << (23 - kMantissa));
      if (kSpecial == Special::kFinite && mantissa == kMantissaMask)
        return from_bits(sign << 31 | 0x7fc00000u);
    }
    float value = exponent == 0
                      ? scale(float(mantissa), 1 - kBias - kMantissa)
                      : scale(float(mantissa | 1u << kMantissa), int(exponent) - kBias - kMantissa);
    return sign != 0 ? -value : value;
  }

  // Rounds to nearest, ties to even. Larger values become infinity, or NaN without infinities.
  CALLGATE_FLOAT_FUNCTION static Bits encode(float value) {
    constexpr unsigned kExponentMask = (1u << kExponent) - 1, kMantissaMask = (1u << kMantissa) - 1;
    constexpr unsigned kSignBit = 1u << (kExponent + kMantissa);
    constexpr unsigned kNan = kSpecial == Special::kUnsignedZero ? kSignBit
                              : kSpecial == Special::kFinite
                                  ? (kExponentMask << kMantissa | kMantissaMask)
                                  : (kExponentMask << kMantissa | 1u << (kMantissa - 1));
    unsigned from = to_bits(value), sign = from >> 31 != 0 ? kSignBit : 0,
             rest = from & 0x7fffffffu;
    // The upper half of a float, rounded by a carry without a branch, so that loops vectorize.
    if (kExponent == 8 && kMantissa == 7)
      return Bits(rest > 0x7f800000u ? sign | kNan : (from + 0x7fffu + (from >> 16 & 1)) >> 16);
    unsigned signed_nan = kSpecial == Special::kUnsignedZero ? kNan : sign | kNan;
    if (rest > 0x7f800000u) return Bits(signed_nan);
    unsigned overflow = kSpecial == Special::kIeee ? sign | kExponentMask << kMantissa : signed_nan;
    if (rest == 0x7f800000u) return Bits(overflow);
    int exponent = int(rest >> 23) - 127;
    unsigned mantissa = rest & 0x7fffffu;
    if (rest >> 23 != 0)
      mantissa |= 0x800000u;
    else
      exponent = -126;
    // `drop`: the bits of the 24-bit mantissa below the target's last one at this exponent.
    int drop = 23 - kMantissa, target = exponent + kBias;
    if (target < 1) drop += 1 - target, target = 1;
    if (drop > 24) return Bits(zero(sign));
    unsigned kept = mantissa >> drop, half = 1u << (drop - 1), below = mantissa & ((half << 1) - 1);
    if (below > half || (below == half && (kept & 1) != 0)) ++kept;
    // A carry out of the mantissa increments the exponent by itself.
    unsigned bits = kept >= 1u << kMantissa ? (unsigned(target - 1) << kMantissa) + kept : kept;
    unsigned greatest = kSpecial == Special::kIeee ? (kExponentMask << kMantissa) - 1
                        : kSpecial == Special::kFinite
                            ? (kExponentMask << kMantissa | kMantissaMask) - 1
                            : (kExponentMask << kMantissa | kMantissaMask);
    if (bits > greatest) return Bits(overflow);
    return bits == 0 ? Bits(zero(sign)) : Bits(sign | bits);
  }

 private:
  CALLGATE_FLOAT_FUNCTION static unsigned zero(unsigned sign) {
    return kSpecial == Special::kUnsignedZero ? 0 : sign;
  }
  CALLGATE_FLOAT_FUNCTION static float from_bits(unsigned bits) { return float_of(bits); }
  CALLGATE_FLOAT_FUNCTION static unsigned to_bits(float value) { return bits_of(value); }
  // value * 2^exponent, exact for the small mantissas here; two steps reach float's denormals.
  CALLGATE_FLOAT_FUNCTION static float scale(float value, int exponent) {
    if (exponent < -126) return value * from_bits(1u << 23) * power(exponent + 126);
    return value * power(exponent);
  }
  CALLGATE_FLOAT_FUNCTION static float power(int exponent) {
    return from_bits(unsigned(exponent + 127) << 23);
  }

  Bits bits_;
};

// A power of two, or NaN: no sign, no zero, no infinity. Rounds to the nearest power, ties upwards.
class PowerOfTwo {
 public:
  PowerOfTwo() = default;
  CALLGATE_FLOAT_FUNCTION PowerOfTwo(float value)
      : bits_(encode(value)) {}  // NOLINT: implicit, as float itself
  CALLGATE_FLOAT_FUNCTION operator float() const { return decode(bits_); }  // NOLINT

  CALLGATE_FLOAT_FUNCTION static float decode(uint8_t bits) {
    unsigned all = bits == 255 ? 0x7fc00000u : bits == 0 ? 0x00400000u : unsigned(bits) << 23;
    return float_of(all);
  }
  CALLGATE_FLOAT_FUNCTION static uint8_t encode(float value) {
    unsigned all = bits_of(value);
    if (all == 0 || all > 0x7f800000u) return 255;  // zero; negative or NaN
    unsigned rounded = (all + 0x400000u) >> 23;
    // Below 2^-126 the exponent doesn't distinguish powers; ml_dtypes, and so JAX, rounds up there.
    if (all < 0x00800000u) return all <= 0x00400000u ? 0 : 1;
    return uint8_t(rounded < 255 ? rounded : 255);
  }

 private:
  uint8_t bits_;
};

}  // namespace detail

using bfloat16 = detail::SmallFloat<uint16_t, 8, 7, 127, detail::Special::kIeee>;
#ifdef __FLT16_MAX__
using float16 = _Float16;
#elif !defined(__CUDA_ARCH__)  // the device has instructions: callgate/elementwise_device.h
using float16 = detail::SmallFloat<uint16_t, 5, 10, 15, detail::Special::kIeee>;
#endif
using float8_e5m2 = detail::SmallFloat<uint8_t, 5, 2, 15, detail::Special::kIeee>;
using float8_e4m3 = detail::SmallFloat<uint8_t, 4, 3, 7, detail::Special::kIeee>;
using float8_e3m4 = detail::SmallFloat<uint8_t, 3, 4, 3, detail::Special::kIeee>;
using float8_e4m3fn = detail::SmallFloat<uint8_t, 4, 3, 7, detail::Special::kFinite>;
using float8_e4m3b11fnuz = detail::SmallFloat<uint8_t, 4, 3, 11, detail::Special::kUnsignedZero>;
using float8_e4m3fnuz = detail::SmallFloat<uint8_t, 4, 3, 8, detail::Special::kUnsignedZero>;
using float8_e5m2fnuz = detail::SmallFloat<uint8_t, 5, 2, 16, detail::Special::kUnsignedZero>;
using float8_e8m0fnu = detail::PowerOfTwo;

}  // namespace small or kernel_v1
}  // namespace callgate

#undef CALLGATE_FLOAT_FUNCTION
// NOLINTEND(modernize-*, readability-identifier-naming)
