// SPDX-License-Identifier: Apache-2.0
// A call site of a gate or tap, on any platform, which devices make its call, and calls that
// outlive their handler.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/call.h"
#include "core/error.h"
#include "core/lifecycle.h"
#include "core/lifetime.h"
#include "core/named_thread.h"
#include "core/threads.h"
#include "core/timeline.h"
#include "xla/ffi.h"

namespace callgate::xla_ffi {

// A call on one of an array's shards, in a program that XLA partitions over several devices. The
// partitioner (python/callgate/_sharding/partitioner.py) makes one for each device. It adds the
// device's position in the program, its partition, as the last operand, and says in the attribute
// `shards` which partitions make the call: of those that hold the same data, one may be enough.
class Shards {
 public:
  Shards() = default;
  // One digit a partition, 1 for those that make the call; "" for a call on whole arrays.
  explicit Shards(std::string runs) : runs_(std::move(runs)) {}

  // Takes the partition's number off the operands; -1 where there is none. Throws Error.
  std::int32_t take(DecodedCall& call) const {
    const void* number = take_operand(call).data;
    return number == nullptr ? -1 : read(number);
  }
  // In two steps, for a number on a device: the operand (null data where there is none), its value.
  ArrayView take_operand(DecodedCall& call) const {
    ArrayView number;
    if (runs_.empty()) return number;
    if (!call.operands().empty()) number = call.operands().back();
    if (number.dtype != DType::kU32 || number.rank != 0)
      throw Error("a call on shards", "the partition as its last operand",
                  call.operands().empty() ? "no operand" : to_string(number));
    call.drop_last_operand();
    return number;
  }
  std::int32_t read(const void* number) const {
    std::uint32_t shard = 0;
    std::memcpy(&shard, number, sizeof(shard));
    if (shard >= runs_.size())
      throw Error("a call on shards", "one of " + std::to_string(runs_.size()) + " partitions",
                  "number " + std::to_string(shard));
    return static_cast<std::int32_t>(shard);
  }

  bool all_run() const noexcept { return runs_.find('0') == std::string::npos; }

  // True if the partition makes the call. Else its results are zeros: the program adds all up.
  bool runs(std::int32_t shard) const noexcept {
    return shard < 0 || runs_[static_cast<std::size_t>(shard)] == '1';
  }

 private:
  std::string runs_;
};

// A call in lanes that the program runs one after the other has as its last operand, before the
// partition, the number of its lane (core/lanes.h). Throws Error.
inline const ArrayView& lane_operand(std::span<const ArrayView> operands) {
  if (operands.empty() || operands.back().dtype != DType::kS32 || operands.back().rank != 0)
    throw Error("a call in numbered lanes", "the lane as its last operand",
                operands.empty() ? "no operand" : to_string(operands.back()));
  return operands.back();
}
// Takes it off, and puts the number into the context; for arrays in the host's memory.
inline void take_lane(Call& call) {
  std::memcpy(&call.context.lane, lane_operand(call.operands).data, sizeof(call.context.lane));
  call.operands = call.operands.first(call.operands.size() - 1);
}

// Of one executable, but shared: a call on its own thread that was given up may outlive that.
struct CallSite {
  std::shared_ptr<Callee> callee;
  std::shared_ptr<Site> site;
  bool poison_on_error = false;  // see settled() in ffi.h
  bool reads_context = true;
  bool numbered = false;  // its calls have the number of their lane
  Shards shards;
  mutable std::atomic<std::int64_t> first_run{-1};

  // True if the run is the first that comes by.
  bool is_first(std::int64_t run) const noexcept {
    std::int64_t first = -1;  // relaxed: a number that is set once
    return first_run.compare_exchange_strong(first, run, std::memory_order_relaxed) || first == run;
  }

  // For arrays in the host's memory.
  void run(const Call& call) const {
    std::optional<TimelineSpan> span;
    if (Timeline::on() && !callee->kind().empty()) [[unlikely]]
      span.emplace(callee->kind(), callee->name());
    settled(poison_on_error, *callee, [&] { site->run(call); }, [&] { poison(call.results); });
  }
};

// Finds the callee and binds it to the site that the attributes describe. Throws Error.
inline std::shared_ptr<CallSite> make_call_site(const XLA_FFI_Attrs& attributes) {
  Attributes held = decode_attributes(attributes);
  Interrupts::watch();
  auto made = std::make_shared<CallSite>();
  made->callee = Registry::instance().find(held.text("name"));
  made->poison_on_error = held.text("on_error") == "poison";
  made->reads_context = made->callee->reads_context();
  made->shards = Shards(std::string(held.text("shards")));
  made->numbered = held.flag("numbered");
  SiteSpec spec{std::string(held.text("spec")),      std::string(held.text("site")),
                Lanes::of(held.dictionary("batch")), Mesh::of(held.dictionary("mesh")),
                std::string(held.text("layout")),    std::move(held)};
  made->site = made->callee->specialise(std::move(spec));
  made->reads_context = made->reads_context && made->site->reads_context();
  return made;
}

// For a call that comes when the process is ending: throws Error, unless the callee is quiet then.
inline void refuse_at_exit(const Callee& callee) {
  if (callee.quiet_at_exit()) return LateCalls::instance().add(callee.name());
  throw Error(ErrorCode::kAborted,
              "gate '" + callee.name() + "' was called while the process is ending");
}

// --- Calls that outlive their handler, on threads of callgate's ----------------------------------

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
  struct alignas(64) Line {  // aligned as XLA's own buffers
    std::array<char, 64> bytes;
  };

  void allocate(ArrayView& view) {
    memory_.push_back(std::make_unique_for_overwrite<Line[]>(view.nbytes() / sizeof(Line) + 1));
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

  std::vector<std::unique_ptr<Line[]>> memory_;
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
  auto patience = std::make_shared<Watch>(kPatience, fail_without_report);
  bool taken = try_submit([call, patience]() mutable {
    Error error = overdue(*call);
    patience.reset();
    if (!call->fail_deferred(error) &&
        call->failed_without_report.load(std::memory_order_acquire))  // see its store
      std::fprintf(stderr, "callgate: %s\n", error.what());
  });
  if (!taken) fail_without_report();
}

// Has a worker run the call, or the thread, which fails where it takes longer than its timeout.
// False where the process is ending, or the thread is closed: it does not run. May throw, likewise.
inline bool submit_with_timeout(const std::shared_ptr<WatchedCall>& call,
                                NamedThread* thread = nullptr) {
  std::shared_ptr<Watch> watch;
  if (auto timeout = call->site->callee->timeout(); timeout.count() > 0)
    watch = std::make_shared<Watch>(timeout, [call] { fail_overdue(call); });
  auto run = [call, watch = std::move(watch)]() mutable {
    call->run();
    watch.reset();  // while the call lives
  };
  return thread != nullptr ? thread->submit(std::move(run))
                           : WorkerPool::instance().submit(std::move(run));
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
