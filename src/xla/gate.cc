// SPDX-License-Identifier: Apache-2.0
// Gates and taps, on the CPU and in programs for CUDA, where only functions that say so wait for a
// device. State and calls are plain C++; only the callee knows Python.
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "cells/progress.h"
#include "core/lifecycle.h"
#include "core/named_thread.h"
#include "cuda/completions.h"
#include "cuda/driver.h"
#include "xla/call_site.h"
#include "xla/cuda_call.h"
#include "xla/ffi.h"
#include "xla/handlers.h"

namespace callgate::xla_ffi {
namespace {

// XLA's state for the site.
struct GateState {
  static inline ::xla::ffi::TypeId id = {};
  static constexpr std::string_view kName = "callgate.gate_state";
  static std::unique_ptr<GateState> make(const XLA_FFI_Attrs& attributes) {
    return std::make_unique<GateState>(make_call_site(attributes));
  }
  static void execute(XLA_FFI_CallFrame* frame);

  std::shared_ptr<CallSite> call_site;
};

// XLA has at most 32 programs of a device in flight; the next one waits. Nested calls, each in a
// program that the previous one runs, must not need more.
constexpr int kMostWithin = 24;
thread_local int t_within = 0;  // nested calls around this worker's code

// A call on a thread of its own, shared by the worker that runs it, the watchdog that abandons it
// and the check whether it waits for itself. The first of them settles it.
struct OwnThreadCall final : WatchedCall, std::enable_shared_from_this<OwnThreadCall> {
  const int within;
  OwnedCall call;
  Promise promise;

  OwnThreadCall(std::shared_ptr<CallSite> of, int place, const Call& made, bool private_memory,
                const XLA_FFI_Api* api)
      : WatchedCall(std::move(of)), within(place), call(made, private_memory), promise(api) {}

  std::string arguments() const override { return call.arguments(); }

  bool fail(const Error& error, const std::function<void()>& keep) override {
    if (!site->poison_on_error) {
      ProgressBoard::instance().fail(call.context().run);
      return promise.fail(error);
    }
    return promise.succeed([&] {
      call.poison_results();
      keep();
    });
  }

  // The promise is settled in all cases.
  void run() override {
    thread.store(python_thread(), std::memory_order_relaxed);  // see watch_for_self_wait()
    site->callee->enter_worker(/*of_device=*/false);
    ActiveCall active;
    auto body = [&] {
      t_within = within;
      active.entered() ? site->site->run(call.call()) : refuse_at_exit(*site->callee);
      t_within = 0;  // the program continues here; its calls aren't nested in this one
      settle([this] { promise.succeed([&] { call.publish(); }); });
    };
    guarded(body, [&](const Error& error) {
      t_within = 0;  // as above
      // The error of an abandoned call is dropped, because its program already has one.
      if (!active.entered()) return settle([this, error] { promise.fail(error); });
      settle([this, error] { fail(error, [&] { keep_failure(*site->callee, error); }); });
    });
  }

  // Called by the thread that queued the call on a named thread. It settles a short call here; a
  // longer one settles at its end.
  void await_shortly() {
    site->callee->thread()->watch_for_end(
        [&] { return turn_.load(std::memory_order_acquire) != kAwaited; });
    // Acquire and release: this or settle() sees the other's state.
    if (turn_.exchange(kLeft, std::memory_order_acq_rel) == kDone) settle_();
  }

 private:
  enum Turn { kAwaited, kDone, kLeft };

  // XLA continues the program on the thread that settles the promise. That must not be a named
  // thread, for which other programs wait, and which the rest of this program may need.
  void settle(std::function<void()> settling) {
    if (site->callee->thread() == nullptr) return settling();
    settle_ = std::move(settling);
    if (turn_.exchange(kDone, std::memory_order_acq_rel) == kAwaited) return;  // as above
    if (!try_submit([self = shared_from_this()] { self->settle_(); })) settle_();
  }

