// SPDX-License-Identifier: Apache-2.0
// Devices, their contexts on threads, and capture as callgate sees it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <thread>
#include <vector>

#include "core/error.h"
#include "cuda/device.h"
#include "cuda/driver.h"
#include "fake_gpu.h"

namespace callgate::cuda {
namespace {

using ::testing::HasSubstr;

Context current() {
  Context context = nullptr;
  EXPECT_EQ(driver().context_current(&context), Result::kSuccess);
  return context;
}

class DeviceTest : public fake::GpuTest {
 protected:
  Stream stream() const { return static_cast<Stream>(stream_); }
};

TEST_F(DeviceTest, KnowsWhatTheDriverSaysOfIt) {
  Device& device = Device::at(1);
  EXPECT_EQ(device.ordinal(), 1);
  EXPECT_EQ(device.id(), 1);
  EXPECT_EQ(device.name(), "Fake GPU 1");
  EXPECT_EQ(device.capability(), 90);
  EXPECT_EQ(device.multiprocessors(), 132);
  EXPECT_EQ(Device::count(), 2);
}

TEST_F(DeviceTest, IsOneForAllThreads) {
  std::vector<Device*> found(8);
  {
    std::vector<std::jthread> threads;
    for (Device*& place : found) threads.emplace_back([&place] { place = &Device::at(1); });
  }
  EXPECT_EQ(std::set<Device*>(found.begin(), found.end()), std::set<Device*>{&Device::at(1)});
}

TEST_F(DeviceTest, OutOfRangeIsAnError) {
  for (int ordinal : {-1, 2, 64, 1000}) {
    try {
      Device::at(ordinal);
      FAIL() << ordinal;
    } catch (const Error& error) {
      EXPECT_THAT(error.what(),
                  HasSubstr("expected a device number below 2, got " + std::to_string(ordinal)));
    }
  }
}

TEST_F(DeviceTest, IsFoundByAStreamOfIts) {
  void* other = fakecuda_new_stream(1);
  std::jthread([&] {  // with no context, and after it with none again
    EXPECT_EQ(Device::of(stream()).ordinal(), 0);
    EXPECT_EQ(Device::of(static_cast<Stream>(other)).ordinal(), 1);
    EXPECT_EQ(current(), nullptr);
  })
      .join();
  fakecuda_delete_stream(other);
}

TEST_F(DeviceTest, AStreamThatIsNoneIsAnError) {
  void* gone = fakecuda_new_stream(0);
  fakecuda_delete_stream(gone);
  EXPECT_THROW(Device::of(static_cast<Stream>(gone)), Error);
  EXPECT_EQ(fakecuda_violation_count(), 1U);
  fakecuda_clear();
}

TEST_F(DeviceTest, AScopePutsBackWhatWasCurrent) {
  std::jthread([] {
    {
      ContextScope outer(Device::at(0));
      EXPECT_EQ(current(), Device::at(0).context());
      {
        ContextScope inner(Device::at(1));
        EXPECT_EQ(current(), Device::at(1).context());
        ContextScope same(Device::at(1));
        EXPECT_EQ(current(), Device::at(1).context());
      }
      EXPECT_EQ(current(), Device::at(0).context());
    }
    EXPECT_EQ(current(), nullptr);
  }).join();
}

TEST_F(DeviceTest, AScopeIsItsThreadsAlone) {
  ContextScope scope(Device::at(1));
  std::jthread([] { EXPECT_EQ(current(), nullptr); }).join();
  EXPECT_EQ(current(), Device::at(1).context());
}

TEST_F(DeviceTest, AScopeThatIsThereAlreadyCostsOneCall) {
  ContextScope scope(Device::at(0));
  std::size_t before = fakecuda_calls("cuCtxSetCurrent");
  {
    ContextScope again(Device::at(0));
  }
  EXPECT_EQ(fakecuda_calls("cuCtxSetCurrent"), before);
}

TEST_F(DeviceTest, SeesCapture) {
  EXPECT_FALSE(capturing(stream()));
  fakecuda_begin_capture(stream_);
  EXPECT_TRUE(capturing(stream()));
  fakecuda_delete_graph(fakecuda_end_capture(stream_));
  EXPECT_FALSE(capturing(stream()));
}

TEST_F(DeviceTest, RelaxedCaptureLetsTheThreadAllocate) {
  ContextScope scope(Device::at(0));
  fakecuda_begin_capture(stream_);
  DevicePointer memory = 0;
  {
    RelaxedCapture relaxed;
    EXPECT_EQ(driver().mem_alloc(&memory, 64), Result::kSuccess);
    EXPECT_EQ(driver().mem_free(memory), Result::kSuccess);
  }
  void* graph = fakecuda_end_capture(stream_);
  EXPECT_NE(graph, nullptr);
  fakecuda_delete_graph(graph);
}

TEST_F(DeviceTest, WithoutItAllocatingEndsTheCapture) {
  ContextScope scope(Device::at(0));
  fakecuda_begin_capture(stream_);
  {
    RelaxedCapture over;
  }  // what was the thread's mode is so again
  DevicePointer memory = 0;
  EXPECT_EQ(driver().mem_alloc(&memory, 64), Result::kStreamCaptureUnsupported);
  EXPECT_FALSE(capturing(stream()));
  EXPECT_EQ(fakecuda_end_capture(stream_), nullptr);
}

TEST_F(DeviceTest, ALostDeviceIsAnError) {
  Device& device = Device::at(0);
  fakecuda_lose(1);
  EXPECT_THROW(ContextScope{device}, Error);
  EXPECT_THROW(Device::of(stream()), Error);
  fakecuda_lose(0);
}

}  // namespace
}  // namespace callgate::cuda
