// Calls on threads of callgate's that do not end: those that have run longer than their timeout,
// and those that wait for themselves.
//
// A report says where Python's threads stand, so it needs the GIL, which the very callable may hold
// for ever. So another thread makes it, and after a short while the call fails without: the
// watchdog's thread never waits, neither do other calls' timeouts.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "core/watchdog.h"
#include "core/worker_pool.h"
#include "xla/call_site.h"

namespace callgate::xla_ffi {

// Ends a call with a text, unless it has ended: then it returns false. Before its program goes on
// it calls `keep`. It takes no GIL itself.
using Settle = std::function<bool(const std::string& text, const std::function<void()>& keep)>;

// On the watchdog's thread, for a call with arguments `described` of the site. A failure that XLA
// is not told of is `deferred` to the callee. A report that comes too late goes to stderr.
void fail_overdue(std::shared_ptr<const CallSite> site, std::string described, bool deferred,
                  Settle settle);

// Has a worker run `work`, and the watchdog's thread `late` where it takes longer than `timeout`; 0
// for never. False where the process is ending: neither is run. May throw, likewise.
template <typename Late, typename Work>
bool submit_with_timeout(std::chrono::nanoseconds timeout, Late late, Work work) {
  Watchdog::Ticket ticket;
  if (timeout.count() > 0) ticket = Watchdog::instance().arm(timeout, std::move(late));
  auto disarm = [ticket, timeout] {
    if (timeout.count() > 0) Watchdog::instance().disarm(ticket);
  };
  bool taken = false;
  try {
    taken = WorkerPool::instance().submit([work = std::move(work), disarm]() mutable {
      work();
      disarm();
    });
  } catch (...) {
    disarm();
    throw;
  }
  if (!taken) disarm();
  return taken;
}

// While JAX calls a jitted function for the first time, other threads that call it wait until that
// call has ended, with all gates in it. A gate on a thread of its own which calls the very function
// would wait for ever. So the first run of a program is watched, and such a call fails.
struct WatchedCall {
  explicit WatchedCall(std::shared_ptr<CallSite> of) : site(std::move(of)) {}
  virtual ~WatchedCall() = default;

  // Ends the call, unless it has ended: why it never will by itself.
  virtual void fail_self_wait(const std::string& text) = 0;

  const std::shared_ptr<CallSite> site;
  std::atomic<unsigned long> thread{0};  // Python's number of the worker; 0 until it begins
};

// As long as the call lives.
void watch_for_self_wait(const std::weak_ptr<WatchedCall>& call);

}  // namespace callgate::xla_ffi
