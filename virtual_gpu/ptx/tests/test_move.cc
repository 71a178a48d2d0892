// SPDX-License-Identifier: Apache-2.0
// mov, special registers, and addresses as numbers.
#include <set>

#include "kernel_test.h"

namespace vgpu::ptx {
namespace {

using u32 = std::uint32_t;
using u64 = std::uint64_t;

TEST(Moves, PartsOfNumbersAndBack) {
  const std::vector<u64> a = edges<u64>();
  auto words = each_thread<u64>("mov.b64 {%r0, %r1}, %in0;\nmov.b64 %out, {%r1, %r0};", a);
  auto halves = each_thread<u64>(
      "mov.b64 {%h0, %h1, %h2, %h3}, %in0;\nmov.b64 %out, {%h3, %h2, %h1, %h0};", a);
  auto one = each_thread<u64>(
      "mov.b64 {_, %r0}, %in0;\nmov.b32 {%h0, _}, %r0;\n"
      "mov.b32 %r1, {%h0, %h0};\nmov.b64 %out, {%r1, 7};",
      a);
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(words[i], a[i] << 32 | a[i] >> 32);
    EXPECT_EQ(halves[i], (a[i] & 0xFFFF) << 48 | (a[i] >> 16 & 0xFFFF) << 32 |
                             (a[i] >> 32 & 0xFFFF) << 16 | a[i] >> 48);
    EXPECT_EQ(one[i], u64{7} << 32 | (a[i] >> 32 & 0xFFFF) * 0x10001);
  }
}
TEST(Moves, ARegisterIntoItsOwnParts) {
  std::vector<u64> a{0x1122334455667788};
  auto swapped = each_thread<u64>(
      "mov.b64 {%r0, %r1}, %in0;\nmov.b64 %l0, {%r0, %r1};\nmov.b64 {%r1, %r0}, %l0;\n"
      "mov.b64 %out, {%r0, %r1};",
      a);
  EXPECT_EQ(swapped[0], 0x5566778811223344U);
}
TEST(Moves, AHundredAndTwentyEightBits) {
  const std::vector<u64> a = edges<u64>();
  auto got = each_thread<u64>(
      "{ .reg .b128 %q<2>;\nmov.b128 %q0, {%in0, 5};\nmov.b128 %q1, %q0;\n"
      "mov.b128 {%l0, %l1}, %q1;\nadd.u64 %out, %l0, %l1; }",
      a);
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_EQ(got[i], a[i] + 5);
}
TEST(Moves, ConstantsAreWrittenInManyWays) {
  std::vector<u32> a{0};
  auto word = [&](const std::string& text) {
    return each_thread<u32>("mov.b32 %out, " + text + ";", a)[0];
  };
  EXPECT_EQ(word("-1"), 0xFFFFFFFFU);
  EXPECT_EQ(word("0xFFu"), 255U);
  EXPECT_EQ(word("017"), 15U);
  EXPECT_EQ(word("0b101"), 5U);
  EXPECT_EQ(word("2+3*4"), 14U);
  EXPECT_EQ(word("7-3*(1+1)<<2+1"), 8U);
  EXPECT_EQ(each_thread<u32>("mov.f32 %out, 0f40490FDB;", a)[0], 0x40490FDBU);
  EXPECT_EQ(each_thread<u32>("mov.f32 %out, 1.5;", a)[0], 0x3FC00000U);
  EXPECT_EQ(each_thread<u64>("mov.f64 %out, 0d3FF8000000000000;", a)[0], 0x3FF8000000000000U);
  EXPECT_EQ(each_thread<u64>("mov.f64 %out, -2.0;", a)[0], 0xC000000000000000U);
  EXPECT_THROW(each_thread<u64>("mov.b64 %out, %r0;", a), Error);  // too small
  EXPECT_THROW(each_thread<u32>("mov.b32 %out, %p0;", a), Error);
}

struct Place {
  u32 thread, block;
};
// In a grid of 2 x 3 x 2 blocks of 5 x 4 x 3 threads, and clusters of 2 x 1 x 2.
u32 register_of(const std::string& name, Place at) {
  const u32 t[] = {at.thread % 5, at.thread / 5 % 4, at.thread / 20};
  const u32 b[] = {at.block % 2, at.block / 2 % 3, at.block / 6};
  const u32 lane = at.thread % 32;
  const std::map<std::string, u32> values{{"%tid.x", t[0]},
                                          {"%tid.y", t[1]},
                                          {"%tid.z", t[2]},
                                          {"%ntid.x", 5},
                                          {"%ntid.y", 4},
                                          {"%ntid.z", 3},
                                          {"%ctaid.x", b[0]},
                                          {"%ctaid.y", b[1]},
                                          {"%ctaid.z", b[2]},
                                          {"%nctaid.x", 2},
                                          {"%nctaid.y", 3},
                                          {"%nctaid.z", 2},
                                          {"%laneid", lane},
                                          {"%warpid", at.thread / 32},
                                          {"%nwarpid", 2},
                                          {"%lanemask_eq", 1U << lane},
                                          {"%lanemask_lt", (1U << lane) - 1},
                                          {"%lanemask_le", (2U << lane) - 1},
                                          {"%lanemask_ge", ~((1U << lane) - 1)},
                                          {"%lanemask_gt", ~((2U << lane) - 1)},
                                          {"%clusterid.x", 0},
                                          {"%clusterid.y", b[1]},
                                          {"%clusterid.z", 0},
                                          {"%nclusterid.x", 1},
                                          {"%nclusterid.y", 3},
                                          {"%nclusterid.z", 1},
                                          {"%cluster_ctaid.x", b[0]},
                                          {"%cluster_ctaid.y", 0},
                                          {"%cluster_ctaid.z", b[2]},
                                          {"%cluster_nctaid.x", 2},
                                          {"%cluster_nctaid.y", 1},
                                          {"%cluster_nctaid.z", 2},
                                          {"%cluster_ctarank", b[0] + 2 * b[2]},
                                          {"%cluster_nctarank", 4},
                                          {"%dynamic_smem_size", 64},
                                          {"%total_smem_size", 80},
                                          {"%aggr_smem_size", 80}};
  return values.at(name);
}
TEST(SpecialRegisters, SayWhereAThreadIs) {
  for (const char* name : {"%tid.x",
                           "%tid.y",
                           "%tid.z",
                           "%ntid.x",
                           "%ntid.y",
                           "%ntid.z",
                           "%ctaid.x",
                           "%ctaid.y",
                           "%ctaid.z",
                           "%nctaid.x",
                           "%nctaid.y",
                           "%nctaid.z",
                           "%laneid",
                           "%warpid",
                           "%nwarpid",
                           "%lanemask_eq",
                           "%lanemask_lt",
                           "%lanemask_le",
                           "%lanemask_ge",
                           "%lanemask_gt",
                           "%clusterid.x",
                           "%clusterid.y",
                           "%clusterid.z",
                           "%nclusterid.x",
                           "%nclusterid.y",
                           "%nclusterid.z",
                           "%cluster_ctaid.x",
                           "%cluster_ctaid.y",
                           "%cluster_ctaid.z",
                           "%cluster_nctaid.x",
                           "%cluster_nctaid.y",
                           "%cluster_nctaid.z",
                           "%cluster_ctarank",
                           "%cluster_nctarank",
                           "%dynamic_smem_size",
                           "%total_smem_size",
                           "%aggr_smem_size"}) {
    Ran ran =
        run(".extern .shared .align 16 .b8 more[];\n"
            ".visible .entry kernel(.param .u64 p0, .param .u64 p1) {\n"
            ".shared .align 16 .b8 tile[16]; \n"
            ".reg .b32 %r<9>; .reg .b64 %l<3>; st.shared.u32 [tile], 1;\n"
            "mov.u32 %r0, %ctaid.z; mad.lo.u32 %r0, %r0, 3, %ctaid.y;\n"
            "mad.lo.u32 %r0, %r0, 2, %ctaid.x; mad.lo.u32 %r0, %r0, 3, %tid.z;\n"
            "mad.lo.u32 %r0, %r0, 4, %tid.y; mad.lo.u32 %r0, %r0, 5, %tid.x;\n"
            "ld.param.u64 %l0, [p0]; mad.wide.u32 %l0, %r0, 4, %l0; mov.u32 %r2, more;\n"
            "mov.u32 %r1, " +
                std::string(name) + "; st.global.u32 [%l0], %r1; ret; }",
            {5, 4, 3}, {2, 3, 2}, 64, {2, 1, 2});
    ASSERT_EQ(ran.outcome.message, "") << name;
    for (u32 i = 0; i < ran.out.size(); ++i) {
      EXPECT_EQ(ran.out[i], register_of(name, {i % 60, i / 60})) << name << " of " << i;
    }
  }
}
TEST(SpecialRegisters, OfTheDeviceAndTheTime) {
  auto out = result(
      kernel("mov.u64 %l0, %clock64; mov.u32 %r0, %clock; mov.u64 %l1, %globaltimer;\n"
             "mov.u32 %r1, %globaltimer_lo; mov.u32 %r2, %globaltimer_hi; mov.u32 %r3, %clock_hi;\n"
             "mov.u64 %l2, %clock64; setp.le.u64 %p0, %l0, %l2; selp.u32 %r4, 1, 0, %p0;\n"
             "mov.u32 %r5, %smid; mov.u32 %r6, %nsmid; setp.lt.u32 %p1, %r5, %r6;\n"
             "selp.u32 %r5, 2, 0, %p1; mov.u64 %l3, %gridid; setp.ne.u64 %p2, %l1, 0;\n"
             "selp.u32 %r6, 4, 0, %p2; or.b32 %r4, %r4, %r5; or.b32 %r4, %r4, %r6;\n"
             "st.global.u32 [%out], %r4;"));
  for (u32 each : out) EXPECT_EQ(each, 7U);
}

TEST(Addresses, OfEveryMemoryAreGenericAndBack) {
  // Each memory's generic address knows where it belongs, and reads the same.
  const std::string spaces[] = {"global", "shared", "local", "const"};
  for (const std::string& space : spaces) {
    std::string body = "mov.u64 %l0, variable_" + space + ";\ncvta." + space +
                       ".u64 %l1, %l0; cvta.to." + space +
                       ".u64 %l2, %l1;\n"
                       "ld." +
                       space + ".u32 %r1, [%l2]; ld.u32 %r2, [%l1]; add.u32 %r0, %r1, %r2;\n";
    if (space != "const") body = "st." + space + ".u32 [variable_" + space + "], 21;\n" + body;
    u32 bit = 100;
    for (const std::string& other : {spaces[0], spaces[1], spaces[2]}) {
      body +=
          "isspacep." + other + " %p0, %l1; @%p0 add.u32 %r0, %r0, " + std::to_string(bit) + ";\n";
      bit *= 10;
    }
    auto out = result(
        ".global .align 4 .u32 variable_global;\n"
        ".const .align 4 .u32 variable_const = 21;\n" +
        kernel(body + "st.global.u32 [%out], %r0;",
               ".shared .align 4 .u32 variable_shared;\n"
               ".local .align 4 .u32 variable_local;\n"));
    const u32 flag = space == "shared" ? 1000 : space == "local" ? 10000 : 100;
    for (u32 each : out) EXPECT_EQ(each, 42 + flag) << space;
  }
}
TEST(Addresses, OfParameters) {
  auto out =
      result(kernel("mov.u64 %l0, p1; cvta.param.u64 %l1, %l0; ld.u64 %l2, [%l1];\n"
                    "isspacep.param %p0, %l1; setp.eq.and.u64 %p1, %l2, %in, %p0;\n"
                    "selp.u32 %r0, 1, 0, %p1; st.global.u32 [%out], %r0;"));
  for (u32 each : out) EXPECT_EQ(each, 1U);
  HostMemory memory;
  EXPECT_THROW(run_kernel(memory, kernel("cvta.global.u32 %r0, %r1;"), {0, 0}), Error);
  EXPECT_THROW(run_kernel(memory, kernel("cvta.u64 %l0, %l1;"), {0, 0}), Error);
}

}  // namespace
}  // namespace vgpu::ptx
