// SPDX-License-Identifier: Apache-2.0
// The watchdog's thread and the workers.
#include "core/threads.h"

#include <cstdio>
#include <exception>

namespace callgate {

Watchdog::Ticket Watchdog::arm(Clock::duration delay, Action action) {
  Ticket ticket;
  if (!process_.here()) return ticket;  // the lock may never be released
  {
    std::lock_guard lock(mutex_);
    // The thread comes first: if the system has no thread left, this throws, and nothing must be
    // armed.
    if (!thread_.joinable() && !stopped_)
      thread_ = std::jthread([this](const std::stop_token& stop) { watch(stop); });
    ticket = {Clock::now() + delay, next_++};
    actions_.emplace(ticket, std::move(action));
  }
  changed_.notify_one();
  return ticket;
}

void Watchdog::disarm(const Ticket& ticket) {
  if (!process_.here()) return;
  std::lock_guard lock(mutex_);
  actions_.erase(ticket);
}

void Watchdog::stop() {
  std::jthread thread;  // wakes and joins
  std::lock_guard lock(mutex_);
  stopped_ = true;
  thread = std::move(thread_);
}

void Watchdog::watch(const std::stop_token& stop) {
  name_thread("callgate-watch");
  std::unique_lock lock(mutex_);
  while (!stop.stop_requested()) {
    if (!changed_.wait(lock, stop, [this] { return !actions_.empty(); })) return;
    auto earliest = actions_.begin()->first;
    if (Clock::now() < earliest.first) {
      changed_.wait_until(lock, stop, earliest.first,
                          [&] { return actions_.empty() || actions_.begin()->first < earliest; });
      continue;
    }
    Action action = std::move(actions_.begin()->second);
    actions_.erase(actions_.begin());
    lock.unlock();
    action();
    action = nullptr;
    lock.lock();
  }
}

WorkerPool& WorkerPool::of_copies() {
  struct OfCopies : WorkerPool {
    OfCopies() : WorkerPool("callgate-copy") {}
  };
  return immortal<OfCopies>();
}

bool WorkerPool::submit(Job job) {
  if (lost()) return false;
  std::list<std::jthread> ended;  // joined after the lock is released
  {
    std::lock_guard lock(mutex_);
    if (stopping_) return false;
    ended.swap(ended_);
    if (!used_.load(std::memory_order_relaxed)) {  // written under the mutex
      process_ = OfProcess();
      used_.store(true, std::memory_order_release);  // see lost()
    }
    // The thread comes first: if the system has no thread left, this throws, and the job must not
    // be queued.
    if (jobs_.size() + 1 > idle_) threads_.emplace_back([this] { work(); });
    jobs_.push_back(std::move(job));
  }
  ready_.notify_one();
  return true;
}

void WorkerPool::stop() {
  std::list<std::jthread> threads;  // joined after the lock is released
  std::lock_guard lock(mutex_);
  stopping_ = true;
  threads.swap(threads_);
  threads.splice(threads.end(), ended_);
  ready_.notify_all();
}

void WorkerPool::work() {
  name_thread(name_);
  std::unique_lock lock(mutex_);
  for (;;) {
    ++idle_;
    const auto asked = [this] { return stopping_ || !jobs_.empty(); };
    bool woken = true;
    if (threads_.size() > kKeptThreads)
      woken = ready_.wait_for(lock, kIdleTime, asked);
    else
      ready_.wait(lock, asked);  // a clock for each sleep takes longer than the sleep
    --idle_;
    if (!jobs_.empty()) {
      Job job = std::move(jobs_.front());
      jobs_.pop_front();
      lock.unlock();
      job();
      job = nullptr;  // the job's captures die before the thread counts as idle
      lock.lock();
    } else if (stopping_) {
      return;
    } else if (!woken && threads_.size() > kKeptThreads) {
      lock.unlock();
      end_thread();  // before another thread can join it
      lock.lock();
      for (auto it = threads_.begin(); it != threads_.end(); ++it) {
        if (it->get_id() != std::this_thread::get_id()) continue;
        ended_.splice(ended_.end(), threads_, it);
        return;
      }
    }
  }
}

StallWatch::StallWatch(std::chrono::nanoseconds delay, std::shared_ptr<Callee> callee,
                       std::function<std::string()> arguments)
    : watch_(delay, [callee = std::move(callee), arguments = std::move(arguments)] {
        report(callee, arguments);
      }) {}

void StallWatch::report(const std::shared_ptr<Callee>& callee,
                        const std::function<std::string()>& arguments) {
  try {
    (void)WorkerPool::instance().submit([callee, text = arguments()] {
      ActiveCall active;
      if (!active.entered()) return;
      std::fprintf(stderr, "%s\n", callee->stall_report(text, /*timed_out=*/false).c_str());
    });
  } catch (const std::exception& error) {  // out of threads or memory
    std::fprintf(stderr, "callgate: '%s' is stalled; no report on it: %s\n", callee->name().c_str(),
                 error.what());
  }
}

}  // namespace callgate
