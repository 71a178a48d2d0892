// Threads that run callbacks for `thread="own"`.
//
// A job may block on other jobs (a gate that runs a program with gates inside), so the pool never
// queues a job behind a busy thread: it grows when no thread is idle. Idle threads beyond a few end
// after a while. Threads are named and joined by `stop`.
#pragma once

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <list>
#include <mutex>
#include <thread>
#include <utility>

#include "core/lifecycle.h"
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
  bool submit(Job job) {
    if (lost()) return false;
    std::list<std::jthread> ended;  // joined after the lock is gone
    {
      std::lock_guard lock(mutex_);
      if (stopping_) return false;
      ended.swap(ended_);
      if (!used_.load(std::memory_order_relaxed)) {  // written under the mutex
        process_ = OfProcess();
        used_.store(true, std::memory_order_release);  // see lost()
      }
      // The thread first: where the system gives none this throws, and the job must not be queued.
      if (jobs_.size() + 1 > idle_) threads_.emplace_back([this] { work(); });
      jobs_.push_back(std::move(job));
    }
    ready_.notify_one();
    return true;
  }

  // In a fork's child of a process that has used the pool: its threads are not here.
  bool lost() const noexcept {
    return used_.load(std::memory_order_acquire) && !process_.here();  // pairs with submit()
  }

  // Finishes the jobs at hand, then joins all threads.
  void stop() {
    std::list<std::jthread> threads;  // joined after the lock is gone
    std::lock_guard lock(mutex_);
    stopping_ = true;
    threads.swap(threads_);
    threads.splice(threads.end(), ended_);
    ready_.notify_all();
  }

  // Threads alive now.
  std::size_t size() const {
    std::lock_guard lock(mutex_);
    return threads_.size();
  }

 private:
  static constexpr auto kIdleTime = std::chrono::seconds(5);
  static constexpr std::size_t kKeptThreads = 2;

  void work() {
    pthread_setname_np(pthread_self(), "callgate-own");
    std::unique_lock lock(mutex_);
    for (;;) {
      ++idle_;
      bool woken = ready_.wait_for(lock, kIdleTime, [this] { return stopping_ || !jobs_.empty(); });
      --idle_;
      if (!jobs_.empty()) {
        Job job = std::move(jobs_.front());
        jobs_.pop_front();
        lock.unlock();
        job();
        job = nullptr;  // what the job held dies before the thread counts as idle
        lock.lock();
      } else if (stopping_) {
        return;
      } else if (!woken && threads_.size() > kKeptThreads) {
        lock.unlock();
        end_thread();  // before anybody can join it
        lock.lock();
        for (auto it = threads_.begin(); it != threads_.end(); ++it) {
          if (it->get_id() != std::this_thread::get_id()) continue;
          ended_.splice(ended_.end(), threads_, it);
          return;
        }
      }
    }
  }

  mutable std::mutex mutex_;  // guards the queue alone: jobs run without it
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
