// SPDX-License-Identifier: Apache-2.0
// What lanes of a warp, warps of a block and blocks of a cluster do together.
#include <algorithm>
#include <bit>
#include <functional>

#include "kernel_test.h"

namespace vgpu::ptx {
namespace {

using u32 = std::uint32_t;
std::vector<u32> numbers(u32 count = 32) {
  std::vector<u32> all;
  for (u32 i = 0; i < count; ++i) all.push_back(i);
  return all;
}

// The manual's pseudocode of shfl.
std::pair<u32, bool> source(const std::string& mode, u32 lane, u32 b, u32 c) {
  const u32 mask = c >> 8 & 31, clamp = c & 31;
  const u32 highest = (lane & mask) | (clamp & ~mask & 31), lowest = lane & mask;
  const int at = static_cast<int>(lane), by = static_cast<int>(b & 31);
  int from = 0;
  bool inside = false;
  if (mode == "up") {
    from = at - by;
    inside = from >= static_cast<int>(highest);
  } else {
    from = mode == "down"   ? at + by
           : mode == "bfly" ? at ^ by
                            : static_cast<int>(lowest | (b & 31 & ~mask));
    inside = from <= static_cast<int>(highest);
  }
  return {inside ? static_cast<u32>(from) : lane, inside};
}
TEST(Lanes, ExchangeInEveryWay) {
  const auto lanes = numbers();
  for (const std::string mode : {"up", "down", "bfly", "idx"}) {
    for (u32 width : {32U, 16U, 8U, 2U}) {
      const u32 c = (32 - width) << 8 | (mode == "up" ? 0U : 31U);
      for (u32 b = 0; b < 34; ++b) {
        auto got =
            each_thread<u32>("mul.lo.u32 %r1, %in0, 3;\nshfl.sync." + mode + ".b32 %r0|%p0, %r1, " +
                                 std::to_string(b) + ", " + std::to_string(c) +
                                 ", -1;\nselp.u32 %r2, 1000, 0, %p0;\n"
                                 "add.u32 %out, %r0, %r2;",
                             lanes);
        for (u32 i = 0; i < 32; ++i) {
          auto [from, inside] = source(mode, i, b, c);
          EXPECT_EQ(got[i], 3 * from + (inside ? 1000 : 0)) << mode << " " << b << " " << c;
        }
      }
    }
  }
}
TEST(Lanes, ExchangeByTheirOwnNumbersAndInPlace) {
  auto got = each_thread<u32>(
      "xor.b32 %r0, %in0, 21;\nshfl.sync.idx.b32 %r0, %r0, %r0, 31, -1;\n"
      "shfl.down.b32 %out, %r0, 0, 31;",
      numbers());
  for (u32 i = 0; i < 32; ++i) EXPECT_EQ(got[i], i);  // twice the same xor
}

TEST(Lanes, Vote) {
  for (u32 limit : {0U, 1U, 20U, 32U}) {
    const std::string set = "setp.lt.u32 %p0, %in0, " + std::to_string(limit) + ";\n";
    auto ballot = each_thread<u32>(set + "vote.sync.ballot.b32 %out, %p0, -1;", numbers());
    auto contrary = each_thread<u32>(set + "vote.ballot.b32 %out, !%p0;", numbers());
    auto others = each_thread<u32>(
        set +
            "vote.sync.all.pred %p1, %p0, -1;\nvote.sync.any.pred %p2, %p0, -1;\n"
            "vote.sync.uni.pred %p3, %p0, -1;\nselp.u32 %r1, 1, 0, %p1;\n"
            "selp.u32 %r2, 2, 0, %p2;\nselp.u32 %r3, 4, 0, %p3;\nor.b32 %r1, %r1, %r2;\n"
            "or.b32 %out, %r1, %r3;",
        numbers());
    const u32 want = limit == 32 ? ~0U : (1U << limit) - 1;
    const u32 rest =
        (limit == 32 ? 1U : 0U) | (limit > 0 ? 2U : 0U) | (limit == 32 || limit == 0 ? 4U : 0U);
    for (u32 i = 0; i < 32; ++i) {
      EXPECT_EQ(ballot[i], want);
      EXPECT_EQ(contrary[i], ~want);
      EXPECT_EQ(others[i], rest) << limit;
    }
  }
}
TEST(Lanes, VoteOnlyWithThoseOfTheMask) {
  auto got = each_thread<u32>(
      "and.b32 %r0, %in0, 1;\nsetp.eq.u32 %p0, %r0, 0;\nsetp.lt.u32 %p1, %in0, 10;\n"
      "mov.u32 %out, 7;\n@%p0 vote.sync.ballot.b32 %out, %p1, 0x55555555;\n"
      "@!%p0 activemask.b32 %out;",
      numbers());
  for (u32 i = 0; i < 32; ++i) EXPECT_EQ(got[i], i % 2 == 0 ? 0x155U : 0xAAAAAAAAU);
}

template <typename T>
void check_matches(const std::string& type) {
  std::vector<T> values;
  for (u32 i = 0; i < 32; ++i) values.push_back(static_cast<T>(static_cast<T>(i % 5) << 30));
  auto any = each_thread<u32>("match.any.sync." + type + " %out, %in0, -1;", values);
  auto all = each_thread<u32>("match.all.sync." + type +
                                  " %r0|%p0, %in0, -1;\nselp.u32 %r1, 5, 0, %p0;\n"
                                  "add.u32 %out, %r0, %r1;",
                              values);
  auto same = each_thread<u32>("match.all.sync." + type +
                                   " %r0|%p0, %in0, -1;\n"
                                   "selp.u32 %r1, 5, 0, %p0;\nadd.u32 %out, %r0, %r1;",
                               std::vector<T>(32, T{9}));
  for (u32 i = 0; i < 32; ++i) {
    u32 want = 0;
    for (u32 j = 0; j < 32; ++j) want |= (values[i] == values[j] ? 1U : 0U) << j;
    EXPECT_EQ(any[i], want);
    EXPECT_EQ(all[i], 0U);
    EXPECT_EQ(same[i], 0xFFFFFFFFU + 5U);
  }
}
TEST(Lanes, FindThoseWithTheSameValue) {
  check_matches<u32>("b32");
  check_matches<std::uint64_t>("b64");
}

template <typename T>
void check_sum(const std::string& opcode, const std::function<T(T, T)>& join) {
  std::vector<T> values;
  for (u32 i = 0; i < 32; ++i) values.push_back(static_cast<T>(i * 2654435761U + 12345U));
  auto got = each_thread<T>("redux.sync." + opcode + " %out, %in0, -1;", values);
  T want = values[0];
  for (u32 i = 1; i < 32; ++i) want = join(want, values[i]);
  for (T each : got) EXPECT_EQ(each, want) << opcode;
}
TEST(Lanes, AreReduced) {
  using s32 = std::int32_t;
  check_sum<u32>("add.u32", [](u32 a, u32 b) { return a + b; });
  check_sum<s32>("add.s32", [](s32 a, s32 b) {
    return static_cast<s32>(static_cast<u32>(a) + static_cast<u32>(b));
  });
  check_sum<u32>("min.u32", [](u32 a, u32 b) { return std::min(a, b); });
  check_sum<u32>("max.u32", [](u32 a, u32 b) { return std::max(a, b); });
  check_sum<s32>("min.s32", [](s32 a, s32 b) { return std::min(a, b); });
  check_sum<s32>("max.s32", [](s32 a, s32 b) { return std::max(a, b); });
  check_sum<u32>("and.b32", std::bit_and<u32>{});
  check_sum<u32>("or.b32", std::bit_or<u32>{});
  check_sum<u32>("xor.b32", std::bit_xor<u32>{});
}
TEST(Lanes, ElectTheLowest) {
  auto got = each_thread<u32>(
      "setp.ge.u32 %p0, %in0, 6;\nmov.u32 %out, 99;\n"
      "@%p0 elect.sync %r0|%p1, 0xFFFFFFC0;\n@%p0 selp.u32 %out, 1, %r0, %p1;",
      numbers());
  for (u32 i = 0; i < 32; ++i) EXPECT_EQ(got[i], i < 6 ? 99U : i == 6 ? 1U : 6U);
}

TEST(BlockBarriers, CountAndJoinPredicates) {
  for (u32 limit : {0U, 1U, 70U, 128U}) {
    auto out =
        result(kernel("setp.lt.u32 %p0, %t, " + std::to_string(limit) +
                      ";\nbarrier.red.popc.u32 %r0, 3, %p0; bar.red.and.pred %p1, 4, %p0;\n"
                      "bar.red.or.pred %p2, 5, 128, !%p0; selp.u32 %r1, 1000, 0, %p1;\n"
                      "selp.u32 %r2, 2000, 0, %p2; add.u32 %r0, %r0, %r1; add.u32 %r0, %r0, %r2;\n"
                      "st.global.u32 [%out], %r0;"),
               {128, 1, 1});
    for (u32 each : out)
      EXPECT_EQ(each, limit + (limit == 128 ? 1000U : 0U) + (limit < 128 ? 2000U : 0U));
  }
}
TEST(BlockBarriers, OneSideArrivesTheOtherWaits) {
  // Warp 0 makes, warp 1 takes: two barriers in turn, as the manual's example has it.
  auto out = result(
      kernel("mov.u32 %r0, tile; mad.lo.u32 %r0, %t, 4, %r0; mov.u32 %r1, 0; mov.u32 %r3, 0;\n"
             "setp.lt.u32 %p0, %t, 32; @!%p0 bra TAKE;\n"
             "MAKE: mad.lo.u32 %r2, %r1, 10, %t; st.shared.u32 [%r0], %r2;\n"
             "barrier.cta.arrive 0, 64; bar.sync 1, 64; add.u32 %r1, %r1, 1;\n"
             "setp.lt.u32 %p1, %r1, 9; @%p1 bra MAKE; ret;\n"
             "TAKE: bar.sync 0, 64; ld.shared.u32 %r2, [%r0-128]; add.u32 %r3, %r3, %r2;\n"
             "bar.arrive 1, 64; add.u32 %r1, %r1, 1; setp.lt.u32 %p1, %r1, 9; @%p1 bra TAKE;\n"
             "st.global.u32 [%out], %r3;",
             ".shared .align 4 .b8 tile[256];\n"),
      {64, 1, 1});
  for (u32 i = 32; i < 64; ++i) EXPECT_EQ(out[i], 360 + 9 * (i - 32));
}
TEST(BlockBarriers, OfAWarpOrderItsLanes) {
  auto out =
      result(kernel("mov.u32 %r0, tile; mad.lo.u32 %r1, %t, 4, %r0; st.shared.u32 [%r1], %t;\n"
                    "bar.warp.sync 0xFFFFFFFF; xor.b32 %r2, %t, 31; "
                    "mad.lo.u32 %r1, %r2, 4, %r0;\n"
                    "ld.shared.u32 %r3, [%r1]; st.global.u32 [%out], %r3;",
                    ".shared .align 4 .b8 tile[128];\n"));
  for (u32 i = 0; i < 32; ++i) EXPECT_EQ(out[i], 31 - i);
}
TEST(BlockBarriers, Faults) {
  expect_fault(kernel("bar.sync 16;"), Result::kIllegalInstruction, "barrier 16 of 16");
  expect_fault(kernel("bar.sync 1, 33;"), Result::kIllegalInstruction, "a multiple of 32");
  HostMemory memory;
  for (const char* text : {"bar.arrive 1;", "bar.red.u32 %r0, 1, %p0;", "barrier.cluster.sync;"}) {
    EXPECT_THROW(run_kernel(memory, kernel(text), {0, 0}), Error) << text;
  }
}

// Each thread does the text in a block of one thread, with an object in shared memory.
u32 with_object(const std::string& text) {
  return result(kernel("mov.u32 %r9, object;\n" + text + "\nst.global.u32 [%out], %r0;",
                       ".shared .align 8 .b64 object;\n"),
                {1, 1, 1})[0];
}
TEST(Objects, PhasesEndWhenAllHaveArrived) {
  const std::string init = "mbarrier.init.shared::cta.b64 [%r9], 3;\n";
  const std::string tell =
      "mbarrier.test_wait.shared.b64 %p0, [%r9], %l0;\nselp.u32 %r0, 1, 0, %p0;";
  const std::string one = "mbarrier.arrive.shared.b64 %l0, [%r9];\n";
  EXPECT_EQ(with_object(init + one + tell), 0U);
  EXPECT_EQ(with_object(init + one + one + tell), 0U);
  EXPECT_EQ(with_object(init + one + one + one + tell), 1U);
  EXPECT_EQ(with_object(init + "mbarrier.arrive.release.cta.shared.b64 %l0, [%r9], 3;\n" + tell),
            1U);
  EXPECT_EQ(with_object(init + one +
                        "mbarrier.arrive.noComplete.shared.b64 %l0, [%r9], 1;\n"
                        "mbarrier.pending_count.b64 %r0, %l0;"),
            2U);
}
TEST(Objects, PhasesHaveAParity) {
  const std::string next = "mbarrier.arrive.shared.b64 _, [%r9];\n";
  for (u32 phases : {0U, 1U, 2U, 3U}) {
    std::string text = "mbarrier.init.shared.b64 [%r9], 1;\n";
    for (u32 i = 0; i < phases; ++i) text += next;
    text +=
        "mbarrier.try_wait.parity.shared.b64 %p0, [%r9], 0;\n"
        "mbarrier.test_wait.parity.shared.b64 %p1, [%r9], 1;\nselp.u32 %r0, 1, 0, %p0;\n"
        "selp.u32 %r1, 2, 0, %p1;\nadd.u32 %r0, %r0, %r1;\nmbarrier.inval.shared.b64 [%r9];";
    EXPECT_EQ(with_object(text), phases % 2 == 1 ? 1U : 2U);
  }
}
TEST(Objects, BytesAreWaitedForAndArrivalsDropped) {
  const std::string init = "mbarrier.init.shared.b64 [%r9], 1;\n";
  const std::string tell =
      "mbarrier.test_wait.shared.b64 %p0, [%r9], %l0;\nselp.u32 %r0, 1, 0, %p0;";
  const std::string expect = "mbarrier.arrive.expect_tx.shared.b64 %l0, [%r9], 64;\n";
  const std::string half = "mbarrier.complete_tx.shared.b64 [%r9], 32;\n";
  EXPECT_EQ(with_object(init + expect + tell), 0U);
  EXPECT_EQ(with_object(init + expect + half + tell), 0U);
  EXPECT_EQ(with_object(init + expect + half + half + tell), 1U);
  EXPECT_EQ(with_object(init +
                        "mbarrier.expect_tx.relaxed.cta.shared.b64 [%r9], 32;\n"
                        "mbarrier.arrive.shared.b64 %l0, [%r9];\n" +
                        half + tell),
            1U);
  // After one of two has gone for good, one arrival ends a phase.
  EXPECT_EQ(with_object("mbarrier.init.shared.b64 [%r9], 2;\n"
                        "mbarrier.arrive_drop.shared.b64 _, [%r9];\n"
                        "mbarrier.arrive.shared.b64 _, [%r9];\n"
                        "mbarrier.arrive.shared.b64 %l0, [%r9];\n" +
                        tell),
            1U);
  expect_fault(kernel("mov.u32 %r9, object; mbarrier.init.shared.b64 [%r9], 1;\n"
                      "mbarrier.arrive.shared.b64 _, [%r9], 2;",
                      ".shared .align 8 .b64 object;\n"),
               Result::kIllegalInstruction, "the phase expects 1", {1, 1, 1});
}

TEST(Clusters, RanksAndAddressesOfOtherBlocks) {
  Ran ran = run(kernel("mov.u32 %r0, word; st.shared.u32 [%r0], %b;\n"
                       "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire;\n"
                       "mov.u32 %r1, %cluster_ctarank; xor.b32 %r1, %r1, 3;\n"
                       "cvt.u64.u32 %l0, %r0; cvta.shared.u64 %l0, %l0;\n"
                       "mapa.u64 %l1, %l0, %r1; ld.u32 %r2, [%l1]; getctarank.u64 %r3, %l1;\n"
                       "mapa.shared::cluster.u32 %r4, %r0, %r1;\n"
                       "getctarank.shared::cluster.u32 %r5, %r4;\n"
                       "mad.lo.u32 %r2, %r2, 10, %r3; mad.lo.u32 %r2, %r2, 10, %r5;\n"
                       "st.global.u32 [%out], %r2;\nbarrier.cluster.arrive; barrier.cluster.wait;",
                       ".shared .align 4 .b32 word;\n"),
                {1, 1, 1}, {8, 1, 1}, 0, {4, 1, 1});
  ASSERT_EQ(ran.outcome.message, "");
  for (u32 i = 0; i < 8; ++i) EXPECT_EQ(ran.out[i], (i ^ 3) * 100 + (i % 4 ^ 3) * 11);
}

}  // namespace
}  // namespace vgpu::ptx
