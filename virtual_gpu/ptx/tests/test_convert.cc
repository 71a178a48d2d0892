// SPDX-License-Identifier: Apache-2.0
// cvt, against C++: casts, the host's rounding modes, and tables of all numbers of a small format.
#include <algorithm>
#include <bit>
#include <cfenv>
#include <cmath>
#include <tuple>

#include "kernel_test.h"

namespace vgpu::ptx {
namespace {

using Integers = std::tuple<std::int8_t, std::uint8_t, std::int16_t, std::uint16_t, std::int32_t,
                            std::uint32_t, std::int64_t, std::uint64_t>;

template <typename Body>
void for_integers(Body&& body) {
  std::apply([&](auto... each) { (body(each), ...); }, Integers{});
}
std::string float_name(std::size_t bytes) { return bytes == 4 ? "f32" : "f64"; }

TEST(Conversions, IntegersAreCutAndExtended) {
  for_integers([]<typename From>(From) {
    const std::vector<From> a = edges<From>();
    for_integers([&]<typename To>(To) {
      const std::string types = name_of_type<To>() + "." + name_of_type<From>();
      auto cut = each_thread<To>("cvt." + types + " %out, %in0;", a);
      auto saturated = each_thread<To>("cvt.sat." + types + " %out, %in0;", a);
      for (std::size_t i = 0; i < a.size(); ++i) {
        const __int128 value = a[i], low = std::numeric_limits<To>::min(),
                       high = std::numeric_limits<To>::max();
        EXPECT_EQ(+cut[i], +static_cast<To>(a[i])) << types << " of " << +a[i];
        EXPECT_EQ(+saturated[i], +static_cast<To>(std::clamp(value, low, high)))
            << types << " of " << +a[i];
      }
    });
  });
}

template <typename F>
std::vector<F> floats() {
  using L = std::numeric_limits<F>;
  std::vector<F> all{F(0),
                     F(0.5),
                     F(0.75),
                     F(1),
                     F(1.5),
                     F(2.5),
                     F(127.5),
                     F(128),
                     F(255.5),
                     F(32767.5),
                     F(65536),
                     F(8388607.5),
                     F(16777217),
                     F(2147483648.0),
                     F(4294967296.0),
                     F(9223372036854775808.0),
                     F(18446744073709551616.0),
                     F(0.1),
                     F(1e30),
                     L::max(),
                     L::min(),
                     L::denorm_min(),
                     L::infinity(),
                     L::quiet_NaN()};
  for (std::size_t i = 0, n = all.size(); i < n; ++i) all.push_back(-all[i]);
  return all;
}
struct Mode {
  std::string name;
  int host;
};
const Mode kModes[] = {
    {"rn", FE_TONEAREST}, {"rz", FE_TOWARDZERO}, {"rm", FE_DOWNWARD}, {"rp", FE_UPWARD}};

template <typename F>
F integral(F value, int mode) {
  switch (mode) {
    case FE_TOWARDZERO: return std::trunc(value);
    case FE_DOWNWARD: return std::floor(value);
    case FE_UPWARD: return std::ceil(value);
    default: return std::nearbyint(value);
  }
}
// The manual: 0 for NaN, but the highest bit alone where one of the types has 64 bits.
template <typename I, typename F>
I expected_integer(F value, int mode) {
  using L = std::numeric_limits<I>;
  if (std::isnan(value)) {
    const bool wide = sizeof(I) == 8 || sizeof(F) == 8;
    return static_cast<I>(wide ? std::uint64_t{1} << (8 * sizeof(I) - 1) : 0);
  }
  const auto whole = static_cast<long double>(integral(value, mode));
  if (whole <= static_cast<long double>(L::min())) return L::min();
  if (whole >= static_cast<long double>(L::max())) return L::max();
  return static_cast<I>(whole);
}

TEST(Conversions, FloatsBecomeIntegersInFourWays) {
  for_integers([]<typename I>(I) {
    auto check = []<typename F>(F) {
      const std::vector<F> a = floats<F>();
      for (const auto& [name, mode] : kModes) {
        const std::string opcode =
            "cvt." + name + "i." + name_of_type<I>() + "." + float_name(sizeof(F));
        auto got = each_thread<I>(opcode + " %out, %in0;", a);
        for (std::size_t i = 0; i < a.size(); ++i) {
          EXPECT_EQ(+got[i], +expected_integer<I>(a[i], mode)) << opcode << " of " << a[i];
        }
      }
    };
    check(float{});
    check(double{});
  });
}

template <typename To, typename From>
To cast(From from, int mode) {
  std::fesetround(mode);
  volatile From before = from;
  volatile To after = static_cast<To>(before);
  std::fesetround(FE_TONEAREST);
  return after;
}
template <typename F>
bool same(F a, F b) {
  return (std::isnan(a) && std::isnan(b)) || (a == b && std::signbit(a) == std::signbit(b));
}

TEST(Conversions, IntegersBecomeFloatsInFourWays) {
  for_integers([]<typename I>(I) {
    auto check = []<typename F>(F) {
      std::vector<I> a = edges<I>();
      for (int shift = 0; shift < static_cast<int>(8 * sizeof(I)); ++shift) {
        a.push_back(static_cast<I>(std::uint64_t{0x9249249249249249} >> shift));
        a.push_back(static_cast<I>((std::uint64_t{1} << shift) + 1));
      }
      for (const auto& [name, mode] : kModes) {
        const std::string opcode =
            "cvt." + name + "." + float_name(sizeof(F)) + "." + name_of_type<I>();
        auto got = each_thread<F>(opcode + " %out, %in0;", a);
        for (std::size_t i = 0; i < a.size(); ++i) {
          EXPECT_TRUE(same(got[i], cast<F>(a[i], mode))) << opcode << " of " << +a[i];
        }
      }
    };
    check(float{});
    check(double{});
  });
}

TEST(Conversions, FloatsOfOtherSizes) {
  std::vector<double> a = floats<double>();
  for (double each : floats<float>()) a.insert(a.end(), {each, each * (1 + 0x1p-30), each * 0.7});
  for (const auto& [name, mode] : kModes) {
    auto got = each_thread<float>("cvt." + name + ".f32.f64 %out, %in0;", a);
    auto flushed = each_thread<float>("cvt." + name + ".ftz.f32.f64 %out, %in0;", a);
    for (std::size_t i = 0; i < a.size(); ++i) {
      const float want = cast<float>(a[i], mode);
      EXPECT_TRUE(same(got[i], want)) << name << " of " << a[i];
      EXPECT_TRUE(same(flushed[i], std::fabs(want) < 0x1p-126F ? std::copysign(0.0F, want) : want))
          << name << " of " << a[i];
    }
  }
  std::vector<float> b = floats<float>();
  auto wide = each_thread<double>("cvt.f64.f32 %out, %in0;", b);
  auto saturated = each_thread<float>("cvt.sat.f32.f32 %out, %in0;", b);
  auto flushed = each_thread<double>("cvt.ftz.f64.f32 %out, %in0;", b);
  for (std::size_t i = 0; i < b.size(); ++i) {
    EXPECT_TRUE(same(wide[i], double{b[i]}));
    EXPECT_EQ(saturated[i], b[i] > 0 ? std::min(b[i], 1.0F) : 0.0F) << b[i];
    EXPECT_TRUE(same(flushed[i], std::fabs(b[i]) < 0x1p-126F ? std::copysign(0.0, b[i]) : b[i]));
  }
}

TEST(Conversions, FloatsAreRoundedToIntegers) {
  auto check = []<typename F>(F) {
    const std::vector<F> a = floats<F>();
    for (const auto& [name, mode] : kModes) {
      const std::string type = "." + float_name(sizeof(F));
      auto got = each_thread<F>("cvt." + name + "i" + type + type + " %out, %in0;", a);
      for (std::size_t i = 0; i < a.size(); ++i) {
        EXPECT_TRUE(same(got[i], integral(a[i], mode))) << name << " of " << a[i];
      }
    }
  };
  check(float{});
  check(double{});
}

// All numbers of a format that are not negative; the last is what infinity stands for.
std::vector<double> numbers_of(int exponent_bits, int fraction_bits, std::size_t finite) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  std::vector<double> all;
  for (std::size_t bits = 0; bits <= finite; ++bits) {
    const auto fraction = static_cast<double>(bits & ((1U << fraction_bits) - 1));
    const int exponent = static_cast<int>(bits >> fraction_bits);
    const double one = exponent == 0 ? 0 : std::ldexp(1.0, fraction_bits);
    all.push_back(std::ldexp(fraction + one, std::max(exponent, 1) - bias - fraction_bits));
  }
  return all;
}
// The nearest by search, as bits without the sign.
std::size_t nearest(const std::vector<double>& all, double value, const std::string& mode) {
  const double magnitude = std::fabs(value);
  if (std::isinf(magnitude)) return all.size() - 1;
  auto at =
      static_cast<std::size_t>(std::upper_bound(all.begin(), all.end(), magnitude) - all.begin()) -
      1;
  if (all[at] == magnitude && at + 1 < all.size()) return at;
  at = std::min(at, all.size() - 2);
  const double below = magnitude - all[at], above = all[at + 1] - magnitude;
  if (mode == "rz" || (mode == "rm" && value > 0) || (mode == "rp" && value < 0)) return at;
  if (mode == "rm" || mode == "rp") return at + 1;
  if (below == above) return mode == "rna" || at % 2 == 1 ? at + 1 : at;
  return below < above ? at : at + 1;
}
// Numbers of the format, their middles, and what lies beside both.
std::vector<float> around(const std::vector<double>& all) {
  std::vector<float> values = floats<float>();
  const std::size_t step = std::max<std::size_t>(all.size() / 1000, 1);
  for (std::size_t i = 0; i + 1 < all.size(); i += i < 40 || i + 60 > all.size() ? 1 : step) {
    for (double each : {all[i], (all[i] + all[i + 1]) / 2}) {
      const auto value = static_cast<float>(i % 2 == 0 ? each : -each);
      values.insert(values.end(),
                    {value, std::nextafter(value, HUGE_VALF), std::nextafter(value, -HUGE_VALF)});
    }
  }
  return values;
}

struct Small {
  std::string name;
  int exponent, fraction;
  std::vector<std::string> modes;
};
const Small kSmall[] = {{"f16", 5, 10, {"rn", "rz", "rm", "rp"}},
                        {"bf16", 8, 7, {"rn", "rz", "rm", "rp"}},
                        {"tf32", 8, 10, {"rna", "rn", "rz"}}};

TEST(Conversions, SmallFloatsAreTheNearestOfTheirFormat) {
  for (const Small& format : kSmall) {
    const std::size_t infinity = ((1U << format.exponent) - 1) << format.fraction;
    const auto all = numbers_of(format.exponent, format.fraction, infinity);
    const std::vector<float> a = around(all);
    const bool is_word = format.name == "tf32";
    for (const std::string& mode : format.modes) {
      const std::string opcode = "cvt." + mode + "." + format.name + ".f32 ";
      auto got = each_thread<std::uint32_t>(
          is_word ? opcode + "%out, %in0;" : opcode + "%h0, %in0;\ncvt.u32.u16 %out, %h0;", a);
      for (std::size_t i = 0; i < a.size(); ++i) {
        const std::uint32_t bits = is_word ? got[i] >> 13 : got[i];
        if (std::isnan(a[i])) {
          EXPECT_GT(bits & ((1U << (format.exponent + format.fraction)) - 1), infinity);
          continue;
        }
        const std::uint32_t sign = std::signbit(a[i]) ? 1 : 0;
        EXPECT_EQ(bits,
                  nearest(all, double{a[i]}, mode) | sign << (format.exponent + format.fraction))
            << opcode << a[i];
      }
    }
  }
}

TEST(Conversions, PairsHaveTheFirstAbove) {
  std::vector<float> a{1, -2, 70000, 0.1F}, b{0.5F, 3, -1, 2};
  auto pair = each_thread<std::uint32_t>("cvt.rn.f16x2.f32 %out, %in0, %in1;", a, b);
  auto relu = each_thread<std::uint32_t>("cvt.rn.relu.bf16x2.f32 %out, %in0, %in1;", a, b);
  EXPECT_EQ(pair, (std::vector<std::uint32_t>{0x3C003800, 0xC0004200, 0x7C00BC00, 0x2E664000}));
  EXPECT_EQ(relu, (std::vector<std::uint32_t>{0x3F803F00, 0x00004040, 0x47890000, 0x3DCD4000}));
}

TEST(Conversions, EightBitFloatsAreTheNearestAndStayFinite) {
  for (auto [name, exponent, fraction, finite] :
       {std::tuple{"e4m3x2", 4, 3, 0x7EU}, {"e5m2x2", 5, 2, 0x7BU}}) {
    auto all = numbers_of(exponent, fraction, finite + 1);
    const std::vector<float> a = around(all);
    auto got = each_thread<std::uint16_t>(
        "cvt.rn.satfinite." + std::string(name) + ".f32 %out, %in0, 0f3F800000;", a);
    for (std::size_t i = 0; i < a.size(); ++i) {
      const std::uint32_t sign = std::signbit(a[i]) ? 128 : 0;
      const auto want = static_cast<std::uint32_t>(
          std::min<std::size_t>(nearest(all, double{a[i]}, "rn"), finite));
      const std::uint32_t high = got[i] >> 8;
      if (std::isnan(a[i])) {
        EXPECT_GT(high & 127U, finite);
      } else {
        EXPECT_EQ(high, want | sign) << name << " of " << a[i];
      }
      EXPECT_EQ(got[i] & 255U, fraction == 3 ? 0x38U : 0x3CU);  // 1.0 below
    }
  }
}

TEST(Conversions, IntegersArePackedIntoAWord) {
  auto [a, b] =
      pairs_of(std::vector<std::int32_t>{0, 1, -1, 127, 128, 255, 256, -128, -129, 32767, 32768,
                                         65535, 65536, -32769, INT32_MAX, INT32_MIN});
  auto bytes =
      each_thread<std::uint32_t>("cvt.pack.sat.u8.s32.b32 %out, %in0, %in1, 0xAABBCCDD;", a, b);
  auto signs =
      each_thread<std::uint32_t>("cvt.pack.sat.s8.s32.b32 %out, %in0, %in1, 0x1234;", a, b);
  auto words = each_thread<std::uint32_t>("cvt.pack.sat.u16.s32 %out, %in0, %in1;", a, b);
  auto short_words = each_thread<std::uint32_t>("cvt.pack.sat.s16.s32 %out, %in0, %in1;", a, b);
  auto cut = [](std::int32_t value, std::int32_t low, std::int32_t high) {
    return static_cast<std::uint32_t>(std::clamp(value, low, high));
  };
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(bytes[i], 0xCCDD0000U | cut(a[i], 0, 255) << 8 | cut(b[i], 0, 255));
    EXPECT_EQ(signs[i],
              0x12340000U | (cut(a[i], -128, 127) & 255U) << 8 | (cut(b[i], -128, 127) & 255U));
    EXPECT_EQ(words[i], cut(a[i], 0, 65535) << 16 | cut(b[i], 0, 65535));
    EXPECT_EQ(short_words[i],
              cut(a[i], -32768, 32767) << 16 | (cut(b[i], -32768, 32767) & 0xFFFFU));
  }
}

TEST(Conversions, WhatCannotBeIsAnError) {
  std::vector<float> a{1};
  EXPECT_THROW(each_thread<float>("cvt.rni.f32.pred %out, %in0;", a), Error);
  EXPECT_THROW(each_thread<double>("cvt.rni.f64.f32 %out, %in0;", a), Error);
  EXPECT_THROW(each_thread<float>("cvt.f32 %out, %in0;", a), Error);
}

}  // namespace
}  // namespace vgpu::ptx
