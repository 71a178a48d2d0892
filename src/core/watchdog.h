// Notices calls that take too long.
//
// A `Watch` stands for one call; if it is not gone by its deadline the watchdog's thread runs its
// action, once, without any lock held. The thread starts with the first watch and is joined by
// `stop`. Calls that set no watch pay nothing.
#pragma once

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
  Ticket arm(Clock::duration delay, Action action);

  // Takes the watch back. After it returns the action will not start, but may be running.
  void disarm(const Ticket& ticket);

  void stop();

 private:
  void watch(const std::stop_token& stop);

  std::mutex mutex_;
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
