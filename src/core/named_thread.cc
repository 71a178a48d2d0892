// SPDX-License-Identifier: Apache-2.0
// A named thread's queue, its loop, and its end.
#include "core/named_thread.h"

#include <thread>
#include <vector>

namespace callgate {

bool NamedThread::submit(Job job) {
  const std::shared_ptr<Queue> queue = of_this_process();
  {
    std::lock_guard lock(queue->mutex);
    if (queue->closed) return false;
    // The thread comes first: if the system has no thread left, this throws, and the job must not
    // be queued.
    if (!queue->started) std::thread([queue, name = name_] { work(queue, name); }).detach();
    queue->started = true;
    queue->jobs.push_back(std::move(job));
    queue->asked_on = current_core();
    queue->waiting.fetch_add(1, std::memory_order_release);  // see watch_for_more()
    if (!queue->asleep) return true;
  }
  queue->changed.notify_all();
  return true;
}

bool NamedThread::serve(std::chrono::nanoseconds wait) {
  Queue& queue = *current_;
  std::unique_lock lock(queue.mutex);
  queue.asleep = true;
  const bool come = queue.changed.wait_for(lock, wait, [&] { return !queue.jobs.empty(); });
  queue.asleep = false;
  if (!come) return false;
  run_next(queue, lock);
  return true;
}

void NamedThread::close() noexcept {
  const std::shared_ptr<Queue> queue = of_this_process();
  std::lock_guard lock(queue->mutex);
  queue->closed = true;
  queue->changed.notify_all();
}

bool NamedThread::has_ended(std::chrono::nanoseconds wait) {
  const std::shared_ptr<Queue> queue = of_this_process();
  std::unique_lock lock(queue->mutex);
  return queue->changed.wait_for(lock, wait, [&] { return queue->ended || !queue->started; });
}

std::shared_ptr<NamedThread::Queue> NamedThread::of_this_process() {
  if (!queue_->process.here()) [[unlikely]] {
    auto& left = immortal<std::vector<std::shared_ptr<Queue>>>();
    left.push_back(std::move(queue_));
    queue_ = std::make_shared<Queue>(number_);
    queue_->closed = left.back()->closed;
  }
  return queue_;
}

void NamedThread::run_next(Queue& queue, std::unique_lock<std::mutex>& lock) {
  Job job = std::move(queue.jobs.front());
  queue.jobs.pop_front();
  queue.waiting.fetch_sub(1, std::memory_order_relaxed);  // only this thread changes it
  lock.unlock();
  queue.runs_on.store(current_core(), std::memory_order_relaxed);  // a hint
  job();
  job = nullptr;  // the job's captures die on this thread, without the lock
  lock.lock();
}

void NamedThread::watch_for_more(Queue& queue, std::unique_lock<std::mutex>& lock) {
  if (queue.asked_on == current_core()) return;
  lock.unlock();
  watch_for(kWakeup, [&] { return queue.waiting.load(std::memory_order_acquire) != 0; });
  lock.lock();
}

void NamedThread::work(const std::shared_ptr<Queue>& queue, const std::string& name) {
  name_thread(name.substr(0, 15).c_str());
  current_ = queue.get();
  std::unique_lock lock(queue->mutex);
  for (;;) {
    if (queue->jobs.empty() && !queue->closed) watch_for_more(*queue, lock);
    queue->asleep = true;
    queue->changed.wait(lock, [&] { return queue->closed || !queue->jobs.empty(); });
    queue->asleep = false;
    if (queue->jobs.empty()) break;
    run_next(*queue, lock);
  }
  lock.unlock();
  end_thread();
  lock.lock();
  queue->ended = true;
  queue->changed.notify_all();
}

}  // namespace callgate
