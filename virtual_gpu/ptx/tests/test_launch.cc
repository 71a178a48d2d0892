// SPDX-License-Identifier: Apache-2.0
// Launches: grids, branches, calls, memory, barriers, lanes together, and what goes wrong.
#include <bit>
#include <cstdlib>

#include "kernel_test.h"

namespace vgpu::ptx {
namespace {

TEST(Launch, EachThreadRunsOnce) {
  auto out = result(kernel("st.global.u32 [%out], %g;"), {100, 1, 1}, {37, 1, 1});
  for (std::uint32_t i = 0; i < out.size(); ++i) EXPECT_EQ(out[i], i);
}

TEST(Launch, ThreeDimensionsAreCounted) {
  auto out = result(
      ".visible .entry kernel(.param .u64 p0, .param .u64 p1) {\n.reg .b32 %r<20>; .reg .b64 "
      "%l<4>;\n"
      "mov.u32 %r0, %tid.x; mov.u32 %r1, %tid.y; mov.u32 %r2, %tid.z;\n"
      "mov.u32 %r3, %ctaid.x; mov.u32 %r4, %ctaid.y; mov.u32 %r5, %ctaid.z;\n"
      "mad.lo.u32 %r6, %r2, 3, %r1; mad.lo.u32 %r6, %r6, 5, %r0;\n"  // block 5 x 3 x 2
      "mad.lo.u32 %r7, %r5, 4, %r4; mad.lo.u32 %r7, %r7, 3, %r3;\n"  // grid 3 x 4 x 2
      "mad.lo.u32 %r8, %r7, 30, %r6; ld.param.u64 %l0, [p0]; mad.wide.u32 %l0, %r8, 4, %l0;\n"
      "st.global.u32 [%l0], %r8; ret; }",
      {5, 3, 2}, {3, 4, 2});
  for (std::uint32_t i = 0; i < out.size(); ++i) EXPECT_EQ(out[i], i);
}

TEST(Branches, LanesPartAndMeetAgain) {
  // Collatz: as many steps as each number needs, then all vote together.
  auto out = result(
      kernel("add.u32 %r0, %t, 1; mov.u32 %r1, 0;\n"
             "LOOP: setp.eq.u32 %p0, %r0, 1; @%p0 bra DONE;\n"
             "and.b32 %r2, %r0, 1; setp.eq.u32 %p1, %r2, 0; @%p1 bra EVEN;\n"
             "mad.lo.u32 %r0, %r0, 3, 1; bra NEXT;\nEVEN: shr.u32 %r0, %r0, 1;\n"
             "NEXT: add.u32 %r1, %r1, 1; bra LOOP;\n"
             "DONE: activemask.b32 %r3; setp.eq.u32 %p2, %r3, 0xFFFFFFFF; @!%p2 mov.u32 %r1, 999;\n"
             "st.global.u32 [%out], %r1;"));
  for (std::uint32_t i = 0; i < 32; ++i) {
    std::uint32_t steps = 0;
    for (std::uint64_t n = i + 1; n != 1; ++steps) n = n % 2 == 0 ? n / 2 : 3 * n + 1;
    EXPECT_EQ(out[i], steps);
  }
}

TEST(Branches, TablesOfLabels) {
  auto out = result(
      kernel("rem.u32 %r0, %t, 3;\nTABLE: .branchtargets A, B, C;\nbrx.idx %r0, TABLE;\n"
             "A: mov.u32 %r1, 10; bra END;\nB: mov.u32 %r1, 20; bra END;\nC: mov.u32 %r1, 30;\n"
             "END: st.global.u32 [%out], %r1;"));
  for (std::uint32_t i = 0; i < 32; ++i) EXPECT_EQ(out[i], 10 * (i % 3 + 1));
}

TEST(Calls, FunctionsRecurAndReturn) {
  const std::string factorial =
      ".func (.param .b32 result) factorial(.param .b32 n) {\n.reg .b32 %r<5>; .reg .pred %p;\n"
      "ld.param.u32 %r0, [n]; setp.gt.u32 %p, %r0, 1; @%p bra MORE;\n"
      "st.param.b32 [result], 1; ret;\n"
      "MORE: sub.u32 %r1, %r0, 1;\n{ .param .b32 a; .param .b32 b;\nst.param.b32 [a], %r1;\n"
      "call.uni (b), factorial, (a);\nld.param.b32 %r2, [b]; }\n"
      "mul.lo.u32 %r3, %r2, %r0; st.param.b32 [result], %r3; ret; }\n";
  auto out = result(
      factorial +
      kernel("rem.u32 %r0, %t, 8;\n{ .param .b32 a; .param .b32 b; st.param.b32 [a], %r0;\n"
             "call (b), factorial, (a); ld.param.b32 %r1, [b]; }\nst.global.u32 [%out], %r1;"));
  const std::uint32_t want[] = {1, 1, 2, 6, 24, 120, 720, 5040};
  for (std::uint32_t i = 0; i < 32; ++i) EXPECT_EQ(out[i], want[i % 8]);
}

TEST(Calls, LanesMayCallDifferentFunctionsByAddress) {
  auto function = [](const std::string& name, const std::string& number) {
    return ".func (.param .b32 r) " + name + "() { st.param.b32 [r], " + number + "; ret; }\n";
  };
  auto out = result(
      function("one", "1") + function("two", "2") +
      ".global .align 8 .u64 table[2] = {one, two};\n" +
      kernel("and.b32 %r0, %t, 1; mov.u64 %l0, table; mad.wide.u32 %l0, %r0, 8, %l0;\n"
             "ld.global.u64 %l1, [%l0];\n{ .param .b32 r;\nPROTO: .callprototype (.param .b32 _) _ "
             "();\n"
             "call (r), %l1, (), PROTO; ld.param.b32 %r1, [r]; }\nst.global.u32 [%out], %r1;"));
  for (std::uint32_t i = 0; i < 32; ++i) EXPECT_EQ(out[i], i % 2 + 1);
}

TEST(Memory, SharedMemoryAndBarriersReverseABlock) {
  auto out = result(
      kernel("mov.u64 %l0, tile; mad.wide.u32 %l1, %t, 4, %l0; st.shared.u32 [%l1], %g;\n"
             "bar.sync 0;\nmov.u32 %r0, %ntid.x; sub.u32 %r0, %r0, %t; sub.u32 %r0, %r0, 1;\n"
             "mad.wide.u32 %l1, %r0, 4, %l0; ld.shared.u32 %r1, [%l1]; st.global.u32 [%out], %r1;",
             ".shared .align 4 .b8 tile[1024];\n"),
      {200, 1, 1}, {5, 1, 1});
  for (std::uint32_t i = 0; i < out.size(); ++i) EXPECT_EQ(out[i], i / 200 * 200 + 199 - i % 200);
}

TEST(Memory, LocalArraysAreEachThreadsOwnAlsoByGenericAddresses) {
  auto out =
      result(kernel("mov.u64 %l0, own; cvta.local.u64 %l1, %l0; st.u32 [%l1+4], %t;\n"
                    "isspacep.local %p0, %l1; ld.local.u32 %r0, [%l0+4];\n"
                    "@!%p0 mov.u32 %r0, 999; st.global.u32 [%out], %r0;",
                    ".local .align 4 .b8 own[16];\n"));
  for (std::uint32_t i = 0; i < 32; ++i) EXPECT_EQ(out[i], i);
}

TEST(Memory, DynamicSharedMemoryAndVariablesWithValues) {
  Ran ran =
      run(".extern .shared .align 16 .b8 dynamic[];\n.const .align 4 .u32 values[2] = {7, 9};\n" +
              kernel("mov.u32 %r0, dynamic; mad.lo.u32 %r0, %t, 4, %r0; st.shared.u32 [%r0], %t;\n"
                     "ld.shared.u32 %r1, [%r0]; ld.const.u32 %r2, [values+4];\n"
                     "add.u32 %r1, %r1, %r2; st.global.u32 [%out], %r1;"),
          {64, 1, 1}, {1, 1, 1}, 256);
  EXPECT_EQ(ran.outcome.message, "");
  for (std::uint32_t i = 0; i < 64; ++i) EXPECT_EQ(ran.out[i], i + 9);
}

TEST(Memory, VectorsAndAsynchronousCopies) {
  Ran ran = run(
      kernel("mov.u32 %r0, tile; cp.async.ca.shared.global [%r0], [%in], 16, 12;\n"
             "cp.async.commit_group; cp.async.wait_group 0;\n"
             "ld.shared.v4.u32 {%r1, %r2, %r3, %r4}, [%r0]; add.u32 %r1, %r1, %r2;\n"
             "add.u32 %r1, %r1, %r3; mad.lo.u32 %r1, %r4, 1000, %r1; st.global.u32 [%out], %r1;",
             ".shared .align 16 .b8 tile[16];\n"),
      {32, 1, 1}, {1, 1, 1}, 0, {1, 1, 1}, false, {1, 2, 4, 8});
  EXPECT_EQ(ran.out[0], 7U) << ran.outcome.message;  // what lies beyond 12 bytes is zero
}

TEST(Atomics, CountOverAllBlocks) {
  HostMemory memory;
  std::uint64_t out = memory.put(std::vector<std::uint32_t>(64 * 128)),
                counter = memory.put(std::vector<std::uint32_t>{0, 0, 0, 0x3F800000});
  Outcome outcome =
      run_kernel(memory,
                 kernel("atom.global.add.u32 %r0, [%in], 1; st.global.u32 [%out], %r0;\n"
                        "red.global.max.u32 [%in+4], %g; atom.global.inc.u32 _, [%in+8], 99;\n"
                        "red.global.add.f32 [%in+12], 0f3F000000;"),
                 {out, counter}, {128, 1, 1}, {64, 1, 1});
  EXPECT_EQ(outcome.message, "");
  auto numbers = memory.get<std::uint32_t>(out);
  std::sort(numbers.begin(), numbers.end());
  for (std::uint32_t i = 0; i < numbers.size(); ++i) EXPECT_EQ(numbers[i], i);
  auto counters = memory.get<std::uint32_t>(counter);
  EXPECT_EQ(counters[0], 8192U);
  EXPECT_EQ(counters[1], 8191U);
  EXPECT_EQ(counters[2], 8192U % 100);
  EXPECT_EQ(std::bit_cast<float>(counters[3]), 4097.0F);
}

TEST(Warps, LanesExchangeValues) {
  auto out = result(
      kernel("shfl.sync.bfly.b32 %r0, %t, 5, 31, -1; shfl.sync.up.b32 %r1|%p0, %t, 3, 0, -1;\n"
             "selp.u32 %r1, %r1, 100, %p0; shfl.sync.idx.b32 %r2, %t, 2, 0x181F, -1;\n"
             "mad.lo.u32 %r0, %r0, 1000, %r1; mad.lo.u32 %r0, %r2, 1000000, %r0;\n"
             "st.global.u32 [%out], %r0;"));
  for (std::uint32_t i = 0; i < 32; ++i) {
    EXPECT_EQ(out[i], (i ^ 5) * 1000 + (i >= 3 ? i - 3 : 100) + ((i & 24) | 2) * 1000000);
  }
}

TEST(Warps, VotesMatchesAndReductions) {
  auto out = result(
      kernel("setp.lt.u32 %p0, %t, 5; vote.sync.ballot.b32 %r0, %p0, -1;\n"
             "and.b32 %r1, %t, 3; match.any.sync.b32 %r2, %r1, -1;\n"
             "redux.sync.add.u32 %r3, %t, -1; xor.b32 %r0, %r0, %r2; add.u32 %r0, %r0, %r3;\n"
             "st.global.u32 [%out], %r0;"));
  for (std::uint32_t i = 0; i < 32; ++i) EXPECT_EQ(out[i], (31U ^ (0x11111111U << (i & 3))) + 496);
}

TEST(Warps, LanesThatComeLaterAreWaitedFor) {
  auto out =
      result(kernel("setp.lt.u32 %p0, %t, 16; mov.u32 %r0, 1; @%p0 bra JOIN;\n"
                    "mov.u32 %r1, 0;\nLOOP: add.u32 %r1, %r1, 1; setp.lt.u32 %p1, %r1, %t;\n"
                    "@%p1 bra LOOP;\nmov.u32 %r0, %r1;\n"
                    "JOIN: redux.sync.add.u32 %r2, %r0, -1; st.global.u32 [%out], %r2;"));
  EXPECT_EQ(out[0], 16U + (16U + 31U) * 8U);
}

TEST(Barriers, ThreadsThatHaveEndedAreNotWaitedFor) {
  auto out = result(kernel("setp.ge.u32 %p0, %t, 40; @%p0 exit;\nbarrier.sync 1;\n"
                           "bar.red.popc.u32 %r0, 2, %p0; st.global.u32 [%out], 5;"),
                    {96, 1, 1});
  EXPECT_EQ(out[0], 5U);
  EXPECT_EQ(out[39], 5U);
  EXPECT_EQ(out[40], 0U);
}

TEST(Barriers, AnObjectInSharedMemory) {
  auto out = result(
      kernel(
          "mov.u32 %r0, object; setp.eq.u32 %p0, %t, 0; @%p0 mbarrier.init.shared.b64 [%r0], 64;\n"
          "bar.sync 0; setp.lt.u32 %p1, %t, 32; @%p1 bra LATE;\n"
          "mbarrier.arrive.shared.b64 %l0, [%r0];\nWAIT: mbarrier.test_wait.shared.b64 %p2, [%r0], "
          "%l0;\n"
          "@!%p2 bra WAIT; ld.shared.u32 %r1, [word]; st.global.u32 [%out], %r1; ret;\n"
          "LATE: @%p0 st.shared.u32 [word], 42; bar.warp.sync -1;\n"
          "mbarrier.arrive.shared.b64 %l0, [%r0];",
          ".shared .align 8 .b64 object; .shared .align 4 .b32 word;\n"),
      {64, 1, 1});
  EXPECT_EQ(out[63], 42U);
}

TEST(Grids, BlocksWaitForEachOther) {
  const std::string meet =
      "setp.ne.u32 %p0, %t, 0; @%p0 bra MET;\nmembar.gl; atom.global.add.u32 %r0, [%in], 1;\n"
      "SPIN: ld.volatile.global.u32 %r1, [%in]; setp.lt.u32 %p1, %r1, 64; @%p1 bra SPIN;\n"
      "MET: bar.sync 0; ld.volatile.global.u32 %r2, [%in]; st.global.u32 [%out], %r2;";
  Ran ran = run(kernel(meet), {64, 1, 1}, {64, 1, 1}, 0, {1, 1, 1}, /*cooperative=*/true);
  EXPECT_EQ(ran.outcome.message, "");
  for (std::uint32_t each : ran.out) EXPECT_EQ(each, 64U);
}

TEST(Grids, BlocksOfAClusterReadEachOthersMemory) {
  Ran ran = run(kernel("mov.u32 %r0, word; st.shared.u32 [%r0], %g;\n"
                       "barrier.cluster.arrive; barrier.cluster.wait;\n"
                       "mov.u32 %r1, %cluster_ctarank; xor.b32 %r1, %r1, 1; "
                       "mapa.shared::cluster.u32 %r2, %r0, %r1;\n"
                       "ld.shared::cluster.u32 %r3, [%r2]; st.global.u32 [%out], %r3;\n"
                       "barrier.cluster.arrive; barrier.cluster.wait;",
                       ".shared .align 4 .b32 word;\n"),
                {1, 1, 1}, {8, 1, 1}, 0, {2, 1, 1});
  EXPECT_EQ(ran.outcome.message, "");
  for (std::uint32_t i = 0; i < 8; ++i) EXPECT_EQ(ran.out[i], i ^ 1U);
}

TEST(Faults, NameTheLineAndWhatWasThere) {
  expect_fault(kernel("ld.global.u32 %r0, [%in+16];"), Result::kIllegalAddress,
               "line 10: 4 bytes at");
  expect_fault(kernel("mov.u64 %l0, 0; st.global.u32 [%l0], 1;"), Result::kIllegalAddress,
               "no allocation is");
  expect_fault(kernel("ld.global.u32 %r0, [%in+2];"), Result::kMisalignedAddress,
               "not aligned to 4");
  expect_fault(kernel("ld.shared.u32 %r0, [64];"), Result::kIllegalAddress, "shared memory");
  expect_fault(kernel("setp.eq.u32 %p0, %t, 3; @%p0 trap;"), Result::kLaunchFailed,
               "thread (3, 0, 0)");
  expect_fault(kernel("setp.lt.u32 %p0, %t, 32; @%p0 bar.sync 1, 64; bar.sync 0;"),
               Result::kLaunchFailed, "wait at barrier 1", {64, 1, 1});
}

TEST(Faults, AKernelThatNeverEndsIsStopped) {
  setenv("VIRTUAL_GPU_STEPS", "4000000", 1);
  Ran ran = run(kernel("FOREVER: bra FOREVER;"));
  unsetenv("VIRTUAL_GPU_STEPS");
  EXPECT_EQ(ran.outcome.result, Result::kLaunchTimeout);
}

}  // namespace
}  // namespace vgpu::ptx
