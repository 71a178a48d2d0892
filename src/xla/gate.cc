// See the header. State and calls are plain C++; the callee alone knows about Python.
#include "xla/gate.h"

#include <pthread.h>

#include <memory>
#include <utility>

#include "core/interrupt.h"
#include "core/lifecycle.h"
#include "core/progress.h"
#include "core/watchdog.h"
#include "core/worker_pool.h"
#include "xla/call_site.h"
#include "xla/decode.h"
#include "xla/future.h"
#include "xla/guard.h"
#include "xla/overdue.h"
#include "xla/owned_call.h"
#include "xla/self_wait.h"
#include "xla/state.h"

namespace callgate::xla_ffi {
namespace {

namespace ffi = ::xla::ffi;

// What XLA owns for the site.
struct GateState {
  static ffi::TypeId id;
  static constexpr std::string_view kName = "callgate.gate_state";
  std::shared_ptr<CallSite> call_site;
};

ffi::TypeId GateState::id = {};

// XLA has 32 programs of a device under way at once, and then makes the next wait. Calls within
// each other, each in a program that the one before runs, must not need more.
constexpr int kMostWithin = 24;
thread_local int t_within = 0;  // such calls around what this worker runs

// Throws.
std::unique_ptr<GateState> instantiate_gate(const XLA_FFI_Attrs& attrs) {
  auto state = std::make_unique<GateState>();
  state->call_site = make_call_site(ffi::Dictionary(&attrs));
  return state;
}

// False where the call is settled, by its end or by having been given up. `keep` is called for a
// failure that XLA is not told of, before the program goes on.
bool fail_owned(const CallSite& site, const OwnedCall& call, Promise& promise, ErrorCode code,
                const std::string& text, const std::function<void()>& keep) {
  if (!site.poison_on_error) {
    ProgressBoard::instance().fail(call.context().run);
    return promise.fail(code, text);
  }
  return promise.succeed([&] {
    call.poison_results();
    keep();
  });
}

// On a worker. Nothing is thrown: a promise is settled whatever the site does.
void run_owned(const CallSite& site, OwnedCall& call, Promise& promise, int within) {
  ActiveCall active;
  t_within = within;
  Outcome outcome = guarded_outcome(
      [&] { return active.entered() ? site.site->run(call.call()) : shutting_down(*site.callee); });
  t_within = 0;  // the program goes on below, on this thread; its calls are not within this one
  if (outcome.ok()) {
    promise.succeed([&] { call.publish(); });
  } else if (active.entered()) {
    // What a call raises that was given up before is dropped: its program was told of that.
    fail_owned(site, call, promise, outcome.error().code, outcome.error().message,
               [&] { keep_failure(*site.callee, outcome.error()); });
  } else {
    promise.fail(outcome.error().code, outcome.error().message);
  }
}

// On the watchdog's thread, when the time is over.
void give_up(const std::shared_ptr<CallSite>& site, const std::shared_ptr<OwnedCall>& call,
             const std::shared_ptr<Promise>& promise) {
  fail_overdue(site, call->describe(), /*deferred=*/site->poison_on_error,
               [site, call, promise](const std::string& text, const std::function<void()>& keep) {
                 return fail_owned(*site, *call, *promise, ErrorCode::kDeadlineExceeded, text,
                                   keep);
               });
}

std::shared_ptr<WatchedCall> watched(const std::shared_ptr<CallSite>& site,
                                     const std::shared_ptr<OwnedCall>& call,
                                     const std::shared_ptr<Promise>& promise) {
  auto watched = std::make_shared<WatchedCall>();
  watched->site = site;
  watched->settle = [site, call, promise](const std::string& text) {
    fail_owned(*site, *call, *promise, ErrorCode::kInternal, text,
               [&] { site->callee->defer(Failure{ErrorCode::kInternal, text}); });
  };
  watch_for_self_wait(watched);
  return watched;
}

// Throws when the call can't be handed on.
void start_on_own_thread(XLA_FFI_CallFrame* frame, const std::shared_ptr<CallSite>& site,
                         DecodedCall& decoded, const CallContext& context) {
  if (WorkerPool::instance().lost()) {
    throw Error(ErrorCode::kAborted,
                "gate '" + site->callee->name() +
                    "': this process was forked from one that ran gates on threads of their own, "
                    "which are not here; expected a process of its own (multiprocessing's 'spawn' "
                    "or 'forkserver')");
  }
  int within = t_within + 1;
  if (within > kMostWithin) {
    throw Error(ErrorCode::kInternal, "gate '" + site->callee->name() + "'",
                "at most " + std::to_string(kMostWithin) +
                    " calls with thread='own' within each other, by programs that they run",
                "one more; does it call itself for ever?");
  }
  auto timeout = site->callee->timeout();
  // Within another such call the jitted function may be called for the first time with its
  // arguments, as the program runs once more.
  bool may_wait_for_itself = site->is_first(context.run) || within > 1;
  auto call =
      std::make_shared<OwnedCall>(Call{decoded.operands(), decoded.results(), context},
                                  /*private_memory=*/timeout.count() > 0 || may_wait_for_itself);
  auto promise = std::make_shared<Promise>(frame->api);
  XLA_FFI_Future* future = promise->future();
  Watchdog::Ticket ticket;
  if (timeout.count() > 0) {
    ticket =
        Watchdog::instance().arm(timeout, [site, call, promise] { give_up(site, call, promise); });
  }
  bool taken = false;
  try {
    auto watch = may_wait_for_itself ? watched(site, call, promise) : nullptr;
    taken = WorkerPool::instance().submit([site, call, promise, timeout, ticket, watch, within] {
      if (watch != nullptr) watch->thread.store(pthread_self(), std::memory_order_relaxed);
      run_owned(*site, *call, *promise, within);
      if (timeout.count() > 0) Watchdog::instance().disarm(ticket);
    });
  } catch (...) {  // the results are the caller's from here on
    if (timeout.count() > 0) Watchdog::instance().disarm(ticket);
    throw;
  }
  if (!taken) {
    auto outcome = shutting_down(*site->callee);
    promise->fail(outcome.error().code, outcome.error().message);
  }
  frame->future = future;
}

XLA_FFI_Error* execute_on_own_thread(XLA_FFI_CallFrame* frame,
                                     const std::shared_ptr<CallSite>& site, DecodedCall& decoded,
                                     const CallContext& context) {
  auto start = [&] {
    start_on_own_thread(frame, site, decoded, context);
    return Outcome::success();
  };
  Outcome outcome = !site->poison_on_error ? start() : poisoned_on_error(*site->callee, start, [&] {
    for (const ArrayView& view : decoded.results()) poison(view);
  });
  if (outcome.ok()) return nullptr;
  return make_error(frame->api, outcome.error().code, outcome.error().message);
}

// Ctrl-C ends the program, with its bars.
XLA_FFI_Error* interrupt(XLA_FFI_CallFrame* frame, const CallSite& site, std::int64_t run) {
  ProgressBoard::instance().fail(run);
  Failure failure = interrupted(site.callee->name());
  return make_error(frame->api, failure.code, failure.message);
}

XLA_FFI_Error* execute_gate(XLA_FFI_CallFrame* frame) {
  const std::shared_ptr<CallSite>& site = StateOf<GateState>::get(*frame).call_site;
  DecodedCall decoded(*frame);
  std::int32_t shard = site->shards.take(decoded);
  if (!site->shards.runs(shard)) [[unlikely]] {
    site->site->skip(Call{decoded.operands(), decoded.results(), {}});
    return nullptr;
  }
  bool own_thread = site->callee->own_thread();
  CallContext context;
  if (site->reads_context || own_thread) {
    context = decode_context(*frame);
  } else {
    context.run = decode_run(*frame);
  }
  context.shard = shard;
  if (Interrupts::ends(context.run)) [[unlikely]] {
    if (!site->poison_on_error) return interrupt(frame, *site, context.run);
    // An error would leave other devices waiting. What need not run is passed over, the rest runs.
    if (site->callee->quiet_at_exit()) {
      site->site->skip(Call{decoded.operands(), decoded.results(), context});
      return nullptr;
    }
  }
  if (own_thread) return execute_on_own_thread(frame, site, decoded, context);
  ActiveCall active;
  Outcome outcome = active.entered()
                        ? site->run(Call{decoded.operands(), decoded.results(), context})
                        : shutting_down(*site->callee);
  if (outcome.ok()) return nullptr;
  // The program ends here, and so do its bars.
  ProgressBoard::instance().fail(context.run);
  return make_error(frame->api, outcome.error().code, outcome.error().message);
}

}  // namespace

XLA_FFI_Error* gate_instantiate(XLA_FFI_CallFrame* frame) {
  return StateOf<GateState>::instantiate(frame, instantiate_gate);
}

XLA_FFI_Error* gate_execute(XLA_FFI_CallFrame* frame) {
  return StateOf<GateState>::execute(frame, execute_gate);
}

}  // namespace callgate::xla_ffi
