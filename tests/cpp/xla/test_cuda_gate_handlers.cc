// SPDX-License-Identifier: Apache-2.0
// Gates and taps in programs for CUDA, against a driver without a GPU: what is copied, who waits
// for what, and what becomes of errors.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <future>
#include <latch>
#include <list>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/call.h"
#include "core/lifecycle.h"
#include "fake_gpu.h"
#include "fake_xla.h"
#include "outcome.h"
#include "xla/handlers.h"

namespace callgate {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsNan;
using Floats = fake::DeviceVector<float>;

// The behaviour that a test wants of a callee on a device.
struct Behaviour {
  OnDevice on_device = OnDevice::kStaged;
  std::function<Outcome(const Call&)> run;
  bool due = true;  // for a deferred call
  bool own_thread = false;
  std::chrono::nanoseconds timeout{0};
  std::vector<Outcome::Failure> deferred;
  int entered_workers = 0;
};

class BehavingSite final : public Site {
 public:
  explicit BehavingSite(Behaviour& behaviour) : behaviour_(behaviour) {}
  void run(const Call& call) override { behaviour_.run(call).raise(); }
  std::optional<std::size_t> reads(const Call& call) override {
    return behaviour_.due ? Site::reads(call) : std::nullopt;
  }

 private:
  Behaviour& behaviour_;
};

class BehavingCallee final : public Callee {
 public:
  explicit BehavingCallee(Behaviour& behaviour) : behaviour_(behaviour) {}
  std::shared_ptr<Site> specialise(SiteSpec /*spec*/) override {
    return std::make_shared<BehavingSite>(behaviour_);
  }
  const std::string& name() const noexcept override { return name_; }
  OnDevice on_device() const noexcept override { return behaviour_.on_device; }
  bool own_thread() const noexcept override { return behaviour_.own_thread; }
  std::chrono::nanoseconds timeout() const noexcept override { return behaviour_.timeout; }
  void defer(const Error& error) override {
    behaviour_.deferred.push_back({error.code(), error.what()});
  }
  void enter_worker(bool of_device) override { behaviour_.entered_workers += of_device; }

 private:
  std::string name_ = "f";
  Behaviour& behaviour_;
};

class CudaGates : public fake::GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    callee_ = std::make_shared<BehavingCallee>(behaviour_);
    Registry::instance().add(callee_);
  }
  void TearDown() override {
    GpuTest::TearDown();
    Registry::instance().remove(*callee_);
    EXPECT_EQ(fake::Runtime::instance().live_errors.load(), 0);
  }

  static fake::Array array(const Floats& memory) {
    return {XLA_FFI_DataType_F32, {memory.size()}, memory.data()};
  }
  static Outcome doubled(const Call& call) {
    const auto* x = static_cast<const float*>(call.operands[0].data);
    auto* y = static_cast<float*>(call.results[0].data);
    for (std::size_t i = 0; i < call.results[0].size(); ++i) y[i] = 2 * x[i];
    return Outcome::success();
  }
  // Work that the program's stream does before or after the call.
  void enqueue(std::function<void()> work) {
    auto* function = &work_.emplace_back(std::move(work));
    fakecuda_enqueue(
        stream_, [](void* data) { (*static_cast<std::function<void()>*>(data))(); }, function,
        nullptr, 0, nullptr, 0);
  }

  Behaviour behaviour_;
  std::shared_ptr<BehavingCallee> callee_;
  std::list<std::function<void()>> work_;
};

TEST_F(CudaGates, AStagedCallSeesWhatTheStreamWroteAndItsResultsFollow) {
  Floats x({1, 2, 3}), y({0, 0, 0}), z({0, 0, 0});
  behaviour_.run = doubled;
  fake::Loaded<fake::CudaGateProgram> program("f", stream_);
  enqueue([&] { x.set({4, 5, 6}); });
  program.run({array(x)}, {array(y)});
  program.run({array(y)}, {array(z)});
  finish();
  EXPECT_THAT(y.values(), ElementsAre(8, 10, 12));
  EXPECT_THAT(z.values(), ElementsAre(16, 20, 24));
}

