// SPDX-License-Identifier: Apache-2.0
// callgate's own threads: the watchdog's, which detects slow calls, and those that run callbacks
// for `thread="own"`. Threads have names, and stop() joins them.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "core/call.h"
#include "core/lifecycle.h"
#include "core/lifetime.h"
#include "core/system.h"

namespace callgate {

// A thread that starts with the first watch and sleeps until a deadline. It costs nothing without
// watches.
class Watchdog : Immovable {
 public:
  using Clock = std::chrono::steady_clock;
  using Action = std::function<void()>;
  using Ticket = std::pair<Clock::time_point, std::uint64_t>;
  static Watchdog& instance() { return immortal<Watchdog>(); }
  ~Watchdog() { stop(); }

  // The thread runs the action once, without locks, unless disarm() comes before. Does nothing in a
  // fork's child, which has no such thread.
  Ticket arm(Clock::duration delay, Action action);

  // Cancels the watch. After it returns, the action won't start, but may be running.
  void disarm(const Ticket& ticket);

  void stop();

 private:
  void watch(const std::stop_token& stop);

  std::mutex mutex_;  // guards only the table
  std::condition_variable_any changed_;
  std::map<Ticket, Action> actions_;
  std::uint64_t next_ = 0;
  bool stopped_ = false;
  OfProcess process_;
  std::jthread thread_;
};

// Arms on construction if the delay is positive, and disarms on destruction.
class Watch : Immovable {
 public:
  Watch(Watchdog::Clock::duration delay, Watchdog::Action action) : armed_(delay.count() > 0) {
    if (armed_) ticket_ = Watchdog::instance().arm(delay, std::move(action));
  }
  ~Watch() {
    if (armed_) Watchdog::instance().disarm(ticket_);
  }

 private:
  bool armed_;
  Watchdog::Ticket ticket_;
};

// A job may block on other jobs (a gate that runs a program with gates), so no job is queued behind
// a busy thread: the pool grows instead. Idle threads beyond a few end after a while.
class WorkerPool : Immovable {
 public:
  using Job = std::function<void()>;
  static WorkerPool& instance() { return immortal<WorkerPool>(); }
  // For parts of large copies; a fork's child copies without it.
  static WorkerPool& of_copies();
  explicit WorkerPool(const char* name = "callgate-own") : name_(name) {}
  ~WorkerPool() { stop(); }

  // Runs the job soon on a thread of the pool. False, and not accepted, after stop() or if lost().
  bool submit(Job job);

  // True in a fork's child of a process that has used the pool, whose threads don't exist here.
  bool lost() const noexcept {
    return used_.load(std::memory_order_acquire) && !process_.here();  // pairs with submit()
  }

  // Finishes the running jobs, then joins all threads.
  void stop();

  std::size_t size() const {  // live threads
    std::lock_guard lock(mutex_);
    return threads_.size();
  }

 private:
  static constexpr auto kIdleTime = std::chrono::seconds(5);
  static constexpr std::size_t kKeptThreads = 2;

  void work();

  const char* name_;          // the threads' name
  mutable std::mutex mutex_;  // guards only the queue: jobs run without it
  std::condition_variable ready_;
  std::deque<Job> jobs_;
  std::list<std::jthread> threads_, ended_;  // threads that left their loop and must be joined
  std::size_t idle_ = 0;
  bool stopping_ = false;
  OfProcess process_;  // the process of the first job
  std::atomic<bool> used_{false};
};

// Reports a slow call on stderr, once; the call continues (callgate.config(stall_seconds=...)).
// `arguments` returns the call's arguments as text when the report is made.
class StallWatch {
 public:
  StallWatch(std::chrono::nanoseconds delay, std::shared_ptr<Callee> callee,
             std::function<std::string()> arguments);

 private:
  // A report shows the stacks of Python's threads, for which it waits for the GIL. The watchdog's
  // thread must not wait, because it serves other calls' timeouts; a worker reports instead.
  static void report(const std::shared_ptr<Callee>& callee,
                     const std::function<std::string()>& arguments);

  Watch watch_;
};

}  // namespace callgate
