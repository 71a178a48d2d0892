// SPDX-License-Identifier: Apache-2.0
// A call site of a gate or tap, on any platform, the devices that make its call, and calls that
// outlive their handler.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
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
// device's position in the program, its partition, as the last operand. The attribute `shards`
// lists the partitions that make the call: of those with the same data, one may be enough.
class Shards {
 public:
  Shards() = default;
  // One digit per partition, 1 for those that make the call; "" for a call on whole arrays.
  explicit Shards(std::string runs) : runs_(std::move(runs)) {}

  // Removes the partition's number from the operands; -1 if there is none. Throws Error.
  std::int32_t take(DecodedCall& call) const {
    const void* number = take_operand(call).data;
    return number == nullptr ? -1 : read(number);
  }
  // In two steps, for a number on a device: the operand (with null data if there is none), then its
  // value.
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

  // True if the partition makes the call. Otherwise its results are zeros, because the program adds
  // all up.
  bool runs(std::int32_t shard) const noexcept {
    return shard < 0 || runs_[static_cast<std::size_t>(shard)] == '1';
  }

 private:
  std::string runs_;
};

// The number of a call's lane, if the program runs the lanes one after the other: the last operand,
// before the partition (core/lanes.h). Throws Error.
inline const ArrayView& lane_operand(std::span<const ArrayView> operands) {
  if (operands.empty() || operands.back().dtype != DType::kS32 || operands.back().rank != 0)
    throw Error("a call in numbered lanes", "the lane as its last operand",
                operands.empty() ? "no operand" : to_string(operands.back()));
  return operands.back();
}
// Removes the operand and puts the number into the context; for arrays in host memory.
inline void take_lane(Call& call) {
  std::memcpy(&call.context.lane, lane_operand(call.operands).data, sizeof(call.context.lane));
  call.operands = call.operands.first(call.operands.size() - 1);
}

// Shared, because an abandoned call on its own thread may outlive the executable.
struct CallSite {
  std::shared_ptr<Callee> callee;
  std::shared_ptr<Site> site;
  bool poison_on_error = false;  // see settled() in ffi.h
  bool reads_context = true;
  bool numbered = false;  // its calls have the number of their lane
  bool marked = false;    // the last result only orders later calls
  Shards shards;
  mutable std::atomic<std::int64_t> first_run{-1};

  // True for the first run that asks.
  bool is_first(std::int64_t run) const noexcept {
    std::int64_t first = -1;  // relaxed: a number that is set once
    return first_run.compare_exchange_strong(first, run, std::memory_order_relaxed) || first == run;
  }

  // For arrays in host memory.
  void run(const Call& call) const {
    std::optional<TimelineSpan> span;
    if (Timeline::on() && !callee->kind().empty()) [[unlikely]]
      span.emplace(callee->kind(), callee->name());
    settled(poison_on_error, *callee, [&] { site->run(call); }, [&] { poison(call.results); });
  }
};

// Finds the callee and binds it to the site that the attributes describe. Throws Error.
std::shared_ptr<CallSite> make_call_site(const XLA_FFI_Attrs& attributes);

// For a call while the process is ending: throws Error, unless the callee is quiet then.
void refuse_at_exit(const Callee& callee);

// --- Calls that outlive their handler, on threads of callgate's ----------------------------------

// The frame's descriptors die with its handler, so they are copied. If the watchdog may fail the
// program, the memory is private, too: XLA then frees its own, while user code may still use it.
class OwnedCall {
 public:
  OwnedCall(const Call& call, bool private_memory);

  Call call() { return Call{operands_.all(), results_.all(), context_}; }

  // Copies private results to XLA's memory.
  void publish() const;

  // Fills the results of an abandoned call.
  void poison_results() const noexcept { poison((targets_ ? *targets_ : results_).all()); }
  const CallContext& context() const noexcept { return context_; }
  std::string arguments() const { return to_string(operands_.all()); }

 private:
  struct alignas(64) Line {  // aligned as XLA's own buffers
    std::array<char, 64> bytes;
  };

  void allocate(ArrayView& view);
  // A result in the memory of an operand (an alias) goes to that operand's private copy.
  void place(ArrayView& result, std::span<const ArrayView> operands);

  std::vector<std::unique_ptr<Line[]>> memory_;
  OwnedViews operands_, results_;
  std::optional<OwnedViews> targets_;  // XLA's results, if ours are private
  CallContext context_;
};

// The promise of a call that completes after its handler has returned. The first of `succeed` and
// `fail` takes effect: by the worker that ran the call, or the watchdog that abandoned it. A
// dropped promise fails the program, which would otherwise block for good. Settling never throws.
class Promise : Immovable {
 public:
  // Creates XLA's future; throws Error if this XLA has none.
  explicit Promise(const XLA_FFI_Api* api);
  ~Promise() { fail(Error(ErrorCode::kAborted, "the call was dropped before it ran")); }

  XLA_FFI_Future* future() const noexcept { return future_; }

  // Runs `publish`, which writes the results, and completes, unless the promise is already settled.
  template <typename Publish>
  bool succeed(Publish&& publish) {
    if (!claim()) return false;
    publish();
    XLA_FFI_Future_SetAvailable_Args args{XLA_FFI_Future_SetAvailable_Args_STRUCT_SIZE, nullptr,
                                          future_};
    (void)succeeded(api_, api_->XLA_FFI_Future_SetAvailable(&args));
    return true;
  }
  bool fail(const Error& error);

 private:
  // True for the one caller that may settle.
  bool claim() noexcept;

  const XLA_FFI_Api* api_;
  XLA_FFI_Future* future_ = nullptr;
  std::atomic<bool> settled_{false};
};

// --- Calls that another thread may end -----------------------------------------------------------
//
// Overdue calls, past their timeout: a report has the stacks of Python's threads, so it needs the
// GIL, which the overdue callable may hold for ever. So another thread makes the report, and after
// a short while the call fails without one: the watchdog's thread never waits.
//
// Calls that wait for themselves: while JAX calls a jitted function for the first time, other
// threads that call it wait until that call has ended, with all its gates. A gate on a thread of
// its own that calls the same function would wait for ever. So the first run of a program is
// watched.

struct WatchedCall : Immovable {
  explicit WatchedCall(std::shared_ptr<CallSite> of) : site(std::move(of)) {}
  virtual ~WatchedCall() = default;

  virtual void run() = 0;  // on a worker; never throws
  virtual std::string arguments() const = 0;
  // Ends the call; returns false if it has already ended. If XLA doesn't get the failure, it calls
  // `keep` before the program continues. Takes no GIL itself.
  virtual bool fail(const Error& error, const std::function<void()>& keep) = 0;

  bool fail_deferred(const Error& error) {
    return fail(error, [&] { site->callee->defer(error); });
  }

  const std::shared_ptr<CallSite> site;
  std::atomic<unsigned long> thread{0};  // Python's number of the worker; 0 before it begins
  std::atomic<bool> failed_without_report{false};
};

// False if there is no thread.
bool try_submit(WorkerPool::Job job);

// Runs the call on a worker or the thread, and fails it after its timeout. False, without running
// it, if the process is ending or the thread is closed. May throw, also without running it.
bool submit_with_timeout(const std::shared_ptr<WatchedCall>& call, NamedThread* thread = nullptr);

// As long as the call lives: checks on a worker whether it waits for itself, because that takes the
// GIL.
void watch_for_self_wait(const std::weak_ptr<WatchedCall>& watched);

}  // namespace callgate::xla_ffi
