// SPDX-License-Identifier: Apache-2.0
// A run's values are dropped once the run has ended, and not before.
#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdint>

#include "core/runs.h"

namespace callgate {
namespace {

using Count = Runs<int>;
int of(Count& runs, std::int64_t run, const void* place, int fresh, std::int64_t part = 0) {
  return runs.of(run, part, place, [fresh] { return fresh; });
}

TEST(Runs, KeepTheirStates) {
  Count runs;
  EXPECT_EQ(of(runs, 5, nullptr, 1), 1);
  EXPECT_EQ(of(runs, 6, nullptr, 2), 2);
  EXPECT_EQ(of(runs, 5, nullptr, 3), 1);
  EXPECT_EQ(of(runs, 5, nullptr, 3), 1);
}

TEST(Runs, AreDroppedWhenAnotherHasTheirMemory) {
  Count runs;
  std::array<char, 4> memory{};
  for (std::int64_t run = 0; run < 1000; ++run) of(runs, run, &memory[run % 4], 0);
  EXPECT_EQ(runs.size(), 4u);
  EXPECT_EQ(of(runs, 999, &memory[3], 1), 0);
  EXPECT_EQ(of(runs, 995, &memory[0], 1), 1) << "has ended: it is a new one of that number";
}

TEST(Runs, AreDroppedWhenAllTheirDevicesHaveEnded) {
  Count runs(2);
  std::array<char, 3> memory{};
  of(runs, 1, &memory[0], 10, 0);
  of(runs, 1, &memory[1], 11, 1);
  of(runs, 2, &memory[0], 20, 0);  // device 0 has ended run 1
  EXPECT_EQ(of(runs, 1, &memory[1], 12, 1), 10);
  of(runs, 2, &memory[1], 21, 1);
  EXPECT_EQ(runs.size(), 1u);
}

TEST(Runs, WithoutMemoryToTellByTheLastToAskAreKept) {
  Count runs(1, 100);
  for (std::int64_t run = 0; run < 1000; ++run) {
    of(runs, run, nullptr, 0);
    EXPECT_EQ(of(runs, 0, nullptr, 1), 0) << "asks often";
  }
  EXPECT_EQ(runs.size(), 100u);
  EXPECT_EQ(of(runs, 1, nullptr, 1), 1) << "was forgotten";
}

}  // namespace
}  // namespace callgate
