// The lock guards the queue alone; jobs run without it.
#include "core/worker_pool.h"

#include <pthread.h>

#include <chrono>
#include <utility>

#include "core/lifecycle.h"

namespace callgate {
namespace {

constexpr auto kIdleTime = std::chrono::seconds(5);
constexpr std::size_t kKeptThreads = 2;

}  // namespace

bool WorkerPool::submit(Job job) {
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

void WorkerPool::stop() {
  std::list<std::jthread> threads;
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    threads.swap(threads_);
    threads.splice(threads.end(), ended_);
  }
  ready_.notify_all();
}  // ~jthread joins each

std::size_t WorkerPool::size() const {
  std::lock_guard lock(mutex_);
  return threads_.size();
}

void WorkerPool::work() {
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

}  // namespace callgate
