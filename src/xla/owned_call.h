// Calls that outlive their handler, on threads of callgate's.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/call.h"
#include "core/lifetime.h"
#include "core/watchdog.h"
#include "core/worker_pool.h"
#include "xla/call_site.h"
#include "xla/ffi.h"

namespace callgate::xla_ffi {

// A call that outlives its handler: the frame's descriptors die with it, so they are copied. Where
// the watchdog may fail the program the memory is private, too: XLA frees its own then, while user
// code may still be reading and writing.
class OwnedCall {
 public:
  OwnedCall(const Call& call, bool private_memory)
      : operands_(call.operands), results_(call.results), context_(call.context) {
    if (!private_memory) return;
    targets_.emplace(call.results);
    for (ArrayView& view : operands_.all()) {
      const void* source = view.data;
      allocate(view);
      copy_to(view, source);
    }
    for (ArrayView& view : results_.all()) place(view, call.operands);
  }

  Call call() { return Call{operands_.all(), results_.all(), context_}; }

  // Copies private results to XLA's memory.
  void publish() const {
    for (std::size_t i = 0; targets_ && i < targets_->size(); ++i)
      copy_to((*targets_)[i], results_[i].data);
  }

  // What a call that was given up leaves in XLA's memory.
  void poison_results() const noexcept { poison((targets_ ? *targets_ : results_).all()); }

  const CallContext& context() const noexcept { return context_; }

  std::string describe() const { return to_string(operands_.all()); }

 private:
  void allocate(ArrayView& view) {
    constexpr std::size_t kAlignment = 64;  // as XLA's own buffers
    std::size_t bytes = (view.nbytes() / kAlignment + 1) * kAlignment;
    memory_.emplace_back(static_cast<char*>(std::aligned_alloc(kAlignment, bytes)), &std::free);
    if (memory_.back() == nullptr) throw std::bad_alloc();
    view.data = memory_.back().get();
  }
  // A result in the memory of an operand (an alias) goes to that operand's private copy.
  void place(ArrayView& result, std::span<const ArrayView> operands) {
    for (std::size_t i = 0; i < operands.size(); ++i) {
      if (result.data != operands[i].data || result.nbytes() != operands[i].nbytes()) continue;
      result.data = operands_[i].data;
      return;
    }
    allocate(result);
  }

  std::vector<std::unique_ptr<char, void (*)(void*)>> memory_;
  OwnedViews operands_, results_;
  std::optional<OwnedViews> targets_;  // XLA's results, where ours are private
  CallContext context_;
};

// The promise of a call that completes after its handler has returned.
//
// Exactly one of `succeed` and `fail` takes effect, whoever comes first: the worker that ran the
// call or the watchdog that gave it up. A promise that is dropped fails the program, since one that
// is never completed would block it for good. By XLA's C interface: settling never throws.
class Promise : Immovable {
 public:
  // Creates XLA's future; throws Error when this XLA has none.
  explicit Promise(const XLA_FFI_Api* api) : api_(api) {
    XLA_FFI_Future_Create_Args args{XLA_FFI_Future_Create_Args_STRUCT_SIZE, nullptr, nullptr};
    check(api, api->XLA_FFI_Future_Create(&args), "XLA gave no future: ");
    future_ = args.future;
  }
  ~Promise() { fail(Error(ErrorCode::kAborted, "the call was dropped before it ran")); }

  XLA_FFI_Future* future() const noexcept { return future_; }

  // Runs `publish` (it writes the results) and completes, unless the promise is already settled.
  template <typename Publish>
  bool succeed(Publish&& publish) {
    if (!claim()) return false;
    publish();
    XLA_FFI_Future_SetAvailable_Args args{XLA_FFI_Future_SetAvailable_Args_STRUCT_SIZE, nullptr,
                                          future_};
    (void)succeeded(api_, api_->XLA_FFI_Future_SetAvailable(&args));
    return true;
  }
  bool fail(const Error& error) {
    if (!claim()) return false;
    XLA_FFI_Future_SetError_Args args{XLA_FFI_Future_SetError_Args_STRUCT_SIZE, nullptr, future_,
                                      make_error(api_, error)};
    (void)succeeded(api_, api_->XLA_FFI_Future_SetError(&args));
    return true;
  }

