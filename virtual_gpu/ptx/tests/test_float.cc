// SPDX-License-Identifier: Apache-2.0
// Floats of all sizes: arithmetic, comparisons, conversions.
#include <bit>
#include <cfenv>
#include <cmath>
#include <limits>

#include "kernel_test.h"
#include "ptx/numbers.h"

namespace vgpu::ptx {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::vector<float> singles() {
  return {0.0F,   -0.0F, 1.0F,  -1.5F, 3.25F, 1e-20F,      1e-40F, -1e-42F, 1e30F,
          -3e38F, kInf,  -kInf, kNan,  0.1F,  16777217.0F, 2.5F,   -2.5F,   0.5F};
}
bool same(float a, float b) {
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && std::isnan(b);
  return std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b);
}

template <typename Want>
void check(const std::string& opcode, Want&& want) {
  auto [a, b] = pairs_of(singles());
  auto got = each_thread<float>(opcode + " %out, %in0, %in1;", a, b);
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_TRUE(same(got[i], want(a[i], b[i])))
        << opcode << " of " << a[i] << " and " << b[i] << " is " << got[i];
  }
}

TEST(Float, ArithmeticIsTheHosts) {
  check("add.f32", [](float a, float b) { return a + b; });
  check("sub.rn.f32", [](float a, float b) { return a - b; });
  check("mul.f32", [](float a, float b) { return a * b; });
  check("div.rn.f32", [](float a, float b) { return a / b; });
}

TEST(Float, NanIsTheDevicesOwn) {
  std::vector<float> a{kNan, kInf};
  auto bits = each_thread<std::uint32_t>("sub.f32 %out, %in0, %in0;", a);
  EXPECT_EQ(bits[0], 0x7FFFFFFFU);
  EXPECT_EQ(bits[1], 0x7FFFFFFFU);
}

TEST(Float, RoundingIsDirected) {
  for (auto [name, mode] :
       {std::pair{"rz", FE_TOWARDZERO}, {"rm", FE_DOWNWARD}, {"rp", FE_UPWARD}}) {
    check("add." + std::string(name) + ".f32", [mode = mode](float a, float b) {
      std::fesetround(mode);
      volatile float x = a, y = b;
      volatile float sum = x + y;
      std::fesetround(FE_TONEAREST);
      return sum;
    });
  }
}

TEST(Float, SubnormalNumbersAreFlushedAndResultsSaturate) {
  check("mul.ftz.f32", [](float a, float b) { return flushed(flushed(a) * flushed(b)); });
  check("add.sat.f32", [](float a, float b) {
    float sum = a + b;
    return sum > 0 ? std::min(sum, 1.0F) : 0.0F;
  });
}

TEST(Float, TheLesserAndTheGreaterPassNanOver) {
  auto extreme = [](bool maximum) {
    return [maximum](float a, float b) {
      if (std::isnan(a)) return b;
      if (std::isnan(b)) return a;
      if (a == b) return std::signbit(a) == maximum ? b : a;
      return (a < b) == maximum ? b : a;
    };
  };
  check("min.f32", extreme(false));
  check("max.f32", extreme(true));
  check("max.NaN.f32", [&](float a, float b) {
    return std::isnan(a) || std::isnan(b) ? kNan : extreme(true)(a, b);
  });
}

TEST(Float, ComparisonsKnowNan) {
  auto [a, b] = pairs_of(singles());
  auto run = [&](const std::string& name) {
    return each_thread<std::uint32_t>("setp." + name +
                                          ".f32 %p0, %in0, %in1;\n"
                                          "selp.u32 %out, 1, 0, %p0;",
                                      a, b);
  };
  auto lt = run("lt"), ltu = run("ltu"), ne = run("ne"), neu = run("neu"), nan = run("nan");
  for (std::size_t i = 0; i < a.size(); ++i) {
    const bool unordered = std::isnan(a[i]) || std::isnan(b[i]);
    EXPECT_EQ(lt[i] != 0, a[i] < b[i]);
    EXPECT_EQ(ltu[i] != 0, unordered || a[i] < b[i]);
    EXPECT_EQ(ne[i] != 0, !unordered && a[i] != b[i]);
    EXPECT_EQ(neu[i] != 0, unordered || a[i] != b[i]);
    EXPECT_EQ(nan[i] != 0, unordered);
  }
}

