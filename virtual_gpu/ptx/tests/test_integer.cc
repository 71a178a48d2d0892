// SPDX-License-Identifier: Apache-2.0
// Integers and bits, against C++ on the numbers where overflow and signs matter.
#include <bit>
#include <limits>

#include "kernel_test.h"

namespace vgpu::ptx {
namespace {

template <typename T>
class Integers : public testing::Test {
 protected:
  using Wide = __int128;
  static T wrap(Wide value) { return static_cast<T>(static_cast<unsigned __int128>(value)); }

  template <typename Want>
  void check(const std::string& opcode, Want&& want) {
    auto [a, b] = pairs_of(edges<T>());
    auto got = each_thread<T>(opcode + "." + name_of_type<T>() + " %out, %in0, %in1;", a, b);
    for (std::size_t i = 0; i < a.size(); ++i) {
      EXPECT_EQ(got[i], want(a[i], b[i])) << opcode << " of " << +a[i] << " and " << +b[i];
    }
  }
};
using Types = testing::Types<std::int16_t, std::uint16_t, std::int32_t, std::uint32_t, std::int64_t,
                             std::uint64_t>;
TYPED_TEST_SUITE(Integers, Types);

TYPED_TEST(Integers, SumsDifferencesAndProductsWrap) {
  using T = TypeParam;
  using W = __int128;
  this->check("add", [&](T a, T b) { return this->wrap(W{a} + b); });
  this->check("sub", [&](T a, T b) { return this->wrap(W{a} - b); });
  this->check("mul.lo", [&](T a, T b) { return this->wrap(W{a} * b); });
  this->check("min", [](T a, T b) { return std::min(a, b); });
  this->check("max", [](T a, T b) { return std::max(a, b); });
  if constexpr (std::is_same_v<T, std::int32_t>) {
    this->check("min.relu", [](T a, T b) { return std::max(T{0}, std::min(a, b)); });
    this->check("max.relu", [](T a, T b) { return std::max({T{0}, a, b}); });
  }
}

TYPED_TEST(Integers, TheUpperHalfOfAProduct) {
  using T = TypeParam;
  this->check("mul.hi", [](T a, T b) {
    if constexpr (std::is_same_v<T, std::uint64_t>) {
      return static_cast<T>((static_cast<unsigned __int128>(a) * b) >> 64);
    }
    return static_cast<T>((static_cast<__int128>(a) * b) >> (8 * sizeof(T)));
  });
}

TYPED_TEST(Integers, QuotientsAndRemaindersAlsoWhereNothingDefinesThem) {
  using T = TypeParam;
  auto lowest = [](T a, T b) {
    return std::is_signed_v<T> && a == std::numeric_limits<T>::min() && b == static_cast<T>(-1);
  };
  this->check("div", [&](T a, T b) {
    return b == 0 ? static_cast<T>(-1) : lowest(a, b) ? a : static_cast<T>(a / b);
  });
  this->check("rem", [&](T a, T b) {
    return b == 0 ? a : lowest(a, b) ? T{0} : static_cast<T>(a % b);
  });
}

TYPED_TEST(Integers, ComparisonsAndChoice) {
  using T = TypeParam;
  auto [a, b] = pairs_of(edges<T>());
  const std::string type = name_of_type<T>();
  for (auto [name, holds] : std::initializer_list<std::pair<const char*, bool (*)(T, T)>>{
           {"eq", [](T x, T y) { return x == y; }},
           {"ne", [](T x, T y) { return x != y; }},
           {"lt", [](T x, T y) { return x < y; }},
           {"le", [](T x, T y) { return x <= y; }},
           {"gt", [](T x, T y) { return x > y; }},
           {"ge", [](T x, T y) { return x >= y; }}}) {
    auto got = each_thread<T>("setp." + std::string(name) + "." + type +
                                  " %p0, %in0, %in1;\nselp." + type + " %out, %in0, %in1, %p0;",
                              a, b);
    for (std::size_t i = 0; i < a.size(); ++i) {
      EXPECT_EQ(got[i], holds(a[i], b[i]) ? a[i] : b[i]) << name;
    }
  }
}

TYPED_TEST(Integers, ShiftsByAnyNumberOfBits) {
  using T = TypeParam;
  std::vector<T> a;
  std::vector<std::uint32_t> by;
  for (T each : edges<T>()) {
    for (std::uint32_t n : {0U, 1U, 7U, 15U, 16U, 31U, 32U, 33U, 63U, 64U, 200U, 0xFFFFFFFFU}) {
      a.push_back(each);
      by.push_back(n);
    }
  }
  auto right = each_thread<T>("shr." + name_of_type<T>() + " %out, %in0, %in1;", a, by);
  auto left = each_thread<T>("shl.b" + std::to_string(8 * sizeof(T)) + " %out, %in0, %in1;", a, by);
  for (std::size_t i = 0; i < a.size(); ++i) {
    const std::uint32_t bits = 8 * sizeof(T), n = std::min(by[i], bits);
    const T sign = a[i] < T{0} ? static_cast<T>(-1) : T{0};
    EXPECT_EQ(right[i], n == bits ? sign : static_cast<T>(a[i] >> n));
    EXPECT_EQ(left[i], n == bits ? T{0} : static_cast<T>(static_cast<std::uint64_t>(a[i]) << n));
  }
}

TYPED_TEST(Integers, DistancesAndSigns) {
  using T = TypeParam;
  using W = __int128;
  auto [a, b] = pairs_of(edges<T>());
  const std::string type = name_of_type<T>();
  auto distance = each_thread<T>("sad." + type + " %out, %in0, %in1, 7;", a, b);
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(distance[i], this->wrap(7 + (a[i] < b[i] ? W{b[i]} - a[i] : W{a[i]} - b[i])));
  }
  if constexpr (std::is_signed_v<T>) {
    auto absolute = each_thread<T>("abs." + type + " %out, %in0;", a);
    auto negative = each_thread<T>("neg." + type + " %out, %in0;", a);
    for (std::size_t i = 0; i < a.size(); ++i) {
      EXPECT_EQ(absolute[i], this->wrap(a[i] < 0 ? -W{a[i]} : W{a[i]}));
      EXPECT_EQ(negative[i], this->wrap(-W{a[i]}));
    }
  }
}

template <typename T>
void check_24() {
  auto [a, b] = pairs_of(edges<T>());
  const std::string type = name_of_type<T>();
  auto cut = [](T value) {  // to 24 bits, with their sign
    const auto bits = static_cast<std::int64_t>(static_cast<std::uint32_t>(value) & 0xFFFFFFU);
    return std::is_signed_v<T> && bits >= 0x800000 ? bits - 0x1000000 : bits;
  };
  for (bool high : {false, true}) {
    const std::string part = high ? ".hi." : ".lo.";
    auto product = each_thread<std::uint32_t>("mul24" + part + type + " %out, %in0, %in1;", a, b);
    auto sum = each_thread<std::uint32_t>("mad24" + part + type + " %out, %in0, %in1, 9;", a, b);
    for (std::size_t i = 0; i < a.size(); ++i) {
      const auto want = static_cast<std::uint32_t>(cut(a[i]) * cut(b[i]) >> (high ? 16 : 0));
      EXPECT_EQ(product[i], want) << part << a[i] << " " << b[i];
      EXPECT_EQ(sum[i], want + 9) << part << a[i] << " " << b[i];
    }
  }
}
TEST(Integer, ProductsOfTwentyFourBits) {
  check_24<std::int32_t>();
  check_24<std::uint32_t>();
}

TEST(Integer, WideProductsHoldAllBits) {
  auto [a, b] = pairs_of(edges<std::int32_t>());
  auto got = each_thread<std::int64_t>("mul.wide.s32 %out, %in0, %in1;", a, b);
  auto sum = each_thread<std::int64_t>(
      "mul.wide.s32 %l0, %in0, %in1;\n"
      "mad.wide.s32 %out, %in0, %in1, %l0;",
      a, b);
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(got[i], std::int64_t{a[i]} * b[i]);
    EXPECT_EQ(static_cast<std::uint64_t>(sum[i]), 2 * static_cast<std::uint64_t>(got[i]));
  }
}

