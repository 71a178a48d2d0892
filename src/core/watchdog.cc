// One thread sleeps until the earliest deadline. The lock guards the table alone.
#include "core/watchdog.h"

#include <pthread.h>

namespace callgate {

Watchdog::Ticket Watchdog::arm(Clock::duration delay, Action action) {
  Ticket ticket;
  if (!process_.here()) return ticket;  // and the lock may be held for ever
  {
    std::lock_guard lock(mutex_);
    // The thread first: where the system gives none this throws, and nothing must be armed.
    if (!thread_.joinable() && !stopped_) {
      thread_ = std::jthread([this](const std::stop_token& stop) { watch(stop); });
    }
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
  std::jthread thread;
  {
    std::lock_guard lock(mutex_);
    stopped_ = true;
    thread = std::move(thread_);
  }
  thread.request_stop();  // wakes the wait
}  // ~jthread joins

void Watchdog::watch(const std::stop_token& stop) {
  pthread_setname_np(pthread_self(), "callgate-watch");
  std::unique_lock lock(mutex_);
  while (!stop.stop_requested()) {
    if (actions_.empty()) {
      changed_.wait(lock, stop, [this] { return !actions_.empty(); });
      continue;
    }
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

}  // namespace callgate
