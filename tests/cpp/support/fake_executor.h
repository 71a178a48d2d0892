// SPDX-License-Identifier: Apache-2.0
// Executors for tests: one with threads, one that starts its tasks when the test says so or never,
// one that takes none.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/kernel_frame.h"

namespace callgate::fake {

// Each task on a thread of its own, joined at the end.
class Threads final : public Executor {
 public:
  explicit Threads(int count) : count_(count) {}
  ~Threads() override { join(); }

  int threads() const noexcept override { return count_; }
  bool schedule(std::function<void()> task) noexcept override {
    scheduled.fetch_add(1);
    std::scoped_lock lock(mutex_);
    started_.emplace_back(std::move(task));
    return true;
  }
  std::int64_t device() const noexcept override { return 5; }

  void join() {
    std::vector<std::thread> mine;
    {
      std::scoped_lock lock(mutex_);
      mine.swap(started_);
    }
    for (std::thread& thread : mine) thread.join();
  }

  std::atomic<int> scheduled{0};

 private:
  int count_;
  std::mutex mutex_;
  std::vector<std::thread> started_;
};

// Takes tasks and keeps them: a pool whose threads are all busy.
class Busy final : public Executor {
 public:
  explicit Busy(int count) : count_(count) {}

  int threads() const noexcept override { return count_; }
  bool schedule(std::function<void()> task) noexcept override {
    tasks.push_back(std::move(task));
    return true;
  }

  std::vector<std::function<void()>> tasks;

 private:
  int count_;
};

// Says that it has threads, and takes no task.
class Refusing final : public Executor {
 public:
  int threads() const noexcept override { return 4; }
  bool schedule(std::function<void()> /*task*/) noexcept override {
    ++asked;
    return false;
  }

  int asked = 0;
};

}  // namespace callgate::fake
