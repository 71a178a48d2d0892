// Notices calls that take too long.
//
// A `Watch` stands for one call; if it is not gone by its deadline the watchdog's thread runs its
// action, once, without any lock held. The thread starts with the first watch, sleeps until the
// earliest deadline and is joined by `stop`. Calls that set no watch pay nothing.
#pragma once

#include <pthread.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "core/lifetime.h"
#include "core/process.h"

namespace callgate {

class Watchdog : Immovable {
 public:
  using Clock = std::chrono::steady_clock;
  using Action = std::function<void()>;
  using Ticket = std::pair<Clock::time_point, std::uint64_t>;

  static Watchdog& instance() { return immortal<Watchdog>(); }

  ~Watchdog() { stop(); }

  // Does nothing in a fork's child, which has no such thread.
  Ticket arm(Clock::duration delay, Action action) {
    Ticket ticket;
    if (!process_.here()) return ticket;  // and the lock may be held for ever
    {
      std::lock_guard lock(mutex_);
      // The thread first: where the system gives none this throws, and nothing must be armed.
      if (!thread_.joinable() && !stopped_)
        thread_ = std::jthread([this](const std::stop_token& stop) { watch(stop); });
      ticket = {Clock::now() + delay, next_++};
      actions_.emplace(ticket, std::move(action));
    }
    changed_.notify_one();
    return ticket;
  }

  // Takes the watch back. After it returns the action will not start, but may be running.
  void disarm(const Ticket& ticket) {
    if (!process_.here()) return;
    std::lock_guard lock(mutex_);
    actions_.erase(ticket);
  }

  void stop() {
    std::jthread thread;  // wakes the wait and joins
    std::lock_guard lock(mutex_);
    stopped_ = true;
    thread = std::move(thread_);
  }

 private:
  void watch(const std::stop_token& stop) {
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

}  // namespace callgate
