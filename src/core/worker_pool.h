// Threads that run callbacks for `thread="own"`.
//
// A job may block on other jobs (a gate that runs a program with gates inside), so the pool never
// queues a job behind a busy thread: it grows when no thread is idle. Idle threads beyond a few end
// after a while. Threads are named and joined by `stop`.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <list>
#include <mutex>
#include <thread>

#include "core/lifetime.h"
#include "core/process.h"

namespace callgate {

class WorkerPool : Immovable {
 public:
  using Job = std::function<void()>;

  static WorkerPool& instance() { return immortal<WorkerPool>(); }

  ~WorkerPool() { stop(); }

  // Runs the job soon on a thread of the pool. False after stop(), and where the pool is lost: the
  // job is not taken.
  bool submit(Job job);

  // In a fork's child of a process that has used the pool: its threads are not here.
  bool lost() const noexcept {
    return used_.load(std::memory_order_acquire) && !process_.here();  // pairs with submit()
  }

  // Finishes the jobs at hand, then joins all threads.
  void stop();

  // Threads alive now.
  std::size_t size() const;

 private:
  void work();

  mutable std::mutex mutex_;
  std::condition_variable ready_;
  std::deque<Job> jobs_;
  std::list<std::jthread> threads_;
  std::list<std::jthread> ended_;  // threads that left their loop, to be joined
  std::size_t idle_ = 0;
  bool stopping_ = false;
  OfProcess process_;  // of the first job
  std::atomic<bool> used_{false};
};

}  // namespace callgate
