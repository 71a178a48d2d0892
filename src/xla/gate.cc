// SPDX-License-Identifier: Apache-2.0
// Gates and taps, on the CPU and in programs for CUDA, where nothing waits for a device but what
// says so. State and calls are plain C++; the callee alone knows about Python.
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

// XLA has 32 programs of a device under way at once, and then makes the next wait. Calls within
// each other, each in a program that the one before runs, must not need more.
constexpr int kMostWithin = 24;
thread_local int t_within = 0;  // such calls around what this worker runs

// A call on a thread of its own, shared by the worker that runs it, the watchdog that gives it up
// and the one that looks whether it waits for itself. The first of them settles it.
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

  // A promise is settled whatever the site does.
  void run() override {
    thread.store(python_thread(), std::memory_order_relaxed);  // see watch_for_self_wait()
    site->callee->enter_worker(/*of_device=*/false);
    ActiveCall active;
    auto body = [&] {
      t_within = within;
      active.entered() ? site->site->run(call.call()) : refuse_at_exit(*site->callee);
      t_within = 0;  // the program goes on here; its calls are not within this one
      settle([this] { promise.succeed([&] { call.publish(); }); });
    };
    guarded(body, [&](const Error& error) {
      t_within = 0;  // as above
      // The error of a call that was given up before is dropped: its program was told of that.
      if (!active.entered()) return settle([this, error] { promise.fail(error); });
      settle([this, error] { fail(error, [&] { keep_failure(*site->callee, error); }); });
    });
  }

  // For who has handed the call to a named thread: a short call is settled here, a longer one when
  // it has ended.
  void await_shortly() {
    site->callee->thread()->watch_for_end(
        [&] { return turn_.load(std::memory_order_acquire) != kAwaited; });
    // Acquire and release: this or settle() sees what the other has left.
    if (turn_.exchange(kLeft, std::memory_order_acq_rel) == kDone) settle_();
  }

 private:
  enum Turn { kAwaited, kDone, kLeft };

  // XLA goes on with the program on the thread that settles the promise: not on a named thread,
  // which other programs wait for, and which the rest of this one may itself need.
  void settle(std::function<void()> settling) {
    if (site->callee->thread() == nullptr) return settling();
    settle_ = std::move(settling);
    if (turn_.exchange(kDone, std::memory_order_acq_rel) == kAwaited) return;  // as above
    if (!try_submit([self = shared_from_this()] { self->settle_(); })) settle_();
  }

  std::atomic<Turn> turn_{kAwaited};
  std::function<void()> settle_;
};

// For a call that nobody takes: throws Error, unless the process is ending and the callee is quiet.
void refuse(Callee& callee) {
  if (callee.thread() == nullptr || Lifecycle::instance().closed()) return refuse_at_exit(callee);
  throw callee.closed_error();
}

int one_more_within(const Callee& callee) {
  if (t_within < kMostWithin) return t_within + 1;
  throw Error(ErrorCode::kInternal, "gate '" + callee.name() + "'",
              "at most " + std::to_string(kMostWithin) +
                  " nested calls with thread='own', by programs that they run",
              "one more; does it call itself without end?");
}

// A call that comes on the very thread that it is for, from a program that a call there runs.
void run_within(const CallSite& site, const Call& call) {
  struct Within : Immovable {
    explicit Within(int place) : before(std::exchange(t_within, place)) {}
    ~Within() { t_within = before; }
    const int before;
  } within(one_more_within(*site.callee));
  ActiveCall active;
  active.entered() ? site.site->run(call) : refuse_at_exit(*site.callee);
}

// Throws when the call can't be handed on.
void start_on_own_thread(XLA_FFI_CallFrame* frame, const std::shared_ptr<CallSite>& site,
                         const Call& call) {
  NamedThread* const thread = site->callee->thread();
  // On a named thread that dispatches a program XLA waits for the call: it would wait for ever for
  // one elsewhere that needs the thread.
  const bool on_named = NamedThread::current() != 0 && site->callee->timeout().count() == 0;
  if (thread != nullptr ? thread->is_here() : on_named) return run_within(*site, call);
  if (thread == nullptr && WorkerPool::instance().lost())
    throw Error(
        ErrorCode::kAborted,
        "gate '" + site->callee->name() +
            "': this process was forked from one that ran gates on threads of their own, which are "
            "not here; start processes with multiprocessing's 'spawn' or 'forkserver'");
  const int within = one_more_within(*site->callee);
  // Within another such call the jitted function may be new, as the program runs once more.
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
    // An error would leave other devices waiting. Calls that need not run are passed over.
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
    ProgressBoard::instance().fail(context.run);  // with the program end its bars
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

// A call on a thread of callgate's, which the stream waits for. XLA is told of success at once.
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

  // For a call that can't be handed on: its error is XLA's. Waits for the stream, which uses this.
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
    // Not before its operands are there: what they wait for may need the thread.
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
    // With a timeout the memory is the callable's own: the watchdog may have given it up.
    OwnedCall owned(call, /*private_memory=*/callee.timeout().count() > 0);
    site->site->run(owned.call());
    if (claim()) owned.publish();
  }

  // True for whoever may write the results: the call that has ended, or fail().
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
  bool settled_by_me_ = false;  // the worker's alone
};

void run_on_own_thread(CudaCall& call) {
  // As long as it is here, the threads that the call needs are there.
  ActiveCall active;
  if (!active.entered()) return refuse_at_exit(call.callee());
  auto own = std::make_shared<HeldStreamCall>(call);
  try {
    own->hold(call.stream);
    if (!cuda::Completions::of(call.device).keep({call.device, call.stream, kAsking}, own)) {
      // Nobody may wait for a stream that waits for this call.
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
  // A graph that is half recorded could not be mended. For several devices see run_deferred().
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
      // XLA's thread waits for a named thread, so that the program is told what a call there
      // raises.
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
      ProgressBoard::instance().fail(decode_run(*frame));  // with the program end its bars
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
