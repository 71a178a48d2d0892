// SPDX-License-Identifier: Apache-2.0
// Worker processes: every lane once, in its place, whatever else they do; ends that are told.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <numeric>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "test_worker.h"
#include "workers/spread.h"

namespace callgate {
namespace {

using fake::make_definition;
using fake::make_pool;
using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;
using ::testing::EndsWith;
using Kind = WorkerFailure::Kind;

// Calls of one operand and one result, of doubles.
class WorkerPools : public ::testing::Test {
 protected:
  // The results of as many lanes, of operands 0, 1, 2 ...
  std::vector<double> run(const Definition& definition, std::int64_t lanes,
                          SpreadOptions options = {}) {
    std::vector<double> operands(static_cast<std::size_t>(lanes)), results(operands.size(), -1);
    std::iota(operands.begin(), operands.end(), 0.0);
    const std::int64_t dims[] = {lanes}, mask[] = {1};
    std::array operand{ArrayView{operands.data(), dims, 1, DType::kF64}};
    std::array result{ArrayView{results.data(), dims, 1, DType::kF64}};
    const Lanes levels({lanes}, mask);
    const std::array<const Definition*, 1> definitions{&definition};
    options.definitions = definitions;
    spread(*pool, options, Call{operand, result, {}}, &levels, time);
    return results;
  }
  double run_one(const Definition& definition, SpreadOptions options = {}) {
    double operand = 21, value = -1;
    std::array operands{ArrayView{&operand, nullptr, 0, DType::kF64}};
    std::array results{ArrayView{&value, nullptr, 0, DType::kF64}};
    const std::array<const Definition*, 1> definitions{&definition};
    options.definitions = definitions;
    spread(*pool, options, Call{operands, results, {}}, nullptr, time);
    return value;
  }
  WorkerFailure failure(const Definition& definition, SpreadOptions options = {},
                        std::int64_t lanes = 0) {
    try {
      lanes == 0 ? (void)run_one(definition, options) : (void)run(definition, lanes, options);
    } catch (const WorkerFailure& why) {
      return why;
    }
    ADD_FAILURE() << "nothing failed";
    return {Kind::kClosed, ""};
  }
  static std::vector<double> doubled(std::int64_t lanes) {
    std::vector<double> all;
    for (std::int64_t i = 0; i < lanes; ++i) all.push_back(2.0 * static_cast<double>(i));
    return all;
  }

