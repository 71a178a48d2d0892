// Calls on copies in the host's memory, whose results are copied back: on XLA's thread, which waits
// for the operands, or on one of callgate's, which the stream waits for.
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "core/lifecycle.h"
#include "core/progress.h"
#include "cuda/completions.h"
#include "cuda/driver.h"
#include "cuda/stream_gate.h"
#include "xla/cuda_call.h"
#include "xla/guard.h"
#include "xla/overdue.h"
#include "xla/owned_call.h"

namespace callgate::xla_ffi {
namespace {

// On XLA's thread.
void run_at_once(CudaCall& call) {
  auto copied = std::make_shared<CopiedCall>(call, call.decoded.operands(), call.decoded.results());
  copied->copies.fetch(call.stream);
  if (!copied->copies.operands().empty()) cuda::wait_for(call.device, call.stream);
  ActiveCall active;
  if (!active.entered()) return refuse_at_exit(call.callee());
  Call on_host = copied->call();
  if (copied->runs()) {
    call.call_site().run(on_host);
  } else {
    call.call_site().site->skip(on_host);
  }
  copied->copies.publish(call.stream);
  if (!call.decoded.results().empty()) cuda::keep_until(call.device, call.stream, copied);
}

// A call on a thread of callgate's. XLA is told of success at once, so a failure is deferred.
class HeldStreamCall {
 public:
  explicit HeldStreamCall(CudaCall& call)
      : device_(call.device),
        copied_(call, call.decoded.operands(), call.decoded.results()),
        fetched_(fetch(call.device, call.stream)) {}

  // From here on the stream waits until the call has settled or is abandoned.
  void hold(cuda::Stream stream) {
    gate_.hold(stream);
    copied_.copies.publish(stream);
  }

  // For a call that can't be handed on: its error is XLA's, and its results are nobody's. Waits
  // for the stream, which uses what is here.
  void abandon(cuda::Stream stream) noexcept {
    settled_.store(true, std::memory_order_release);  // see claim()
    gate_.open();
    cuda::driver().stream_synchronize(stream);
  }

  void run() {
    Callee& callee = *copied_.site->callee;
    callee.enter_worker(/*of_device=*/true);
    guarded([&] { run_copied(callee); },
            [&](const Error& error) {
              if (!claim()) return;
              poison_results();
              callee.defer(error);
            });
    if (settled_by_me_) gate_.open();
  }

  static void give_up(const std::shared_ptr<HeldStreamCall>& call) {
    fail_overdue(call->copied_.site, "arrays on the device", /*deferred=*/true,
                 [call](const std::string& /*text*/, const std::function<void()>& keep) {
                   if (call->settled_.exchange(true, std::memory_order_acq_rel)) return false;
                   call->poison_results();
                   keep();
                   call->gate_.open();
                   return true;
                 });
  }

 private:
  cuda::StreamEvent fetch(cuda::Device& device, cuda::Stream stream) {
    copied_.copies.fetch(stream);
    return {device, stream};
  }

  void run_copied(Callee& callee) {
    {
      cuda::ContextScope current(device_);
      cuda::check(fetched_.wait(), "cuEventSynchronize");
    }
    ActiveCall active;
    if (!active.entered()) return refuse_at_exit(callee);
    Call call = copied_.call();
    if (!copied_.runs()) {
      if (claim()) copied_.site->site->skip(call);
      return;
    }
    // With a timeout the memory is the callable's own: the watchdog may have given it up.
    OwnedCall owned(call, /*private_memory=*/callee.timeout().count() > 0);
    copied_.site->site->run(owned.call());
    if (claim()) owned.publish();
  }

  // True for whoever may write the results: the call that has ended, or give_up().
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
    bool taken = submit_with_timeout(
        call.callee().timeout(), [own] { HeldStreamCall::give_up(own); }, [own] { own->run(); });
    if (!taken) own->run();  // the process is ending: it fails, but opens the stream
  } catch (...) {
    own->abandon(call.stream);
    throw;
  }
}

}  // namespace

void run_staged(CudaCall& call) {
  settled(
      call.call_site().poison_on_error, call.callee(),
      [&] { call.callee().own_thread() ? run_on_own_thread(call) : run_at_once(call); },
      [&] { cuda::poison_on_device(call.decoded.results(), call.stream); });
}

}  // namespace callgate::xla_ffi
