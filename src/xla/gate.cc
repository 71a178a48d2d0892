// Gates and taps on the CPU. State and calls are plain C++; the callee alone knows about Python.
#include <pthread.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "core/lifecycle.h"
#include "core/progress.h"
#include "xla/call_site.h"
#include "xla/decode.h"
#include "xla/ffi.h"
#include "xla/handlers.h"
#include "xla/owned_call.h"

namespace callgate::xla_ffi {
namespace {

// What XLA owns for the site.
struct GateState {
  static inline ::xla::ffi::TypeId id = {};
  static constexpr std::string_view kName = "callgate.gate_state";
  std::shared_ptr<CallSite> call_site;
};

// XLA has 32 programs of a device under way at once, and then makes the next wait. Calls within
// each other, each in a program that the one before runs, must not need more.
constexpr int kMostWithin = 24;
thread_local int t_within = 0;  // such calls around what this worker runs

// A call on a thread of its own, shared by the worker that runs it, the watchdog that gives it up
// and the one that looks whether it waits for itself. The first of them settles it.
struct OwnThreadCall final : WatchedCall {
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
    thread.store(pthread_self(), std::memory_order_relaxed);  // see watch_for_self_wait()
    site->callee->enter_worker(/*of_device=*/false);
    ActiveCall active;
    auto body = [&] {
      t_within = within;
      active.entered() ? site->site->run(call.call()) : refuse_at_exit(*site->callee);
      t_within = 0;  // the program goes on here; its calls are not within this one
      promise.succeed([&] { call.publish(); });
    };
    guarded(body, [&](const Error& error) {
      t_within = 0;  // as above
      // What a call raises that was given up before is dropped: its program was told of that.
      if (!active.entered()) return (void)promise.fail(error);
      fail(error, [&] { keep_failure(*site->callee, error); });
    });
  }
};

// Throws when the call can't be handed on.
void start_on_own_thread(XLA_FFI_CallFrame* frame, const std::shared_ptr<CallSite>& site,
                         const Call& call) {
  if (WorkerPool::instance().lost())
    throw Error(ErrorCode::kAborted,
                "gate '" + site->callee->name() +
                    "': this process was forked from one that ran gates on threads of their own, "
                    "which are not here; expected a process of its own (multiprocessing's 'spawn' "
                    "or 'forkserver')");
  int within = t_within + 1;
  if (within > kMostWithin)
    throw Error(ErrorCode::kInternal, "gate '" + site->callee->name() + "'",
                "at most " + std::to_string(kMostWithin) +
                    " calls with thread='own' within each other, by programs that they run",
                "one more; does it call itself for ever?");
  // Within another such call the jitted function may be new, as the program runs once more.
  bool may_wait_for_itself = site->is_first(call.context.run) || within > 1;
  bool private_memory = site->callee->timeout().count() > 0 || may_wait_for_itself;
  auto own = std::make_shared<OwnThreadCall>(site, within, call, private_memory, frame->api);
  XLA_FFI_Future* future = own->promise.future();
  if (may_wait_for_itself) watch_for_self_wait(own);
  if (!submit_with_timeout(own))
    guarded([&] { refuse_at_exit(*site->callee); },
            [&](const Error& error) { own->promise.fail(error); });
  frame->future = future;
}

void run_call(XLA_FFI_CallFrame* frame, const std::shared_ptr<CallSite>& site, const Call& call,
              bool own_thread) {
  if (Interrupts::ends(call.context.run)) [[unlikely]] {
    if (!site->poison_on_error) throw interrupted(site->callee->name());
    // An error would leave other devices waiting. What need not run is passed over, the rest runs.
    if (site->callee->quiet_at_exit()) return site->site->skip(call);
  }
  if (own_thread) {
    return settled(
        site->poison_on_error, *site->callee, [&] { start_on_own_thread(frame, site, call); },
        [&] { poison(call.results); });
  }
  ActiveCall active;
  if (!active.entered()) return refuse_at_exit(*site->callee);
  site->run(call);
}

void execute_gate(XLA_FFI_CallFrame* frame) {
  const std::shared_ptr<CallSite>& site = StateOf<GateState>::get(*frame).call_site;
  DecodedCall decoded(*frame);
  std::int32_t shard = site->shards.take(decoded);
  if (!site->shards.runs(shard)) [[unlikely]]
    return site->site->skip(Call{decoded.operands(), decoded.results(), {}});
  bool own_thread = site->callee->own_thread();
  CallContext context = site->reads_context || own_thread ? decode_context(*frame)
                                                          : CallContext{.run = decode_run(*frame)};
  context.shard = shard;
  try {
    run_call(frame, site, {decoded.operands(), decoded.results(), context}, own_thread);
  } catch (const std::exception&) {
    ProgressBoard::instance().fail(context.run);  // with the program end its bars
    throw;
  }
}

}  // namespace

XLA_FFI_Error* gate_instantiate(XLA_FFI_CallFrame* frame) {
  return StateOf<GateState>::instantiate(frame, [](const XLA_FFI_Attrs& attributes) {
    return std::make_unique<GateState>(make_call_site(attributes));
  });
}

XLA_FFI_Error* gate_execute(XLA_FFI_CallFrame* frame) {
  return StateOf<GateState>::execute(frame, execute_gate);
}

}  // namespace callgate::xla_ffi
