// SPDX-License-Identifier: Apache-2.0
// ld and st of all types in all memories, vectors, copies, and addresses where nothing is.
#include <numeric>

#include "kernel_test.h"

namespace vgpu::ptx {
namespace {

using u32 = std::uint32_t;
using u64 = std::uint64_t;

// A number goes to memory and back as `type`, through registers of 64 bits.
template <typename T>
void check_round_trip(const std::string& space, const std::string& type) {
  const std::vector<u64> a = edges<u64>();
  // Both of a variable of that memory, and of an address in a register of 64 and 32 bits.
  const std::string head =
      "{ ." + space +
      " .align 16 .b8 tile[512];\nmov.u64 %l0, tile;\nmad.wide.u32 %l0, %c, 8, %l0;\n"
      "st." +
      space + "." + type + " [%l0+8], %in0;\n";
  const std::string from = "ld." + space + "." + type;
  const std::string narrow = "cvt.u32.u64 %r0, %l0;\n" + from + " %out, [%r0+8]; }";
  auto wide = each_thread<u64>(head + from + " %out, [%l0+8]; }", a);
  auto by_word = each_thread<u64>(head + narrow, a);
  for (std::size_t i = 0; i < a.size(); ++i) {
    const auto want = static_cast<u64>(static_cast<std::int64_t>(static_cast<T>(a[i])));
    EXPECT_EQ(wide[i], want) << from;
    EXPECT_EQ(by_word[i], want) << from;
  }
}
TEST(Accesses, NumbersAreCutAndExtended) {
  for (const std::string space : {"shared", "local"}) {
    check_round_trip<std::uint8_t>(space, "u8");
    check_round_trip<std::int8_t>(space, "s8");
    check_round_trip<std::uint8_t>(space, "b8");
    check_round_trip<std::uint16_t>(space, "u16");
    check_round_trip<std::int16_t>(space, "s16");
    check_round_trip<std::uint16_t>(space, "b16");
    check_round_trip<u32>(space, "u32");
    check_round_trip<std::int32_t>(space, "s32");
    check_round_trip<u32>(space, "b32");
    check_round_trip<u64>(space, "u64");
    check_round_trip<std::int64_t>(space, "s64");
    check_round_trip<u64>(space, "b64");
  }
}
TEST(Accesses, SmallStoresLeaveTheirNeighbours) {
  auto out =
      result(kernel("st.global.u32 [%out], 0x11223344; st.global.u8 [%out+1], 0xFFAA;\n"
                    "ld.global.s8 %r0, [%out+1]; shr.u32 %r0, %r0, 8;\n"
                    "st.global.u8 [%out+3], %r0;"));
  for (u32 each : out) EXPECT_EQ(each, 0xFF22AA44U);
}

TEST(Accesses, AllTheirHints) {
  for (const std::string load :
       {"ld.global.nc", "ld.volatile.global", "ld.relaxed.gpu.global", "ld.acquire.sys.global",
        "ld.global.ca", "ld.global.cg.L2::128B", "ld.global.nc.L1::no_allocate.L2::256B",
        "ldu.global", "ld.weak.global.lu", "ld.global.cv", "ld", "ldu"}) {
    for (const std::string store :
         {"st.global", "st.volatile.global", "st.relaxed.cta.global", "st.release.gpu.global",
          "st.global.wb", "st.global.wt", "st.global.cs.L1::evict_last", "st"}) {
      auto out = result(kernel(store + ".u32 [%out], %t;\n" + load + ".u32 %r0, [%out];\n" +
                               "mad.lo.u32 %r0, %r0, 3, 1;\n" + store + ".u32 [%out], %r0;"));
      for (u32 i = 0; i < 32; ++i) EXPECT_EQ(out[i], 3 * i + 1) << load << " " << store;
    }
  }
}

TEST(Accesses, Vectors) {
  const std::string text =
      "{ .shared .align 16 .b8 tile[1024];\nmov.u32 %r9, tile;\nmad.lo.u32 %r9, %c, 32, %r9;\n"
      "mov.b64 {%r0, %r1}, %in0;\nst.shared.v4.b32 [%r9], {%r0, %r1, %r1, %r0};\n"
      "st.shared.v2.u64 [%r9+16], {%in0, 7};\nst.shared.v2.u8 [%r9+24], {1, 2};\n";
  const std::vector<u64> a = edges<u64>();
  auto first = each_thread<u64>(text + "ld.shared.v2.u64 {%l0, %out}, [%r9]; }", a);
  auto second = each_thread<u64>(text +
                                     "ld.shared.v4.u16 {%h0, %h1, %h2, %h3}, [%r9+16];\n"
                                     "mov.b64 %out, {%h3, %h2, %h1, %h0}; }",
                                 a);
  auto third = each_thread<u64>(text +
                                    "ld.shared.v4.u8 {%h0, %h1, %h2, _}, [%r9+24];\n"
                                    "mov.b64 %out, {%h0, %h1, %h2, %h2}; }",
                                a);
  auto fourth = each_thread<u64>(text +
                                     "ld.shared.v4.s8 {%h0, %h1, %h2, %h3}, [%r9];\n"
                                     "cvt.s64.s16 %out, %h3; }",
                                 a);
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(first[i], a[i] << 32 | a[i] >> 32);
    EXPECT_EQ(second[i],
              a[i] << 48 | (a[i] >> 16 & 0xFFFF) << 32 | (a[i] >> 32 & 0xFFFF) << 16 | a[i] >> 48);
    EXPECT_EQ(third[i], 0x20001U);
    EXPECT_EQ(fourth[i], static_cast<u64>(static_cast<std::int8_t>(a[i] >> 24)));
  }
  HostMemory memory;
  for (const char* wrong : {"ld.global.v2.u32 %r0, [%in];", "ld.global.u32 {%r0, %r1}, [%in];",
                            "st.global.v4.u32 [%in], {%r0, %r1};", "ld.global.u64 %r0, [%in];",
                            "st.global.u64 [%in], %r0;", "ld.global.v3.u32 {%r0, %r1, %r2}, [%in];",
                            "ld.global.u32 %r0, %in;", "ld.nowhere.u32 %r0, [%in];"}) {
    EXPECT_THROW(run_kernel(memory, kernel(wrong), {0, 0}), Error) << wrong;
  }
}
TEST(Accesses, AHundredAndTwentyEightBits) {
  auto out =
      result(kernel("{ .reg .b128 %q; mov.b128 %q, {%out, 9}; st.shared.b128 [tile+16], %q;\n"
                    "ld.shared.v2.u64 {%l0, %l1}, [tile+16]; ld.shared.b128 %q, [tile+16];\n"
                    "mov.b128 {%l2, %l3}, %q; } setp.eq.u64 %p0, %l0, %l2;\n"
                    "setp.eq.and.u64 %p0, %l1, %l3, %p0; cvt.u32.u64 %r0, %l1;\n"
                    "@!%p0 mov.u32 %r0, 0; st.global.u32 [%out], %r0;",
                    ".shared .align 16 .b8 tile[32];\n"));
  for (u32 each : out) EXPECT_EQ(each, 9U);
}

TEST(Accesses, VariablesOfTheModuleKeepWhatLaunchesWrite) {
  HostMemory memory;
  auto module = load(module_text(".global .align 8 .u32 counter[3] = {5, 6};\n"
                                 ".global .align 8 .u64 pointer = generic(counter)+4;\n"
                                 ".visible .entry kernel(.param .u64 p0) {\n.reg .b32 %r<3>;\n"
                                 ".reg .b64 %l<3>; ld.global.u64 %l0, [pointer];\n"
                                 "ld.global.u32 %r0, [%l0]; add.u32 %r0, %r0, 1;\n"
                                 "st.global.u32 [counter+4], %r0; ld.param.u64 %l1, [p0];\n"
                                 "ld.global.u32 %r1, [counter+8]; add.u32 %r0, %r0, %r1;\n"
                                 "st.global.u32 [%l1], %r0; ret; }"),
                     memory);
  std::uint64_t out = memory.put(std::vector<u32>{0});
  const std::vector<u64> parameters{out};
  for (u32 i = 0; i < 3; ++i) {
    Outcome outcome = module->function("kernel")->run(
        {{}, {}, {}, 0, false, std::as_bytes(std::span(parameters))});
    EXPECT_EQ(outcome.message, "");
    EXPECT_EQ(memory.get<u32>(out)[0], 7 + i);
  }
  EXPECT_EQ(module->global("counter")->bytes, 12U);
}

TEST(Parameters, OfAllSizesLieWhereTheyShould) {
  HostMemory memory;
  std::uint64_t out = memory.put(std::vector<u32>{0});
  auto module = load(
      module_text(".visible .entry kernel(.param .u8 a, .param .u16 b, .param .u32 c,\n"
                  ".param .align 16 .b8 d[20], .param .u64 .ptr .global .align 4 e) {\n"
                  ".reg .b16 %h<2>; .reg .b32 %r<9>; .reg .b64 %l;\n"
                  "ld.param.u8 %h0, [a]; ld.param.u16 %h1, [b]; ld.param.u32 %r0, [c];\n"
                  "ld.param.u32 %r1, [d+16]; ld.param.v2.u32 {%r2, %r3}, [d+8];\n"
                  "ld.param.u64 %l, [e]; cvt.u32.u16 %r4, %h0; cvt.u32.u16 %r5, %h1;\n"
                  "add.u32 %r0, %r0, %r1; add.u32 %r0, %r0, %r2; add.u32 %r0, %r0, %r3;\n"
                  "add.u32 %r0, %r0, %r4; add.u32 %r0, %r0, %r5; st.global.u32 [%l], %r0; ret; }"),
      memory);
  Function* function = module->function("kernel");
  const std::size_t offsets[] = {0, 2, 4, 16, 40}, sizes[] = {1, 2, 4, 20, 8};
  ASSERT_EQ(function->parameters().size(), 5U);
  for (std::size_t i = 0; i < 5; ++i) {
    EXPECT_EQ(function->parameters()[i].offset, offsets[i]);
    EXPECT_EQ(function->parameters()[i].size, sizes[i]);
  }
  std::vector<std::byte> bytes(function->parameter_bytes());
  auto put = [&](std::size_t at, auto value) { std::memcpy(&bytes[at], &value, sizeof(value)); };
  put(0, std::uint8_t{200});
  put(2, std::uint16_t{1000});
  put(4, u32{20000});
  put(24, u32{300000});
  put(28, u32{4000000});
  put(32, u32{50000000});
  put(40, out);
  EXPECT_EQ(function->run({{}, {}, {}, 0, false, bytes}).message, "");
  EXPECT_EQ(memory.get<u32>(out)[0], 54321200U);
}

TEST(Copies, OfEverySizeFillWithZeros) {
  std::vector<u32> in(16);
  for (u32 i = 0; i < 16; ++i) in[i] = 0x01010101U * (i + 1);
  for (u32 bytes : {4U, 8U, 16U}) {
    for (u32 size = 0; size <= bytes + 1; ++size) {
      const std::string n = std::to_string(bytes);
      Ran ran = run(
          kernel("mov.u32 %r0, tile; mov.u32 %r1, " + std::to_string(size) +
                     "; st.shared.v4.u32 [%r0+16], {-1, -1, -1, -1};\n"
                     "setp.eq.u32 %p0, %t, 0; @%p0 cp.async.ca.shared.global.L2::128B [%r0+16], "
                     "[%in+16], " +
                     n +
                     ", %r1;\n"
                     "cp.async.commit_group; cp.async.wait_all; bar.sync 0;\n"
                     "mad.lo.u32 %r0, %t, 4, %r0; ld.shared.u32 %r2, [%r0+16];\n"
                     "st.global.u32 [%out], %r2;",
                 ".shared .align 16 .b8 tile[32];\n"),
          {4, 1, 1}, {1, 1, 1}, 0, {1, 1, 1}, false, in);
      ASSERT_EQ(ran.outcome.message, "");
      for (u32 i = 0; i < 16; ++i) {
        const u32 byte = ran.out[i / 4] >> (8 * (i % 4)) & 255;
        EXPECT_EQ(byte, i >= bytes ? 255U : i < size ? 5 + i / 4 : 0U) << bytes << " " << size;
      }
    }
  }
}
TEST(Copies, GoBackwardsFromABaseToo) {
  Ran ran = run(kernel("mov.u32 %r0, tile; add.u32 %r0, %r0, 32; add.u64 %l0, %in, 32;\n"
                       "cp.async.cg.shared::cta.global [%r0+-16], [%l0+-16], 16;\n"
                       "cp.async.wait_group 0; ld.shared.u32 %r1, [tile+16];\n"
                       "st.global.u32 [%out], %r1;",
                       ".shared .align 16 .b8 tile[32];\n"),
                {32, 1, 1}, {1, 1, 1}, 0, {1, 1, 1}, false, {0, 1, 2, 3, 4, 5, 6, 7});
  EXPECT_EQ(ran.outcome.message, "");
  EXPECT_EQ(ran.out[0], 4U);
}

TEST(Bounds, EveryMemoryHasItsEnds) {
  const std::string variables = ".shared .align 16 .b8 tile[64]; .local .align 16 .b8 own[64];\n";
  auto illegal = [&](const std::string& text, const std::string& said) {
    expect_fault(kernel(text, variables), Result::kIllegalAddress, said);
  };
  illegal("ld.global.u32 %r0, [%in+16];", "no allocation is");
  illegal("ld.global.u8 %r0, [%in+-1];", "global memory");
  illegal("ld.global.v4.u32 {%r0, %r1, %r2, %r3}, [%in+16];", "16 bytes at");
  illegal("st.shared.u32 [tile+64], 1;", "of shared memory, which has 64");
  illegal("ld.shared.v4.u32 {%r0, %r1, %r2, %r3}, [tile+64];", "16 bytes at 0x40");
  illegal("ld.shared.u32 %r0, [tile+-4];", "of shared memory");
  illegal("mov.u32 %r0, tile; ld.shared.u32 %r0, [%r0+-8];", "of shared memory");
  illegal("mov.u64 %l0, own; st.local.u32 [%l0+1048576], 1;", "of local memory");
  illegal("mov.u64 %l0, own; cvta.local.u64 %l0, %l0; ld.u32 %r0, [%l0+1048576];", "local memory");
  illegal("mov.u64 %l0, tile; cvta.shared.u64 %l0, %l0; ld.u32 %r0, [%l0+64];", "shared memory");
  illegal("ld.param.u32 %r0, [p1+8];", "of parameter memory");
  illegal("ld.u32 %r0, [16];", "no allocation is");
  illegal("mov.u64 %l0, 0xFF00000000000000; ld.u32 %r0, [%l0];", "of no memory");
  illegal("mov.u64 %l0, -4; ld.global.u32 %r0, [%l0];", "global memory");
  illegal("cp.async.ca.shared.global [tile+64], [%in], 4;", "shared memory");
  illegal("cp.async.ca.shared.global [tile], [%in+16], 4;", "global memory");
  illegal("mov.u32 %r0, 2; cp.async.ca.shared.global [tile], [%in+16], 4, %r0;", "global memory");
}
TEST(Bounds, EveryAccessHasItsAlignment) {
  auto crooked = [&](const std::string& text, const std::string& bytes) {
    expect_fault(kernel(text, ".shared .align 16 .b8 tile[64]; .local .align 16 .b8 own[64];\n"),
                 Result::kMisalignedAddress, "is not aligned to " + bytes + " bytes");
  };
  crooked("ld.global.u16 %r0, [%in+1];", "2");
  crooked("st.shared.u32 [tile+2], 1;", "4");
  crooked("ld.shared.u64 %l0, [tile+4];", "8");
  crooked("st.local.u32 [own+1], 1;", "4");
  crooked("ld.global.v2.u32 {%r0, %r1}, [%in+4];", "8");
  crooked("ld.shared.v4.u32 {%r0, %r1, %r2, %r3}, [tile+8];", "16");
  crooked("cp.async.ca.shared.global [tile+4], [%in], 8;", "8");
  crooked("cp.async.ca.shared.global [tile], [%in+4], 8;", "8");
}
TEST(Bounds, WhatTheGuardLeavesOutIsNotTouched) {
  auto out =
      result(kernel("setp.lt.u32 %p0, %t, 4; mov.u32 %r0, 9; mad.wide.u32 %l0, %t, 4, %in;\n"
                    "@%p0 ld.global.u32 %r0, [%l0]; st.global.u32 [%out], %r0;"));
  for (u32 i = 0; i < 32; ++i) EXPECT_EQ(out[i], i < 4 ? 0U : 9U);
}

}  // namespace
}  // namespace vgpu::ptx
