// SPDX-License-Identifier: Apache-2.0
// Threads of callgate's own: the watchdog's, which notices calls that take too long, and those that
// run callbacks for `thread="own"`. Threads are named, and joined by stop().
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

// A thread that starts with the first watch and sleeps until a deadline. Without any it is free.
class Watchdog : Immovable {
 public:
  using Clock = std::chrono::steady_clock;
  using Action = std::function<void()>;
  using Ticket = std::pair<Clock::time_point, std::uint64_t>;
  static Watchdog& instance() { return immortal<Watchdog>(); }
  ~Watchdog() { stop(); }

  // The thread runs the action, once and without any lock held, unless disarm() comes before. Does
  // nothing in a fork's child, which has no such thread.
  Ticket arm(Clock::duration delay, Action action);

  // Takes the watch back. After it returns the action will not start, but may be running.
  void disarm(const Ticket& ticket);

  void stop();

 private:
  void watch(const std::stop_token& stop);

  std::mutex mutex_;  // guards the table alone
  std::condition_variable_any changed_;
  std::map<Ticket, Action> actions_;
  std::uint64_t next_ = 0;
  bool stopped_ = false;
  OfProcess process_;
  std::jthread thread_;
};

// Arms on construction when the delay is positive, disarms on destruction.
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

// A job may block on other jobs (a gate that runs a program with gates), so none is queued behind a
// busy thread: the pool grows. Idle threads beyond a few end after a while.
class WorkerPool : Immovable {
 public:
  using Job = std::function<void()>;
  static WorkerPool& instance() { return immortal<WorkerPool>(); }
  // For parts of large copies, which a fork's child makes alone.
  static WorkerPool& of_copies();
  explicit WorkerPool(const char* name = "callgate-own") : name_(name) {}
  ~WorkerPool() { stop(); }

  // Runs the job soon on a thread of the pool. False, and not taken, after stop() or if lost().
  bool submit(Job job);

  // In a fork's child of a process that has used the pool: its threads are not here.
  bool lost() const noexcept {
    return used_.load(std::memory_order_acquire) && !process_.here();  // pairs with submit()
  }

  // Finishes the jobs at hand, then joins all threads.
  void stop();

  std::size_t size() const {  // threads alive now
    std::lock_guard lock(mutex_);
    return threads_.size();
  }

 private:
  static constexpr auto kIdleTime = std::chrono::seconds(5);
  static constexpr std::size_t kKeptThreads = 2;

  void work();

  const char* name_;          // of its threads
  mutable std::mutex mutex_;  // guards the queue alone: jobs run without it
  std::condition_variable ready_;
  std::deque<Job> jobs_;
  std::list<std::jthread> threads_, ended_;  // those that left their loop, to be joined
  std::size_t idle_ = 0;
  bool stopping_ = false;
  OfProcess process_;  // of the first job
  std::atomic<bool> used_{false};
};

// Reports on stderr, once, a call that takes long and goes on (callgate.config(stall_seconds=...)).
// `arguments` says what it was called with, and is asked when the report is made.
class StallWatch {
 public:
  StallWatch(std::chrono::nanoseconds delay, std::shared_ptr<Callee> callee,
             std::function<std::string()> arguments);

 private:
  // A report says where Python's threads stand, for which it waits for the GIL. The watchdog's
  // thread must not, since other calls' timeouts are its business: a worker does.
  static void report(const std::shared_ptr<Callee>& callee,
                     const std::function<std::string()>& arguments);

  Watch watch_;
};

}  // namespace callgate