  std::atomic<Turn> turn_{kAwaited};
  std::function<void()> settle_;
};

// For a refused call: throws Error, unless the process is ending and the callee is quiet.
void refuse(Callee& callee) {
  if (callee.thread() == nullptr || Lifecycle::instance().closed()) return refuse_at_exit(callee);
  throw callee.closed_error();
}

int one_more_within(const Callee& callee) {
  if (t_within < kMostWithin) return t_within + 1;
  throw Error(ErrorCode::kInternal, "gate '" + callee.name() + "'",
              "at most " + std::to_string(kMostWithin) +
                  " nested calls, each in a program that the previous one runs",
              "one more; does it call itself without end?");
}

// A call that arrives on its own target thread, from a program that a call there runs.
void run_within(const CallSite& site, const Call& call) {
  struct Within : Immovable {
    explicit Within(int place) : before(std::exchange(t_within, place)) {}
    ~Within() { t_within = before; }
    const int before;
  } within(one_more_within(*site.callee));
  ActiveCall active;
  active.entered() ? site.site->run(call) : refuse_at_exit(*site.callee);
}

// Throws if the call can't be queued.
void start_on_own_thread(XLA_FFI_CallFrame* frame, const std::shared_ptr<CallSite>& site,
                         const Call& call) {
  NamedThread* const thread = site->callee->thread();
  // If a named thread dispatches a program, XLA waits for the call there. A call elsewhere that
  // needs the thread would then wait for ever.
  const bool on_named = NamedThread::current() != 0 && site->callee->timeout().count() == 0;
  if (thread != nullptr ? thread->is_here() : on_named) return run_within(*site, call);
  if (thread == nullptr && WorkerPool::instance().lost())
    throw Error(
        ErrorCode::kAborted,
        "gate '" + site->callee->name() +
            "': this process was forked from one that ran gates on threads of their own, which are "
            "not here; start processes with multiprocessing's 'spawn' or 'forkserver'");
  const int within = one_more_within(*site->callee);
  // Within another such call the jitted function may be new, because the program runs once more.
  bool may_wait_for_itself = site->is_first(call.context.run) || within > 1;
  bool private_memory = site->callee->timeout().count() > 0 || may_wait_for_itself;
  auto own = std::make_shared<OwnThreadCall>(site, within, call, private_memory, frame->api);
  XLA_FFI_Future* future = own->promise.future();
  if (may_wait_for_itself) watch_for_self_wait(own);
  if (!submit_with_timeout(own, thread))
    guarded([&] { refuse(*site->callee); }, [&](const Error& error) { own->promise.fail(error); });
  else if (thread != nullptr)
    own->await_shortly();
  frame->future = future;
}

void run_call(XLA_FFI_CallFrame* frame, const std::shared_ptr<CallSite>& site, const Call& call,
              bool own_thread) {
  const void* place = call.results.empty() ? nullptr : call.results[0].data;
  if (Interrupts::ends(call.context.run, place)) [[unlikely]] {
    if (!site->poison_on_error) throw interrupted(site->callee->name());
    // An error would leave other devices waiting. Optional calls are skipped.
    if (site->callee->quiet_at_exit()) return site->site->skip(call);
  }
  if (own_thread)
    return settled(
        site->poison_on_error, *site->callee, [&] { start_on_own_thread(frame, site, call); },
        [&] { poison(call.results); });
  ActiveCall active;
  if (!active.entered()) return refuse_at_exit(*site->callee);
  site->run(call);
}

void GateState::execute(XLA_FFI_CallFrame* frame) {
  const std::shared_ptr<CallSite>& site = StateOf<GateState>::get(*frame).call_site;
  DecodedCall decoded(*frame, site->marked);
  std::int32_t shard = site->shards.take(decoded);
  if (!site->shards.runs(shard)) [[unlikely]]
    return site->site->skip(Call{decoded.operands(), decoded.results(), {}});
  bool own_thread = site->callee->own_thread();
  const bool reads = site->reads_context || own_thread ||
                     contexts_wanted.load(std::memory_order_relaxed);  // see there
  CallContext context = reads ? decode_context(*frame) : CallContext{.run = decode_run(*frame)};
  context.shard = shard;
  try {
    Call call{decoded.operands(), decoded.results(), context};
    if (site->numbered) take_lane(call);
    run_call(frame, site, call, own_thread);
  } catch (const std::exception&) {
    ProgressBoard::instance().fail(context.run);  // the program's bars end with it
    throw;
  }
}

// --- In programs for CUDA ------------------------------------------------------------------------

using enum cuda::Device::Waiting;

// Runs `body` on the callee's thread, if it has one, and waits for it.
void on_its_thread(CudaCall& call, const std::function<void()>& body) {
  NamedThread* const thread = call.callee().thread();
  if (thread == nullptr || thread->is_here()) return body();
  const bool taken = thread->run([&] {
    call.callee().enter_worker(/*of_device=*/true);
    cuda::ContextScope current(call.device);
    body();
  });
  if (!taken) refuse(call.callee());
}

void run_native(CudaCall& call) {
  const CallSite& site = call.call_site();
  call.context.shard = call.site.shards.read(site.shards, call.number, call.device, call.stream);
  if (!site.shards.runs(call.context.shard))
    return cuda::clear_on_device(call.decoded.results(), call.stream);
  ActiveCall active;
  if (!active.entered()) return refuse_at_exit(call.callee());
  site.site->run(call.call());
}

// --- Staged: on copies in the host's memory, whose results are copied back -----------------------

// On XLA's thread, which waits for the operands.
void run_at_once(CudaCall& call) {
  auto copied = std::make_shared<CopiedCall>(call, call.decoded.operands(), call.decoded.results());
  if (!copied->copies.operands().empty())
    cuda::check(copied->copies.fetch_with_event(call.stream, kAsleep).wait_near(),
                "cuEventSynchronize");
  ActiveCall active;
  if (!active.entered()) return refuse_at_exit(call.callee());
  Call on_host = copied->call();
  if (!copied->runs())
    call.call_site().site->skip(on_host);
  else
    on_its_thread(call, [&] { call.call_site().run(on_host); });
  if (call.decoded.results().empty()) return;
  cuda::given(call.stream, [&] { copied->copies.publish(call.stream); });
  cuda::keep_until(call.device, call.stream, copied);
}

// A call on callgate's thread, for which the stream waits. It reports success to XLA at once.
class HeldStreamCall final : public WatchedCall {
 public:
  explicit HeldStreamCall(CudaCall& call)
      : WatchedCall(call.site.call_site),
        device_(call.device),
        copied_(call, call.decoded.operands(), call.decoded.results()),
        fetched_(copied_.copies.fetch_with_event(call.stream, kAsleep)) {}