TEST(Integer, SaturatingSumsStayAtTheEnds) {
  auto [a, b] = pairs_of(edges<std::int32_t>());
  auto sum = each_thread<std::int32_t>("add.sat.s32 %out, %in0, %in1;", a, b);
  for (std::size_t i = 0; i < a.size(); ++i) {
    auto exact = std::int64_t{a[i]} + b[i];
    EXPECT_EQ(sum[i], std::clamp<std::int64_t>(exact, INT32_MIN, INT32_MAX));
  }
  EXPECT_THROW(each_thread<std::uint32_t>("add.sat.u32 %out, %in0, %in1;", a, b), Error);
}

TEST(Integer, CarriesMakeSumsOfAnyLength) {
  auto [a, b] = pairs_of(edges<std::uint64_t>());
  auto words = [](const char* first, const char* second) {
    return std::string("mov.b64 {%r0, %r1}, %in0;\nmov.b64 {%r2, %r3}, %in1;\n") + first +
           ".cc.u32 %r4, %r0, %r2;\n" + second + ".u32 %r5, %r1, %r3;\nmov.b64 %out, {%r4, %r5};";
  };
  auto sum = each_thread<std::uint64_t>(words("add", "addc"), a, b);
  auto difference = each_thread<std::uint64_t>(words("sub", "subc"), a, b);
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(sum[i], a[i] + b[i]);
    EXPECT_EQ(difference[i], a[i] - b[i]);
  }
}

