// SPDX-License-Identifier: Apache-2.0
// A call's arrays in the host's memory and back: contents, aliases, order, errors, leaks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <list>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "core/error.h"
#include "cuda/completions.h"
#include "cuda/copies.h"
#include "cuda/driver.h"
#include "fake_gpu.h"

namespace callgate::cuda {
namespace {

using namespace std::chrono_literals;
using ::testing::Each;
using ::testing::ElementsAre;
using Floats = fake::DeviceVector<float>;

class HostCopiesTest : public fake::InContextTest {
 protected:
  ArrayView view(const Floats& array) {
    dims_.push_back({array.size()});
    return {array.data(), dims_.back().data(), 1, DType::kF32};
  }
  static std::vector<float> values(const ArrayView& view) {
    std::vector<float> values(view.size());
    std::memcpy(values.data(), view.data, view.nbytes());
    return values;
  }
  static void write(const ArrayView& view, const std::vector<float>& values) {
    std::memcpy(view.data, values.data(), view.nbytes());
  }
  std::vector<ArrayView> views(std::initializer_list<const Floats*> arrays) {
    std::vector<ArrayView> all;
    for (const Floats* array : arrays) all.push_back(view(*array));
    return all;
  }

 private:
  std::list<std::vector<std::int64_t>> dims_;
};

TEST_F(HostCopiesTest, OperandsComeAndResultsGo) {
  Floats a({1, 2, 3}), b({4, 5}), c({0, 0}), d({0, 0, 0, 0});
  HostCopies copies(device_, views({&a, &b}), views({&c, &d}));
  copies.fetch(stream());
  EXPECT_EQ(fakecuda_finish(stream_), 0);
  EXPECT_THAT(values(copies.operands()[0]), ElementsAre(1, 2, 3));
  EXPECT_THAT(values(copies.operands()[1]), ElementsAre(4, 5));
  write(copies.results()[0], {6, 7});
  write(copies.results()[1], {8, 9, 10, 11});
  copies.publish(stream());
  EXPECT_EQ(fakecuda_finish(stream_), 0);
  EXPECT_THAT(c.values(), ElementsAre(6, 7));
  EXPECT_THAT(d.values(), ElementsAre(8, 9, 10, 11));
}

TEST_F(HostCopiesTest, ViewsHaveShapesOfTheirOwn) {
  Floats a({1, 2, 3, 4, 5, 6});
  std::vector<std::int64_t> dims{2, 3};
  std::vector<ArrayView> operands{{a.data(), dims.data(), 2, DType::kF32}};
  HostCopies copies(device_, operands, {});
  dims = {9, 9};
  operands.clear();
  EXPECT_THAT(copies.operands()[0].shape(), ElementsAre(2, 3));
  HostCopies moved = std::move(copies);
  EXPECT_THAT(moved.operands()[0].shape(), ElementsAre(2, 3));
}

TEST_F(HostCopiesTest, HostMemoryIsAlignedAndPinned) {
  Floats a({1}), b({2, 3}), c({0});
  HostCopies copies(device_, views({&a, &b}), views({&c}));
  for (const ArrayView& view : copies.operands())
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(view.data) % 64, 0U);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(copies.results()[0].data) % 64, 0U);
  EXPECT_EQ(copies.operand_bytes(), 128U);
  copies.fetch(stream());
  EXPECT_EQ(fakecuda_finish(stream_), 0);  // a copy to other memory would be a violation
}

TEST_F(HostCopiesTest, AResultInAnOperandsMemoryIsSoOnTheHost) {
  Floats a({1, 2}), b({3, 4});
  HostCopies copies(device_, views({&a, &b}), views({&b}));
  EXPECT_EQ(copies.results()[0].data, copies.operands()[1].data);
  copies.fetch(stream());
  EXPECT_EQ(fakecuda_finish(stream_), 0);
  write(copies.operands()[1], {30, 40});
  copies.publish(stream());
  EXPECT_EQ(fakecuda_finish(stream_), 0);
  EXPECT_THAT(a.values(), ElementsAre(1, 2));
  EXPECT_THAT(b.values(), ElementsAre(30, 40));
}

