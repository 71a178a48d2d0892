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
#include "core/threads.h"
#include "xla/call_site.h"
#include "xla/ffi.h"

namespace callgate::xla_ffi {

// The frame's descriptors die with its handler, so they are copied. Where the watchdog may fail the
// program the memory is private, too: XLA frees its own then, while user code may still use it.
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
  std::string arguments() const { return to_string(operands_.all()); }

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

// The promise of a call that completes after its handler has returned. Of `succeed` and `fail` the
// first takes effect: the worker that ran the call or the watchdog that gave it up. A promise that
// is dropped fails the program, which it would else block for good. Settling never throws.
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

// --- Calls that another thread may end -----------------------------------------------------------
//
// Those that have run longer than their timeout: a report says where Python's threads stand, so it
// needs the GIL, which the very callable may hold for ever. So another thread makes it, and after a
// short while the call fails without: the watchdog's thread never waits.
//
// And those that wait for themselves: while JAX calls a jitted function for the first time, other
// threads that call it wait until that call has ended, with all gates in it. A gate on a thread of
// its own which calls the very function would wait for ever. So the first run of a program is
// watched.

struct WatchedCall : Immovable {
  explicit WatchedCall(std::shared_ptr<CallSite> of) : site(std::move(of)) {}
  virtual ~WatchedCall() = default;

  virtual void run() = 0;  // on a worker. Nothing is thrown.
  virtual std::string arguments() const = 0;
  // Ends the call, unless it has ended: then it returns false. Where XLA is not told of the failure
  // it calls `keep` before the program goes on. It takes no GIL itself.
  virtual bool fail(const Error& error, const std::function<void()>& keep) = 0;

  bool fail_deferred(const Error& error) {
    return fail(error, [&] { site->callee->defer(error); });
  }

  const std::shared_ptr<CallSite> site;
  std::atomic<unsigned long> thread{0};  // Python's number of the worker; 0 until it begins
  std::atomic<bool> failed_without_report{false};
};

// Python makes a GateTimeoutError of it, which needs the GIL, too (callgate/_core/failures.py).
inline Error overdue_without_report(const WatchedCall& call, const std::string& why) {
  static std::atomic<std::int64_t> next{1};
  std::int64_t number = next.fetch_add(1, std::memory_order_relaxed);  // a number, no order
  return Error::verbatim(
      ErrorCode::kDeadlineExceeded,
      "[callgate timeout #" + std::to_string(number) + "] gate '" + call.site->callee->name() +
          "' called with " + call.arguments() +
          " has run longer than its timeout; where Python's threads stand can't be told: " + why);
}

inline Error overdue(const WatchedCall& call) try {
  return Error::verbatim(ErrorCode::kDeadlineExceeded,
                         call.site->callee->stall_report(call.arguments(), /*timed_out=*/true));
} catch (const std::exception& error) {
  return overdue_without_report(call, error.what());
}

// False where no thread is to be had.
inline bool try_submit(WorkerPool::Job job) try {
  return WorkerPool::instance().submit(std::move(job));
} catch (const std::exception&) {
  return false;
}

// On the watchdog's thread. A report that comes too late goes to stderr.
inline void fail_overdue(const std::shared_ptr<WatchedCall>& call) {
  constexpr auto kPatience = std::chrono::milliseconds(500);
  auto fail_without_report = [call] {
    Error error = overdue_without_report(*call, "one of them holds the GIL");
    // Release: who finds the call settled by it sees the flag.
    call->failed_without_report.store(true, std::memory_order_release);
    bool deferred = false;
    if (call->fail(error, [&] { deferred = true; }) && deferred)
      (void)try_submit([call, error] { call->site->callee->defer(error); });  // it needs the GIL
  };
  Watchdog::Ticket ticket = Watchdog::instance().arm(kPatience, fail_without_report);
  bool taken = try_submit([call, ticket] {
    Error error = overdue(*call);
    Watchdog::instance().disarm(ticket);
    if (!call->fail_deferred(error) &&
        call->failed_without_report.load(std::memory_order_acquire))  // see its store
      std::fprintf(stderr, "callgate: %s\n", error.what());
  });
  if (taken) return;
  Watchdog::instance().disarm(ticket);
  fail_without_report();
}

// Has a worker run the call, which fails where it takes longer than its timeout. False where the
// process is ending: it does not run. May throw, likewise.
inline bool submit_with_timeout(const std::shared_ptr<WatchedCall>& call) {
  auto timeout = call->site->callee->timeout();
  Watchdog::Ticket ticket;
  if (timeout.count() > 0)
    ticket = Watchdog::instance().arm(timeout, [call] { fail_overdue(call); });
  auto disarm = [ticket, timeout] {
    if (timeout.count() > 0) Watchdog::instance().disarm(ticket);
  };
  auto work = [call, disarm] {
    call->run();
    disarm();
  };
  try {
    if (WorkerPool::instance().submit(work)) return true;
  } catch (...) {
    disarm();
    throw;
  }
  disarm();
  return false;
}

// As long as the call lives: looks whether it waits for itself, on a worker, as that takes the GIL.
inline void watch_for_self_wait(const std::weak_ptr<WatchedCall>& watched) {
  auto look = [watched] {
    std::shared_ptr<WatchedCall> call = watched.lock();
    if (call == nullptr) return;
    // Relaxed: a number. Who comes too early looks again.
    unsigned long thread = call->thread.load(std::memory_order_relaxed);
    std::string text = thread == 0 ? "" : call->site->callee->self_wait(thread);
    if (text.empty()) return watch_for_self_wait(watched);
    call->fail_deferred(Error::verbatim(ErrorCode::kInternal, text));
  };
  Watchdog::instance().arm(std::chrono::seconds(1), [watched, look] {
    if (!watched.expired()) (void)WorkerPool::instance().submit(look);  // not while it is ending
  });
}

}  // namespace callgate::xla_ffi