  // From here on the stream waits until the call has settled or is abandoned.
  void hold(cuda::Stream stream) {
    gate_.hold(stream);
    copied_.copies.publish(stream);
  }

  // For a call that can't be queued: XLA gets its error. Waits for the stream, which uses this
  // object.
  void abandon(cuda::Stream stream) noexcept {
    settled_.store(true, std::memory_order_release);  // see claim()
    gate_.open();
    cuda::driver().stream_synchronize(stream);
  }

  void run() override {
    Callee& callee = *site->callee;
    guarded([&] { cuda::named(callee.name(), [&] { run_copied(callee); }); },
            [&](const Error& error) {
              if (!claim()) return;
              poison_results();
              callee.defer(error);
            });
    if (settled_by_me_) gate_.open();
  }

  std::string arguments() const override { return "arrays on the device"; }

  bool fail(const Error& /*error*/, const std::function<void()>& keep) override {
    if (settled_.exchange(true, std::memory_order_acq_rel)) return false;  // see claim()
    poison_results();
    keep();
    gate_.open();
    return true;
  }

 private:
  void run_copied(Callee& callee) {
    {
      cuda::ContextScope current(device_);
      cuda::check(fetched_.wait(), "cuEventSynchronize");
    }
    // Not before its operands are ready, because the work that they wait for may need the thread.
    NamedThread* const thread = callee.thread();
    if (thread == nullptr) return call_it(callee);
    if (!thread->run([&] { call_it(callee); })) refuse(callee);
  }