  std::shared_ptr<Pool> pool = make_pool(2);
  LaneTime time{0};
  const Definition twice = make_definition("double");
};

TEST_F(WorkerPools, RunsACallWithoutLanes) {
  EXPECT_EQ(run_one(twice), 42);
  EXPECT_EQ(pool->pids().size(), 2);
}

TEST_F(WorkerPools, BringsEveryLaneBackInItsPlace) {
  for (std::int64_t lanes : {0, 1, 2, 3, 64, 10'000})
    for (int turn = 0; turn < 2; ++turn) EXPECT_EQ(run(twice, lanes), doubled(lanes));
}

TEST_F(WorkerPools, SpreadsSlowLanesOverAllWorkers) {
  const Definition slow = make_definition("sleep 0.02"), pid = make_definition("pid");
  (void)run(slow, 2);
  auto begin = steady_clock::now();
  (void)run(slow, 20);
  EXPECT_LT(steady_clock::now() - begin, milliseconds(390));
}

TEST_F(WorkerPools, KeepsALaneOnItsWorker) {
  const Definition pid = make_definition("pid");
  SpreadOptions options;
  options.by_lane = true;
  const std::vector<double> first = run(pid, 7, options);
  EXPECT_EQ(std::set(first.begin(), first.end()).size(), 2);
  for (int turn = 0; turn < 5; ++turn) EXPECT_EQ(run(pid, 7, options), first);
  options.first_lane = 1;
  EXPECT_EQ(run(pid, 1, options)[0], first[1]);
}

TEST_F(WorkerPools, TellsLanesTheirNumbers) {
  const std::vector<double> lanes = run(make_definition("lane"), 100);
  for (std::size_t i = 0; i < lanes.size(); ++i) EXPECT_EQ(lanes[i], static_cast<double>(i));
}

TEST_F(WorkerPools, SendsADefinitionOnceAWorkerAndDropsIt) {
  pool = make_pool(1);
  const Definition defined = make_definition("defined"), known = make_definition("known");
  for (int turn = 0; turn < 3; ++turn) EXPECT_EQ(run_one(defined), 1);
  EXPECT_EQ(run_one(known), 2);
  pool->forget(defined.id);
  EXPECT_EQ(run_one(known), 1);
  EXPECT_EQ(run_one(defined), 3);  // once more
}

TEST_F(WorkerPools, SharesWorkersAmongThreads) {
  std::atomic<int> wrong{0};
  std::vector<std::jthread> threads;
  for (int thread = 0; thread < 8; ++thread)
    threads.emplace_back([&] {
      for (int turn = 0; turn < 50; ++turn)
        if (run(twice, 33) != doubled(33)) ++wrong;
    });
  threads.clear();
  EXPECT_EQ(wrong, 0);
}

TEST_F(WorkerPools, TellsTheFirstLaneThatRaised) {
  const WorkerFailure why = failure(make_definition("raise 10"), {}, 100);
  EXPECT_EQ(why.kind, Kind::kRaised);
  EXPECT_EQ(why.lane, 10);
  EXPECT_THAT(why.raised, EndsWith("x in lane 10"));  // larger than the memory was
  EXPECT_EQ(run_one(twice), 42);
}

TEST_F(WorkerPools, TellsADefinitionThatFailed) {
  const WorkerFailure why = failure(make_definition("undefined"));
  EXPECT_EQ(why.kind, Kind::kUndefined);
  EXPECT_EQ(why.raised, "no definition");
}

TEST_F(WorkerPools, TellsHowAWorkerEndedAndReplacesIt) {
  WorkerFailure why = failure(make_definition("exit 3"));
  EXPECT_EQ(why.kind, Kind::kEnded);
  EXPECT_EQ(why.how.code, 3);
  EXPECT_THAT(why.said, EndsWith("last words\n"));
  why = failure(make_definition("kill 9"));
  EXPECT_EQ(why.how.signal, SIGKILL);
  EXPECT_EQ(run_one(twice), 42);
  EXPECT_EQ(pool->replaced(), 2);
}

TEST_F(WorkerPools, RunsLanesAgainSoManyTimes) {
  SpreadOptions options;
  options.retries = 2;
  EXPECT_EQ(failure(make_definition("exit 1"), options).kind, Kind::kEnded);
  EXPECT_EQ(pool->replaced(), 3);
}

TEST_F(WorkerPools, EndsACallThatTakesTooLong) {
  SpreadOptions options;
  options.timeout = milliseconds(100);
  auto begin = steady_clock::now();
  EXPECT_EQ(failure(make_definition("sleep 60"), options).kind, Kind::kOverdue);
  EXPECT_LT(steady_clock::now() - begin, seconds(10));
  EXPECT_EQ(run_one(twice, options), 42);
}

TEST_F(WorkerPools, OutlivesTheDeathOfIdleWorkers) {
  EXPECT_EQ(run_one(twice), 42);
  for (pid_t pid : pool->pids()) kill(pid, SIGKILL);
  for (int turn = 0; turn < 20; ++turn) EXPECT_EQ(run_one(twice), 42);
}

TEST_F(WorkerPools, TellsAStartThatFailedAndTriesAgain) {
  pool = make_pool(2, "fail");
  for (int turn = 0; turn < 2; ++turn) {
    const WorkerFailure why = failure(twice);
    EXPECT_EQ(why.kind, Kind::kNotStarted);
    EXPECT_EQ(why.raised, "no start");
  }
  pool = make_pool(1, "exit");
  EXPECT_EQ(failure(twice).how.code, 7);
}

TEST_F(WorkerPools, TellsACommandThatIsNone) {
  PoolOptions options;
  options.command = {"/no/such/program"};
  pool = Pool::make(options);
  const WorkerFailure why = failure(twice);
  EXPECT_EQ(why.kind, Kind::kNotStarted);
  EXPECT_THAT(why.what(), ::testing::HasSubstr("/no/such/program"));
}

TEST_F(WorkerPools, LeavesNoProcessWhenItIsClosed) {
  EXPECT_EQ(run_one(twice), 42);
  const std::vector<pid_t> pids = pool->pids();
  pool->shut_down(seconds(5));
  for (pid_t pid : pids) EXPECT_NE(kill(pid, 0), 0);
  EXPECT_EQ(failure(twice).kind, Kind::kClosed);
}

TEST_F(WorkerPools, EndsWhatRunsWhenItIsClosed) {
  EXPECT_EQ(run_one(twice), 42);
  const Definition slow = make_definition("sleep 60");
  std::jthread closer([&] {
    std::this_thread::sleep_for(milliseconds(100));
    pool->shut_down(milliseconds(50));
  });
  EXPECT_EQ(failure(slow).kind, Kind::kClosed);
}

TEST_F(WorkerPools, IsNotThereInAForksChild) {
  EXPECT_EQ(run_one(twice), 42);
  const pid_t child = fork();
  if (child == 0) {
    const bool refused = failure(twice).kind == Kind::kClosed;
    pool->shut_down(seconds(1));
    pool.reset();
    _exit(refused ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(run_one(twice), 42);
}

}  // namespace
}  // namespace callgate