TEST_F(CudaGates, AStagedCallWaitsForAnEventAndNotForTheStream) {
  Floats x({1}), y({0});
  behaviour_.run = doubled;
  fake::Loaded<fake::CudaGateProgram> program("f", stream_);
  program.run({array(x)}, {array(y)});
  EXPECT_GE(fakecuda_calls("cuEventQuery") + fakecuda_calls("cuEventSynchronize"), 1U);
  EXPECT_EQ(fakecuda_calls("cuStreamSynchronize"), 0U);
  finish();
}

TEST_F(CudaGates, AnAliasedResultIsOneMemoryOnTheHostToo) {
  Floats x({1, 2});
  behaviour_.run = [](const Call& call) {
    EXPECT_EQ(call.operands[0].data, call.results[0].data);
    return doubled(call);
  };
  fake::Loaded<fake::CudaGateProgram> program("f", stream_);
  program.run({array(x)}, {array(x)});
  finish();
  EXPECT_THAT(x.values(), ElementsAre(2, 4));
}

TEST_F(CudaGates, EmptyArraysAndNoneAreCalls) {
  Floats none(std::vector<float>{}), y({7});
  behaviour_.run = [](const Call& call) {
    EXPECT_EQ(call.operands[0].size(), 0U);
    return Outcome::success();
  };
  fake::Loaded<fake::CudaGateProgram> program("f", stream_);
  program.run({array(none)}, {array(none)});
}

TEST_F(CudaGates, AnErrorIsXlasAndNothingIsWritten) {
  Floats x({1}), y({5});
  behaviour_.run = [](const Call&) { return Outcome::failure(ErrorCode::kInternal, "no luck"); };
  fake::Loaded<fake::CudaGateProgram> program("f", stream_);
  EXPECT_THAT(program.execute({array(x)}, {array(y)}).wait().message, HasSubstr("no luck"));
  finish();
  EXPECT_THAT(y.values(), ElementsAre(5));
}

TEST_F(CudaGates, OnSeveralDevicesAnErrorPoisonsTheResults) {
  Floats x({1}), y({5, 6});
  behaviour_.run = [](const Call&) { return Outcome::failure(ErrorCode::kInternal, "no luck"); };
  for (OnDevice how : {OnDevice::kStaged, OnDevice::kNative}) {
    behaviour_.on_device = how;
    y.set({5, 6});
    fake::Loaded<fake::CudaGateProgram> program("f", stream_, {{"on_error", "poison"}});
    program.run({array(x)}, {array(y)});
    finish();
    EXPECT_THAT(y.values(), Each(IsNan()));
  }
  ASSERT_EQ(behaviour_.deferred.size(), 2U);
  EXPECT_THAT(behaviour_.deferred[0].message, HasSubstr("no luck"));
}

TEST_F(CudaGates, OnSeveralDevicesWhatIsThrownPoisonsTheResults) {
  Floats x({1}), y({5, 6});
  behaviour_.run = [](const Call&) -> Outcome { throw std::bad_alloc(); };
  for (OnDevice how : {OnDevice::kStaged, OnDevice::kNative}) {
    behaviour_.on_device = how;
    y.set({5, 6});
    fake::Loaded<fake::CudaGateProgram> program("f", stream_, {{"on_error", "poison"}});
    program.run({array(x)}, {array(y)});
    finish();
    EXPECT_THAT(y.values(), Each(IsNan()));
  }
  ASSERT_EQ(behaviour_.deferred.size(), 2U);
  EXPECT_THAT(behaviour_.deferred[0].message, HasSubstr("bad_alloc"));
}

TEST_F(CudaGates, OnSeveralDevicesACallThatCannotBeginPoisonsTheResults) {
  Floats x({1}), y({5, 6});
  behaviour_.run = doubled;
  cuda::ContextScope of_xla(cuda::Device::at(0));
  for (const char* symbol : {"cuStreamGetCtx", "cuCtxGetCurrent"}) {
    behaviour_.deferred.clear();
    y.set({5, 6});
    fake::Loaded<fake::CudaGateProgram> program("f", stream_, {{"on_error", "poison"}});
    fakecuda_fail(symbol, 719, 0, 1);
    program.run({array(x)}, {array(y)});
    finish();
    EXPECT_THAT(y.values(), Each(IsNan()));
    ASSERT_EQ(behaviour_.deferred.size(), 1U);
    EXPECT_THAT(behaviour_.deferred[0].message, HasSubstr("'f': " + std::string(symbol) + ": "));
  }
}