  void call_it(Callee& callee) {
    callee.enter_worker(/*of_device=*/true);
    ActiveCall active;
    if (!active.entered()) return refuse_at_exit(callee);
    Call call = copied_.call();
    if (!copied_.runs()) {
      if (claim()) site->site->skip(call);
      return;
    }
    // With a timeout the callable has private memory, because the watchdog may have abandoned the
    // call.
    OwnedCall owned(call, /*private_memory=*/callee.timeout().count() > 0);
    site->site->run(owned.call());
    if (claim()) owned.publish();
  }

  // True for the one that may write the results: the finished call, or fail().
  bool claim() noexcept {
    // Acquire and release: the loser sees that the results are the winner's.
    settled_by_me_ = settled_by_me_ || !settled_.exchange(true, std::memory_order_acq_rel);
    return settled_by_me_;
  }

  void poison_results() {
    ProgressBoard::instance().fail(copied_.context.run);
    poison(copied_.copies.results());
  }

  cuda::Device& device_;
  CopiedCall copied_;
  cuda::StreamEvent fetched_;
  cuda::StreamGate gate_;
  std::atomic<bool> settled_{false};
  bool settled_by_me_ = false;  // only the worker's
};

void run_on_own_thread(CudaCall& call) {
  // While it is active, the threads that the call needs exist.
  ActiveCall active;
  if (!active.entered()) return refuse_at_exit(call.callee());
  auto own = std::make_shared<HeldStreamCall>(call);
  try {
    own->hold(call.stream);
    if (!cuda::Completions::of(call.device).keep({call.device, call.stream, kAsking}, own)) {
      // Nothing may wait for a stream that waits for this call.
      throw Error(ErrorCode::kAborted, "gate '" + call.callee().name() + "': its state is gone");
    }
    if (!submit_with_timeout(own))
      own->run();  // the process is ending: it fails, but opens the stream
  } catch (...) {
    own->abandon(call.stream);
    throw;
  }
}

void run_call(CudaSite& site, const XLA_FFI_CallFrame& frame) {
  CudaCall call(site, frame);
  cuda::ContextScope current(call.device);
  // A half-recorded graph could not be repaired. For several devices see run_deferred().
  if (Interrupts::ends(call.context.run) && !call.call_site().poison_on_error &&
      !cuda::capturing(call.stream)) [[unlikely]]
    throw interrupted(call.callee().name());
  std::optional<TimelineSpan> span;
  if (Timeline::on() && !call.callee().kind().empty()) [[unlikely]]
    span.emplace(call.callee().kind(), call.callee().name());
  switch (call.callee().on_device()) {
    case OnDevice::kNative: return on_its_thread(call, [&] { run_native(call); });
    case OnDevice::kDeferred: return run_deferred(call);
    case OnDevice::kStaged: {
      // XLA's thread waits for a named thread, so the program gets the exceptions of calls there.
      const Callee& callee = call.callee();
      const bool goes_on = callee.thread() == nullptr || callee.timeout().count() > 0;
      return callee.own_thread() && goes_on ? run_on_own_thread(call) : run_at_once(call);
    }
  }
}

}  // namespace

void CudaSite::execute(XLA_FFI_CallFrame* frame) {
  CudaSite& site = StateOf<CudaSite>::get(*frame);
  settled_on_device(*frame, site.call_site->poison_on_error, *site.call_site->callee, [&] {
    try {
      run_call(site, *frame);
    } catch (const std::exception&) {
      ProgressBoard::instance().fail(decode_run(*frame));  // the program's bars end with it
      throw;
    }
  });
}

XLA_FFI_Handler& gate_instantiate = StateOf<GateState>::instantiate;
XLA_FFI_Handler& gate_execute = StateOf<GateState>::execute<>;
XLA_FFI_Handler& cuda_gate_instantiate = StateOf<CudaSite>::instantiate;
XLA_FFI_Handler& cuda_gate_execute = StateOf<CudaSite>::execute<>;
XLA_FFI_Handler& cuda_graph_execute =
    StateOf<CudaSite>::execute<XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE>;

}  // namespace callgate::xla_ffi
