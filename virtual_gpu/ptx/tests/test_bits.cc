// SPDX-License-Identifier: Apache-2.0
// Logic, shifts, fields, permutations, dot products and carries, against the manual's definitions.
#include <bit>
#include <functional>

#include "kernel_test.h"

namespace vgpu::ptx {
namespace {

using u32 = std::uint32_t;
using u64 = std::uint64_t;

template <typename T>
void check_logic() {
  const std::string type = "b" + std::to_string(8 * sizeof(T));
  auto [a, b] = pairs_of(edges<T>());
  const std::pair<std::string, std::function<T(T, T)>> two[] = {
      {"and", std::bit_and<T>{}}, {"or", std::bit_or<T>{}}, {"xor", std::bit_xor<T>{}}};
  for (const auto& [name, want] : two) {
    auto got = each_thread<T>(name + "." + type + " %out, %in0, %in1;", a, b);
    for (std::size_t i = 0; i < a.size(); ++i) EXPECT_EQ(got[i], want(a[i], b[i])) << name;
  }
  auto inverted = each_thread<T>("not." + type + " %out, %in0;", a);
  auto zero = each_thread<T>("cnot." + type + " %out, %in0;", a);
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(inverted[i], static_cast<T>(~a[i]));
    EXPECT_EQ(zero[i], a[i] == 0 ? T{1} : T{0});
  }
}
TEST(Logic, OfAllWidths) {
  check_logic<std::uint16_t>();
  check_logic<u32>();
  check_logic<u64>();
}

TEST(Logic, OfPredicates) {
  std::vector<u32> a{0, 0, 1, 1}, b{0, 1, 0, 1};
  auto got = each_thread<u32>(
      "setp.ne.u32 %p0, %in0, 0;\nsetp.ne.u32 %p1, %in1, 0;\nand.pred %p2, %p0, %p1;\n"
      "or.pred %p3, %p0, %p1;\nxor.pred %p4, %p0, !%p1;\nnot.pred %p5, %p0;\nmov.pred %p6, %p1;\n"
      "mov.u32 %out, 0;\n@%p2 or.b32 %out, %out, 1;\n@%p3 or.b32 %out, %out, 2;\n"
      "@%p4 or.b32 %out, %out, 4;\n@%p5 or.b32 %out, %out, 8;\n@!%p6 or.b32 %out, %out, 16;",
      a, b);
  for (u32 i = 0; i < 4; ++i) {
    const u32 x = i >> 1, y = i & 1;
    EXPECT_EQ(got[i], (x & y) | (x | y) << 1 | (x ^ y ^ 1) << 2 | (x ^ 1) << 3 | (y ^ 1) << 4);
  }
}

TEST(Logic, EveryTableOfThreeBits) {
  std::vector<u32> a{0xF0F0F0F0}, b{0xCCCCCCCC}, c{0xAAAAAAAA};  // bits 7 to 0 are the entries
  for (u32 entry = 0; entry < 256; ++entry) {
    auto got = each_thread<u32>("lop3.b32 %out, %in0, %in1, %in2, " + std::to_string(entry) + ";",
                                a, b, c)[0];
    EXPECT_EQ(got, entry * 0x01010101U);
  }
}

TEST(Shifts, FunnelsOfEveryDistance) {
  std::vector<u32> by;
  for (u32 n = 0; n < 70; ++n) by.push_back(n);
  by.push_back(0xFFFFFFFF);
  std::vector<u32> a(by.size(), 0x89ABCDEF), b(by.size(), 0x01234567);
  for (bool left : {false, true}) {
    for (bool wrap : {false, true}) {
      auto got = each_thread<u32>(std::string("shf.") + (left ? "l" : "r") +
                                      (wrap ? ".wrap" : ".clamp") + ".b32 %out, %in0, %in1, %in2;",
                                  a, b, by);
      for (std::size_t i = 0; i < by.size(); ++i) {
        const u32 n = wrap ? by[i] % 32 : std::min(by[i], 32U);
        const u64 both = u64{b[i]} << 32 | a[i];
        EXPECT_EQ(got[i], static_cast<u32>(left ? both >> (32 - n) : both >> n)) << by[i];
      }
    }
  }
}

// The manual's loops, bit by bit.
template <typename T>
T field_of(T value, u32 position, u32 length) {
  using U = std::make_unsigned_t<T>;
  const u32 top = 8 * sizeof(T) - 1;
  const auto bits = static_cast<U>(value);
  position &= 255;
  length &= 255;
  const U sign = std::is_unsigned_v<T> || length == 0
                     ? U{0}
                     : static_cast<U>(bits >> std::min(position + length - 1, top) & 1U);
  U result = 0;
  for (u32 i = 0; i <= top; ++i) {
    const U bit = i < length && position + i <= top ? bits >> (position + i) & 1U : sign;
    result |= static_cast<U>(bit << i);
  }
  return static_cast<T>(result);
}
template <typename T>
T inserted(T from, T into, u32 position, u32 length) {
  position &= 255;
  length &= 255;
  for (u32 i = 0; i < length && position + i < 8 * sizeof(T); ++i) {
    const T bit = T{1} << (position + i);
    into = (from >> i & 1U) != 0 ? into | bit : into & ~bit;
  }
  return into;
}

template <typename T>
void check_fields() {
  std::vector<T> a;
  std::vector<u32> position, length;
  for (T each : edges<T>()) {
    for (u32 p : {0U, 1U, 5U, 31U, 32U, 33U, 63U, 64U, 255U, 256U}) {
      for (u32 n : {0U, 1U, 8U, 31U, 32U, 33U, 63U, 64U, 255U, 257U}) {
        a.push_back(each);
        position.push_back(p);
        length.push_back(n);
      }
    }
  }
  auto taken =
      each_thread<T>("bfe." + name_of_type<T>() + " %out, %in0, %in1, %in2;", a, position, length);
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(taken[i], field_of(a[i], position[i], length[i]))
        << name_of_type<T>() << " " << a[i] << " " << position[i] << " " << length[i];
  }
  if constexpr (std::is_unsigned_v<T>) {
    const T into = static_cast<T>(0x0F0F0F0F0F0F0F0FULL);
    auto put = each_thread<T>(
        "bfi.b" + std::to_string(8 * sizeof(T)) + " %out, %in0, 0x0F0F0F0F0F0F0F0F, %in1, %in2;", a,
        position, length);
    for (std::size_t i = 0; i < a.size(); ++i) {
      EXPECT_EQ(put[i], inserted(a[i], into, position[i], length[i]))
          << a[i] << " " << position[i] << " " << length[i];
    }
  }
}
TEST(Fields, OfBothWidthsWithAndWithoutSigns) {
  check_fields<std::int32_t>();
  check_fields<u32>();
  check_fields<std::int64_t>();
  check_fields<u64>();
}