 private:
  // True for the one caller that may settle.
  bool claim() noexcept {
    // Acquire and release: the loser sees that the winner's results are complete or never coming.
    return !settled_.exchange(true, std::memory_order_acq_rel);
  }

  const XLA_FFI_Api* api_;
  XLA_FFI_Future* future_ = nullptr;
  std::atomic<bool> settled_{false};
};

// --- Calls that do not end: those that have run longer than their timeout, and those that wait for
// themselves
// ---------------------------------------------------------------------------------------
//
// A report says where Python's threads stand, so it needs the GIL, which the very callable may hold
// for ever. So another thread makes it, and after a short while the call fails without: the
// watchdog's thread never waits, neither do other calls' timeouts.

// Ends a call with a text, unless it has ended: then it returns false. Before its program goes on
// it calls `keep`. It takes no GIL itself.
using Settle = std::function<bool(const std::string& text, const std::function<void()>& keep)>;

// A call that has run longer than its timeout.
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
  std::string report() const try {
    return site->callee->stall_report(described, /*timed_out=*/true);
  } catch (const std::exception& error) {
    return without_report(error.what());
  }
  void defer(const std::string& text) const {
    if (deferred) site->callee->defer(Error::verbatim(ErrorCode::kDeadlineExceeded, text));
  }
};

// False where no thread is to be had.
inline bool try_submit(WorkerPool::Job job) try {
  return WorkerPool::instance().submit(std::move(job));
} catch (const std::exception&) {
  return false;
}

// On the watchdog's thread, for a call with arguments `described` of the site. A failure that XLA
// is not told of is `deferred` to the callee. A report that comes too late goes to stderr.
inline void fail_overdue(std::shared_ptr<const CallSite> site, std::string described, bool deferred,
                         Settle settle) {
  constexpr auto kPatience = std::chrono::milliseconds(500);
  auto call = std::make_shared<OverdueCall>(std::move(site), std::move(described), deferred,
                                            std::move(settle));
  auto fail_without_report = [call] {
    std::string text = call->without_report("one of them holds the GIL");
    // Release: who finds the call settled by it sees the flag.
    call->failed_without.store(true, std::memory_order_release);
    if (!call->settle(text, [] {})) return;
    (void)try_submit([call, text] { call->defer(text); });  // it needs the GIL
  };
  Watchdog::Ticket ticket = Watchdog::instance().arm(kPatience, fail_without_report);
  bool taken = try_submit([call, ticket] {
    std::string text = call->report();
    Watchdog::instance().disarm(ticket);
    bool settled = call->settle(text, [&] { call->defer(text); });
    if (!settled && call->failed_without.load(std::memory_order_acquire))  // see its store
      std::fprintf(stderr, "callgate: %s\n", text.c_str());
  });
  if (taken) return;
  Watchdog::instance().disarm(ticket);
  fail_without_report();
}

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

// As long as the call lives. A worker looks, since it takes the GIL.
inline void watch_for_self_wait(const std::weak_ptr<WatchedCall>& watched) {
  auto look = [watched] {
    std::shared_ptr<WatchedCall> call = watched.lock();
    if (call == nullptr) return;
    // Relaxed: a number. Who comes too early looks again.
    unsigned long thread = call->thread.load(std::memory_order_relaxed);
    std::string text = thread == 0 ? "" : call->site->callee->self_wait(thread);
    if (!text.empty()) return call->fail_self_wait(text);
    watch_for_self_wait(watched);
  };
  Watchdog::instance().arm(std::chrono::seconds(1), [watched, look] {
    if (!watched.expired()) (void)WorkerPool::instance().submit(look);  // not while it is ending
  });
}

}  // namespace callgate::xla_ffi