TEST_F(HostCopiesTest, EmptyArraysAreNotCopied) {
  std::vector<std::int64_t> dims{0, 3};
  std::vector<ArrayView> empty{{nullptr, dims.data(), 2, DType::kF32}};
  HostCopies copies(device_, empty, empty);
  copies.fetch(stream());
  EXPECT_EQ(copies.fetch_aside(stream()).wait(), Result::kSuccess);
  copies.publish(stream());
  poison_on_device(empty, stream());
  clear_on_device(empty, stream());
  EXPECT_EQ(fakecuda_calls("cuMemcpyDtoHAsync_v2"), 0U);
  EXPECT_EQ(fakecuda_calls("cuMemcpyHtoDAsync_v2"), 0U);
  EXPECT_EQ(fakecuda_calls("cuMemsetD8Async"), 0U);
}

TEST_F(HostCopiesTest, CallsWithoutArraysWork) {
  HostCopies copies(device_, {}, {});
  copies.fetch(stream());
  copies.publish(stream());
  EXPECT_EQ(copies.operand_bytes(), 0U);
}

TEST_F(HostCopiesTest, FetchingWaitsForNobody) {
  Floats a({1, 2});
  fakecuda_hold(stream_);
  HostCopies copies(device_, views({&a}), {});
  copies.fetch(stream());
  a.set({3, 4});  // the copy has not begun
  fakecuda_release(stream_);
  EXPECT_EQ(fakecuda_finish(stream_), 0);
  EXPECT_THAT(values(copies.operands()[0]), ElementsAre(3, 4));
}

