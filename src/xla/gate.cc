// See the header. State and calls are plain C++; the callee alone knows about Python.
#include "xla/gate.h"

#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "core/lifecycle.h"
#include "core/progress.h"
#include "core/registry.h"
#include "core/watchdog.h"
#include "core/worker_pool.h"
#include "xla/attributes.h"
#include "xla/decode.h"
#include "xla/future.h"
#include "xla/guard.h"
#include "xla/shards.h"
#include "xla/state.h"

namespace callgate::xla_ffi {
namespace {

namespace ffi = ::xla::ffi;

// One call site of one executable. Shared, since a call on its own thread that was given up by the
// watchdog may outlive the executable.
struct CallSite {
  std::shared_ptr<Callee> callee;
  std::shared_ptr<Site> site;
  // In a program over several devices an error returned by one of them leaves the others waiting in
  // their next collective, until XLA aborts the process. There a failing call succeeds for XLA: its
  // results are poisoned and the callee keeps the failure for the next who asks.
  bool poison_on_error = false;
  bool reads_context = true;
  Shards shards;

  Outcome run(const Call& call) const {
    Outcome outcome = site->run(call);
    if (outcome.ok() || !poison_on_error) return outcome;
    for (const ArrayView& view : call.results) poison(view);
    callee->defer(outcome.error());
    return Outcome::success();
  }
};

// What XLA owns for the site.
struct GateState {
  static ffi::TypeId id;
  std::shared_ptr<CallSite> call_site;
};

ffi::TypeId GateState::id = {};

constexpr std::string_view kStateName = "callgate.gate_state";

// Throws; gate_instantiate() guards it.
std::unique_ptr<GateState> instantiate(const ffi::Dictionary& attributes) {
  auto text = [&](std::string_view name) { return text_attribute(attributes, name); };
  auto state = std::make_unique<GateState>();
  state->call_site = std::make_shared<CallSite>();
  state->call_site->callee = Registry::instance().find(text("name"));
  state->call_site->poison_on_error = text("on_error") == "poison";
  state->call_site->reads_context = state->call_site->callee->reads_context();
  state->call_site->site = state->call_site->callee->specialise(SiteSpec{
      text("spec"), text("site"), Lanes::parse(text("batch")), text("mesh"), text("layout")});
  state->call_site->shards = Shards(text("shards"));
  return state;
}

Outcome shutting_down(const Callee& callee) {
  if (callee.quiet_at_exit()) return Outcome::success();
  return Outcome::failure(ErrorCode::kAborted, "callgate: gate '" + callee.name() +
                                                   "' was called while the process is ending");
}

// A call that outlives its handler: the frame's descriptors die with it, so they are copied. With a
// timeout the memory is private too, since XLA frees its own when the watchdog fails the program
// while user code may still be reading and writing.
class OwnedCall {
 public:
  OwnedCall(DecodedCall& decoded, const CallContext& context, bool private_memory)
      : context_(context) {
    keep(decoded.operands(), operands_);
    keep(decoded.results(), results_);
    keep(decoded.results(), targets_);
    if (!private_memory) return;
    for (ArrayView& view : operands_) copy_in(view);
    for (ArrayView& view : results_) place(view, decoded.operands());
  }

  Call call() { return Call{operands_, results_, context_}; }

  // Copies private results to XLA's memory.
  void publish() const {
    for (std::size_t i = 0; i < results_.size(); ++i) {
      if (results_[i].data == targets_[i].data || results_[i].nbytes() == 0) continue;
      std::memcpy(targets_[i].data, results_[i].data, results_[i].nbytes());
    }
  }

  // What a call that was given up leaves in XLA's memory.
  void poison_results() const noexcept {
    for (const ArrayView& view : targets_) poison(view);
  }

  const CallContext& context() const noexcept { return context_; }

  std::string describe() const {
    std::string text;
    for (const ArrayView& view : operands_) text += (text.empty() ? "" : ", ") + to_string(view);
    return "(" + text + ")";
  }

 private:
  void keep(std::span<const ArrayView> views, std::vector<ArrayView>& copies) {
    copies.assign(views.begin(), views.end());
    for (ArrayView& view : copies) {
      dims_.emplace_back(view.dims, view.dims + view.rank);
      view.dims = dims_.back().data();
    }
  }
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
  void copy_in(ArrayView& view) {
    const void* source = view.data;
    allocate(view);
    if (view.nbytes() != 0) std::memcpy(view.data, source, view.nbytes());
  }

