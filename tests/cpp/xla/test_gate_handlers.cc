// SPDX-License-Identifier: Apache-2.0
// The handlers of `callgate.gate`, driven as XLA drives them, with callees made of C++ functions.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <latch>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "channel_fixtures.h"
#include "core/call.h"
#include "core/lifecycle.h"
#include "core/threads.h"
#include "fake_callee.h"
#include "fake_xla.h"

namespace callgate {
namespace {

using fake::eventually;
using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Options = fake::FunctionCallee::Options;

// The process's threads end with the test program, as at Python's exit.
class Threads : public ::testing::Environment {
 public:
  void TearDown() override {
    WorkerPool::instance().stop();
    Watchdog::instance().stop();
  }
};
[[maybe_unused]] const ::testing::Environment* const kThreadsEnd =
    ::testing::AddGlobalTestEnvironment(new Threads());

std::shared_ptr<Callee> define(std::string name, fake::FunctionSite::Function function,
                               Options options = {}) {
  auto callee = std::make_shared<fake::FunctionCallee>(std::move(name), std::move(function),
                                                       std::move(options));
  Registry::instance().add(callee);
  return callee;
}

Options on_own_thread(std::chrono::nanoseconds timeout = {}) {
  Options options;
  options.own_thread = true;
  options.timeout = timeout;
  return options;
}

fake::Array vector_of(std::vector<float>& memory) {
  return {XLA_FFI_DataType_F32, {static_cast<std::int64_t>(memory.size())}, memory.data()};
}

// result[i] = 2 operand[i]
Outcome twice(const Call& call) {
  const auto* x = static_cast<const float*>(call.operands[0].data);
  auto* y = static_cast<float*>(call.results[0].data);
  for (std::size_t i = 0; i < call.operands[0].size(); ++i) y[i] = 2 * x[i];
  return Outcome::success();
}

// Every test leaves no call inside, no callee alive and no error that nobody destroyed.
class GateHandlers : public ::testing::Test {
 protected:
  void TearDown() override {
    EXPECT_TRUE(eventually([] { return Lifecycle::instance().active() == 0; }));
    EXPECT_TRUE(eventually([] { return Registry::instance().names().empty(); }));
    EXPECT_EQ(fake::Runtime::instance().live_errors.load(), 0);
  }
};

TEST_F(GateHandlers, MetadataCarriesTheVersionAndTheStatesType) {
  XLA_FFI_Metadata instantiate, execute;
  ASSERT_TRUE(fake::query_metadata(xla_ffi::gate_instantiate, instantiate).ok());
  ASSERT_TRUE(fake::query_metadata(xla_ffi::gate_execute, execute).ok());
  EXPECT_EQ(instantiate.api_version.minor_version, XLA_FFI_API_MINOR);
  EXPECT_EQ(execute.api_version.minor_version, XLA_FFI_API_MINOR);
  EXPECT_GT(instantiate.state_type_id.type_id, 0);
}

TEST_F(GateHandlers, AnUnknownNameIsAnErrorThatNamesIt) {
  fake::Program program("no.such.gate");
  fake::Status status = program.load();
  EXPECT_EQ(status.code, XLA_FFI_Error_Code_NOT_FOUND);
  EXPECT_THAT(status.message, HasSubstr("'no.such.gate'"));
}

TEST_F(GateHandlers, ASiteIsBoundOnceWithItsAttributes) {
  std::vector<SiteSpec> seen;
  Options options;
  options.on_specialise = [&](SiteSpec spec) { seen.push_back(std::move(spec)); };
  auto callee = define("f", [](const Call&) { return Outcome::success(); }, options);
  fake::Program program(
      "f", {{"spec", "(x)"}, {"site", "model.py:12"}, {"batch", fake::levels("3:1;4:0")}});
  ASSERT_TRUE(program.load().ok());
  for (int i = 0; i < 3; ++i) program.run();
  ASSERT_EQ(seen.size(), 1U);
  EXPECT_EQ(seen[0].spec, "(x)");
  EXPECT_EQ(seen[0].site, "model.py:12");
  EXPECT_EQ(seen[0].lanes.count(), 12);
}

TEST_F(GateHandlers, WhatGivesATokenOnTouchesNothing) {
  auto after = std::make_shared<AfterCallee>();
  Registry::instance().add(after);
  fake::Loaded<fake::Program> program("callgate.after");
  program.run({{XLA_FFI_DataType_F32, {3}, nullptr}});
}

TEST_F(GateHandlers, MalformedBatchLevelsAreAnErrorAtLoad) {
  auto callee = define("f", [](const Call&) { return Outcome::success(); });
  fake::Program program("f", {{"batch", fake::levels("3:7")}});
  fake::Status status = program.load();
  EXPECT_EQ(status.code, XLA_FFI_Error_Code_INVALID_ARGUMENT);
  EXPECT_THAT(status.message, HasSubstr("batch levels: expected masks of 0 and 1, got 7"));
}

TEST_F(GateHandlers, WhatACalleeThrowsAtLoadIsAnError) {
  auto load = [](auto thrown) {
    Options options;
    options.on_specialise = [thrown](const SiteSpec&) { throw thrown; };
    auto callee = define("f", nullptr, options);
    return fake::Program("f").load();
  };
  fake::Status status = load(Error(ErrorCode::kInvalidArgument, "argument 'x'"));
  EXPECT_EQ(status.code, XLA_FFI_Error_Code_INVALID_ARGUMENT);
  EXPECT_EQ(status.message, "callgate: argument 'x'");
  status = load(std::runtime_error("broken"));
  EXPECT_EQ(status.code, XLA_FFI_Error_Code_INTERNAL);
  EXPECT_THAT(status.message, HasSubstr("broken"));
  EXPECT_EQ(load(17).code, XLA_FFI_Error_Code_INTERNAL);
}

TEST_F(GateHandlers, ASiteSeesViewsOfAllRanks) {
  std::vector<std::string> seen;
  std::vector<void*> data;
  auto callee = define("f", [&](const Call& call) {
    for (const ArrayView& view : call.operands) {
      seen.push_back(to_string(view));
      data.push_back(view.data);
    }
    for (const ArrayView& view : call.results) seen.push_back("-> " + to_string(view));
    return Outcome::success();
  });
  std::vector<fake::Array> operands;
  std::vector<std::int64_t> memory(64), dims;
  for (int rank = 0; rank < 5; ++rank) {
    operands.push_back({XLA_FFI_DataType_S64, dims, &memory[static_cast<std::size_t>(rank)]});
    dims.push_back(rank == 3 ? 0 : 2);
  }
  fake::Loaded<fake::Program> program("f");
  program.run(operands, {{XLA_FFI_DataType_BF16, {7}, nullptr}});
  EXPECT_THAT(seen, ElementsAre("int64[]", "int64[2]", "int64[2,2]", "int64[2,2,2]",
                                "int64[2,2,2,0]", "-> bfloat16[7]"));
  EXPECT_THAT(data, ElementsAre(&memory[0], &memory[1], &memory[2], &memory[3], &memory[4]));
}

TEST_F(GateHandlers, ACallMayHaveAnyNumberOfBuffers) {
  std::size_t operands_seen = 0, results_seen = 0;
  auto callee = define("f", [&](const Call& call) {
    operands_seen = call.operands.size();
    results_seen = call.results.size();
    for (std::size_t i = 0; i < call.results.size(); ++i)
      *static_cast<std::int32_t*>(call.results[i].data) = static_cast<std::int32_t>(i);
    return Outcome::success();
  });
  fake::Loaded<fake::Program> program("f");
  for (std::size_t count : {0, 1, 15, 16, 17, 18, 33, 200}) {
    std::vector<std::int32_t> memory(count, -1);
    std::vector<fake::Array> arrays;
    for (std::int32_t& value : memory) arrays.push_back({XLA_FFI_DataType_S32, {}, &value});
    program.run(arrays, arrays);
    EXPECT_EQ(operands_seen, count);
    EXPECT_EQ(results_seen, count);
    for (std::size_t i = 0; i < count; ++i) EXPECT_EQ(memory[i], static_cast<std::int32_t>(i));
  }
}

TEST_F(GateHandlers, TokensAreLeftOut) {
  std::vector<std::string> seen;
  auto callee = define("f", [&](const Call& call) {
    seen.clear();
    for (const ArrayView& view : call.operands) seen.push_back(to_string(view));
    for (const ArrayView& view : call.results) seen.push_back("-> " + to_string(view));
    return Outcome::success();
  });
  fake::Loaded<fake::Program> program("f");
  fake::Array scalar{XLA_FFI_DataType_F32, {}, nullptr}, pair{XLA_FFI_DataType_F32, {2}, nullptr};
  EXPECT_TRUE(program.execute({fake::token(), scalar, fake::token(), pair}, {scalar, fake::token()})
                  .wait()
                  .ok());
  EXPECT_THAT(seen, ElementsAre("float32[]", "float32[2]", "-> float32[]"));
  EXPECT_TRUE(program.execute(std::vector(20, fake::token()), {fake::token()}).wait().ok());
  EXPECT_THAT(seen, ElementsAre());
}

TEST_F(GateHandlers, TheContextTellsDeviceAndRunWhereXlaHasThem) {
  CallContext seen;
  auto callee = define("f", [&](const Call& call) {
    seen = call.context;
    return Outcome::success();
  });
  fake::Loaded<fake::Program> program("f");
  program.run();
  EXPECT_EQ(seen.device, 3);
  EXPECT_EQ(seen.run, 77);
  program.context().device = -1;
  program.context().run = -1;
  program.run();
  EXPECT_EQ(seen.device, -1);
  EXPECT_EQ(seen.run, -1);
}

struct Mapped {
  ErrorCode code;
  XLA_FFI_Error_Code xla;
};
constexpr Mapped kErrorCodes[] = {
    {ErrorCode::kInvalidArgument, XLA_FFI_Error_Code_INVALID_ARGUMENT},
    {ErrorCode::kNotFound, XLA_FFI_Error_Code_NOT_FOUND},
    {ErrorCode::kAlreadyExists, XLA_FFI_Error_Code_ALREADY_EXISTS},
    {ErrorCode::kDeadlineExceeded, XLA_FFI_Error_Code_DEADLINE_EXCEEDED},
    {ErrorCode::kResourceExhausted, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED},
    {ErrorCode::kAborted, XLA_FFI_Error_Code_ABORTED},
    {ErrorCode::kInternal, XLA_FFI_Error_Code_INTERNAL},
};

// One test for calls on XLA's thread and on callgate's own: errors look the same.
class GateErrors : public GateHandlers, public ::testing::WithParamInterface<bool> {
 protected:
  static fake::Status run(fake::FunctionSite::Function function) {
    Options options;
    options.own_thread = GetParam();
    auto callee = define("f", std::move(function), options);
    fake::Loaded<fake::Program> program("f");
    fake::Execution execution = program.execute();
    EXPECT_EQ(execution.future != nullptr, GetParam());
    Registry::instance().remove(*callee);  // a worker may hold it for a moment longer
    return execution.wait();
  }
};

TEST_P(GateErrors, AFailingOutcomeKeepsItsCodeAndMessage) {
  for (const Mapped& mapped : kErrorCodes) {
    fake::Status status = run([&](const Call&) {
      return Outcome::failure(mapped.code, "message " + std::string(300, 'm'));
    });
    EXPECT_EQ(status.code, mapped.xla);
    EXPECT_EQ(status.message, "message " + std::string(300, 'm'));
  }
}

TEST_P(GateErrors, AThrownErrorKeepsItsCodeAndMessage) {
  for (const Mapped& mapped : kErrorCodes) {
    fake::Status status = run([&](const Call&) -> Outcome { throw Error(mapped.code, "x"); });
    EXPECT_EQ(status.code, mapped.xla);
    EXPECT_EQ(status.message, "callgate: x");
  }
}

TEST_P(GateErrors, NoOtherExceptionCrossesEither) {
  fake::Status status = run([](const Call&) -> Outcome { throw std::runtime_error("broken"); });
  EXPECT_EQ(status.code, XLA_FFI_Error_Code_INTERNAL);
  EXPECT_EQ(status.message, "callgate: broken");
  status = run([](const Call&) -> Outcome { throw std::bad_alloc(); });
  EXPECT_EQ(status.code, XLA_FFI_Error_Code_INTERNAL);
  status = run([](const Call&) -> Outcome { throw 17; });
  EXPECT_EQ(status.code, XLA_FFI_Error_Code_INTERNAL);
  EXPECT_EQ(status.message, "callgate: unknown C++ exception");
}

INSTANTIATE_TEST_SUITE_P(, GateErrors, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "OwnThread" : "XlasThread"; });

TEST_F(GateHandlers, ExecuteWithoutStateIsAnError) {
  auto callee = define("f", [](const Call&) { return Outcome::success(); });
  fake::Program program("f");
  fake::Status status = program.execute().wait();
  EXPECT_EQ(status.code, XLA_FFI_Error_Code_INTERNAL);
  EXPECT_THAT(status.message, HasSubstr("no state"));
}

TEST_F(GateHandlers, AProgramKeepsItsCalleeAndReleasesItWithItsState) {
  auto callee = define("f", [](const Call&) { return Outcome::success(); });
  std::weak_ptr<Callee> watched = callee;
  fake::Loaded<fake::Program> first("f"), second("f");
  callee.reset();
  first.run();
  first.unload();
  second.run();
  second.unload();
  EXPECT_TRUE(watched.expired());
}

TEST_F(GateHandlers, ACallIsInsideTheLifecycleWhileItRuns) {
  std::int64_t inside = 0;
  auto callee = define("f", [&](const Call&) {
    inside = Lifecycle::instance().active();
    return Outcome::success();
  });
  fake::Loaded<fake::Program> program("f");
  program.run();
  EXPECT_EQ(inside, 1);
}

TEST_F(GateHandlers, ManyThreadsRunOneSiteAtOnce) {
  std::atomic<int> runs{0};
  auto callee = define("f", [&](const Call& call) {
    runs.fetch_add(1);
    return twice(call);
  });
  fake::Loaded<fake::Program> program("f");
  {
    std::vector<std::jthread> threads;
    for (int worker = 0; worker < 4; ++worker) {
      threads.emplace_back([&] {
        for (int round = 0; round < 100; ++round) {
          std::vector<float> x{static_cast<float>(round)}, y{0};
          program.run({vector_of(x)}, {vector_of(y)});
          EXPECT_EQ(y[0], 2 * x[0]);
        }
      });
    }
  }
  EXPECT_EQ(runs.load(), 400);
}

TEST_F(GateHandlers, AnOwnThreadWritesXlasMemoryAndCompletesTheFuture) {
  std::thread::id ran_on;
  void *operand = nullptr, *result = nullptr;
  auto callee = define(
      "f",
      [&](const Call& call) {
        std::this_thread::sleep_for(milliseconds(5));  // the frame is gone by now
        ran_on = std::this_thread::get_id();
        operand = call.operands[0].data;
        result = call.results[0].data;
        EXPECT_EQ(to_string(call.operands[0]), "float32[3]");
        EXPECT_EQ(call.context.device, 3);
        return twice(call);
      },
      on_own_thread());
  fake::Loaded<fake::Program> program("f");
  std::vector<float> x{1, 2, 3};
  // The first run may be found to wait for itself, and its memory be gone before the call has
  // ended.
  for (bool first : {true, false}) {
    std::vector<float> y(3);
    program.context().run = first ? 1 : 2;
    fake::Execution execution = program.execute({vector_of(x)}, {vector_of(y)});
    ASSERT_NE(execution.future, nullptr);
    EXPECT_TRUE(execution.wait().ok());
    EXPECT_THAT(y, ElementsAre(2, 4, 6));
    EXPECT_NE(ran_on, std::this_thread::get_id());
    EXPECT_EQ(operand == x.data(), !first);
    EXPECT_EQ(result == y.data(), !first);
    EXPECT_EQ(execution.times_settled(), 1);
  }
}

TEST_F(GateHandlers, OwnThreadsMayWaitForProgramsThatCallThemAgain) {
  fake::Program program("f");
  auto callee = define(
      "f",
      [&](const Call& call) {
        const auto* x = static_cast<const float*>(call.operands[0].data);
        if (x[0] == 0) return Outcome::success();
        std::vector<float> inner{x[0] - 1};
        return program.execute({vector_of(inner)}).wait().ok()
                   ? Outcome::success()
                   : Outcome::failure(ErrorCode::kInternal, "inner");
      },
      on_own_thread());
  ASSERT_TRUE(program.load().ok());
  std::vector<float> depth{12};
  program.run({vector_of(depth)});
}

TEST_F(GateHandlers, ACallOnItsOwnThreadOutlivesItsExecutable) {
  std::latch unloaded(1);
  auto callee = define(
      "f",
      [&](const Call& call) {
        unloaded.wait();
        return twice(call);
      },
      on_own_thread());
  std::weak_ptr<Callee> watched = callee;
  std::vector<float> x{4}, y{0};
  fake::Execution execution;
  {
    fake::Loaded<fake::Program> program("f");
    execution = program.execute({vector_of(x)}, {vector_of(y)});
  }
  callee.reset();
  EXPECT_FALSE(watched.expired());
  unloaded.count_down();
  EXPECT_TRUE(execution.wait().ok());
  EXPECT_THAT(y, ElementsAre(8));
  EXPECT_TRUE(eventually([&] { return watched.expired(); }));
}

TEST_F(GateHandlers, AnXlaWithoutFuturesRefusesOwnThreads) {
  auto callee = define("f", [](const Call&) { return Outcome::success(); }, on_own_thread());
  fake::Loaded<fake::Program> program("f");
  fake::Runtime::instance().has_futures = false;
  fake::Execution execution = program.execute();
  fake::Runtime::instance().has_futures = true;
  EXPECT_EQ(execution.future, nullptr);
  EXPECT_THAT(execution.at_once.message, HasSubstr("futures are not supported"));
}

TEST_F(GateHandlers, ATimeoutThatIsMetPublishesPrivateResults) {
  std::vector<float> x{1, 2, 3}, y(3), empty;
  auto callee = define(
      "f",
      [&](const Call& call) {
        EXPECT_NE(call.operands[0].data, x.data());
        EXPECT_NE(call.results[0].data, y.data());
        EXPECT_EQ(reinterpret_cast<std::uintptr_t>(call.results[0].data) % 64, 0U);
        Outcome outcome = twice(call);
        EXPECT_THAT(y, ElementsAre(0, 0, 0)) << "XLA's memory is written last";
        return outcome;
      },
      on_own_thread(seconds(600)));
  fake::Loaded<fake::Program> program("f");
  fake::Execution execution =
      program.execute({vector_of(x), vector_of(empty)}, {vector_of(y), vector_of(empty)});
  EXPECT_TRUE(execution.wait().ok());
  EXPECT_THAT(y, ElementsAre(2, 4, 6));
}

TEST_F(GateHandlers, WithATimeoutAnAliasedResultStillHoldsItsOperand) {
  auto callee = define(
      "f",
      [](const Call& call) {
        EXPECT_EQ(call.operands[0].data, call.results[0].data);
        static_cast<float*>(call.results[0].data)[1] += 10;
        return Outcome::success();
      },
      on_own_thread(seconds(600)));
  fake::Loaded<fake::Program> program("f");
  std::vector<float> x{1, 2, 3};
  program.run({vector_of(x)}, {vector_of(x)});
  EXPECT_THAT(x, ElementsAre(1, 12, 3));
}

TEST_F(GateHandlers, ATimeoutFailsTheFutureOnceAndALateResultIsDiscarded) {
  std::latch failed(1);
  auto callee = define(
      "f",
      [&](const Call& call) {
        failed.wait();
        return twice(call);  // reads and writes after XLA has freed its memory
      },
      on_own_thread(milliseconds(20)));
  std::weak_ptr<Callee> watched = callee;
  auto x = std::make_unique<std::vector<float>>(3, 1.0F);
  auto y = std::make_unique<std::vector<float>>(3, -1.0F);
  fake::Execution execution;
  {
    fake::Loaded<fake::Program> program("f");
    execution = program.execute({vector_of(*x)}, {vector_of(*y)});
    fake::Status status = execution.wait();
    EXPECT_EQ(status.code, XLA_FFI_Error_Code_DEADLINE_EXCEEDED);
    EXPECT_EQ(status.message, "f(float32[3]) is stalled");
    EXPECT_THAT(*y, ElementsAre(-1, -1, -1));
  }
  x.reset();
  y.reset();
  callee.reset();
  failed.count_down();
  EXPECT_TRUE(eventually([&] { return watched.expired(); }));
  EXPECT_EQ(execution.times_settled(), 1);
}

TEST_F(GateHandlers, AStallReportThatThrowsStillFailsTheProgram) {
  auto failed = std::make_shared<std::latch>(1);  // the late call still uses it when the test ends
  Options options = on_own_thread(milliseconds(20));
  options.report = [](const std::string&) -> std::string { throw std::runtime_error("no stacks"); };
  auto callee = define(
      "f",
      [failed](const Call&) {
        failed->wait();
        return Outcome::success();
      },
      options);
  fake::Loaded<fake::Program> program("f");
  fake::Execution execution = program.execute();
  fake::Status status = execution.wait();
  failed->count_down();
  EXPECT_EQ(status.code, XLA_FFI_Error_Code_DEADLINE_EXCEEDED);
  EXPECT_THAT(status.message, HasSubstr("'f'"));
}

TEST_F(GateHandlers, AReportThatWaitsHoldsUpNeitherItsProgramNorTheTimeoutsOfOthers) {
  auto released = std::make_shared<std::latch>(1);  // the late call still uses it in the end
  auto wait = [released](const Call&) {
    released->wait();
    return Outcome::success();
  };
  Options waiting = on_own_thread(milliseconds(20));
  waiting.report = [released](const std::string&) {
    released->wait();
    return std::string("late");
  };
  auto first = define("waiting", wait, waiting);
  auto second = define("other", wait, on_own_thread(milliseconds(20)));
  fake::Loaded<fake::Program> stuck("waiting"), other("other");
  fake::Execution of_stuck = stuck.execute(), of_other = other.execute();
  fake::Status status = of_other.wait();
  EXPECT_EQ(status.code, XLA_FFI_Error_Code_DEADLINE_EXCEEDED);
  EXPECT_EQ(status.message, "other() is stalled");
  status = of_stuck.wait();
  EXPECT_EQ(status.code, XLA_FFI_Error_Code_DEADLINE_EXCEEDED);
  EXPECT_THAT(status.message, HasSubstr("gate 'waiting' called with () has run longer than its"));
  released->count_down();
}

// The end of the process can't be undone, so these tests run in processes of their own.
class GateHandlersDeathTest : public ::testing::Test {
 protected:
  void SetUp() override { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
};

// Loads, ends what `end` ends, executes, and exits with 0 if the call was refused and never ran.
template <typename End>
[[noreturn]] void refuse_after(End&& end, const Options& options) {
  std::atomic<bool> ran{false};
  auto callee = define(
      "f",
      [&](const Call&) {
        ran = true;
        return Outcome::success();
      },
      options);
  fake::Program program("f");
  bool loaded = program.load().ok();
  end();
  fake::Execution execution = program.execute();
  fake::Status status = execution.wait();
  bool refused = status.code == XLA_FFI_Error_Code_ABORTED &&
                 status.message.find("gate 'f'") != std::string::npos;
  bool once = execution.future == nullptr || execution.times_settled() == 1;
  program.unload();
  Threads().TearDown();
  std::_Exit(loaded && refused && once && !ran ? 0 : 1);
}

TEST_F(GateHandlersDeathTest, AfterCloseCallsAreRefused) {
  auto close = [] { Lifecycle::instance().close(seconds(60)); };
  EXPECT_EXIT(refuse_after(close, {}), ::testing::ExitedWithCode(0), "");
  EXPECT_EXIT(refuse_after(close, on_own_thread()), ::testing::ExitedWithCode(0), "");
  EXPECT_EXIT(refuse_after(close, on_own_thread(seconds(600))), ::testing::ExitedWithCode(0), "");
}

TEST_F(GateHandlersDeathTest, AfterThePoolStoppedOwnThreadsAreRefused) {
  auto stop = [] { WorkerPool::instance().stop(); };
  EXPECT_EXIT(refuse_after(stop, on_own_thread()), ::testing::ExitedWithCode(0), "");
  EXPECT_EXIT(refuse_after(stop, on_own_thread(seconds(600))), ::testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace callgate
