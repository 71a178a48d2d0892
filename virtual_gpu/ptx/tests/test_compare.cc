// SPDX-License-Identifier: Apache-2.0
// setp, set, selp, slct, testp, copysign, against C++; NaN is neither less nor greater.
#include <bit>
#include <cmath>
#include <functional>

#include "kernel_test.h"
#include "ptx/numbers.h"

namespace vgpu::ptx {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

using Holds = std::function<bool(double, double)>;
const std::vector<std::pair<std::string, Holds>>& ordered() {
  static const auto* all = new std::vector<std::pair<std::string, Holds>>{
      {"eq", [](double a, double b) { return a == b; }},
      {"ne", [](double a, double b) { return a < b || a > b; }},
      {"lt", [](double a, double b) { return a < b; }},
      {"le", [](double a, double b) { return a <= b; }},
      {"gt", [](double a, double b) { return a > b; }},
      {"ge", [](double a, double b) { return a >= b; }}};
  return *all;
}
std::vector<std::pair<std::string, Holds>> of_floats() {
  auto all = ordered();
  auto unordered = [](double a, double b) { return std::isnan(a) || std::isnan(b); };
  for (const auto& [name, holds] : ordered()) {
    all.emplace_back(name + "u", [holds = holds, unordered](double a, double b) {
      return unordered(a, b) || holds(a, b);
    });
  }
  all.emplace_back("num", [=](double a, double b) { return !unordered(a, b); });
  all.emplace_back("nan", unordered);
  return all;
}

// `Bits` are a type's registers; `value` reads them.
template <typename Bits, typename Value>
void check_floats(const std::string& type, const std::vector<Bits>& values, Value&& value) {
  auto [a, b] = pairs_of(values);
  for (const auto& [name, holds] : of_floats()) {
    auto got = each_thread<std::uint32_t>(
        "setp." + name + "." + type + " %p0, %in0, %in1;\nselp.u32 %out, 1, 0, %p0;", a, b);
    auto ones =
        each_thread<std::uint32_t>("set." + name + ".u32." + type + " %out, %in0, %in1;", a, b);
    auto one = each_thread<float>("set." + name + ".f32." + type + " %out, %in0, %in1;", a, b);
    for (std::size_t i = 0; i < a.size(); ++i) {
      const bool want = holds(value(a[i]), value(b[i]));
      EXPECT_EQ(got[i], want ? 1U : 0U)
          << name << "." << type << " of " << value(a[i]) << ", " << value(b[i]);
      EXPECT_EQ(ones[i], want ? 0xFFFFFFFFU : 0U);
      EXPECT_EQ(one[i], want ? 1.0F : 0.0F);
    }
  }
}

const std::vector<double> kValues{0.0, -0.0, 1.0, -1.0, 1.5, kInf, -kInf, kNan, 0x1p-14, -0x1p-14};

TEST(Comparisons, FloatsOfAllSizes) {
  check_floats("f64", kValues, [](double each) { return each; });
  check_floats("f32", std::vector<float>(kValues.begin(), kValues.end()),
               [](float each) { return double{each}; });
  std::vector<std::uint16_t> halves, brains;
  for (double each : kValues) {
    halves.push_back(Half::from(each).bits);
    brains.push_back(Brain::from(each).bits);
  }
  check_floats("f16", halves, [](std::uint16_t bits) { return double{Half{bits}.get()}; });
  check_floats("bf16", brains, [](std::uint16_t bits) { return double{Brain{bits}.get()}; });
}

TEST(Comparisons, SubnormalNumbersAreZeroIfAsked) {
  std::vector<float> a{1e-40F, -1e-40F, 1e-37F}, b{0.0F, 0.0F, 0.0F};
  auto run = [&](const std::string& name) {
    return each_thread<std::uint32_t>(
        "setp." + name + ".f32 %p0, %in0, %in1;\nselp.u32 %out, 1, 0, %p0;", a, b);
  };
  EXPECT_EQ(run("eq"), (std::vector<std::uint32_t>{0, 0, 0}));
  EXPECT_EQ(run("eq.ftz"), (std::vector<std::uint32_t>{1, 1, 0}));
}

template <typename T>
void check_unsigned() {
  auto [a, b] = pairs_of(edges<T>());
  const std::pair<std::string, std::function<bool(T, T)>> all[] = {{"lo", std::less<T>{}},
                                                                   {"ls", std::less_equal<T>{}},
                                                                   {"hi", std::greater<T>{}},
                                                                   {"hs", std::greater_equal<T>{}}};
  for (const auto& [name, holds] : all) {
    auto got = each_thread<std::uint32_t>(
        "setp." + name + "." + name_of_type<T>() + " %p0, %in0, %in1;\nselp.u32 %out, 1, 0, %p0;",
        a, b);
    for (std::size_t i = 0; i < a.size(); ++i) EXPECT_EQ(got[i] != 0, holds(a[i], b[i])) << name;
  }
}
TEST(Comparisons, UnsignedNumbersHaveTheirOwnNames) {
  check_unsigned<std::uint16_t>();
  check_unsigned<std::uint32_t>();
  check_unsigned<std::uint64_t>();
  std::vector<float> a{1};
  EXPECT_THROW(each_thread<float>("setp.lo.f32 %p0, %in0, %in0;", a), Error);
  std::vector<std::uint32_t> b{1};
  EXPECT_THROW(each_thread<std::uint32_t>("setp.num.u32 %p0, %in0, %in0;", b), Error);
}

TEST(Comparisons, AreJoinedWithAPredicateAndGiveTheirContraryToo) {
  auto [a, b] = pairs_of(edges<std::int32_t>());
  const std::pair<std::string, std::function<bool(bool, bool)>> joins[] = {
      {"and", std::logical_and<bool>{}},
      {"or", std::logical_or<bool>{}},
      {"xor", std::not_equal_to<bool>{}}};
  for (const auto& [name, join] : joins) {
    for (bool negated : {false, true}) {
      const std::string third = negated ? "!%p9;\n" : "%p9;\n";
      auto got = each_thread<std::uint32_t>(
          "setp.eq.s32 %p9, %in1, 7;\nsetp.lt." + name + ".s32 %p0|%p1, %in0, %in1, " + third +
              "selp.u32 %r0, 1, 0, %p0;\nselp.u32 %r1, 2, 0, %p1;\nor.b32 %out, %r0, %r1;",
          a, b);
      auto set = each_thread<std::uint32_t>(
          "setp.eq.s32 %p9, %in1, 7;\nset.lt." + name + ".s32.s32 %out, %in0, %in1, " + third, a,
          b);
      for (std::size_t i = 0; i < a.size(); ++i) {
        const bool c = (b[i] == 7) != negated, less = a[i] < b[i];
        const std::uint32_t both = (join(less, c) ? 1U : 0U) | (join(!less, c) ? 2U : 0U);
        EXPECT_EQ(got[i], both) << name;
        EXPECT_EQ(set[i], join(less, c) ? 0xFFFFFFFFU : 0U) << name;
      }
    }
  }
}

TEST(Comparisons, PairsOfHalvesGiveTwoPredicates) {
  auto [a, b] =
      pairs_of(std::vector<std::uint32_t>{0x3C004000, 0x40003C00, 0x7E000000, 0x80000000});
  for (const std::string type : {"f16x2", "bf16x2"}) {
    auto value = [&](std::uint32_t word, int shift) {
      const auto bits = static_cast<std::uint16_t>(word >> shift);
      return type == "f16x2" ? Half{bits}.get() : Brain{bits}.get();
    };
    auto got = each_thread<std::uint32_t>("setp.le." + type +
                                              " %p0|%p1, %in0, %in1;\nselp.u32 %r0, 1, 0, %p0;\n" +
                                              "selp.u32 %r1, 2, 0, %p1;\nor.b32 %out, %r0, %r1;",
                                          a, b);
    for (std::size_t i = 0; i < a.size(); ++i) {
      const bool low = value(a[i], 0) <= value(b[i], 0), high = value(a[i], 16) <= value(b[i], 16);
      EXPECT_EQ(got[i], (low ? 1U : 0U) | (high ? 2U : 0U)) << std::hex << a[i] << " " << b[i];
    }
  }
}

TEST(Comparisons, SetOfSmallTypes) {
  std::vector<std::int32_t> a{1, 2, 3}, b{2, 2, 2};
  auto run = [&](const std::string& to) {
    return each_thread<std::uint16_t>("set.ge." + to + ".s32 %out, %in0, %in1;", a, b);
  };
  EXPECT_EQ(run("u16"), (std::vector<std::uint16_t>{0, 0xFFFF, 0xFFFF}));
  EXPECT_EQ(run("s16"), (std::vector<std::uint16_t>{0, 0xFFFF, 0xFFFF}));
  EXPECT_EQ(run("f16"), (std::vector<std::uint16_t>{0, 0x3C00, 0x3C00}));
  EXPECT_EQ(run("bf16"), (std::vector<std::uint16_t>{0, 0x3F80, 0x3F80}));
}

template <typename T>
void check_choice(const std::string& type) {
  auto [a, b] = pairs_of(edges<T>());
  std::vector<std::int32_t> signs;
  std::vector<float> numbers;
  const float all[] = {0.0F, -0.0F, 1.0F, -1.0F, static_cast<float>(kNan), -1e-40F};
  for (std::size_t i = 0; i < a.size(); ++i) {
    signs.push_back(static_cast<std::int32_t>(i % 3) - 1);
    numbers.push_back(all[i % 6]);
  }
  auto by_sign = each_thread<T>("slct." + type + ".s32 %out, %in0, %in1, %in2;", a, b, signs);
  auto by_number = each_thread<T>("slct." + type + ".f32 %out, %in0, %in1, %in2;", a, b, numbers);
  auto flushed = each_thread<T>("slct.ftz." + type + ".f32 %out, %in0, %in1, %in2;", a, b, numbers);
  auto by_predicate = each_thread<T>(
      "setp.lt.s32 %p0, %in2, 0;\nselp." + type + " %out, %in0, %in1, !%p0;", a, b, signs);
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(by_sign[i], signs[i] >= 0 ? a[i] : b[i]);
    EXPECT_EQ(by_number[i], numbers[i] >= 0 ? a[i] : b[i]);
    EXPECT_EQ(flushed[i], i % 6 == 5 || numbers[i] >= 0 ? a[i] : b[i]);
    EXPECT_EQ(by_predicate[i], signs[i] >= 0 ? a[i] : b[i]);
  }
}
TEST(Choices, BySignNumberAndPredicate) {
  for (const char* type : {"b16", "u16", "s16"}) check_choice<std::uint16_t>(type);
  for (const char* type : {"b32", "u32", "s32", "f32"}) check_choice<std::uint32_t>(type);
  for (const char* type : {"b64", "u64", "s64", "f64"}) check_choice<std::uint64_t>(type);
}

