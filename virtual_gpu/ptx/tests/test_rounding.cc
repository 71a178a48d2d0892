// SPDX-License-Identifier: Apache-2.0
// Arithmetic of f32 and f64 in each rounding mode against the host's, and pairs of 16 bits.
#include <cfenv>
#include <cmath>

#include "kernel_test.h"

namespace vgpu::ptx {
namespace {

template <typename F>
void check_modes(const std::string& type) {
  using L = std::numeric_limits<F>;
  auto [a, b] =
      pairs_of(std::vector<F>{F(0), F(-0.0), F(1), F(-3), F(0.1), F(1) + L::epsilon(), L::max(),
                              -L::min(), L::denorm_min(), L::infinity(), L::quiet_NaN()});
  for (auto [mode, host] : {std::pair{"rn", FE_TONEAREST},
                            {"rz", FE_TOWARDZERO},
                            {"rm", FE_DOWNWARD},
                            {"rp", FE_UPWARD}}) {
    const std::string tail = "." + std::string(mode) + "." + type + " %out, %in0, %in1";
    auto check = [&, host = host](const std::string& opcode, const std::string& third, auto want) {
      auto got = each_thread<F>(opcode + tail + third + ";", a, b);
      for (std::size_t i = 0; i < a.size(); ++i) {
        std::fesetround(host);
        volatile F x = a[i], y = b[i];
        volatile F exact = want(x, y);
        std::fesetround(FE_TONEAREST);
        EXPECT_TRUE((std::isnan(got[i]) && std::isnan(exact)) ||
                    (got[i] == exact && std::signbit(got[i]) == std::signbit(exact)))
            << opcode << tail << " of " << a[i] << ", " << b[i] << ": " << got[i];
      }
    };
    check("add", "", [](F x, F y) { return x + y; });
    check("sub", "", [](F x, F y) { return x - y; });
    check("mul", "", [](F x, F y) { return x * y; });
    check("div", "", [](F x, F y) { return x / y; });
    check("fma", ", %in1", [](F x, F y) { return std::fma(x, y, y); });
  }
}
TEST(RoundingModes, AreTheHosts) {
  check_modes<float>("f32");
  check_modes<double>("f64");
}

TEST(Pairs, OfSixteenBits) {
  auto [a, b] = pairs_of(std::vector<std::uint32_t>{0, 0x00017FFF, 0x80008000, 0xFFFF0001});
  auto each_half = [](std::uint32_t x, std::uint32_t y, auto want) {
    auto half = [&](int shift) {
      return std::uint32_t{static_cast<std::uint16_t>(
          want(static_cast<std::uint16_t>(x >> shift), static_cast<std::uint16_t>(y >> shift)))};
    };
    return half(0) | half(16) << 16;
  };
  auto sum = each_thread<std::uint32_t>("add.u16x2 %out, %in0, %in1;", a, b);
  auto least = each_thread<std::uint32_t>("min.s16x2 %out, %in0, %in1;", a, b);
  auto most = each_thread<std::uint32_t>("max.u16x2 %out, %in0, %in1;", a, b);
  auto relu = each_thread<std::uint32_t>("max.relu.s16x2 %out, %in0, %in1;", a, b);
  for (std::size_t i = 0; i < a.size(); ++i) {
    using s16 = std::int16_t;
    EXPECT_EQ(sum[i], each_half(a[i], b[i], [](int x, int y) { return x + y; }));
    EXPECT_EQ(least[i], each_half(a[i], b[i], [](int x, int y) {
                return std::min(static_cast<s16>(x), static_cast<s16>(y));
              }));
    EXPECT_EQ(most[i], each_half(a[i], b[i], [](int x, int y) { return std::max(x, y); }));
    EXPECT_EQ(relu[i], each_half(a[i], b[i], [](int x, int y) {
                return std::max<int>({0, static_cast<s16>(x), static_cast<s16>(y)});
              }));
  }
}

}  // namespace
}  // namespace vgpu::ptx
