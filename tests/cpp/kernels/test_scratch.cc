// SPDX-License-Identifier: Apache-2.0
// Working memory that threads keep between calls.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <set>
#include <thread>
#include <vector>

#include "kernels/kernel_frame.h"

namespace callgate {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

std::uintptr_t address(void* memory) { return reinterpret_cast<std::uintptr_t>(memory); }

// Runs on a thread without kept blocks.
template <typename Body>
void on_new_thread(Body&& body) {
  std::thread(body).join();
}

TEST(Scratch, IsAlignedAndWritable) {
  on_new_thread([] {
    Scratch scratch;
    for (std::size_t alignment : {1, 8, 64, 128, 4096}) {
      for (std::size_t bytes : {0, 1, 63, 64, 65, 1000, 4096}) {
        void* memory = scratch.take(bytes, alignment);
        ASSERT_NE(memory, nullptr);
        EXPECT_EQ(address(memory) % alignment, 0U);
        EXPECT_EQ(address(memory) % 64, 0U);
        std::memset(memory, 1, bytes);
      }
    }
  });
}

TEST(Scratch, BlocksOfOneCallAreApart) {
  on_new_thread([] {
    Scratch scratch;
    std::set<std::uintptr_t> taken;
    for (int i = 0; i < 50; ++i) EXPECT_TRUE(taken.insert(address(scratch.take(100, 64))).second);
  });
}

TEST(Scratch, TheNextCallOfTheThreadGetsTheSameMemory) {
  on_new_thread([] {
    std::uintptr_t first = 0;
    {
      Scratch scratch;
      first = address(scratch.take(32 * kMiB, 64));
    }
    Scratch scratch;
    EXPECT_EQ(address(scratch.take(31 * kMiB, 64)), first);
    EXPECT_NE(address(scratch.take(31 * kMiB, 64)), first);  // that one is in use
  });
}

TEST(Scratch, ASmallRequestDoesNotTakeALargeBlock) {
  on_new_thread([] {
    std::uintptr_t first = 0;
    {
      Scratch scratch;
      first = address(scratch.take(32 * kMiB, 64));
    }
    Scratch scratch;
    EXPECT_NE(address(scratch.take(100, 64)), first);
    EXPECT_EQ(address(scratch.take(32 * kMiB, 64)), first);
  });
}

TEST(Scratch, OfAThreadsManyBlocksTheNewestAreKept) {
  on_new_thread([] {
    // Each is more than twice as large as the one before, so that none is taken for another.
    for (std::size_t bytes = 1; bytes <= 48 * kMiB; bytes = 2 * bytes + 64) {
      Scratch scratch;
      std::memset(scratch.take(bytes, 64), 7, bytes);
    }
    Scratch scratch;
    auto* memory = static_cast<unsigned char*>(scratch.take(32 * kMiB, 64));
    EXPECT_EQ(memory[0], 7);  // memory that is new from the system holds zeros
    EXPECT_EQ(memory[32 * kMiB - 1], 7);
  });
}

TEST(Scratch, ImpossibleRequestsGetNull) {
  Scratch scratch;
  EXPECT_EQ(scratch.take(SIZE_MAX, 64), nullptr);
  EXPECT_EQ(scratch.take(SIZE_MAX - 100, 64), nullptr);
}

TEST(Scratch, AnyThreadOfACallMayTakeABlock) {
  on_new_thread([] {
    for (int round = 0; round < 10; ++round) {
      Scratch scratch;
      std::vector<std::thread> threads;
      for (int i = 0; i < 4; ++i) {
        threads.emplace_back([&scratch, i] {
          for (int k = 0; k < 20; ++k) {
            auto* memory = static_cast<unsigned char*>(scratch.take(1000, 64));
            std::memset(memory, i, 1000);
            EXPECT_EQ(memory[999], i);
          }
        });
      }
      for (std::thread& thread : threads) thread.join();
    }
  });
}

}  // namespace
}  // namespace callgate