TEST(Bits, LogicOfTwoAndThree) {
  auto [a, b] = pairs_of(edges<std::uint32_t>());
  auto got = each_thread<std::uint32_t>(
      "and.b32 %r0, %in0, %in1;\nor.b32 %r1, %in0, %in1;\nxor.b32 %r2, %in0, 0x1234;\n"
      "lop3.b32 %out, %r0, %r1, %r2, 0xE8;",  // the majority
      a, b);
  for (std::size_t i = 0; i < a.size(); ++i) {
    std::uint32_t x = a[i] & b[i], y = a[i] | b[i], z = a[i] ^ 0x1234U;
    EXPECT_EQ(got[i], (x & y) | (x & z) | (y & z));
  }
}

TEST(Bits, CountsAndReversals) {
  std::vector<std::uint32_t> a = edges<std::uint32_t>();
  auto leading = each_thread<std::uint32_t>("clz.b32 %out, %in0;", a);
  auto ones = each_thread<std::uint32_t>("popc.b32 %out, %in0;", a);
  auto reversed = each_thread<std::uint32_t>("brev.b32 %out, %in0;", a);
  auto top = each_thread<std::uint32_t>("bfind.u32 %out, %in0;", a);
  auto signed_top = each_thread<std::uint32_t>("bfind.s32 %out, %in0;", a);
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(leading[i], static_cast<std::uint32_t>(std::countl_zero(a[i])));
    EXPECT_EQ(ones[i], static_cast<std::uint32_t>(std::popcount(a[i])));
    std::uint32_t mirror = 0;
    for (int bit = 0; bit < 32; ++bit) mirror |= ((a[i] >> bit) & 1U) << (31 - bit);
    EXPECT_EQ(reversed[i], mirror);
    EXPECT_EQ(top[i], 31U - static_cast<std::uint32_t>(std::countl_zero(a[i])));
    std::uint32_t magnitude = (a[i] >> 31) != 0 ? ~a[i] : a[i];
    EXPECT_EQ(signed_top[i], 31U - static_cast<std::uint32_t>(std::countl_zero(magnitude)));
  }
}