  std::vector<std::vector<std::int64_t>> dims_;  // outer growth moves vectors, not their memory
  std::vector<std::unique_ptr<char, void (*)(void*)>> memory_;
  std::vector<ArrayView> operands_, results_, targets_;
  CallContext context_;
};

// On a worker. Nothing is thrown: a promise is settled whatever the site does.
void run_owned(const CallSite& site, OwnedCall& call, Promise& promise) {
  ActiveCall active;
  Outcome outcome = guarded_outcome(
      [&] { return active.entered() ? site.run(call.call()) : shutting_down(*site.callee); });
  if (outcome.ok()) {
    promise.succeed([&] { call.publish(); });
  } else {
    ProgressBoard::instance().fail(call.context().run);
    promise.fail(outcome.error().code, outcome.error().message);
  }
}

// On the watchdog's thread, when the time is over.
void give_up(const CallSite& site, const OwnedCall& call, Promise& promise) {
  std::string report;
  try {
    report = site.callee->stall_report(call.describe(), /*timed_out=*/true);
  } catch (const std::exception& error) {
    report = "callgate: gate '" + site.callee->name() + "' is stalled; no report: " + error.what();
  }
  ProgressBoard::instance().fail(call.context().run);
  if (!site.poison_on_error) {
    promise.fail(ErrorCode::kDeadlineExceeded, report);
  } else {
    promise.succeed([&] {
      call.poison_results();
      site.callee->defer(Failure{ErrorCode::kDeadlineExceeded, report});
    });
  }
}

XLA_FFI_Error* execute_on_own_thread(XLA_FFI_CallFrame* frame,
                                     const std::shared_ptr<CallSite>& site, DecodedCall& decoded,
                                     std::int32_t shard) {
  auto timeout = site->callee->timeout();
  CallContext context = decode_context(*frame);
  context.shard = shard;
  auto call = std::make_shared<OwnedCall>(decoded, context,
                                          /*private_memory=*/timeout.count() > 0);
  auto promise = std::make_shared<Promise>(frame->api);
  XLA_FFI_Future* future = promise->future();
  Watchdog::Ticket ticket;
  if (timeout.count() > 0) {
    ticket = Watchdog::instance().arm(timeout,
                                      [site, call, promise] { give_up(*site, *call, *promise); });
  }
  bool taken = WorkerPool::instance().submit([site, call, promise, timeout, ticket] {
    run_owned(*site, *call, *promise);
    if (timeout.count() > 0) Watchdog::instance().disarm(ticket);
  });
  if (!taken) {
    auto outcome = shutting_down(*site->callee);
    promise->fail(outcome.error().code, outcome.error().message);
  }
  frame->future = future;
  return nullptr;
}

XLA_FFI_Error* execute(XLA_FFI_CallFrame* frame) {
  const std::shared_ptr<CallSite>& site = StateOf<GateState>::get(*frame).call_site;
  DecodedCall decoded(*frame);
  std::int32_t shard = site->shards.take(decoded);
  if (!site->shards.runs(shard)) [[unlikely]] {
    site->site->skip(Call{decoded.operands(), decoded.results(), {}});
    return nullptr;
  }
  if (site->callee->own_thread()) return execute_on_own_thread(frame, site, decoded, shard);
  ActiveCall active;
  CallContext context = site->reads_context ? decode_context(*frame) : CallContext{};
  context.shard = shard;
  Outcome outcome = active.entered()
                        ? site->run(Call{decoded.operands(), decoded.results(), context})
                        : shutting_down(*site->callee);
  if (outcome.ok()) return nullptr;
  // The program ends here, and so do its bars.
  ProgressBoard::instance().fail(decode_context(*frame).run);
  return make_error(frame->api, outcome.error().code, outcome.error().message);
}

}  // namespace

XLA_FFI_Error* gate_instantiate(XLA_FFI_CallFrame* frame) {
  return guarded(frame->api, [frame]() -> XLA_FFI_Error* {
    XLA_FFI_Error* error = nullptr;
    if (StateOf<GateState>::answer_metadata(frame, kStateName, /*gives_state=*/true, error))
      return error;
    error = StateOf<GateState>::register_type(frame->api, kStateName);
    if (error != nullptr) return error;
    return StateOf<GateState>::give(*frame, instantiate(ffi::Dictionary(&frame->attrs)));
  });
}

XLA_FFI_Error* gate_execute(XLA_FFI_CallFrame* frame) {
  XLA_FFI_Error* error = nullptr;
  if (StateOf<GateState>::answer_metadata(frame, kStateName, /*gives_state=*/false, error))
    return error;
  return guarded(frame->api, [frame] { return execute(frame); });
}

}  // namespace callgate::xla_ffi
