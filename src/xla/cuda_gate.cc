// Gates and taps in programs for CUDA. Nothing here waits for a device but what says so.
#include <atomic>
#include <functional>
#include <memory>
#include <string>

#include "core/lifecycle.h"
#include "core/progress.h"
#include "cuda/completions.h"
#include "cuda/driver.h"
#include "xla/cuda_call.h"
#include "xla/ffi.h"
#include "xla/handlers.h"
#include "xla/owned_call.h"

namespace callgate::xla_ffi {
namespace {

// What XLA owns for the site. CUDA's plugin has a registry of types of its own.
struct CudaGateState {
  static inline ::xla::ffi::TypeId id = {};
  static constexpr std::string_view kName = "callgate.cuda_gate_state";
  CudaSite site;
};

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
    cuda::check(copied->copies.fetch_with_event(call.stream).wait(), "cuEventSynchronize");
  ActiveCall active;
  if (!active.entered()) return refuse_at_exit(call.callee());
  Call on_host = copied->call();
  copied->runs() ? call.call_site().run(on_host) : call.call_site().site->skip(on_host);
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
        fetched_(copied_.copies.fetch_with_event(call.stream)) {}

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
    callee.enter_worker(/*of_device=*/true);
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
    if (!cuda::Completions::of(call.device).keep({call.device, call.stream}, own)) {
      // Nobody may wait for a stream that waits for this call.
      throw Error(ErrorCode::kAborted,
                  "gate '" + call.callee().name() + "': nothing is kept for it any more");
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
  switch (call.callee().on_device()) {
    case OnDevice::kNative: return run_native(call);
    case OnDevice::kDeferred: return run_deferred(call);
    case OnDevice::kStaged:
      return call.callee().own_thread() ? run_on_own_thread(call) : run_at_once(call);
  }
}

void execute_cuda_gate(XLA_FFI_CallFrame* frame) {
  CudaSite& site = StateOf<CudaGateState>::get(*frame).site;
  Callee& callee = *site.call_site->callee;
  auto run = [&] {
    try {
      cuda::named(callee.name(), [&] { run_call(site, *frame); });
    } catch (const std::exception&) {
      ProgressBoard::instance().fail(decode_run(*frame));  // with the program end its bars
      throw;
    }
  };
  settled(site.call_site->poison_on_error, callee, run, [&] { poison_on_device(*frame); });
}

}  // namespace

XLA_FFI_Error* cuda_gate_instantiate(XLA_FFI_CallFrame* frame) {
  return StateOf<CudaGateState>::instantiate(frame, [](const XLA_FFI_Attrs& attributes) {
    auto state = std::make_unique<CudaGateState>();
    state->site.call_site = make_call_site(attributes);
    return state;
  });
}

XLA_FFI_Error* cuda_gate_execute(XLA_FFI_CallFrame* frame) {
  return StateOf<CudaGateState>::execute(frame, execute_cuda_gate);
}

XLA_FFI_Error* cuda_graph_execute(XLA_FFI_CallFrame* frame) {
  return StateOf<CudaGateState>::execute(frame, execute_cuda_gate,
                                         XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE);
}

}  // namespace callgate::xla_ffi
