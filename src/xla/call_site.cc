// SPDX-License-Identifier: Apache-2.0
// The creation of call sites, and calls on callgate's threads.
#include "xla/call_site.h"

#include <chrono>
#include <cstdio>
#include <exception>

namespace callgate::xla_ffi {
namespace {

// Python makes a GateTimeoutError of it, which needs the GIL, too (callgate/_core/failures.py).
Error overdue_without_report(const WatchedCall& call, const std::string& why) {
  static std::atomic<std::int64_t> next{1};
  std::int64_t number = next.fetch_add(1, std::memory_order_relaxed);  // only a number, no order
  return Error::verbatim(
      ErrorCode::kDeadlineExceeded,
      "[callgate timeout #" + std::to_string(number) + "] gate '" + call.site->callee->name() +
          "' called with " + call.arguments() +
          " has run longer than its timeout; Python's stacks are not available: " + why);
}

Error overdue(const WatchedCall& call) try {
  return Error::verbatim(ErrorCode::kDeadlineExceeded,
                         call.site->callee->stall_report(call.arguments(), /*timed_out=*/true));
} catch (const std::exception& error) {
  return overdue_without_report(call, error.what());
}

// On the watchdog's thread. A late report goes to stderr.
void fail_overdue(const std::shared_ptr<WatchedCall>& call) {
  constexpr auto kPatience = std::chrono::milliseconds(500);
  auto fail_without_report = [call] {
    Error error = overdue_without_report(*call, "a thread holds the GIL");
    // Release: a thread that finds the call settled by it sees the flag.
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

}  // namespace

std::shared_ptr<CallSite> make_call_site(const XLA_FFI_Attrs& attributes) {
  Attributes held = decode_attributes(attributes);
  Interrupts::watch();
  auto made = std::make_shared<CallSite>();
  made->callee = Registry::instance().find(held.text("name"));
  made->poison_on_error = held.text("on_error") == "poison";
  made->reads_context = made->callee->reads_context();
  made->shards = Shards(std::string(held.text("shards")));
  made->numbered = held.flag("numbered");
  made->marked = held.flag("marked");
  SiteSpec spec{std::string(held.text("spec")),      std::string(held.text("site")),
                Lanes::of(held.dictionary("batch")), Mesh::of(held.dictionary("mesh")),
                std::string(held.text("layout")),    std::move(held)};
  made->site = made->callee->specialise(std::move(spec));
  made->reads_context = made->reads_context && made->site->reads_context();
  return made;
}

void refuse_at_exit(const Callee& callee) {
  if (callee.quiet_at_exit()) return LateCalls::instance().add(callee.name());
  throw Error(ErrorCode::kAborted,
              "gate '" + callee.name() + "' was called while the process is ending");
}

OwnedCall::OwnedCall(const Call& call, bool private_memory)
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

void OwnedCall::publish() const {
  for (std::size_t i = 0; targets_ && i < targets_->size(); ++i)
    copy_to((*targets_)[i], results_[i].data);
}

void OwnedCall::allocate(ArrayView& view) {
  memory_.push_back(std::make_unique_for_overwrite<Line[]>(view.nbytes() / sizeof(Line) + 1));
  view.data = memory_.back().get();
}

void OwnedCall::place(ArrayView& result, std::span<const ArrayView> operands) {
  for (std::size_t i = 0; i < operands.size(); ++i) {
    if (result.data != operands[i].data || result.nbytes() != operands[i].nbytes()) continue;
    result.data = operands_[i].data;
    return;
  }
  allocate(result);
}

Promise::Promise(const XLA_FFI_Api* api) : api_(api) {
  XLA_FFI_Future_Create_Args args{XLA_FFI_Future_Create_Args_STRUCT_SIZE, nullptr, nullptr};
  check(api, api->XLA_FFI_Future_Create(&args), "XLA gave no future: ");
  future_ = args.future;
}

bool Promise::fail(const Error& error) {
  if (!claim()) return false;
  XLA_FFI_Future_SetError_Args args{XLA_FFI_Future_SetError_Args_STRUCT_SIZE, nullptr, future_,
                                    make_error(api_, error)};
  (void)succeeded(api_, api_->XLA_FFI_Future_SetError(&args));
  return true;
}

bool Promise::claim() noexcept {
  // Acquire and release: the loser sees that the winner's results are complete or never coming.
  return !settled_.exchange(true, std::memory_order_acq_rel);
}

bool try_submit(WorkerPool::Job job) try {
  return WorkerPool::instance().submit(std::move(job));
} catch (const std::exception&) {
  return false;
}

bool submit_with_timeout(const std::shared_ptr<WatchedCall>& call, NamedThread* thread) {
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

void watch_for_self_wait(const std::weak_ptr<WatchedCall>& watched) {
  auto look = [watched] {
    std::shared_ptr<WatchedCall> call = watched.lock();
    if (call == nullptr) return;
    // Relaxed: a number. A check that comes too early is repeated.
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