template <typename T>
void check_top() {
  const std::vector<T> a = edges<T>();
  const std::string type = name_of_type<T>();
  auto top = each_thread<u32>("bfind." + type + " %out, %in0;", a);
  auto amount = each_thread<u32>("bfind.shiftamt." + type + " %out, %in0;", a);
  for (std::size_t i = 0; i < a.size(); ++i) {
    int want = 8 * sizeof(T) - 1;
    const T sign = a[i] < T{0} ? T{1} : T{0};
    while (want >= 0 && static_cast<T>(a[i] >> want & 1) == sign) --want;
    EXPECT_EQ(top[i], static_cast<u32>(want)) << type << " " << a[i];
    const int shift = static_cast<int>(8 * sizeof(T)) - 1 - want;
    EXPECT_EQ(amount[i], want < 0 ? ~0U : static_cast<u32>(shift)) << type << " " << a[i];
  }
}
TEST(Counts, TheHighestBitThatIsNotTheSign) {
  check_top<std::int32_t>();
  check_top<u32>();
  check_top<std::int64_t>();
  check_top<u64>();
}

TEST(Counts, OfSixtyFourBits) {
  const std::vector<u64> a = edges<u64>();
  auto leading = each_thread<u32>("clz.b64 %out, %in0;", a);
  auto ones = each_thread<u32>("popc.b64 %out, %in0;", a);
  auto reversed = each_thread<u64>("brev.b64 %out, %in0;", a);
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(leading[i], static_cast<u32>(std::countl_zero(a[i])));
    EXPECT_EQ(ones[i], static_cast<u32>(std::popcount(a[i])));
    u64 mirror = 0;
    for (int bit = 0; bit < 64; ++bit) mirror |= (a[i] >> bit & 1U) << (63 - bit);
    EXPECT_EQ(reversed[i], mirror);
  }
}

TEST(Permutations, TheManualsTable) {
  // Which bytes the lower two bits of the control choose, the highest first.
  const std::pair<std::string, std::array<u32, 4>> rows[] = {
      {"f4e", {0x3210, 0x4321, 0x5432, 0x6543}}, {"b4e", {0x5670, 0x6701, 0x7012, 0x0123}},
      {"rc8", {0x0000, 0x1111, 0x2222, 0x3333}}, {"ecl", {0x3210, 0x3211, 0x3222, 0x3333}},
      {"ecr", {0x0000, 0x1110, 0x2210, 0x3210}}, {"rc16", {0x1010, 0x3232, 0x1010, 0x3232}}};
  const u32 bytes[] = {0x80, 0x11, 0x92, 0x23, 0xA4, 0x35, 0xB6, 0x47};
  std::vector<u32> a{0x23921180}, b{0x47B635A4};
  auto chosen = [&](u32 control) {
    u32 want = 0;
    for (u32 i = 0; i < 4; ++i) {
      const u32 nibble = control >> (4 * i) & 15, byte = bytes[nibble & 7];
      want |= ((nibble & 8) == 0 ? byte : (byte & 128) != 0 ? 255U : 0U) << (8 * i);
    }
    return want;
  };
  for (const auto& [mode, choices] : rows) {
    for (u32 control = 0; control < 8; ++control) {
      auto got = each_thread<u32>(
          "prmt.b32." + mode + " %out, %in0, %in1, " + std::to_string(control) + ";", a, b)[0];
      EXPECT_EQ(got, chosen(choices[control % 4])) << mode << " " << control;
    }
  }
  std::vector<u32> x(1000, a[0]), y(1000, b[0]), control;
  for (u32 i = 0; i < 1000; ++i) control.push_back(i * 2654435761U);
  auto got = each_thread<u32>("prmt.b32 %out, %in0, %in1, %in2;", x, y, control);
  for (std::size_t i = 0; i < got.size(); ++i) EXPECT_EQ(got[i], chosen(control[i]));
}

