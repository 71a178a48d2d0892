// SPDX-License-Identifier: Apache-2.0
// Copies that run ahead to a device, and copies that stay there, against a driver without a GPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "channel/tap.h"
#include "channel_fixtures.h"
#include "core/call.h"
#include "cuda/copies.h"
#include "fake_gpu.h"
#include "fake_xla.h"
#include "xla/handlers.h"

namespace callgate {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Floats = fake::DeviceVector<float>;

class CudaUploads : public fake::GpuTest {
 protected:
  static std::shared_ptr<cuda::Upload> upload(const std::vector<float>& values) {
    std::int64_t size = static_cast<std::int64_t>(values.size());
    ArrayView type{nullptr, &size, 1, DType::kF32};
    auto made = std::make_shared<cuda::Upload>(cuda::Device::at(0), std::span(&type, 1));
    std::copy(values.begin(), values.end(), static_cast<float*>(made->host()[0].data));
    return made;
  }
  void give(const std::shared_ptr<cuda::Upload>& made, const Floats& to) {
    std::array<void*, 1> targets{to.data()};
    cuda::Upload::give(made, targets, static_cast<cuda::Stream>(stream_));
  }
};

TEST_F(CudaUploads, TheCopyRunsAheadAndTheProgramsStreamTakesItsOwn) {
  Floats x({0, 0, 0});
  fakecuda_hold(stream_);
  std::shared_ptr<cuda::Upload> made = upload({1, 2, 3});
  made->start();
  EXPECT_EQ(fakecuda_calls("cuMemcpyHtoDAsync_v2"), 1U);
  give(made, x);
  made.reset();  // lives until the stream has come by
  EXPECT_GT(cuda::memory_in_use().pinned, 0U);
  fakecuda_release(stream_);
  finish();
  EXPECT_THAT(x.values(), ElementsAre(1, 2, 3));
  EXPECT_EQ(fakecuda_calls("cuStreamSynchronize"), 0U);
}

TEST_F(CudaUploads, OneMayBeGivenTwice) {
  Floats x({0}), y({0});
  std::shared_ptr<cuda::Upload> made = upload({5});
  made->start();
  give(made, x);
  give(made, y);
  made.reset();
  finish();
  EXPECT_EQ(x.values(), y.values());
  EXPECT_THAT(x.values(), ElementsAre(5));
}

TEST_F(CudaUploads, OneThatNobodyTakesIsFreedWhenItsCopyHasEnded) {
  fakecuda_delay_copies(20'000);
  std::shared_ptr<cuda::Upload> made = upload({1, 2});
  made->start();
  made.reset();
  fakecuda_delay_copies(0);
  EXPECT_TRUE(cuda::Completions::drain_all(std::chrono::seconds(60)));
  EXPECT_EQ(cuda::memory_in_use().pinned, 0U);
}

TEST_F(CudaUploads, MemoryIsKeptForACopyOfWhichTheDriverCantTell) {
  cuda::Stream side = cuda::Device::at(0).side_stream(cuda::Device::Direction::kToDevice);
  fakecuda_hold(side);
  std::shared_ptr<cuda::Upload> made = upload({1, 2});
  made->start();
  fakecuda_fail("cuEventQuery", 719, 0, 1);        // where it dies
  fakecuda_fail("cuEventSynchronize", 719, 0, 1);  // on the thread that waits for it
  made.reset();
  EXPECT_TRUE(fake::eventually([] { return fakecuda_calls("cuEventSynchronize") == 2; }));
  EXPECT_FALSE(cuda::Completions::drain_all(std::chrono::milliseconds(20)));
  EXPECT_GT(cuda::memory_in_use().pinned, 0U);
  fakecuda_release(side);
  EXPECT_TRUE(cuda::Completions::drain_all(std::chrono::seconds(60)));
  EXPECT_EQ(cuda::memory_in_use().pinned, 0U);
}

TEST_F(CudaUploads, OneThatWasNotStartedIsFree) {
  upload({1, 2});
  EXPECT_EQ(cuda::memory_in_use().device, 0U);
}

TEST_F(CudaUploads, EmptyArraysAreArrays) {
  std::shared_ptr<cuda::Upload> made = upload({});
  made->start();
  Floats x({4});
  give(made, x);
  made.reset();
  finish();
  EXPECT_THAT(x.values(), ElementsAre(4));
}

TEST_F(CudaUploads, WithoutMemoryThereIsAnErrorByName) {
  cuda::trim_memory();
  fakecuda_fail("cuMemAlloc_v2", 2, 0, -1);
  try {
    upload({1});
    ADD_FAILURE() << "there was no memory to be had";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY"));
  }
  EXPECT_EQ(cuda::memory_in_use().pinned, 0U);
}

TEST_F(CudaUploads, CopiesThatStayHoldWhatTheArraysHeldThen) {
  Floats x({1, 2}), y({3});
  std::int64_t two = 2, one = 1;
  std::vector<ArrayView> arrays{{x.data(), &two, 1, DType::kF32}, {y.data(), &one, 1, DType::kF32}};
  {
    cuda::ContextScope current(cuda::Device::at(0));
    cuda::KeptCopies kept(cuda::Device::at(0), static_cast<cuda::Stream>(stream_), arrays);
    EXPECT_EQ(fakecuda_finish(stream_), 0);
    x.set({8, 9});
    std::vector<float> copied(2);
    for (const ArrayView& view : kept.arrays())
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(view.data) % 256, 0U);
    fakecuda_read(copied.data(), reinterpret_cast<std::uint64_t>(kept.arrays()[0].data), 8);
    EXPECT_THAT(copied, ElementsAre(1, 2));
    EXPECT_GT(cuda::memory_in_use().device, 0U);
    fakecuda_hold(stream_);
  }
  EXPECT_GT(cuda::memory_in_use().device, 0U);  // a program may still read them
  fakecuda_release(stream_);
  finish();
  EXPECT_EQ(cuda::memory_in_use().device, 0U);
}

// A consumer of records whose arrays are on a device.
class Holder final : public Consumer {
 public:
  void consume(std::span<const Record> records) override {
    for (const Record& record : records) {
      RecordViews views(*record.source);
      views.each_lane(record, [&](std::int64_t lane, std::span<const ArrayView> leaves) {
        float value = 0;
        fakecuda_read(&value, reinterpret_cast<std::uint64_t>(leaves[0].data), sizeof(value));
        seen.emplace_back(lane, value);
      });
    }
  }
  bool takes_device_arrays() const noexcept override { return true; }

