// SPDX-License-Identifier: Apache-2.0
// GPUs without a GPU: streams and memory of the fake CUDA driver (virtual_gpu/fake_driver), which
// callgate loads as it would load the real one.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "cuda/completions.h"
#include "cuda/device.h"
#include "fake_driver/fakecuda.h"

namespace callgate::fake {

// Before callgate asks for the driver.
inline const bool kDriverChosen = setenv("CALLGATE_CUDA_DRIVER", CALLGATE_FAKE_CUDA, 1) == 0;

// An array in a device's memory.
template <typename T>
class DeviceVector {
 public:
  explicit DeviceVector(const std::vector<T>& values, int device = 0)
      : size_(values.size()), pointer_(fakecuda_new_memory(device, values.size() * sizeof(T))) {
    EXPECT_EQ(fakecuda_write(pointer_, values.data(), size_ * sizeof(T)), 0);
  }
  ~DeviceVector() { fakecuda_delete_memory(pointer_); }
  DeviceVector(const DeviceVector&) = delete;
  DeviceVector& operator=(const DeviceVector&) = delete;

  // The content now, whatever the streams are about to do.
  std::vector<T> values() const {
    std::vector<T> values(size_);
    EXPECT_EQ(fakecuda_read(values.data(), pointer_, size_ * sizeof(T)), 0);
    return values;
  }
  void set(const std::vector<T>& values) {
    EXPECT_EQ(fakecuda_write(pointer_, values.data(), values.size() * sizeof(T)), 0);
  }
  void* data() const { return reinterpret_cast<void*>(pointer_); }
  std::uint64_t pointer() const { return pointer_; }
  std::int64_t size() const { return static_cast<std::int64_t>(size_); }

 private:
  std::size_t size_;
  std::uint64_t pointer_;
};

// A test with a stream, which expects that the driver was used as it may be.
class GpuTest : public ::testing::Test {
 protected:
  void SetUp() override {
    fakecuda_clear();
    stream_ = fakecuda_new_stream(0);
  }
  void TearDown() override {
    fakecuda_finish(stream_);
    EXPECT_TRUE(cuda::Completions::drain_all(std::chrono::seconds(60)));
    for (std::size_t i = 0; i < fakecuda_violation_count(); ++i)
      ADD_FAILURE() << fakecuda_violation_at(i);
    fakecuda_delete_stream(stream_);
    // A worker lets its call go a moment after the stream has passed it.
    auto in_use = [] { return cuda::memory_in_use().pinned + cuda::memory_in_use().device; };
    auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (in_use() != 0 && std::chrono::steady_clock::now() < end) std::this_thread::yield();
    EXPECT_EQ(in_use(), 0U);
  }

  void finish() {
    EXPECT_EQ(fakecuda_finish(stream_), 0);
    EXPECT_TRUE(cuda::Completions::drain_all(std::chrono::seconds(60)));
  }

  void* stream_ = nullptr;
};

// The same in the device's context.
class InContextTest : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    context_.emplace(device_);
  }
  void TearDown() override {
    context_.reset();
    GpuTest::TearDown();
  }
  cuda::Stream stream() const { return static_cast<cuda::Stream>(stream_); }

  cuda::Device& device_ = cuda::Device::at(0);

 private:
  std::optional<cuda::ContextScope> context_;
};

}  // namespace callgate::fake
