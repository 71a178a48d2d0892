// SPDX-License-Identifier: Apache-2.0
// f16 and bf16, alone and in pairs, against a double that is rounded once by search in the format.
#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>

#include "kernel_test.h"

namespace vgpu::ptx {
namespace {

using Bits = std::uint16_t;

// A format by its definition: nothing of numbers.h.
struct Format {
  std::string name;
  int fraction, bias;
  Bits infinity;

  double value(Bits bits) const {
    const int magnitude = bits & 0x7FFF, exponent = magnitude >> fraction;
    const double digits = magnitude & ((1 << fraction) - 1);
    double result = 0;
    if (magnitude > infinity) {
      result = std::numeric_limits<double>::quiet_NaN();
    } else if (magnitude == infinity) {
      result = std::numeric_limits<double>::infinity();
    } else {
      result = std::ldexp(digits + (exponent == 0 ? 0 : 1 << fraction),
                          std::max(exponent, 1) - bias - fraction);
    }
    return bits >> 15 != 0 ? -result : result;
  }
  // To the nearest, ties to even. Infinity counts as the number that follows the largest.
  Bits round(double number) const {
    if (std::isnan(number)) return 0x7FFF;
    const auto sign = static_cast<Bits>(std::signbit(number) ? 0x8000 : 0);
    const double magnitude = std::fabs(number);
    int low = 0, high = infinity;  // low's value is not greater
    const double beyond = std::ldexp(1.0, (infinity >> fraction) - bias);
    auto at = [&](int bits) { return bits == infinity ? beyond : value(static_cast<Bits>(bits)); };
    if (magnitude >= beyond) return static_cast<Bits>(sign | infinity);
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (at(middle) <= magnitude ? low : high) = middle;
    }
    const double below = magnitude - at(low), above = at(high) - magnitude;
    const bool up = above < below || (above == below && low % 2 == 1);
    return static_cast<Bits>(sign | (up ? high : low));
  }
  double smallest_normal() const { return std::ldexp(1.0, 1 - bias); }
};
const Format kFormats[] = {{"f16", 10, 15, 0x7C00}, {"bf16", 7, 127, 0x7F80}};

std::vector<Bits> values_of(const Format& format) {
  std::vector<Bits> all{0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x0400, 0x8400,
                        0x3C00, 0xBC00, 0x3F80, 0xBF80, 0x7BFF, 0x7F7F, 0xFF7F,
                        0x7C00, 0xFC00, 0x7F80, 0xFF80, 0x7FFF, 0xFE00};
  for (std::uint32_t i = 77; i < 65536; i += 2003) all.push_back(static_cast<Bits>(i));
  all.push_back(format.infinity);
  return all;
}
bool same(const Format& format, Bits a, Bits b) {
  return a == b || (std::isnan(format.value(a)) && std::isnan(format.value(b)));
}

// One alone, and both halves of a pair: the operands there and exchanged.
void check(const Format& format, const std::string& opcode,
           const std::function<double(double, double)>& want) {
  auto [a, b] = pairs_of(values_of(format));
  auto got = each_thread<Bits>(opcode + "." + format.name + " %out, %in0, %in1;", a, b);
  auto pairs =
      each_thread<std::uint32_t>("mov.b32 %r0, {%in0, %in1};\nmov.b32 %r1, {%in1, %in0};\n" +
                                     opcode + "." + format.name + "x2 %out, %r0, %r1;",
                                 a, b);
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double x = format.value(a[i]), y = format.value(b[i]);
    const Bits forward = format.round(want(x, y)), backward = format.round(want(y, x));
    EXPECT_TRUE(same(format, got[i], forward)) << opcode << " " << x << ", " << y << ": " << got[i];
    EXPECT_TRUE(same(format, static_cast<Bits>(pairs[i]), forward))
        << opcode << " " << x << ", " << y;
    EXPECT_TRUE(same(format, static_cast<Bits>(pairs[i] >> 16), backward))
        << opcode << " " << x << ", " << y;
  }
}

// A sum may have more digits than a double: with an odd last one it rounds as the whole would.
double odd_sum(double x, double y) {
  const double sum = x + y, rest = (x - (sum - (sum - x))) + (y - (sum - x));
  if (!std::isfinite(sum) || rest == 0 || (std::bit_cast<std::uint64_t>(sum) & 1U) != 0) return sum;
  return std::nextafter(sum, rest > 0 ? HUGE_VAL : -HUGE_VAL);
}

TEST(Halves, ArithmeticRoundsOnce) {
  for (const Format& format : kFormats) {
    check(format, "add.rn", odd_sum);
    check(format, "sub", [](double x, double y) { return odd_sum(x, -y); });
    check(format, "mul.rn", [](double x, double y) { return x * y; });
  }
}

TEST(Halves, ResultsSaturateAndLoseTheirSign) {
  const Format& format = kFormats[0];
  check(format, "add.sat", [](double x, double y) {
    return x + y > 0 ? std::min(x + y, 1.0) : 0.0;  // NaN too
  });
  check(format, "mul.sat",
        [](double x, double y) { return x * y > 0 ? std::min(x * y, 1.0) : 0.0; });
}

