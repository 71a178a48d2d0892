// SPDX-License-Identifier: Apache-2.0
// The header's small floats, all values of each: what a code means is worked out here from the
// format's definition, in double; what a float becomes is the nearest of those values.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "callgate/kernel.h"

namespace {

enum class Nan { kIeee, kAllOnes, kMinusZero };

// A format by its definition: OCP's 8-bit floating-point specification, IEEE 754 and bfloat16.
template <class T, class Bits, int kExponentBits, int kMantissaBits, int kBiasOf, Nan kNanOf>
struct Format {
  using Float = T;
  using Code = Bits;
  static constexpr int kExponent = kExponentBits, kMantissa = kMantissaBits, kBias = kBiasOf;
  static constexpr Nan kNan = kNanOf;
  static constexpr unsigned kCodes = 1u << (1 + kExponent + kMantissa);
  static constexpr unsigned kSign = kCodes / 2;
};

using Formats =
    ::testing::Types<Format<cg::bfloat16, uint16_t, 8, 7, 127, Nan::kIeee>,
                     Format<cg::detail::SmallFloat<uint16_t, 5, 10, 15, cg::detail::Special::kIeee>,
                            uint16_t, 5, 10, 15, Nan::kIeee>,
                     Format<cg::float8_e5m2, uint8_t, 5, 2, 15, Nan::kIeee>,
                     Format<cg::float8_e4m3, uint8_t, 4, 3, 7, Nan::kIeee>,
                     Format<cg::float8_e3m4, uint8_t, 3, 4, 3, Nan::kIeee>,
                     Format<cg::float8_e4m3fn, uint8_t, 4, 3, 7, Nan::kAllOnes>,
                     Format<cg::float8_e4m3b11fnuz, uint8_t, 4, 3, 11, Nan::kMinusZero>,
                     Format<cg::float8_e4m3fnuz, uint8_t, 4, 3, 8, Nan::kMinusZero>,
                     Format<cg::float8_e5m2fnuz, uint8_t, 5, 2, 16, Nan::kMinusZero>>;

template <class F>
class SmallFloats : public ::testing::Test {};
TYPED_TEST_SUITE(SmallFloats, Formats);

// The value of a code.
template <class F>
double value_of(unsigned code) {
  unsigned magnitude = code % F::kSign, mantissa = magnitude % (1u << F::kMantissa);
  unsigned exponent = magnitude >> F::kMantissa, top = (1u << F::kExponent) - 1;
  double sign = code >= F::kSign ? -1 : 1, nan = std::numeric_limits<double>::quiet_NaN();
  if (F::kNan == Nan::kMinusZero && code == F::kSign) return nan;
  if (F::kNan == Nan::kAllOnes && magnitude == F::kSign - 1) return nan;
  if (F::kNan == Nan::kIeee && exponent == top)
    return mantissa != 0 ? nan : sign * std::numeric_limits<double>::infinity();
  double fraction = mantissa / std::ldexp(1.0, F::kMantissa);
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - F::kBias);
  return sign * std::ldexp(1 + fraction, static_cast<int>(exponent) - F::kBias);
}

template <class F>
unsigned encode(float value) {
  return F::Float::encode(value);
}

TYPED_TEST(SmallFloats, EveryCodeDecodesToItsValue) {
  for (unsigned code = 0; code < TypeParam::kCodes; ++code) {
    double want = value_of<TypeParam>(code);
    float got = TypeParam::Float::decode(static_cast<TypeParam::Code>(code));
    if (std::isnan(want)) {
      EXPECT_TRUE(std::isnan(got)) << code;
    } else {
      EXPECT_EQ(static_cast<double>(got), want) << code;
      EXPECT_EQ(std::signbit(got), std::signbit(want)) << code;
    }
  }
}

TYPED_TEST(SmallFloats, EveryValueComesBackAsItsCode) {
  for (unsigned code = 0; code < TypeParam::kCodes; ++code) {
    double value = value_of<TypeParam>(code);
    unsigned got = encode<TypeParam>(static_cast<float>(value));
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(value_of<TypeParam>(got))) << code;
    } else {
      EXPECT_EQ(got, code);
    }
  }
}

// Between neighbours: the middle goes to the even code, a float beside it to the nearer one.
TYPED_TEST(SmallFloats, WhatIsBetweenTwoValuesBecomesTheNearerAndTiesTheEven) {
  float infinity = std::numeric_limits<float>::infinity();
  for (unsigned code = 0; code + 1 < TypeParam::kSign; ++code) {
    double low = value_of<TypeParam>(code), high = value_of<TypeParam>(code + 1);
    if (!std::isfinite(low) || !std::isfinite(high)) continue;
    auto middle = static_cast<float>(low / 2 + high / 2);
    ASSERT_EQ(static_cast<double>(middle), low / 2 + high / 2);
    EXPECT_EQ(encode<TypeParam>(middle), code % 2 == 0 ? code : code + 1) << code;
    EXPECT_EQ(encode<TypeParam>(std::nextafter(middle, -infinity)), code) << code;
    EXPECT_EQ(encode<TypeParam>(std::nextafter(middle, infinity)), code + 1) << code;
    unsigned even = code % 2 == 0 ? code : code + 1;
    bool unsigned_zero = TypeParam::kNan == Nan::kMinusZero && even == 0;
    EXPECT_EQ(encode<TypeParam>(-middle), unsigned_zero ? 0 : TypeParam::kSign + even) << code;
  }
}

TYPED_TEST(SmallFloats, WhatIsTooLargeBecomesInfinityOrNanWhereThereIsNone) {
  double greatest = 0;
  for (unsigned code = 0; code < TypeParam::kSign; ++code) {
    double value = value_of<TypeParam>(code);
    if (std::isfinite(value)) greatest = std::max(greatest, value);
  }
  // Half a step beyond the greatest value is where IEEE 754 begins to overflow.
  double step = std::ldexp(1.0, std::ilogb(greatest) - TypeParam::kMantissa);
  auto limit = static_cast<float>(greatest + step / 2);
  for (float value : {limit, -limit, INFINITY, -INFINITY}) {
    double got = value_of<TypeParam>(encode<TypeParam>(value));
    if (TypeParam::kNan == Nan::kIeee) {
      EXPECT_EQ(got, std::copysign(INFINITY, value));
    } else if (TypeParam::kNan == Nan::kAllOnes && std::isfinite(value)) {
      // The greatest value's code is even, so the tie with NaN's place is its own.
      EXPECT_EQ(got, std::copysign(greatest, value));
    } else {
      EXPECT_TRUE(std::isnan(got)) << value;
    }
  }
  float inside = std::nextafter(limit, 0.0F);
  EXPECT_EQ(value_of<TypeParam>(encode<TypeParam>(inside)), greatest);
  EXPECT_EQ(value_of<TypeParam>(encode<TypeParam>(-inside)), -greatest);
}

TYPED_TEST(SmallFloats, ComputeInFloatAndRoundWhatIsStored) {
  using T = TypeParam::Float;
  T x = 1.0F;
  x += 0.5F;
  EXPECT_EQ(static_cast<float>(x), 1.5F);
  x *= 2.0F;
  x -= 1.0F;
  x /= 4.0F;
  EXPECT_EQ(static_cast<float>(x), 0.5F);
  EXPECT_EQ(sizeof(T), sizeof(typename TypeParam::Code));
  EXPECT_TRUE(std::isnan(static_cast<float>(T(std::nanf("")))));
}

}  // namespace