TEST_F(CudaGates, TheFirstFailureIsToldOfWherePoisonFailsToo) {
  Floats x({1}), y({5});
  behaviour_.run = [](const Call&) { return Outcome::failure(ErrorCode::kInternal, "no luck"); };
  fake::Loaded<fake::CudaGateProgram> program("f", stream_, {{"on_error", "poison"}});
  fakecuda_fail("cuMemsetD8Async", 719, 0, 1);
  program.run({array(x)}, {array(y)});
  finish();
  ASSERT_EQ(behaviour_.deferred.size(), 1U);
  EXPECT_THAT(behaviour_.deferred[0].message, HasSubstr("no luck"));
}

TEST_F(CudaGates, ANativeCallGetsTheDevicesArraysWithoutWaiting) {
  Floats x({1}), y({0});
  fakecuda_hold(stream_);
  behaviour_.on_device = OnDevice::kNative;
  behaviour_.run = [&](const Call& call) {
    EXPECT_EQ(call.operands[0].data, x.data());
    EXPECT_EQ(call.results[0].data, y.data());
    EXPECT_EQ(call.context.stream, stream_);
    EXPECT_EQ(call.context.device, 0);
    return Outcome::success();
  };
  fake::Loaded<fake::CudaGateProgram> program("f", stream_);
  program.run({array(x)}, {array(y)});
  fakecuda_release(stream_);
  EXPECT_EQ(fakecuda_calls("cuEventSynchronize"), 0U);
}

TEST_F(CudaGates, TheStreamsDeviceIsCurrentInTheCallAndWhatWasBeforeIsBack) {
  void* second = fakecuda_new_stream(1);
  cuda::ContextScope outer(cuda::Device::at(0));
  behaviour_.on_device = OnDevice::kNative;
  behaviour_.run = [](const Call& call) {
    EXPECT_EQ(call.context.device, 1);
    Floats made({1}, 1);
    cuda::DeviceBlock block(cuda::Device::at(1), 8);  // fails in another device's context
    return Outcome::success();
  };
  fake::Loaded<fake::CudaGateProgram> program("f", second);
  program.run();
  cuda::DeviceBlock block(cuda::Device::at(0), 8);
  fakecuda_delete_stream(second);
}

TEST_F(CudaGates, ACallOnItsOwnThreadHoldsTheStreamAndNotXla) {
  Floats x({1, 2}), y({0, 0}), z({0, 0});
  std::latch go(1);
  behaviour_.own_thread = true;
  behaviour_.run = [&](const Call& call) {
    go.wait();
    return doubled(call);
  };
  fake::Loaded<fake::CudaGateProgram> program("f", stream_);
  program.run({array(x)}, {array(y)});
  enqueue([&] { z.set(y.values()); });  // the program goes on, behind the call
  EXPECT_EQ(fakecuda_calls("cuStreamSynchronize"), 0U);
  EXPECT_GE(fakecuda_queued(stream_), 1U);
  go.count_down();
  finish();
  EXPECT_THAT(z.values(), ElementsAre(2, 4));
  EXPECT_EQ(behaviour_.entered_workers, 1);
}

TEST_F(CudaGates, WithoutMemoryOperationsAHostFunctionHoldsTheStream) {
  Floats x({3}), y({0});
  fakecuda_fail("cuStreamWaitValue32_v2", 801, 0, -1);
  behaviour_.own_thread = true;
  behaviour_.run = doubled;
  fake::Loaded<fake::CudaGateProgram> program("f", stream_);
  program.run({array(x)}, {array(y)});
  finish();
  EXPECT_THAT(y.values(), ElementsAre(6));
  EXPECT_GE(fakecuda_calls("cuLaunchHostFunc"), 1U);
}

TEST_F(CudaGates, AFailureOnItsOwnThreadIsDeferredAndPoisons) {
  Floats x({3}), y({0});
  behaviour_.own_thread = true;
  behaviour_.run = [](const Call&) -> Outcome { throw std::runtime_error("thrown"); };
  fake::Loaded<fake::CudaGateProgram> program("f", stream_);
  program.run({array(x)}, {array(y)});
  finish();
  EXPECT_THAT(y.values(), Each(IsNan()));
  ASSERT_EQ(behaviour_.deferred.size(), 1U);
  EXPECT_THAT(behaviour_.deferred[0].message, HasSubstr("thrown"));
}