TEST(Halves, SubnormalNumbersAreZeroIfAsked) {
  const Format& format = kFormats[0];
  auto flushed = [&](double value) {
    return std::fabs(value) < format.smallest_normal() ? std::copysign(0.0, value) : value;
  };
  auto rounded = [&](double value) { return flushed(format.value(format.round(value))); };
  check(format, "add.ftz", [&](double x, double y) { return rounded(flushed(x) + flushed(y)); });
  check(format, "sub.ftz", [&](double x, double y) { return rounded(flushed(x) - flushed(y)); });
  check(format, "mul.ftz", [&](double x, double y) { return rounded(flushed(x) * flushed(y)); });
}

double extreme(bool maximum, double x, double y) {
  if (std::isnan(x)) return y;
  if (std::isnan(y)) return x;
  if (x == y) return std::signbit(x) == maximum ? y : x;
  return (x < y) == maximum ? y : x;
}
TEST(Halves, TheLesserAndTheGreater) {
  for (const Format& format : kFormats) {
    for (bool maximum : {false, true}) {
      const std::string opcode = maximum ? "max" : "min";
      auto plain = [=](double x, double y) { return extreme(maximum, x, y); };
      check(format, opcode, plain);
      check(format, opcode + ".NaN", [=](double x, double y) {
        return std::isnan(x) || std::isnan(y) ? x + y : plain(x, y);
      });
      check(format, opcode + ".xorsign.abs", [=](double x, double y) {
        if (std::isnan(x) && std::isnan(y)) return x;
        const bool negative = std::signbit(x) != std::signbit(y);
        return std::copysign(plain(std::fabs(x), std::fabs(y)), negative ? -1.0 : 1.0);
      });
    }
  }
}

TEST(Halves, SignsOfEveryNumber) {
  std::vector<Bits> all(65536);
  for (std::uint32_t i = 0; i < all.size(); ++i) all[i] = static_cast<Bits>(i);
  for (const Format& format : kFormats) {
    auto absolute = each_thread<Bits>("abs." + format.name + " %out, %in0;", all);
    auto negative = each_thread<Bits>("neg." + format.name + " %out, %in0;", all);
    auto pair = each_thread<std::uint32_t>("mov.b32 %r0, {%in0, %in0};\nabs." + format.name +
                                               "x2 %r1, %r0;\nneg." + format.name + "x2 %out, %r1;",
                                           all);
    for (std::uint32_t i = 0; i < all.size(); ++i) {
      EXPECT_TRUE(same(format, absolute[i], static_cast<Bits>(i & 0x7FFFU)));
      EXPECT_TRUE(same(format, negative[i], static_cast<Bits>(i ^ 0x8000U)));
      if (std::isnan(format.value(all[i]))) continue;
      EXPECT_EQ(pair[i], (i | 0x8000U) << 16 | (i | 0x8000U));
    }
  }
}

TEST(Halves, FusedSumsRoundOnce) {
  for (const Format& format : kFormats) {
    auto [a, b] = pairs_of(values_of(format));
    auto got = each_thread<Bits>("fma.rn." + format.name + " %out, %in0, %in1, %in0;", a, b);
    auto relu = each_thread<Bits>("fma.rn.relu." + format.name + " %out, %in0, %in1, %in0;", a, b);
    for (std::size_t i = 0; i < a.size(); ++i) {
      const double x = format.value(a[i]), y = format.value(b[i]);
      const double odd = odd_sum(x * y, x);  // the product is exact
      EXPECT_TRUE(same(format, got[i], format.round(odd))) << x << " * " << y << " + " << x;
      const double kept = odd < 0 ? 0 : odd;
      EXPECT_EQ(
          format.value(relu[i]) + 0.0 == format.value(format.round(kept)) + 0.0 || std::isnan(kept),
          true)
          << x << " * " << y << " + " << x;
    }
  }
}

TEST(Halves, FunctionsAreNear) {
  for (const Format& format : kFormats) {
    const std::vector<Bits> a = values_of(format);
    const std::string flush = format.name == "bf16" ? "ftz." : "";
    auto power = each_thread<Bits>("ex2.approx." + flush + format.name + " %out, %in0;", a);
    auto tangent = each_thread<Bits>("tanh.approx." + format.name + " %out, %in0;", a);
    auto pair = each_thread<std::uint32_t>(
        "mov.b32 %r0, {%in0, %in0};\ntanh.approx." + format.name + "x2 %out, %r0;", a);
    auto near = [&](Bits got, double want) {
      if (std::isnan(want)) return std::isnan(format.value(got));
      const Bits rounded = format.round(want);
      return std::abs((got & 0x7FFF) - (rounded & 0x7FFF)) <= 1 &&
             (std::signbit(format.value(got)) == std::signbit(want));
    };
    for (std::size_t i = 0; i < a.size(); ++i) {
      const double x = format.value(a[i]);
      double want = std::exp2(x);
      if (!flush.empty() && want < format.smallest_normal()) want = 0;
      EXPECT_TRUE(near(power[i], want)) << format.name << " ex2 " << x << " " << power[i];
      EXPECT_TRUE(near(tangent[i], std::tanh(x))) << format.name << " tanh " << x;
      EXPECT_EQ(pair[i], tangent[i] * 0x10001U);
    }
  }
}

}  // namespace
}  // namespace vgpu::ptx
