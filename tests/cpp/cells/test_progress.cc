// SPDX-License-Identifier: Apache-2.0
// The board of progress bars: counts, chunks, devices, runs, and who is woken.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <bit>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cells/progress.h"
#include "cells/progress_callee.h"
#include "fake_attributes.h"

namespace callgate {
namespace {

using ::testing::HasSubstr;
using Phase = ProgressState::Phase;

CallContext on(std::int64_t run, std::int32_t device = 0) {
  return {.device = device, .run = run, .stream = nullptr, .shard = -1};
}

ProgressStart start_of(std::int64_t site, std::int64_t total = -1, std::int64_t every = 0) {
  return {.site = site, .every = every, .total = total};
}

// A board on a clock that the test sets.
struct Timed {
  std::chrono::nanoseconds time{0};
  ProgressBoard board{[this] { return time; }};
};

TEST(ProgressBoard, ABarIsSeenFromItsBeginToItsRelease) {
  Timed t;
  EXPECT_TRUE(t.board.poll().empty());
  std::int32_t handle = t.board.begin("text", start_of(1, 10), on(7));
  ASSERT_GT(handle, 0);
  t.board.update(handle, 4);
  t.time = std::chrono::seconds(2);
  auto bars = t.board.poll();
  ASSERT_EQ(bars.size(), 1U);
  EXPECT_EQ(bars[0].handle, handle);
  EXPECT_EQ(bars[0].spec, "text");
  EXPECT_EQ(bars[0].run, 7);
  EXPECT_EQ(bars[0].total, 10);
  EXPECT_EQ(bars[0].count, 4);
  EXPECT_EQ(bars[0].elapsed_ns, 2'000'000'000);
  EXPECT_EQ(bars[0].phase, Phase::kLive);
  t.board.release(handle);
  EXPECT_EQ(t.board.poll().size(), 1U) << "a live bar was released";
  t.board.end(handle, 9);
  t.time = std::chrono::seconds(5);
  bars = t.board.poll();
  EXPECT_EQ(bars[0].count, 9);
  EXPECT_EQ(bars[0].elapsed_ns, 2'000'000'000) << "an ended bar's time went on";
  EXPECT_EQ(bars[0].age_ns, 5'000'000'000);
  EXPECT_EQ(bars[0].phase, Phase::kEnded);
  t.board.release(handle);
  EXPECT_TRUE(t.board.poll().empty());
}

TEST(ProgressBoard, ALateUpdateFindsNobody) {
  Timed t;
  std::int32_t handle = t.board.begin("", start_of(1), on(1));
  t.board.end(handle, 3);
  EXPECT_EQ(t.board.update(handle, 8), 1 << 30);
  EXPECT_EQ(t.board.poll()[0].count, 3);
  t.board.release(handle);
  EXPECT_EQ(t.board.update(handle, 8), 1 << 30);
  std::int32_t next = t.board.begin("", start_of(2), on(2));
  EXPECT_NE(next, handle);
  t.board.update(handle, 8);
  EXPECT_EQ(t.board.poll()[0].count, 0);
  EXPECT_EQ(t.board.update(0, 1), 1 << 30);
  EXPECT_EQ(t.board.update(-5, 1), 1 << 30);
}

TEST(ProgressBoard, CountsGoOnBeyond32Bits) {
  Timed t;
  std::int32_t handle = t.board.begin("", start_of(1), on(1));
  std::int64_t count = 0;
  for (int i = 0; i < 10; ++i) {
    count += 1'000'000'000;
    t.board.update(handle, static_cast<std::uint32_t>(count));
  }
  EXPECT_EQ(t.board.poll()[0].count, 10'000'000'000);
}

TEST(ProgressBoard, UpdatesComeEveryFewMillisecondsWhateverAStepTakes) {
  for (std::int64_t step_ns : {1, 1000, 1'000'000, 100'000'000}) {
    Timed t;
    std::int32_t handle = t.board.begin("", start_of(1), on(1));
    std::uint32_t count = 0;
    std::int32_t chunk = 1;
    for (int i = 0; i < 40; ++i) {
      count += static_cast<std::uint32_t>(chunk);
      t.time += std::chrono::nanoseconds(step_ns * chunk);
      std::int32_t next = t.board.update(handle, count);
      EXPECT_LE(next, std::int64_t{chunk} * 8);
      chunk = next;
    }
    EXPECT_EQ(chunk, std::max<std::int64_t>(5'000'000 / step_ns, 1)) << step_ns;
  }
}

TEST(ProgressBoard, AClockThatStandsStillLimitsNothing) {
  Timed t;
  std::int32_t handle = t.board.begin("", start_of(1), on(1));
  EXPECT_EQ(t.board.update(handle, 1), 8);
  EXPECT_EQ(t.board.update(handle, 1), 8);
}

TEST(ProgressBoard, EveryIsKeptTo) {
  Timed t;
  std::int32_t handle = t.board.begin("", start_of(1, -1, 25), on(1));
  EXPECT_EQ(t.board.update(handle, 1), 25);
}

TEST(ProgressBoard, OneDeviceOfARunDrawsAlsoWhenARunsNumberIsNegative) {
  Timed t;
  for (std::int64_t run : {5, -932}) {
    std::int32_t handle = t.board.begin("", start_of(1), on(run, 2));
    EXPECT_GT(handle, 0);
    EXPECT_EQ(t.board.begin("", start_of(1), on(run, 0)), 0);
    t.board.end(handle, 1);
    EXPECT_EQ(t.board.begin("", start_of(1), on(run, 1)), 0) << "after the first has ended";
    EXPECT_GT(t.board.begin("", start_of(2), on(run, 2)), 0);
  }
  EXPECT_GT(t.board.begin("", start_of(1), on(-1, 0)), 0);
  EXPECT_GT(t.board.begin("", start_of(1), on(-1, 1)), 0) << "without a run there is no other";
}

TEST(ProgressBoard, ARunsDeviceDrawsOnHoweverManyOthersDrawMeanwhile) {
  ProgressBoard board;
  ProgressStart start;
  std::int32_t outer = board.begin("outer", start, on(1, 0));
  EXPECT_NE(outer, 0);
  for (std::int64_t run = 2; run < 1000; ++run) {
    std::int32_t other = board.begin("other", start, on(run, 1));
    board.end(other, 1);
    board.release(other);
  }
  EXPECT_EQ(board.begin("inner", start, on(1, 1)), 0) << "device 0 draws the outer bar";
  EXPECT_NE(board.begin("inner", start, on(1, 0)), 0);
}

TEST(ProgressBoard, ALoopThatBeginsAgainInItsRunKeepsItsBar) {
  Timed t;
  std::int32_t first = t.board.begin("", start_of(1, 5), on(1));
  std::int64_t bar = t.board.poll()[0].bar;
  t.board.end(first, 5);
  std::int32_t second = t.board.begin("", start_of(1, 6), on(1));
  EXPECT_NE(first, second);
  auto bars = t.board.poll();
  ASSERT_EQ(bars.size(), 1U);
  EXPECT_EQ(bars[0].bar, bar);
  EXPECT_EQ(bars[0].total, 6);
  EXPECT_EQ(bars[0].count, 0);
  t.board.begin("", start_of(1), on(2));
  EXPECT_EQ(t.board.poll().size(), 2U) << "another run has a bar of its own";
}

TEST(ProgressBoard, AFailedRunEndsItsBarsAlone) {
  Timed t;
  std::int32_t failing = t.board.begin("", start_of(1), on(1));
  std::int32_t other = t.board.begin("", start_of(1), on(2));
  t.board.update(failing, 3);
  t.board.fail(1);
  t.board.fail(-1);
  t.board.end(failing, 9);
  auto bars = t.board.poll();
  EXPECT_EQ(bars[0].phase, Phase::kFailed);
  EXPECT_EQ(bars[1].phase, Phase::kLive);
  EXPECT_EQ(bars[1].handle, other);
}

TEST(ProgressBoard, WithAllSlotsTakenTheOldestEndedBarGivesWay) {
  Timed t;
  std::vector<std::int32_t> handles;
  while (std::int32_t handle =
             t.board.begin("", start_of(static_cast<std::int64_t>(handles.size())), on(1))) {
    handles.push_back(handle);
  }
  EXPECT_EQ(handles.size(), 256U);
  t.board.end(handles[20], 1);
  t.board.end(handles[10], 1);
  EXPECT_GT(t.board.begin("new", start_of(1000), on(1)), 0);
  EXPECT_EQ(t.board.update(handles[10], 5), 1 << 30);
  EXPECT_EQ(t.board.poll()[10].spec, "new");
  EXPECT_EQ(t.board.poll()[20].phase, Phase::kEnded);
}

TEST(ProgressBoard, WhoeverDrawsIsWokenOnceUntilItRetires) {
  Timed t;
  int woken = 0;
  t.board.set_wake([&] {
    ++woken;
    EXPECT_FALSE(t.board.retire()) << "called with a bar, and without the lock";
  });
  std::int32_t first = t.board.begin("", start_of(1), on(1));
  std::int32_t second = t.board.begin("", start_of(2), on(1));
  EXPECT_EQ(woken, 1);
  t.board.end(first, 0);
  t.board.release(first);
  EXPECT_FALSE(t.board.retire());
  t.board.end(second, 0);
  t.board.release(second);
  EXPECT_TRUE(t.board.retire());
  t.board.begin("", start_of(1), on(2));
  EXPECT_EQ(woken, 2);
}

TEST(ProgressBoard, LoneStepsBeginAndEndABar) {
  Timed t;
  for (int i = 0; i < 3; ++i) t.board.step("lone", start_of(1, 3), on(1));
  auto bars = t.board.poll();
  ASSERT_EQ(bars.size(), 1U);
  EXPECT_EQ(bars[0].count, 3);
  EXPECT_EQ(bars[0].phase, Phase::kEnded);
  t.board.step("unknown", start_of(2, -1), on(1));
  EXPECT_EQ(t.board.poll().size(), 1U);
}

TEST(ProgressBoard, ManyProgramsAndADrawerAtOnce) {
  ProgressBoard board;
  std::atomic<bool> done{false};
  std::thread drawer([&] {
    while (!done.load(std::memory_order_acquire)) {  // pairs with the store below
      for (const ProgressState& state : board.poll()) {
        EXPECT_GE(state.count, 0);
        EXPECT_LE(state.count, 100);
        if (state.phase != Phase::kLive) board.release(state.handle);
      }
    }
  });
  std::vector<std::thread> programs;
  for (std::int64_t run = 0; run < 4; ++run) {
    programs.emplace_back([&board, run] {
      for (int turn = 0; turn < 200; ++turn) {
        std::int32_t handle = board.begin("b", start_of(run, 100), on(run * 1000 + turn));
        ASSERT_GT(handle, 0);
        for (std::uint32_t i = 1; i <= 100; ++i) board.update(handle, i);
        board.end(handle, 100);
      }
    });
  }
  for (std::thread& program : programs) program.join();
  done.store(true, std::memory_order_release);  // after all ends
  drawer.join();
}

// -- the callee -----------------------------------------------------------------------------------

// An operand: integers or floats, of one bar or of each lane's.
struct Operand {
  Operand(int number) : bits{number} {}
  Operand(float number) : dtype(DType::kF32), bits{std::bit_cast<std::int32_t>(number)} {}
  Operand(std::vector<int> numbers) : bits(numbers.begin(), numbers.end()), rank(1) {}
  Operand(std::vector<float> numbers) : dtype(DType::kF32), rank(1) {
    for (float number : numbers) bits.push_back(std::bit_cast<std::int32_t>(number));
  }
  ArrayView view() {
    dims = static_cast<std::int64_t>(bits.size());
    return {bits.data(), &dims, rank, dtype};
  }
  DType dtype = DType::kS32;
  std::vector<std::int32_t> bits;
  std::int64_t dims = 0;
  std::int32_t rank = 0;
};

SiteSpec progress(const char* kind, int every, int total, const char* text) {
  const fake::AttributeMap held{{"kind", kind}, {"every", every}, {"total", total}};
  return fake::site_spec({{"spec", text}, {"progress", held}});
}

// The values that a call writes to a result like `answer`.
std::vector<std::int32_t> call(ProgressCallee& callee, SiteSpec spec, std::vector<Operand> values,
                               Operand answer) {
  std::vector<ArrayView> operands;
  for (Operand& value : values) operands.push_back(value.view());
  std::vector<ArrayView> results{answer.view()};
  auto site = callee.specialise(std::move(spec));
  EXPECT_NO_THROW(site->run({operands, results, on(3)}));
  return answer.bits;
}

std::int32_t call(ProgressCallee& callee, SiteSpec spec, std::vector<Operand> values) {
  return call(callee, std::move(spec), std::move(values), Operand(-1))[0];
}

constexpr float kNone = ProgressState::kNoValue;

TEST(ProgressCallee, LanesHaveBarsThatAValueMovesAndEndOneByOne) {
  Timed t;
  ProgressCallee callee(t.board);
  auto handles = call(callee, progress("begin_at", 5, -1, "lanes"),
                      {std::vector{0.0F, 1.0F}, std::vector{2.0F, 5.0F}}, std::vector{0, 0});
  ASSERT_NE(handles[0], handles[1]);
  const std::vector<int> of(handles.begin(), handles.end());
  auto update = [&](std::vector<int> counts, std::vector<float> at, std::vector<int> going) {
    return call(callee, progress("update", 5, -1, ""), {of, counts, at, going});
  };
  EXPECT_EQ(update({3, 3}, {1.0F, 2.0F}, {1, 1}), 5);
  EXPECT_EQ(update({4, 6}, {2.0F, 3.0F}, {0, 1}), 5);
  EXPECT_EQ(update({9, 7}, {9.0F, 5.0F}, {0, 0}), 1 << 30);
  call(callee, progress("end", 5, -1, ""), {of, std::vector{9, 9}, std::vector{9.0F, 9.0F}});
  auto bars = t.board.poll();
  ASSERT_EQ(bars.size(), 2U);
  for (std::size_t lane = 0; lane < 2; ++lane) {
    EXPECT_EQ(bars[lane].lane, static_cast<std::int64_t>(lane));
    EXPECT_EQ(bars[lane].phase, Phase::kEnded);
  }
  EXPECT_EQ(bars[0].count, 4);
  EXPECT_EQ(bars[0].at, 2.0F);
  EXPECT_EQ(bars[0].last, 2.0F);
  EXPECT_EQ(bars[1].count, 7);
  EXPECT_EQ(bars[1].at, 5.0F);
  EXPECT_EQ(bars[1].first, 1.0F);
}

TEST(ProgressCallee, BeginsUpdatesAndEndsABar) {
  Timed t;
  ProgressCallee callee(t.board);
  EXPECT_EQ(callee.name(), "callgate.progress");
  std::int32_t handle = call(callee, progress("begin", 7, 100, R"({"desc": "a b"})"), {});
  EXPECT_EQ(call(callee, progress("update", 7, 100, ""), {handle, 50, kNone, 1}), 7);
  call(callee, progress("end", 7, 100, ""), {handle, 100, kNone, 12345});
  std::int32_t other = call(callee, progress("begin_of", 0, -1, "text"), {-4});
  EXPECT_NE(handle, other);
  auto bars = t.board.poll();
  ASSERT_EQ(bars.size(), 2U);
  EXPECT_EQ(bars[0].spec, "{\"desc\": \"a b\"}");
  EXPECT_EQ(bars[0].total, 100);
  EXPECT_EQ(bars[0].count, 100);
  EXPECT_EQ(bars[0].phase, Phase::kEnded);
  EXPECT_EQ(bars[1].total, 0);
}

TEST(ProgressCallee, RefusesKindsThatItDoesNotKnow) {
  Timed t;
  ProgressCallee callee(t.board);
  for (const char* kind : {"", "start"}) {
    try {
      callee.specialise(progress(kind, 1, 1, "t"));
      ADD_FAILURE() << "'" << kind << "' was taken";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_THAT(error.what(), HasSubstr(std::string("'") + kind + "'"));
    }
  }
  EXPECT_THROW(callee.specialise(fake::site_spec({{"spec", "begin 1 2 t"}})), Error);
}

TEST(ProgressCallee, RefusesOperandsOfAnotherType) {
  Timed t;
  ProgressCallee callee(t.board);
  auto site = callee.specialise(progress("update", 0, 1, "t"));
  float value = 0;
  ArrayView real{&value, nullptr, 0, DType::kF32};
  std::int32_t number = 0;
  std::vector result{ArrayView{&number, nullptr, 0, DType::kS32}};
  std::vector four{real, real, real, real};
  EXPECT_THROW(site->run({four, result, on(1)}), Error);
  EXPECT_THROW(site->run({four, {}, on(1)}), Error);
  EXPECT_THROW(site->run({{}, {}, on(1)}), Error);
  auto begin = callee.specialise(progress("begin_of", 0, 1, "t"));
  EXPECT_THROW(begin->run({four, result, on(1)}), Error);
}

}  // namespace
}  // namespace callgate