TEST_F(CudaGates, ATimeoutLetsTheStreamGo) {
  Floats x({3}), y({0});
  std::latch given_up(1);
  behaviour_.own_thread = true;
  behaviour_.timeout = std::chrono::milliseconds(20);
  behaviour_.run = [&](const Call& call) {
    given_up.wait();
    return doubled(call);  // into memory that nobody reads any more
  };
  fake::Loaded<fake::CudaGateProgram> program("f", stream_);
  program.run({array(x)}, {array(y)});
  EXPECT_EQ(fakecuda_finish(stream_), 0);
  EXPECT_THAT(y.values(), Each(IsNan()));
  ASSERT_EQ(behaviour_.deferred.size(), 1U);
  EXPECT_EQ(behaviour_.deferred[0].code, ErrorCode::kDeadlineExceeded);
  given_up.count_down();
  while (behaviour_.entered_workers == 0 || cuda::memory_in_use().pinned != 0)
    std::this_thread::yield();  // the call comes to its end
  EXPECT_THAT(y.values(), Each(IsNan()));
}

// The copies of the results, and the event that says when they have ended.
TEST_F(CudaGates, ACallThatCannotBeHandedOnLetsTheStreamGo) {
  for (auto [symbol, after] :
       {std::pair("cuMemcpyHtoDAsync_v2", 0), std::pair("cuEventRecord", 1)}) {
    SCOPED_TRACE(symbol);
    Floats x({3}), y({0});
    int runs = 0;
    behaviour_.own_thread = true;
    behaviour_.timeout = std::chrono::seconds(60);
    behaviour_.run = [&](const Call& call) {
      ++runs;
      return doubled(call);
    };
    fake::Loaded<fake::CudaGateProgram> program("f", stream_);
    fakecuda_fail(symbol, 1, after, 1);
    EXPECT_THAT(program.execute({array(x)}, {array(y)}).wait().message, HasSubstr("CUDA_ERROR"));
    finish();
    EXPECT_EQ(runs, 0);
    EXPECT_TRUE(behaviour_.deferred.empty());
    program.run({array(x)}, {array(y)});  // and the next one runs
    finish();
    EXPECT_THAT(y.values(), ElementsAre(6));
  }
}

TEST_F(CudaGates, ADeferredCallRunsLaterWithWhatTheArraysHeldThen) {
  Floats x({1, 2});
  std::vector<std::vector<float>> seen;
  behaviour_.on_device = OnDevice::kDeferred;
  behaviour_.run = [&](const Call& call) {
    const auto* data = static_cast<const float*>(call.operands[0].data);
    seen.emplace_back(data, data + call.operands[0].size());
    EXPECT_TRUE(call.results.empty());
    return Outcome::success();
  };
  fake::Loaded<fake::CudaGateProgram> program("f", stream_);
  fakecuda_hold(stream_);
  for (float i : {1.0F, 2.0F, 3.0F}) {
    enqueue([&, i] { x.set({i, i}); });
    program.run({array(x)});  // though nothing has run yet
  }
  EXPECT_TRUE(seen.empty());
  fakecuda_release(stream_);
  finish();
  EXPECT_THAT(seen, ElementsAre(ElementsAre(1, 1), ElementsAre(2, 2), ElementsAre(3, 3)));
}