  std::vector<std::pair<std::int64_t, float>> seen;
};

class CudaKeptTaps : public fake::GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    channel_ = std::make_shared<Channel>(
        ChannelOptions{"kept", 1 << 16},
        [this](const Channel&, const Consumer&, const auto& text) { errors_.push_back(text); });
    Channels::instance().slot("kept").open(channel_);
    callee_ = std::make_shared<TapCallee>("tap", "kept", nullptr);
    Registry::instance().add(callee_);
  }
  void TearDown() override {
    Channels::instance().slot("kept").vacate(*channel_);
    channel_->close(std::nullopt);
    GpuTest::TearDown();
    Registry::instance().remove(*callee_);
  }

  static fake::AttributeMap kept(bool where) {
    return fake::tap("t", {""}, {{"where", where}, {"on_device", true}});
  }
  void deliver() {
    finish();
    EXPECT_TRUE(channel_->flush(std::chrono::seconds(60)));
  }

  std::shared_ptr<Channel> channel_;
  std::shared_ptr<TapCallee> callee_;
  std::vector<std::string> errors_;
};

TEST_F(CudaKeptTaps, ConsumersSeeTheDevicesMemoryOfEachLaneThatIsSent) {
  auto holder = std::make_shared<Holder>();
  channel_->add(holder);
  Floats x({4, 5, 6});
  fake::DeviceVector<std::uint8_t> where({1, 0, 1});
  fake::Loaded<fake::CudaGateProgram> program(
      "tap", stream_, fake::with(kept(true), {{"batch", fake::levels("3:11")}}));
  fake::Array values{XLA_FFI_DataType_F32, {3}, x.data()};
  fake::Array mask{XLA_FFI_DataType_PRED, {3}, where.data()};
  program.run({values, mask});
  deliver();
  EXPECT_THAT(holder->seen, ElementsAre(std::pair(0, 4.0F), std::pair(2, 6.0F)));
  EXPECT_TRUE(cuda::Completions::drain_all(std::chrono::seconds(60)));
  EXPECT_EQ(cuda::memory_in_use().device, 0U);
}

TEST_F(CudaKeptTaps, AConsumerOfTheHostIsRefusedAndTheRecordCounts) {
  class HostConsumer final : public Consumer {
   public:
    void consume(std::span<const Record>) override { ADD_FAILURE() << "it can't read a device"; }
  };
  channel_->add(std::make_shared<HostConsumer>());
  Floats x({4});
  fake::Loaded<fake::CudaGateProgram> program("tap", stream_, kept(false));
  program.run({{XLA_FFI_DataType_F32, {1}, x.data()}});
  deliver();
  ASSERT_EQ(errors_.size(), 1U);
  EXPECT_THAT(errors_[0], HasSubstr("tap 't' has on_device=True"));
  EXPECT_EQ(channel_->stats().delivered, 1U);
}

TEST_F(CudaKeptTaps, WithoutMemoryForTheCopiesTheRecordCountsAsDropped) {
  for (const char* symbol : {"cuMemHostAlloc", "cuMemAlloc_v2"}) {
    SCOPED_TRACE(symbol);
    Floats x({4});
    const auto before = channel_->stats().dropped;
    EXPECT_TRUE(cuda::Completions::drain_all(std::chrono::seconds(60)));
    cuda::trim_memory();
    fake::Loaded<fake::CudaGateProgram> program("tap", stream_, kept(false));
    fakecuda_fail(symbol, 2, 0, -1);
    program.run({{XLA_FFI_DataType_F32, {1}, x.data()}});
    fakecuda_clear();
    EXPECT_EQ(channel_->stats().dropped, before + 1);
    EXPECT_EQ(channel_->stats().delivered, 0U);
  }
}

TEST_F(CudaKeptTaps, NobodyRecordsItIntoAGraph) {
  Floats x({4});
  fake::Loaded<fake::CudaGateProgram> program("tap", stream_, kept(false));
  ASSERT_EQ(fakecuda_begin_capture(stream_), 0);
  EXPECT_THAT(program.execute({{XLA_FFI_DataType_F32, {1}, x.data()}}).wait().message,
              HasSubstr("not recorded into a CUDA graph"));
  fakecuda_delete_graph(fakecuda_end_capture(stream_));
}

}  // namespace
}  // namespace callgate
