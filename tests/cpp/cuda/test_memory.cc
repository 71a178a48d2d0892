// SPDX-License-Identifier: Apache-2.0
// Pinned and device memory in pools: sizes, reuse, budgets, and a driver that has no more.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "core/error.h"
#include "cuda/device.h"
#include "cuda/driver.h"
#include "fake_gpu.h"

namespace callgate::cuda {
namespace {

constexpr std::size_t kMebi = std::size_t{1} << 20;

class MemoryTest : public fake::InContextTest {
 protected:
  void SetUp() override {
    InContextTest::SetUp();
    trim_memory();
    fakecuda_count_live(&before_);
  }
  void TearDown() override {
    trim_memory();
    fakecuda_live after{};
    fakecuda_count_live(&after);
    EXPECT_EQ(after.pinned_allocations, before_.pinned_allocations);
    EXPECT_EQ(after.device_allocations, before_.device_allocations);
    InContextTest::TearDown();
  }
  std::size_t pinned_made() const { return fakecuda_calls("cuMemHostAlloc"); }
  std::size_t device_made() const { return fakecuda_calls("cuMemAlloc_v2"); }

 private:
  fakecuda_live before_{};
};

TEST_F(MemoryTest, PinnedBlocksAreLargeEnoughAndAligned) {
  for (std::size_t bytes : {std::size_t{1}, std::size_t{4096}, std::size_t{4097}, kMebi - 1, kMebi,
                            kMebi + 1, 5 * kMebi / 2}) {
    PinnedBlock block(bytes);
    EXPECT_GE(block.size(), bytes);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(block.data()) % 64, 0U);
    std::memset(block.data(), 1, block.size());
    EXPECT_EQ(memory_in_use().pinned, block.size());
  }
}

TEST_F(MemoryTest, BlocksComeBackFromThePool) {
  char* first = nullptr;
  {
    PinnedBlock block(100);
    first = block.data();
  }
  PinnedBlock again(3000);  // of the same class
  EXPECT_EQ(again.data(), first);
  EXPECT_EQ(pinned_made(), 1U);
  DevicePointer device = 0;
  {
    DeviceBlock block(Device::at(0), 5000);
    device = block.data();
  }
  DeviceBlock other(Device::at(0), 8000);
  EXPECT_EQ(other.data(), device);
  EXPECT_EQ(device_made(), 1U);
}

TEST_F(MemoryTest, TwoBlocksInUseAreTwo) {
  PinnedBlock a(64), b(64);
  EXPECT_NE(a.data(), b.data());
  DeviceBlock c(Device::at(0), 64), d(Device::at(0), 64);
  EXPECT_NE(c.data(), d.data());
  EXPECT_EQ(memory_in_use().pinned, 2 * a.size());
  EXPECT_EQ(memory_in_use().device, 2 * c.size());
}

TEST_F(MemoryTest, MovingABlockMovesItsMemory) {
  PinnedBlock a(64);
  char* data = a.data();
  PinnedBlock b = std::move(a);
  EXPECT_EQ(b.data(), data);
  EXPECT_EQ(a.data(), nullptr);  // NOLINT: says that it is empty
  PinnedBlock c(64);
  c = std::move(b);
  EXPECT_EQ(c.data(), data);
  EXPECT_EQ(memory_in_use().pinned, c.size());
  DeviceBlock d(Device::at(0), 64);
  DeviceBlock e;
  e = std::move(d);
  EXPECT_EQ(memory_in_use().device, e.size());
}

TEST_F(MemoryTest, BeyondTheBudgetBlocksAreFreed) {
  {
    PinnedBlock a(500 * kMebi), b(200 * kMebi);
    DeviceBlock c(Device::at(0), 500 * kMebi), d(Device::at(0), 200 * kMebi);
  }
  EXPECT_EQ(fakecuda_calls("cuMemFreeHost"), 1U);
  EXPECT_EQ(fakecuda_calls("cuMemFree_v2"), 1U);
}

TEST_F(MemoryTest, AThreadWithoutAContextMayLetABlockGo) {
  std::vector<PinnedBlock> pinned;
  std::vector<DeviceBlock> device;
  for (std::size_t mebi : {500, 200}) {
    pinned.emplace_back(mebi * kMebi);
    device.emplace_back(Device::at(0), mebi * kMebi);
  }
  std::jthread([&] {
    pinned.clear();
    device.clear();
    trim_memory();
  }).join();
  EXPECT_EQ(fakecuda_calls("cuMemFreeHost"), 2U);
  EXPECT_EQ(fakecuda_calls("cuMemFree_v2"), 2U);
}

TEST_F(MemoryTest, DevicesHavePoolsOfTheirOwn) {
  DevicePointer first = 0;
  {
    DeviceBlock block(Device::at(0), 64);
    first = block.data();
  }
  ContextScope other(Device::at(1));
  DeviceBlock block(Device::at(1), 64);
  EXPECT_NE(block.data(), first);
  int ordinal = -1;
  EXPECT_EQ(driver().pointer_attribute(&ordinal, PointerAttribute::kDeviceOrdinal, block.data()),
            Result::kSuccess);
  EXPECT_EQ(ordinal, 1);
}

TEST_F(MemoryTest, WhereThereIsNoMoreThePoolIsEmptiedFirst) {
  {
    PinnedBlock kept(64);
  }
  fakecuda_fail("cuMemHostAlloc", 2, 0, 1);
  PinnedBlock block(kMebi);
  EXPECT_NE(block.data(), nullptr);
  EXPECT_EQ(fakecuda_calls("cuMemFreeHost"), 1U);
  {
    DeviceBlock kept(Device::at(0), 64);
  }
  fakecuda_fail("cuMemAlloc_v2", 2, 0, 1);
  DeviceBlock other(Device::at(0), kMebi);
  EXPECT_NE(other.data(), 0U);
  EXPECT_EQ(fakecuda_calls("cuMemFree_v2"), 1U);
}

TEST_F(MemoryTest, WithoutMemoryThereIsAnErrorAndNothingInUse) {
  fakecuda_fail("cuMemHostAlloc", 2, 0, -1);
  fakecuda_fail("cuMemAlloc_v2", 2, 0, -1);
  EXPECT_THROW(PinnedBlock(64), Error);
  EXPECT_THROW(DeviceBlock(Device::at(0), 64), Error);
  EXPECT_EQ(memory_in_use().pinned, 0U);
  EXPECT_EQ(memory_in_use().device, 0U);
  fakecuda_clear();
  EXPECT_NO_THROW(PinnedBlock(64));
}

TEST_F(MemoryTest, MemoryToKeepIsTheProcessesOwn) {
  auto made = [] { return fakecuda_calls("cuMemHostRegister_v2"); };
  char* first = nullptr;
  {
    KeepableBlock block(3 * kMebi);
    first = block.data();
    ASSERT_NE(first, nullptr);
    std::memset(first, 1, block.size());
    EXPECT_EQ(memory_in_use().pinned, block.size());
  }
  EXPECT_EQ(KeepableBlock(3 * kMebi).data(), first) << "from the pool";
  EXPECT_EQ(made(), 1U);
  trim_memory();
  EXPECT_EQ(fakecuda_calls("cuMemHostUnregister"), 1U);
  EXPECT_EQ(pinned_made(), 0U);
}

TEST_F(MemoryTest, OfMemoryToKeepThereIsNeverMuch) {
  KeepableBlock most(640 * kMebi);
  ASSERT_NE(most.data(), nullptr);
  EXPECT_EQ(KeepableBlock(kMebi).data(), nullptr);
  EXPECT_EQ(memory_in_use().pinned, most.size());
}

TEST_F(MemoryTest, WhereTheDriverRegistersNoneThereIsNoMemoryToKeep) {
  constexpr int kNotSupported = 801, kOutOfMemory = 2;
  fakecuda_fail("cuMemHostRegister_v2", kNotSupported, 0, -1);
  EXPECT_EQ(KeepableBlock(kMebi).data(), nullptr);
  fakecuda_clear();
  fakecuda_fail("cuMemHostRegister_v2", kOutOfMemory, 0, -1);
  EXPECT_THROW(KeepableBlock{kMebi}, Error);
  EXPECT_EQ(memory_in_use().pinned, 0U);
  fakecuda_clear();
}

TEST_F(MemoryTest, ThreadsShareThePools) {
  constexpr int kThreads = 4, kRounds = 200;
  {
    std::vector<std::jthread> threads;
    for (int thread = 0; thread < kThreads; ++thread) {
      threads.emplace_back([thread] {
        ContextScope scope(Device::at(thread % 2));
        for (int round = 0; round < kRounds; ++round) {
          PinnedBlock block(static_cast<std::size_t>(round * 100 + 1));
          std::memset(block.data(), thread, 64);
          DeviceBlock device(Device::at(thread % 2), 64);
          EXPECT_EQ(block.data()[63], thread);
        }
      });
    }
  }
  EXPECT_EQ(memory_in_use().pinned, 0U);
  EXPECT_LE(device_made(), static_cast<std::size_t>(kThreads));
}

}  // namespace
}  // namespace callgate::cuda