TEST_F(CudaGates, LargeArraysGoAsideAndTheStreamGoesOn) {
  std::vector<float> first(100'000, 1), second(100'000, 2);
  Floats x(first);
  std::vector<float> seen;
  std::vector<std::size_t> order;
  behaviour_.on_device = OnDevice::kDeferred;
  behaviour_.run = [&](const Call& call) {
    order.push_back(call.operands[0].size());
    const auto* data = static_cast<const float*>(call.operands[0].data);
    if (order.size() == 1) seen.assign(data, data + call.operands[0].size());
    return Outcome::success();
  };
  fake::Loaded<fake::CudaGateProgram> program("f", stream_);
  program.run({array(x)});
  enqueue([&] { x.set(second); });  // right behind the call
  Floats small({1});
  program.run({array(small)});
  finish();
  EXPECT_EQ(seen, first);
  EXPECT_THAT(order, ElementsAre(100'000, 1));  // in the program's order all the same
}

TEST_F(CudaGates, NobodyWaitsForRoomOnADeviceThatHasFailed) {
  Floats x(std::vector<float>(70 << 20));  // more than half of what may wait
  int runs = 0;
  behaviour_.on_device = OnDevice::kDeferred;
  behaviour_.run = [&](const Call&) {
    ++runs;
    return Outcome::success();
  };
  fake::Loaded<fake::CudaGateProgram> program("f", stream_);
  fakecuda_hold(stream_);
  program.run({array(x)});
  fakecuda_fail("cuEventRecord", 719, 0, 1);  // as every call does from then on
  EXPECT_THAT(program.execute({array(x)}).wait().message, HasSubstr("'f': cuEventRecord: "));
  fakecuda_release(stream_);
  finish();
  EXPECT_EQ(runs, 1);
}

TEST_F(CudaGates, ADeferredCallsResultsAreItsOperands) {
  Floats x({1, 2}), y({0, 0});
  behaviour_.on_device = OnDevice::kDeferred;
  behaviour_.due = false;
  behaviour_.run = [](const Call&) {
    ADD_FAILURE() << "nothing was to be read";
    return Outcome::success();
  };
  fake::Loaded<fake::CudaGateProgram> program("f", stream_);
  program.run({array(x)}, {array(y)});
  finish();
  EXPECT_THAT(y.values(), ElementsAre(1, 2));
  EXPECT_EQ(fakecuda_calls("cuMemcpyDtoHAsync_v2"), 0U);
}

TEST_F(CudaGates, ADeferredCallsFailureIsKeptForTheNextWhoAsks) {
  Floats x({1});
  behaviour_.on_device = OnDevice::kDeferred;
  behaviour_.run = [](const Call&) { return Outcome::failure(ErrorCode::kInternal, "too late"); };
  fake::Loaded<fake::CudaGateProgram> program("f", stream_);
  program.run({array(x)});
  finish();
  ASSERT_EQ(behaviour_.deferred.size(), 1U);
  EXPECT_EQ(behaviour_.deferred[0].message, "too late");
}

TEST_F(CudaGates, CopiesOfAStreamThatFailedAreNotDelivered) {
  Floats x({1});
  int runs = 0;
  behaviour_.on_device = OnDevice::kDeferred;
  behaviour_.run = [&](const Call&) {
    ++runs;
    return Outcome::success();
  };
  fake::Loaded<fake::CudaGateProgram> program("f", stream_);
  fakecuda_fail_stream(stream_, 700);
  program.run({array(x)});
  fakecuda_finish(stream_);
  EXPECT_TRUE(cuda::Completions::drain_all(std::chrono::seconds(60)));
  EXPECT_EQ(runs, 0);
}

TEST_F(CudaGates, InAGraphADeferredCallRunsOnceAReplay) {
  Floats x({1});
  std::vector<float> seen;
  std::vector<std::int64_t> runs;
  behaviour_.on_device = OnDevice::kDeferred;
  behaviour_.run = [&](const Call& call) {
    seen.push_back(*static_cast<const float*>(call.operands[0].data));
    runs.push_back(call.context.run);
    return Outcome::success();
  };
  {
    fake::Loaded<fake::CudaGateProgram> program("f", stream_);
    ASSERT_EQ(fakecuda_begin_capture(stream_), 0);
    program.run({array(x)});
    void* graph = fakecuda_end_capture(stream_);
    ASSERT_NE(graph, nullptr);
    EXPECT_TRUE(seen.empty());
    for (float i : {5.0F, 6.0F}) {
      x.set({i});
      ASSERT_EQ(fakecuda_replay(graph, stream_), 0);
      ASSERT_EQ(fakecuda_finish(stream_), 0);
    }
    EXPECT_TRUE(cuda::Completions::drain_all(std::chrono::seconds(60)));
    fakecuda_delete_graph(graph);
  }
  EXPECT_THAT(seen, ElementsAre(5, 6));
  EXPECT_THAT(runs, Each(-1)) << "no replay tells which run it is of";
}

TEST_F(CudaGates, LargeArraysGoAsideBehindAGraphToo) {
  Floats x({1}), large(std::vector<float>(100'000, 2));
  std::vector<std::size_t> order;
  behaviour_.on_device = OnDevice::kDeferred;
  behaviour_.run = [&](const Call& call) {
    order.push_back(call.operands[0].size());
    return Outcome::success();
  };
  fake::Loaded<fake::CudaGateProgram> program("f", stream_);
  ASSERT_EQ(fakecuda_begin_capture(stream_), 0);
  program.run({array(x)});
  void* graph = fakecuda_end_capture(stream_);
  void* side = [] {
    cuda::Device& device = cuda::Device::at(0);
    cuda::ContextScope current(device);
    return device.side_stream(cuda::Device::Direction::kToHost);
  }();
  fakecuda_hold(side);
  program.run({array(large)});
  ASSERT_EQ(fakecuda_replay(graph, stream_), 0);
  program.run({array(x)});
  ASSERT_EQ(fakecuda_finish(stream_), 0) << "it does not wait for the copy";
  EXPECT_TRUE(order.empty());
  fakecuda_release(side);
  EXPECT_TRUE(cuda::Completions::drain_all(std::chrono::seconds(60)));
  EXPECT_THAT(order, ElementsAre(100'000, 1, 1));
  fakecuda_delete_graph(graph);
}

// A host function may not call CUDA, and whoever has what it waits for may wait for the stream.
TEST_F(CudaGates, AReplayRunsNothingInAHostFunction) {
  Floats x({1});
  std::thread::id ran_on, host_function;
  behaviour_.on_device = OnDevice::kDeferred;
  behaviour_.run = [&](const Call&) {
    ran_on = std::this_thread::get_id();
    EXPECT_NO_THROW(cuda::PinnedBlock(64));  // which may ask the driver
    return Outcome::failure(ErrorCode::kInternal, "too late");
  };
  fake::Loaded<fake::CudaGateProgram> program("f", stream_);
  ASSERT_EQ(fakecuda_begin_capture(stream_), 0);
  program.run({array(x)});
  enqueue([&] { host_function = std::this_thread::get_id(); });
  void* graph = fakecuda_end_capture(stream_);
  ASSERT_EQ(fakecuda_replay(graph, stream_), 0);
  ASSERT_EQ(fakecuda_finish(stream_), 0);
  EXPECT_TRUE(cuda::Completions::drain_all(std::chrono::seconds(60)));
  EXPECT_NE(ran_on, std::thread::id());
  EXPECT_NE(ran_on, host_function);
  ASSERT_EQ(behaviour_.deferred.size(), 1U);
  EXPECT_EQ(behaviour_.deferred[0].message, "too late");
  fakecuda_delete_graph(graph);
}

// With the pools full a block that comes back is freed, which a graph's destructor must not do.
TEST_F(CudaGates, AGraphThatDiesCallsNoFunctionOfTheDrivers) {
  constexpr std::size_t kMore =
      (std::size_t{300} << 20) / sizeof(float);  // than a pool has room for
  Floats x(std::vector<float>(kMore, 1.0F));
  {
    cuda::ContextScope current(cuda::Device::at(0));
    cuda::trim_memory();
    cuda::PinnedBlock most(std::size_t{500} << 20);
  }
  behaviour_.on_device = OnDevice::kDeferred;
  behaviour_.run = [](const Call&) { return Outcome::success(); };
  fake::Loaded<fake::CudaGateProgram> program("f", stream_);
  ASSERT_EQ(fakecuda_begin_capture(stream_), 0);
  program.run({array(x)});
  void* graph = fakecuda_end_capture(stream_);
  ASSERT_NE(graph, nullptr);
  const std::size_t freed = fakecuda_calls("cuMemFreeHost");
  fakecuda_delete_graph(graph);
  EXPECT_TRUE(cuda::Completions::drain_all(std::chrono::seconds(60)));
  EXPECT_EQ(fakecuda_calls("cuMemFreeHost"), freed + 1) << "and freed it is, elsewhere";
}

// The stream waits for the call, and who ends the process for the stream.
TEST_F(CudaGates, ACallOnItsOwnThreadThatComesTooLateIsRefused) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  auto late = [this] {
    Floats x({3}), y({0});
    behaviour_.own_thread = true;
    behaviour_.run = doubled;
    fake::CudaGateProgram program("f", stream_);
    bool good = program.load().ok();
    good = Lifecycle::instance().close(std::chrono::seconds(1)) && good;
    good = cuda::Completions::stop_all(std::chrono::seconds(1)) && good;
    const fake::Status status = program.execute({array(x)}, {array(y)}).wait();
    good = status.message.find("while the process is ending") != std::string::npos && good;
    fakecuda_finish(stream_);
    std::_Exit(good ? 0 : 1);
  };
  EXPECT_EXIT(late(), ::testing::ExitedWithCode(0), "");
}

TEST_F(CudaGates, ThePartitionIsReadFromTheDevice) {
  Floats x({1}), y({9});
  fake::DeviceVector<std::uint32_t> number({1});
  std::vector<std::int32_t> shards;
  behaviour_.run = [&](const Call& call) {
    EXPECT_EQ(call.operands.size(), 1U);
    shards.push_back(call.context.shard);
    return Outcome::success();
  };
  fake::Array partition{XLA_FFI_DataType_U32, {}, number.data()};
  for (OnDevice how : {OnDevice::kStaged, OnDevice::kDeferred, OnDevice::kNative}) {
    behaviour_.on_device = how;
    fake::Loaded<fake::CudaGateProgram> program("f", stream_, {{"shards", "01"}});
    std::vector<fake::Array> results;
    if (how != OnDevice::kDeferred) results.push_back(array(y));
    program.run({array(x), partition}, results);
    program.run({array(x), partition}, results);
    finish();
  }
  EXPECT_THAT(shards, ElementsAre(1, 1, 1, 1, 1, 1));
}

TEST_F(CudaGates, APartitionThatDoesNotCallHasZeros) {
  Floats x({1});
  fake::DeviceVector<std::uint32_t> number({1});
  behaviour_.run = [](const Call&) {
    ADD_FAILURE() << "another device was to make the call";
    return Outcome::success();
  };
  fake::Array partition{XLA_FFI_DataType_U32, {}, number.data()};
  for (OnDevice how : {OnDevice::kStaged, OnDevice::kDeferred, OnDevice::kNative}) {
    behaviour_.on_device = how;
    Floats y({9});
    fake::Loaded<fake::CudaGateProgram> program("f", stream_, {{"shards", "10"}});
    std::vector<fake::Array> results;
    if (how != OnDevice::kDeferred) results.push_back(array(y));
    program.run({array(x), partition}, results);
    finish();
    EXPECT_THAT(y.values(), ElementsAre(results.empty() ? 9 : 0));
  }
}

TEST_F(CudaGates, OutOfPinnedMemoryIsAnErrorByName) {
  Floats x({1}), y({0});
  behaviour_.run = doubled;
  cuda::trim_memory();
  fakecuda_fail("cuMemHostAlloc", 2, 0, -1);
  fake::Loaded<fake::CudaGateProgram> program("f", stream_);
  EXPECT_THAT(program.execute({array(x)}, {array(y)}).wait().message,
              HasSubstr("cuMemHostAlloc: CUDA_ERROR_OUT_OF_MEMORY"));
}

TEST_F(CudaGates, AXlaWithoutAStreamIsAnError) {
  behaviour_.run = doubled;
  fake::Loaded<fake::CudaGateProgram> program("f", nullptr);
  EXPECT_THAT(program.execute().wait().message, HasSubstr("no stream"));
}

TEST(CudaGateMetadata, GraphsMayHoldTapsAndGatesThatSaySo) {
  XLA_FFI_Metadata metadata;
  ASSERT_TRUE(fake::query_metadata(&xla_ffi::cuda_graph_execute, metadata).ok());
  EXPECT_EQ(metadata.traits, XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE);
  ASSERT_TRUE(fake::query_metadata(&xla_ffi::cuda_gate_execute, metadata).ok());
  EXPECT_EQ(metadata.traits, 0U);
}

}  // namespace
}  // namespace callgate