TEST(Dots, OfFourAndOfTwo) {
  auto [a, b] = pairs_of(std::vector<u32>{0, 0x01020304, 0x80FF7F01, 0xFFFFFFFF, 0x7FFF8000});
  auto part = [](u32 word, u32 shift, u32 bits, bool sign) {
    const auto value = static_cast<std::int64_t>(word >> shift & ((1U << bits) - 1));
    return sign && (value >> (bits - 1)) != 0 ? value - (std::int64_t{1} << bits) : value;
  };
  for (bool a_sign : {false, true}) {
    for (bool b_sign : {false, true}) {
      const std::string types = std::string(a_sign ? ".s32" : ".u32") + (b_sign ? ".s32" : ".u32");
      auto four = each_thread<u32>("dp4a" + types + " %out, %in0, %in1, -5;", a, b);
      auto low = each_thread<u32>("dp2a.lo" + types + " %out, %in0, %in1, 9;", a, b);
      auto high = each_thread<u32>("dp2a.hi" + types + " %out, %in0, %in1, 9;", a, b);
      for (std::size_t i = 0; i < a.size(); ++i) {
        std::int64_t sum = -5, lower = 9, upper = 9;
        for (u32 j = 0; j < 4; ++j)
          sum += part(a[i], 8 * j, 8, a_sign) * part(b[i], 8 * j, 8, b_sign);
        for (u32 j = 0; j < 2; ++j) {
          lower += part(a[i], 16 * j, 16, a_sign) * part(b[i], 8 * j, 8, b_sign);
          upper += part(a[i], 16 * j, 16, a_sign) * part(b[i], 8 * j + 16, 8, b_sign);
        }
        EXPECT_EQ(four[i], static_cast<u32>(sum)) << types;
        EXPECT_EQ(low[i], static_cast<u32>(lower)) << types;
        EXPECT_EQ(high[i], static_cast<u32>(upper)) << types;
      }
    }
  }
}

TEST(Carries, SumsAndDifferencesOfAHundredAndTwentyEightBits) {
  auto [a, b] = pairs_of(edges<u64>());
  using Wide = unsigned __int128;
  for (bool upper : {false, true}) {
    const std::string to = upper ? "mov.b64 %out, %l1;" : "mov.b64 %out, %l0;";
    auto sum = each_thread<u64>(
        "add.cc.u64 %l0, %in0, %in1;\naddc.cc.u64 %l1, %in1, %in0;\naddc.u64 %l2, 0, 0;\n" + to, a,
        b);
    auto difference = each_thread<u64>(
        "sub.cc.u64 %l0, %in0, %in1;\nsubc.cc.u64 %l1, %in1, %in0;\nsubc.u64 %l2, 0, 0;\n" + to, a,
        b);
    for (std::size_t i = 0; i < a.size(); ++i) {
      const Wide x = Wide{b[i]} << 64 | a[i], y = Wide{a[i]} << 64 | b[i];
      EXPECT_EQ(sum[i], static_cast<u64>((x + y) >> (upper ? 64 : 0)));
      EXPECT_EQ(difference[i], static_cast<u64>((x - y) >> (upper ? 64 : 0)));
    }
  }
}

TEST(Carries, AProductOfTwoWordsEachFromFourOfOne) {
  auto [a, b] = pairs_of(edges<u64>());
  const std::string product =
      "mov.b64 {%r0, %r1}, %in0;\nmov.b64 {%r2, %r3}, %in1;\n"
      "mul.lo.u32 %r4, %r0, %r2;\nmul.hi.u32 %r5, %r0, %r2;\n"
      "mad.lo.cc.u32 %r5, %r1, %r2, %r5;\nmadc.hi.u32 %r6, %r1, %r2, 0;\n"
      "mad.lo.cc.u32 %r5, %r0, %r3, %r5;\nmadc.hi.cc.u32 %r6, %r0, %r3, %r6;\naddc.u32 %r7, 0, 0;\n"
      "mad.lo.cc.u32 %r6, %r1, %r3, %r6;\nmadc.hi.u32 %r7, %r1, %r3, %r7;\n";
  auto low = each_thread<u64>(product + "mov.b64 %out, {%r4, %r5};", a, b);
  auto high = each_thread<u64>(product + "mov.b64 %out, {%r6, %r7};", a, b);
  for (std::size_t i = 0; i < a.size(); ++i) {
    const unsigned __int128 want = static_cast<unsigned __int128>(a[i]) * b[i];
    EXPECT_EQ(low[i], static_cast<u64>(want));
    EXPECT_EQ(high[i], static_cast<u64>(want >> 64));
  }
}

}  // namespace
}  // namespace vgpu::ptx