TEST(Float, OneRoundingInAFusedSum) {
  std::vector<float> a{1.0F + 0x1p-12F, 3.0F}, b{1.0F + 0x1p-12F, 5.0F}, c{-1.0F, kInf};
  auto got = each_thread<float>("fma.rn.f32 %out, %in0, %in1, %in2;", a, b, c);
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(same(got[i], std::fma(a[i], b[i], c[i])));
}

TEST(Float, RootsAndFunctions) {
  std::vector<float> a{0.25F, 2.0F, 1e-3F, 100.0F};
  auto root = each_thread<float>("sqrt.rn.f32 %out, %in0;", a);
  auto exponential = each_thread<float>("ex2.approx.ftz.f32 %out, %in0;", a);
  auto sine = each_thread<float>("sin.approx.f32 %out, %in0;", a);
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(root[i], std::sqrt(a[i]));
    EXPECT_NEAR(exponential[i] / std::exp2(a[i]), 1, 1e-6);
    EXPECT_NEAR(sine[i], std::sin(a[i]), 1e-6);
  }
}

template <typename F>
void check_functions(const std::string& type, double tolerance) {
  using L = std::numeric_limits<F>;
  std::vector<F> a{F(0),   F(-0.0), F(0.25), F(2),   F(3.75),       F(-0.5),        F(1e-3),
                   F(100), F(-9),   F(1e30), F(0.1), L::infinity(), -L::infinity(), L::quiet_NaN()};
  auto check_one = [&](const std::string& opcode, double (*want)(double), double bound) {
    auto got = each_thread<F>(opcode + type + " %out, %in0;", a);
    for (std::size_t i = 0; i < a.size(); ++i) {
      const double exact = want(a[i]);
      if (std::isnan(exact)) {
        EXPECT_TRUE(std::isnan(got[i])) << opcode << " of " << a[i];
      } else if (std::isinf(exact) || exact == 0) {
        EXPECT_EQ(got[i], static_cast<F>(exact)) << opcode << " of " << a[i];
        EXPECT_EQ(std::signbit(got[i]), std::signbit(exact)) << opcode << " of " << a[i];
      } else {
        EXPECT_NEAR(got[i] / exact, 1, bound) << opcode << " of " << a[i];
      }
    }
  };
  check_one("rcp.rn", [](double x) { return 1 / x; }, tolerance);
  check_one("rcp.approx.ftz", [](double x) { return 1 / x; }, 1e-5);
  check_one("rsqrt.approx", [](double x) { return 1 / std::sqrt(x); }, 1e-5);
  check_one("sqrt.rn", [](double x) { return std::sqrt(x); }, tolerance);
  check_one("abs", [](double x) { return std::fabs(x); }, 0);
  check_one("neg", [](double x) { return -x; }, 0);
  if (sizeof(F) == 8) return;
  check_one("lg2.approx", [](double x) { return std::log2(x); }, 1e-5);
  check_one("tanh.approx", [](double x) { return std::tanh(x); }, 1e-3);
}
TEST(Float, FunctionsAtTheirEnds) {
  check_functions<float>(".f32", 1e-7);
  check_functions<double>(".f64", 1e-15);
  std::vector<float> angles{0.0F, 0.5F, -2.0F, 3.0F};
  auto cosine = each_thread<float>("cos.approx.ftz.f32 %out, %in0;", angles);
  for (std::size_t i = 0; i < 4; ++i) EXPECT_NEAR(cosine[i], std::cos(angles[i]), 1e-6);
  auto [a, b] = pairs_of(singles());
  auto sum = each_thread<float>("mad.rn.f32 %out, %in0, %in1, %in0;", a, b);
  auto wide = each_thread<double>(
      "cvt.f64.f32 %l0, %in0;\ncvt.f64.f32 %l1, %in1;\nmad.rz.f64 %out, %l0, %l1, "
      "0d0000000000000000;",
      a, b);
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_TRUE(same(sum[i], std::fma(a[i], b[i], a[i]))) << a[i] << " " << b[i];
    const double product = double{a[i]} * b[i] + 0.0;  // exact
    EXPECT_TRUE(wide[i] == product || (std::isnan(wide[i]) && std::isnan(product)));
  }
}

