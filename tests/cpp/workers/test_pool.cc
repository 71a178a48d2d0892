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
#include <filesystem>
#include <numeric>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "core/lifecycle.h"
#include "test_worker.h"
#include "workers/spread.h"

namespace callgate {
namespace {

using fake::make_definition;
using fake::make_pool;
using std::chrono::milliseconds;
using std::chrono::seconds;
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
  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() / ("callgate_meet_" + std::to_string(getpid()));
  std::filesystem::create_directory(folder);
  (void)run(make_definition("sleep 0.02"), 2);  // a lane is known to be slow
  EXPECT_EQ(run(make_definition("meet " + folder.string()), 20).size(), 20);
  std::filesystem::remove_all(folder);
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
  // Longer than the test may take.
  EXPECT_EQ(failure(make_definition("sleep 600"), options).kind, Kind::kOverdue);
  EXPECT_EQ(run_one(twice, options), 42);
}

// Ctrl-C, once a call may be under way.
class Interruption {
 public:
  Interruption()
      : thread_([] {
          std::this_thread::sleep_for(milliseconds(50));
          Interrupts::end_all(/*on=*/true);
          Interrupts::end_all(/*on=*/false);
        }) {}

 private:
  std::jthread thread_;
};

TEST_F(WorkerPools, KeepsWorkersThatHearOfAnInterrupt) {
  (void)run(make_definition("sleep 0.02"), 2);  // both are up
  const std::vector<pid_t> pids = pool->pids();
  SpreadOptions options;
  options.interrupts = Interrupts::count();
  const Interruption interruption;
  EXPECT_EQ(failure(make_definition("wait"), options, 5).kind, Kind::kInterrupted);
  EXPECT_EQ(run(twice, 10), doubled(10));
  EXPECT_EQ(pool->pids(), pids);
}

TEST_F(WorkerPools, EndsAWorkerThatDoesNotHearOfAnInterrupt) {
  (void)run(make_definition("sleep 0.02"), 2);  // both are up
  SpreadOptions options;
  options.interrupts = Interrupts::count();
  const Interruption interruption;
  EXPECT_EQ(failure(make_definition("sleep 600"), options).kind, Kind::kInterrupted);
  EXPECT_EQ(run(twice, 10), doubled(10));
  EXPECT_EQ(pool->replaced(), 1);
}

TEST_F(WorkerPools, OutlivesTheDeathOfIdleWorkers) {
  EXPECT_EQ(run_one(twice), 42);
  for (pid_t pid : pool->pids()) kill(pid, SIGKILL);
  for (int turn = 0; turn < 20; ++turn) EXPECT_EQ(run_one(twice), 42);
}

TEST_F(WorkerPools, RunsLanesOnTheWorkersThatTheyArePlacedOn) {
  const Definition pid = make_definition("pid");
  std::vector<std::uint64_t> ran_on(50), placed;
  SpreadOptions options;
  options.ran_on = ran_on;
  const std::vector<double> where = run(pid, 50, options);
  const std::set<std::uint64_t> numbers(ran_on.begin(), ran_on.end());
  ASSERT_LE(numbers.size(), 2);
  EXPECT_FALSE(numbers.contains(0));
  for (std::size_t lane = 0; lane < 50; ++lane)
    for (std::size_t other = 0; other < 50; ++other)
      EXPECT_EQ(where[lane] == where[other], ran_on[lane] == ran_on[other]);
  placed.assign(ran_on.rbegin(), ran_on.rend());
  for (bool in_order : {false, true}) {
    options = {};
    options.placed = placed;
    options.in_order = in_order;
    const std::vector<double> again = run(pid, 50, options);
    EXPECT_EQ(again, std::vector<double>(where.rbegin(), where.rend()));
    EXPECT_EQ(run(twice, 50, options), doubled(50));
  }
}

TEST_F(WorkerPools, TellsOfAWorkerThatIsGone) {
  pool = make_pool(1);
  std::vector<std::uint64_t> number(1);
  SpreadOptions options;
  options.ran_on = number;
  (void)run(twice, 1, options);
  EXPECT_EQ(pool->index_of(number[0]), 0);
  EXPECT_EQ(failure(make_definition("exit 3")).kind, Kind::kEnded);
  EXPECT_EQ(pool->index_of(number[0]), Pool::kAny);
  options = {};
  options.placed = number;
  const WorkerFailure why = failure(twice, options, 1);
  EXPECT_EQ(why.kind, Kind::kGone);
  EXPECT_EQ(why.how.code, 3);
  EXPECT_EQ(why.worker, 0);
  EXPECT_EQ(run_one(twice), 42);
}

TEST_F(WorkerPools, DropsObjectsOfOneWorkerOrOfAll) {
  const Definition dropped = make_definition("dropped");
  pool = make_pool(1);
  std::vector<std::uint64_t> number(1);
  SpreadOptions options;
  options.ran_on = number;
  (void)run(twice, 1, options);
  pool->forget(7 | kObject, number[0]);
  EXPECT_EQ(run_one(dropped), 1);
  pool->forget(8 | kObject, number[0] + 1);  // another's
  EXPECT_EQ(run_one(dropped), 1);
  for (std::uint64_t id = 0; id < 20'000; ++id) pool->forget(id | kObject);  // more than has room
  // Between calls, too; what a call of the meantime takes along is not told twice.
  for (int turn = 0; turn < 200 && run_one(dropped) < 20'001; ++turn)
    std::this_thread::sleep_for(milliseconds(25));
  EXPECT_EQ(run_one(dropped), 20'001);
}

TEST_F(WorkerPools, SendsResultsWhereAsked) {
  const Definition keep = make_definition("keep");
  double operand = 1, value = 5;
  std::array operands{ArrayView{&operand, nullptr, 0, DType::kF64}};
  std::array results{ArrayView{&value, nullptr, 0, DType::kF64}};
  const std::array<const Definition*, 1> definitions{&keep};
  SpreadOptions options;
  options.definitions = definitions;
  options.send_results = true;
  spread(*pool, options, Call{operands, results, {}}, nullptr, time);
  EXPECT_EQ(value, 5);
}

TEST_F(WorkerPools, EndsAWorkerThatLoadsForTooLong) {
  SpreadOptions options;
  options.timeout = milliseconds(10);
  options.loading = milliseconds(200);
  const WorkerFailure why = failure(make_definition("endless"), options);
  EXPECT_EQ(why.kind, Kind::kOverdue);
  EXPECT_THAT(why.what(), ::testing::HasSubstr("not loaded"));
  EXPECT_EQ(run_one(twice), 42);
}

TEST_F(WorkerPools, GivesUpOnWorkersThatEndWithNothingToDo) {
  pool = make_pool(1, "leave");
  while (pool->replaced() < 5) std::this_thread::sleep_for(milliseconds(10));
  std::this_thread::sleep_for(milliseconds(200));
  EXPECT_EQ(pool->replaced(), 5);
  EXPECT_TRUE(pool->pids().empty());
  const WorkerFailure why = failure(twice);
  EXPECT_EQ(why.kind, Kind::kRestarts);
  EXPECT_EQ(why.how.code, 5);
  while (pool->replaced() < 6) std::this_thread::sleep_for(milliseconds(10));  // it tries again
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
  (void)run(make_definition("sleep 0.02"), 2);  // both are up
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
