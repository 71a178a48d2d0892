// SPDX-License-Identifier: Apache-2.0
// One thread that runs its jobs in order: the place of objects that belong to a thread
// (callgate.thread).
//
// A job may wait for a program whose calls are for the same thread. The thread can therefore serve
// its queue from inside a job (serve()), and a call from the thread itself runs at once (run()).
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "core/event_count.h"
#include "core/lifecycle.h"
#include "core/lifetime.h"
#include "core/system.h"

namespace callgate {

class NamedThread : Immovable {
 public:
  using Job = std::function<void()>;
  // About the time to wake a thread, which is longer than most jobs. The thread spins this long for
  // its next job before it sleeps, and watch_for_end() spins this long for a job's end.
  static constexpr std::chrono::microseconds kWakeup{50};
  explicit NamedThread(std::string name) : name_(std::move(name)) {}
  ~NamedThread() { close(); }

  const std::string& name() const noexcept { return name_; }

  // The number of this named thread in the process, and of the named thread that runs the caller (0
  // for none).
  std::uint64_t number() const noexcept { return number_; }
  static std::uint64_t current() noexcept { return current_ == nullptr ? 0 : current_->number; }
  bool is_here() const noexcept { return current_ != nullptr && current_->number == number_; }

  // Runs the job after all earlier ones. False, and not accepted, after close(). Throws if the
  // system has no thread left.
  bool submit(Job job);

  // Runs `body` on the thread and waits for it, or at once if this is the thread; throws what the
  // body throws. False, without running it, after close().
  template <typename Body>
  bool run(Body&& body) {
    if (is_here()) return body(), true;
    auto task = std::make_shared<std::packaged_task<void()>>(std::forward<Body>(body));
    std::future<void> done = task->get_future();
    if (!submit([task] { (*task)(); })) return false;
    done.get();
    return true;
  }

  // On a named thread, inside a job: runs the next job, if one arrives within the given time.
  static bool serve(std::chrono::nanoseconds wait);

  // For waits on a job that may be short: spins until `done()`, for about kWakeup, if the thread
  // runs on another core.
  template <typename Done>
  void watch_for_end(Done&& done) {
    if (of_this_process()->runs_on.load(std::memory_order_relaxed) != current_core())  // a hint
      watch_for(kWakeup, done);
  }

  // Accepts no more jobs. The thread ends after the queued jobs.
  void close() noexcept;

  // After close(): true if the thread has ended, or never started. False if that takes longer than
  // `wait`.
  bool has_ended(std::chrono::nanoseconds wait);

 private:
  struct Queue {
    explicit Queue(std::uint64_t of) : number(of) {}

    const std::uint64_t number;
    std::mutex mutex;  // guards only the queue: jobs run without it
    std::condition_variable changed;
    std::deque<Job> jobs;
    std::atomic<std::size_t> waiting{0};    // queued jobs
    std::int32_t asked_on = -1;             // the core from which the last job came
    std::atomic<std::int32_t> runs_on{-1};  // the core on which the thread last ran a job
    bool started = false, closed = false, ended = false, asleep = false;
    OfProcess process;
  };

  // A fork's child has its own queue, and so its own thread. The parent's queue is left alone,
  // because its lock may never be released. Needs no lock: a child begins with one thread.
  std::shared_ptr<Queue> of_this_process();

  static void run_next(Queue& queue, std::unique_lock<std::mutex>& lock);

  static void watch_for_more(Queue& queue, std::unique_lock<std::mutex>& lock);

  static void work(const std::shared_ptr<Queue>& queue, const std::string& name);

  static std::uint64_t next_number() noexcept {
    static std::atomic<std::uint64_t> next{1};
    return next.fetch_add(1, std::memory_order_relaxed);  // only a number, no order
  }

  static inline thread_local Queue* current_ = nullptr;

  const std::string name_;
  const std::uint64_t number_ = next_number();
  std::shared_ptr<Queue> queue_ = std::make_shared<Queue>(number_);
};

}  // namespace callgate