// bfe and bfi as the manual defines them, bit by bit.
TEST(Bits, FieldsAreTakenOutAndPutIn) {
  std::vector<std::int32_t> a;
  std::vector<std::uint32_t> position, length;
  for (std::int32_t each : edges<std::int32_t>()) {
    for (std::uint32_t p : {0U, 1U, 5U, 30U, 31U, 32U, 255U}) {
      for (std::uint32_t n : {0U, 1U, 4U, 8U, 31U, 32U, 40U}) {
        a.push_back(each);
        position.push_back(p);
        length.push_back(n);
      }
    }
  }
  auto taken = each_thread<std::uint32_t>("bfe.s32 %out, %in0, %in1, %in2;", a, position, length);
  auto put = each_thread<std::uint32_t>("bfi.b32 %out, %in0, 0x0F0F0F0F, %in1, %in2;", a, position,
                                        length);
  for (std::size_t i = 0; i < a.size(); ++i) {
    const auto bits = static_cast<std::uint32_t>(a[i]);
    auto bit = [&](std::uint32_t at) { return (bits >> at) & 1U; };
    const std::uint32_t p = position[i], n = length[i];
    const std::uint32_t sign = n == 0 ? 0 : bit(std::min(p + n - 1, 31U));
    std::uint32_t field = 0, inserted = 0x0F0F0F0F;
    for (std::uint32_t at = 0; at < 32; ++at) {
      field |= (at < n && p + at < 32 ? bit(p + at) : sign) << at;
      if (at >= p && at - p < n && p < 32) {
        inserted = (inserted & ~(1U << at)) | bit(at - p) << at;
      }
    }
    EXPECT_EQ(taken[i], field) << p << " " << n;
    EXPECT_EQ(put[i], inserted) << p << " " << n;
  }
}

TEST(Bits, BytesArePermuted) {
  std::vector<std::uint32_t> a{0x33221100}, b{0x77665544};
  auto permuted = [&](const std::string& control, const std::string& mode = "") {
    return each_thread<std::uint32_t>("prmt.b32" + mode + " %out, %in0, %in1, " + control + ";", a,
                                      b)[0];
  };
  EXPECT_EQ(permuted("0x7530"), 0x77553300U);
  EXPECT_EQ(permuted("0x3210"), 0x33221100U);
  EXPECT_EQ(permuted("0x000C"), 0x00000000U);  // the sign of 0x44
  EXPECT_EQ(permuted("1", ".f4e"), 0x44332211U);
  EXPECT_EQ(permuted("1", ".b4e"), 0x66770011U);
  EXPECT_EQ(permuted("2", ".rc8"), 0x22222222U);
  EXPECT_EQ(permuted("2", ".ecl"), 0x33222222U);
  EXPECT_EQ(permuted("2", ".ecr"), 0x22221100U);
  EXPECT_EQ(permuted("1", ".rc16"), 0x33223322U);
}

TEST(Bits, FunnelShiftsAndDotProducts) {
  std::vector<std::uint32_t> a{0x89ABCDEF}, b{0x01234567};
  auto run = [&](const std::string& text) { return each_thread<std::uint32_t>(text, a, b)[0]; };
  EXPECT_EQ(run("shf.l.wrap.b32 %out, %in0, %in1, 36;"), 0x12345678U);
  EXPECT_EQ(run("shf.l.clamp.b32 %out, %in0, %in1, 36;"), 0x89ABCDEFU);
  EXPECT_EQ(run("shf.r.wrap.b32 %out, %in0, %in1, 4;"), 0x789ABCDEU);
  std::int32_t dot = 5;
  for (int i = 0; i < 4; ++i) {
    dot += static_cast<std::int8_t>(a[0] >> (8 * i)) * static_cast<std::uint8_t>(b[0] >> (8 * i));
  }
  EXPECT_EQ(run("dp4a.s32.u32 %out, %in0, %in1, 5;"), static_cast<std::uint32_t>(dot));
}

}  // namespace
}  // namespace vgpu::ptx