// All 65,536 halves: there and back, and against the rounding of a double.
TEST(Half, EveryHalfGoesToFloatAndBack) {
  std::vector<std::uint16_t> all(65536);
  for (std::uint32_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint16_t>(i);
  auto back = each_thread<std::uint16_t>("cvt.f32.f16 %r0, %in0;\ncvt.rn.f16.f32 %out, %r0;", all);
  auto brain =
      each_thread<std::uint16_t>("cvt.f32.bf16 %r0, %in0;\ncvt.rn.bf16.f32 %out, %r0;", all);
  for (std::uint32_t i = 0; i < all.size(); ++i) {
    bool nan = (i & 0x7C00U) == 0x7C00U && (i & 0x3FFU) != 0;
    EXPECT_EQ(back[i], nan ? 0x7FFF : all[i]);
    bool brain_nan = (i & 0x7F80U) == 0x7F80U && (i & 0x7FU) != 0;
    EXPECT_EQ(brain[i], brain_nan ? 0x7FFF : all[i]);
  }
}

TEST(Half, ArithmeticRoundsOnce) {
  std::vector<std::uint16_t> values;
  for (std::uint32_t i = 0; i < 65536; i += 1013) values.push_back(static_cast<std::uint16_t>(i));
  auto [a, b] = pairs_of(values);
  auto sum = each_thread<std::uint16_t>("add.rn.f16 %out, %in0, %in1;", a, b);
  auto product = each_thread<std::uint16_t>("mul.rn.f16 %out, %in0, %in1;", a, b);
  auto fused = each_thread<std::uint16_t>("fma.rn.f16 %out, %in0, %in1, %in0;", a, b);
  auto value = [](std::uint16_t bits) { return double{Half{bits}.get()}; };
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double x = value(a[i]), y = value(b[i]);
    EXPECT_EQ(sum[i], pack(x + y, kHalfFormat)) << x << " + " << y;
    EXPECT_EQ(product[i], pack(x * y, kHalfFormat)) << x << " * " << y;
    const auto exact = static_cast<long double>(x) * y + x;  // 64 digits: exact here
    double odd = static_cast<double>(exact);
    if (std::isfinite(odd) && static_cast<long double>(odd) != exact &&
        (std::bit_cast<std::uint64_t>(odd) & 1U) == 0) {
      odd = std::nextafter(odd, exact > odd ? HUGE_VAL : -HUGE_VAL);
    }
    EXPECT_EQ(fused[i], pack(odd, kHalfFormat)) << x << " * " << y << " + " << x;
  }
}

TEST(Half, PairsAreTwoForThemselves) {
  std::vector<std::uint32_t> a{0x3C004000U}, b{0x44003800U};  // (2, 1) and (0.5, 4)
  EXPECT_EQ(each_thread<std::uint32_t>("add.rn.f16x2 %out, %in0, %in1;", a, b)[0], 0x45004100U);
  EXPECT_EQ(each_thread<std::uint32_t>("max.f16x2 %out, %in0, %in1;", a, b)[0], 0x44004000U);
}