// The program overwrites its array while the copy to the host has not even begun.
TEST_F(HostCopiesTest, FetchedAsideTheProgramGoesOnAtOnce) {
  std::vector<float> many(100'000);
  std::iota(many.begin(), many.end(), 0.0F);
  Floats a(many), b({5, 6, 7});
  HostCopies copies(device_, views({&a, &b}), {});
  fakecuda_hold_all(1);
  fakecuda_release(stream_);
  StreamEvent end = copies.fetch_aside(stream());
  EXPECT_EQ(driver().set_8(a.pointer(), 0, many.size() * sizeof(float), stream()),
            Result::kSuccess);
  StreamEvent overwritten(device_, stream());
  fakecuda_hold_all(0);
  EXPECT_EQ(overwritten.wait(), Result::kSuccess);
  EXPECT_EQ(end.wait(), Result::kSuccess);
  EXPECT_EQ(values(copies.operands()[0]), many);
  EXPECT_THAT(values(copies.operands()[1]), ElementsAre(5, 6, 7));
  EXPECT_THAT(a.values(), Each(0.0F));
}

TEST_F(HostCopiesTest, CopiesAsideAreOrderedAmongThemselves) {
  Floats a({1, 2});
  for (int round = 0; round < 20; ++round) {
    HostCopies copies(device_, views({&a}), {});
    StreamEvent end = copies.fetch_aside(stream());
    EXPECT_EQ(end.wait(), Result::kSuccess);
    EXPECT_THAT(values(copies.operands()[0]), ElementsAre(1, 2));
  }
  EXPECT_LE(fakecuda_calls("cuMemAlloc_v2"), 1U);  // one block serves all
}

TEST_F(HostCopiesTest, MemoryIsKeptUntilTheStreamIsDone) {
  Floats a({1, 2});
  auto copies = std::make_shared<HostCopies>(device_, std::span<const ArrayView>(), views({&a}));
  write(copies->results()[0], {8, 9});
  fakecuda_hold(stream_);
  copies->publish(stream());
  keep_until(device_, stream(), std::move(copies));
  EXPECT_GT(memory_in_use().pinned, 0U);
  // Another call's memory must be another while this one's is to be copied.
  HostCopies other(device_, {}, views({&a}));
  write(other.results()[0], {0, 0});
  fakecuda_release(stream_);
  finish();
  EXPECT_THAT(a.values(), ElementsAre(8, 9));
}

TEST_F(HostCopiesTest, WithoutMemoryThereIsAnErrorAndNoLeak) {
  Floats a({1, 2});
  trim_memory();
  fakecuda_fail("cuMemHostAlloc", 2, 0, -1);
  EXPECT_THROW(HostCopies(device_, views({&a}), {}), Error);
  fakecuda_clear();
  HostCopies copies(device_, views({&a}), {});
  fakecuda_fail("cuMemAlloc_v2", 2, 0, -1);
  EXPECT_THROW(copies.fetch_aside(stream()), Error);
  EXPECT_EQ(memory_in_use().device, 0U);
}

TEST_F(HostCopiesTest, LargeCopiesMayBeKeptAndOutliveTheCall) {
  Floats small({1, 2}), large(std::vector<float>(1 << 18, 3));
  EXPECT_EQ(HostCopies(device_, views({&large}), {}).memory(), nullptr);
  EXPECT_EQ(HostCopies(device_, views({&small}), {}, /*for_keeping=*/true).memory(), nullptr);
  std::shared_ptr<void> kept;
  const float* data = nullptr;
  {
    HostCopies copies(device_, views({&small, &large}), {}, /*for_keeping=*/true);
    EXPECT_EQ(copies.fetch_aside(stream()).wait(), Result::kSuccess);
    kept = copies.memory();
    data = static_cast<const float*>(copies.operands()[1].data);
  }
  ASSERT_NE(kept, nullptr);
  EXPECT_EQ(data[0], 3);
  EXPECT_EQ(data[(1 << 18) - 1], 3);
  HostCopies other(device_, views({&large}), {}, /*for_keeping=*/true);
  EXPECT_NE(other.operands()[0].data, data) << "somebody has it";
  fakecuda_fail("cuMemHostRegister_v2", 801, 0, -1);
  trim_memory();
  HostCopies next(device_, views({&large}), {}, /*for_keeping=*/true);
  EXPECT_EQ(next.memory(), nullptr) << "the driver has other memory";
  EXPECT_NE(next.operands()[0].data, nullptr);
}

TEST_F(HostCopiesTest, ACopyThatIsRefusedIsAnError) {
  Floats a({1, 2});
  for (const char* symbol :
       {"cuMemcpyDtoDAsync_v2", "cuMemcpyDtoHAsync_v2", "cuEventRecord", "cuStreamWaitEvent"}) {
    HostCopies copies(device_, views({&a}), {});
    fakecuda_fail(symbol, 719, 0, 1);
    EXPECT_THROW(copies.fetch_aside(stream()), Error) << symbol;
    EXPECT_EQ(fakecuda_finish(stream_), 0);
  }
  HostCopies copies(device_, {}, views({&a}));
  fakecuda_fail("cuMemcpyHtoDAsync_v2", 719, 0, 1);
  EXPECT_THROW(copies.publish(stream()), Error);
}

TEST_F(HostCopiesTest, WhereCopiesWereRefusedNoneIsUnderWay) {
  Floats a({1, 2}), b({3});
  fakecuda_delay_copies(2000);
  auto side = device_.side_stream(Device::Direction::kToHost);
  struct Refused {
    const char* symbol;
    int after;
  };
  for (auto [symbol, after] : {Refused{"cuMemcpyDtoHAsync_v2", 1}, Refused{"cuEventRecord", 0}}) {
    HostCopies copies(device_, views({&a, &b}), {});
    fakecuda_fail(symbol, 719, after, 1);
    EXPECT_THROW(copies.fetch_with_event(stream(), Device::Waiting::kAsking), Error) << symbol;
    EXPECT_EQ(fakecuda_queued(stream_), 0U) << symbol;
  }
  for (int event : {0, 1}) {
    HostCopies copies(device_, views({&a, &b}), {});
    fakecuda_fail("cuEventRecord", 719, event, 1);
    EXPECT_THROW(copies.fetch_aside(stream()), Error) << event;
    EXPECT_EQ(fakecuda_queued(event == 0 ? stream_ : side), 0U) << event;
    EXPECT_EQ(fakecuda_finish(stream_), 0);
  }
  auto copies = std::make_shared<HostCopies>(device_, std::span<const ArrayView>(), views({&a}));
  write(copies->results()[0], {8, 9});
  copies->publish(stream());
  fakecuda_fail("cuEventRecord", 719, 0, 1);
  EXPECT_THROW(keep_until(device_, stream(), std::move(copies)), Error);
  EXPECT_EQ(fakecuda_queued(stream_), 0U);
  EXPECT_THAT(a.values(), ElementsAre(8, 9));
}

TEST_F(HostCopiesTest, PoisonIsNanOrZero) {
  Floats a({1, 2});
  fake::DeviceVector<std::int32_t> b({3, 4});
  std::int64_t two = 2;
  std::vector<ArrayView> views{{a.data(), &two, 1, DType::kF32}, {b.data(), &two, 1, DType::kS32}};
  poison_on_device(views, stream());
  EXPECT_EQ(fakecuda_finish(stream_), 0);
  EXPECT_TRUE(std::isnan(a.values()[0]) && std::isnan(a.values()[1]));
  EXPECT_THAT(b.values(), Each(0));
  clear_on_device(std::span(views).first(1), stream());
  EXPECT_EQ(fakecuda_finish(stream_), 0);
  EXPECT_THAT(a.values(), Each(0.0F));
}

}  // namespace
}  // namespace callgate::cuda