template <typename F>
void check_kinds(const std::string& type) {
  using L = std::numeric_limits<F>;
  std::vector<F> a{F(0),           F(-0.0),          F(1),     F(-2),
                   L::min(),       -L::denorm_min(), L::max(), L::infinity(),
                   -L::infinity(), L::quiet_NaN()};
  const std::pair<std::string, std::function<bool(F)>> all[] = {
      {"finite", [](F x) { return std::isfinite(x); }},
      {"infinite", [](F x) { return std::isinf(x); }},
      {"number", [](F x) { return !std::isnan(x); }},
      {"notanumber", [](F x) { return std::isnan(x); }},
      {"normal", [](F x) { return std::isnormal(x) || x == 0; }},  // the manual: zeros too
      {"subnormal", [](F x) { return std::fpclassify(x) == FP_SUBNORMAL; }}};
  for (const auto& [name, holds] : all) {
    auto got = each_thread<std::uint32_t>(
        "testp." + name + "." + type + " %p0, %in0;\nselp.u32 %out, 1, 0, %p0;", a);
    for (std::size_t i = 0; i < a.size(); ++i) EXPECT_EQ(got[i] != 0, holds(a[i])) << name << a[i];
  }
  auto [x, y] = pairs_of(a);
  auto signs = each_thread<F>("copysign." + type + " %out, %in0, %in1;", x, y);
  for (std::size_t i = 0; i < x.size(); ++i) {
    const F want = std::copysign(y[i], x[i]);
    EXPECT_EQ(std::memcmp(&signs[i], &want, sizeof(F)), 0) << x[i] << " " << y[i];
  }
}
TEST(Choices, KindsAndSignsOfFloats) {
  check_kinds<float>("f32");
  check_kinds<double>("f64");
}

}  // namespace
}  // namespace vgpu::ptx