TEST(Convert, FloatsBecomeIntegersAndStayAtTheEnds) {
  std::vector<float> a = singles();
  auto nearest = each_thread<std::int32_t>("cvt.rni.s32.f32 %out, %in0;", a);
  auto zero = each_thread<std::uint32_t>("cvt.rzi.u32.f32 %out, %in0;", a);
  for (std::size_t i = 0; i < a.size(); ++i) {
    double rounded = std::nearbyint(double{a[i]}), cut = std::trunc(double{a[i]});
    bool nan = std::isnan(a[i]);
    EXPECT_EQ(
        nearest[i],
        nan ? 0 : static_cast<std::int32_t>(std::clamp(rounded, -2147483648.0, 2147483647.0)));
    EXPECT_EQ(zero[i], nan ? 0U : static_cast<std::uint32_t>(std::clamp(cut, 0.0, 4294967295.0)));
  }
}

TEST(Convert, IntegersOf64BitsRoundOnce) {
  std::vector<std::int64_t> a{0,
                              1,
                              -1,
                              INT64_MAX,
                              INT64_MIN,
                              (1LL << 62) + (1LL << 38) + 1,
                              -(1LL << 60) - (1LL << 36) - 1,
                              16777217,
                              123456789012345678};
  auto single = each_thread<float>("cvt.rn.f32.s64 %out, %in0;", a);
  auto wide = each_thread<double>("cvt.rn.f64.s64 %out, %in0;", a);
  auto natural = each_thread<float>("cvt.rn.f32.u64 %out, %in0;", a);
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(single[i], static_cast<float>(a[i]));
    EXPECT_EQ(wide[i], static_cast<double>(a[i]));
    EXPECT_EQ(natural[i], static_cast<float>(static_cast<std::uint64_t>(a[i])));
  }
}

TEST(Convert, SmallIntegersAreCutExtendedAndSaturated) {
  std::vector<std::int32_t> a{0, 1, -1, 127, 128, -128, -129, 255, 256, 70000};
  auto cut = each_thread<std::int32_t>("cvt.s8.s32 %h0, %in0;\ncvt.s32.s8 %out, %h0;", a);
  auto saturated = each_thread<std::int32_t>("cvt.sat.u8.s32 %out, %in0;", a);
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(cut[i], static_cast<std::int8_t>(a[i]));
    EXPECT_EQ(saturated[i], std::clamp(a[i], 0, 255));
  }
}

TEST(Convert, EightBitFloatsGoThereAndBack) {
  std::vector<std::uint16_t> pairs;
  for (std::uint32_t i = 0; i < 256; ++i)
    pairs.push_back(static_cast<std::uint16_t>(i << 8 | (255 - i)));
  for (const char* type : {"e4m3x2", "e5m2x2"}) {
    auto back = each_thread<std::uint16_t>("cvt.rn.f16x2." + std::string(type) +
                                               " %r0, %in0;\ncvt.rn.satfinite." + type +
                                               ".f16x2 %out, %r0;",
                                           pairs);
    for (std::size_t i = 0; i < pairs.size(); ++i) {
      for (int shift : {0, 8}) {
        std::uint32_t before = (pairs[i] >> shift) & 255U, after = (back[i] >> shift) & 255U;
        const bool e4m3 = type[1] == '4';
        const std::uint32_t magnitude = before & 127U;
        const bool nan = e4m3 ? magnitude == 127 : magnitude > 0x7C;
        const bool infinite = !e4m3 && magnitude == 0x7C;  // becomes the largest
        EXPECT_EQ(after, nan ? 127U : infinite ? (before & 128U) | 0x7BU : before) << type;
      }
    }
  }
}

TEST(Unknown, WhatIsNotUnderstoodIsAnErrorWithItsLine) {
  std::vector<float> a{1};
  for (const char* text : {"add.nonsense.f32 %out, %in0, %in0;", "frobnicate.f32 %out, %in0;",
                           "add.f32 %out, %in0, %nothing;", "add.f32 %out, %in0;"}) {
    try {
      each_thread<float>(text, a);
      FAIL() << text;
    } catch (const Error& error) {
      EXPECT_EQ(std::string(error.what()).rfind("line ", 0), 0U) << error.what();
    }
  }
}

}  // namespace
}  // namespace vgpu::ptx
