// See the header.
#include "xla/overdue.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <memory>
#include <utility>

namespace callgate::xla_ffi {
namespace {

constexpr auto kPatience = std::chrono::milliseconds(500);

struct OverdueCall {
  std::shared_ptr<const CallSite> site;
  std::string described;
  bool deferred;
  Settle settle;
  std::atomic<bool> failed_without{false};

  // Python makes a GateTimeoutError of it, which needs the GIL, too (callgate/_core/failures.py).
  std::string without_report(const std::string& why) const {
    static std::atomic<std::int64_t> next{1};
    std::int64_t number = next.fetch_add(1, std::memory_order_relaxed);  // a number, no order
    return "[callgate timeout #" + std::to_string(number) + "] gate '" + site->callee->name() +
           "' called with " + described +
           " has run longer than its timeout; where Python's threads stand can't be told: " + why;
  }
  std::string report() const {
    try {
      return site->callee->stall_report(described, /*timed_out=*/true);
    } catch (const std::exception& error) {
      return without_report(error.what());
    }
  }
  void defer(const std::string& text) const {
    if (deferred) site->callee->defer(Error::verbatim(ErrorCode::kDeadlineExceeded, text));
  }
};

// False where no thread is to be had.
bool submit(WorkerPool::Job job) {
  try {
    return WorkerPool::instance().submit(std::move(job));
  } catch (const std::exception&) {
    return false;
  }
}

void fail_without_report(const std::shared_ptr<OverdueCall>& call) {
  std::string text = call->without_report("one of them holds the GIL");
  // Release: who finds the call settled by it sees the flag.
  call->failed_without.store(true, std::memory_order_release);
  if (!call->settle(text, [] {})) return;
  (void)submit([call, text] { call->defer(text); });  // it needs the GIL
}

constexpr auto kInterval = std::chrono::seconds(1);

// On a worker, since it takes the GIL.
void look(const std::weak_ptr<WatchedCall>& watched) {
  std::shared_ptr<WatchedCall> call = watched.lock();
  if (call == nullptr) return;
  // Relaxed: a number. Who comes too early looks again.
  unsigned long thread = call->thread.load(std::memory_order_relaxed);
  std::string text = thread == 0 ? "" : call->site->callee->self_wait(thread);
  if (!text.empty()) return call->fail_self_wait(text);
  watch_for_self_wait(watched);
}

}  // namespace

void fail_overdue(std::shared_ptr<const CallSite> site, std::string described, bool deferred,
                  Settle settle) {
  auto call = std::make_shared<OverdueCall>(std::move(site), std::move(described), deferred,
                                            std::move(settle));
  Watchdog::Ticket ticket =
      Watchdog::instance().arm(kPatience, [call] { fail_without_report(call); });
  bool taken = submit([call, ticket] {
    std::string text = call->report();
    Watchdog::instance().disarm(ticket);
    bool settled = call->settle(text, [&] { call->defer(text); });
    if (!settled && call->failed_without.load(std::memory_order_acquire)) {  // see its store
      std::fprintf(stderr, "callgate: %s\n", text.c_str());
    }
  });
  if (taken) return;
  Watchdog::instance().disarm(ticket);
  fail_without_report(call);
}

void watch_for_self_wait(const std::weak_ptr<WatchedCall>& call) {
  Watchdog::instance().arm(kInterval, [call] {
    if (call.expired()) return;
    (void)WorkerPool::instance().submit([call] { look(call); });  // not while the process ends
  });
}

}  // namespace callgate::xla_ffi
