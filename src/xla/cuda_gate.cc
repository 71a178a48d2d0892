// See the header. Nothing here waits for a device but what says so.
#include "xla/cuda_gate.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "core/lifecycle.h"
#include "core/progress.h"
#include "core/watchdog.h"
#include "core/worker_pool.h"
#include "cuda/completions.h"
#include "cuda/device.h"
#include "cuda/driver.h"
#include "cuda/graph.h"
#include "cuda/host_copies.h"
#include "cuda/kept_copies.h"
#include "cuda/stream_gate.h"
#include "xla/call_site.h"
#include "xla/cuda_backlog.h"
#include "xla/cuda_shards.h"
#include "xla/decode.h"
#include "xla/guard.h"
#include "xla/overdue.h"
#include "xla/owned_call.h"
#include "xla/state.h"

namespace callgate::xla_ffi {
namespace {

namespace ffi = ::xla::ffi;
using cuda::HostCopies;

// Up to this size operands are copied to the host by the program's own stream: the copy takes it no
// longer than one on the device would.
constexpr std::size_t kCopiedInStream = std::size_t{64} << 10;

// A call that is replayed with the graph that it was captured into.
struct CapturedCall {
  std::shared_ptr<CallSite> site;
  HostCopies copies;
  CallContext context;
  bool sharded;
};

struct CudaSite {
  std::shared_ptr<CallSite> call_site;
  DeviceShards shards;
  std::mutex mutex;
  // Of graphs that can't keep them themselves.
  std::vector<std::shared_ptr<void>> captured;
};

// What XLA owns for the site. CUDA's plugin has a registry of types of its own.
struct CudaGateState {
  static ffi::TypeId id;
  static constexpr std::string_view kName = "callgate.cuda_gate_state";
  std::shared_ptr<CudaSite> site;
};

ffi::TypeId CudaGateState::id = {};

// One call, with all that the ways to make it need.
struct CudaCall {
  CudaSite& site;
  DecodedCall decoded;
  ArrayView number;  // of the partition; no data where there is none
  cuda::Stream stream;
  cuda::Device& device;
  CallContext context;

  CudaCall(CudaSite& of, const XLA_FFI_CallFrame& frame)
      : site(of),
        decoded(frame),
        number(of.call_site->shards.take_operand(decoded)),
        stream(static_cast<cuda::Stream>(decode_stream(frame))),
        device(cuda::Device::of(stream)),
        context(decode_context(frame)) {
    context.device = device.id();
    context.stream = stream;
  }

  const CallSite& call_site() const { return *site.call_site; }
  const Callee& callee() const { return *site.call_site->callee; }
  Call call() { return {decoded.operands(), decoded.results(), context}; }

  // As CallSite::run, on the device.
  template <typename Body>
  Outcome settled(Body&& body) {
    if (!call_site().poison_on_error) return body();
    return poisoned_on_error(*site.call_site->callee, body, [&] {
      for (const ArrayView& view : decoded.results()) cuda::poison_on_device(view, stream);
    });
  }

  void skip() {
    for (const ArrayView& view : decoded.results()) cuda::clear_on_device(view, stream);
  }
};

// -- native ---------------------------------------------------------------------------------------

Outcome run_native(CudaCall& call) {
  call.context.shard =
      call.site.shards.read(call.call_site().shards, call.number, call.device, call.stream);
  if (!call.call_site().shards.runs(call.context.shard)) {
    call.skip();
    return Outcome::success();
  }
  ActiveCall active;
  if (!active.entered()) return shutting_down(call.callee());
  return call.settled([&] { return call.call_site().site->run(call.call()); });
}

// -- staged ---------------------------------------------------------------------------------------

std::shared_ptr<HostCopies> fetched(CudaCall& call) {
  std::vector<ArrayView> operands(call.decoded.operands().begin(), call.decoded.operands().end());
  if (call.number.data != nullptr) operands.push_back(call.number);
  auto copies = std::make_shared<HostCopies>(call.device, operands, call.decoded.results());
  copies->fetch(call.stream);
  return copies;
}

// The copied call, without the partition's number, which goes into its context.
Call on_host(HostCopies& copies, const Shards& shards, bool sharded, CallContext& context) {
  std::span<const ArrayView> operands = copies.operands();
  if (sharded) {
    context.shard = shards.read(operands.back().data);
    operands = operands.first(operands.size() - 1);
  }
  return {operands, copies.results(), context};
}

Outcome run_copied(const CallSite& site, HostCopies& copies, bool sharded, CallContext& context) {
  Call call = on_host(copies, site.shards, sharded, context);
  if (site.shards.runs(context.shard)) return site.run(call);
  site.site->skip(call);
  return Outcome::success();
}

Outcome run_staged(CudaCall& call) {
  std::shared_ptr<HostCopies> copies = fetched(call);
  if (!copies->operands().empty())
    cuda::check(cuda::StreamEvent(call.device, call.stream).wait(), "cuEventSynchronize");
  ActiveCall active;
  if (!active.entered()) return shutting_down(call.callee());
  bool sharded = call.number.data != nullptr;
  Outcome outcome = run_copied(call.call_site(), *copies, sharded, call.context);
  if (!outcome.ok()) return outcome;
  copies->publish(call.stream);
  if (!call.decoded.results().empty()) cuda::keep_until(call.device, call.stream, copies);
  return Outcome::success();
}

// A staged call on a thread of callgate's. XLA is told of success at once, so a failure is
// deferred.
class OwnThreadCall {
 public:
  OwnThreadCall(CudaCall& call, std::shared_ptr<CallSite> site)
      : site_(std::move(site)),
        copies_(fetched(call)),
        fetched_(call.device, call.stream),
        sharded_(call.number.data != nullptr),
        context_(call.context) {}

  // From here on the stream waits until the call has settled or is abandoned.
  void hold(cuda::Stream stream) {
    gate_.hold(stream);
    copies_->publish(stream);
  }

  // For a call that can't be handed on: its error is XLA's, and its results are nobody's. Waits
  // for the stream, which uses what is here.
  void abandon(cuda::Stream stream) noexcept {
    settled_.store(true, std::memory_order_release);  // see claim()
    gate_.open();
    cuda::driver().stream_synchronize(stream);
  }

  void run() {
    site_->callee->enter_device_worker();
    Outcome outcome = guarded_outcome([&]() -> Outcome {
      cuda::check(fetched_.wait(), "cuEventSynchronize");
      ActiveCall active;
      if (!active.entered()) return shutting_down(*site_->callee);
      Call call = on_host(*copies_, site_->shards, sharded_, context_);
      if (!site_->shards.runs(context_.shard)) {
        site_->site->skip(call);
        return Outcome::success();
      }
      // With a timeout the memory is the callable's own: the watchdog may have given it up.
      OwnedCall owned(call, /*private_memory=*/site_->callee->timeout().count() > 0);
      Outcome ran = site_->site->run(owned.call());
      if (ran.ok() && claim()) owned.publish();
      return ran;
    });
    if (!outcome.ok() && claim()) {
      poison_results();
      site_->callee->defer(outcome.error());
    }
    if (settled_by_me_) gate_.open();
  }

  static void give_up(const std::shared_ptr<OwnThreadCall>& call) {
    fail_overdue(call->site_, "arrays on the device", /*deferred=*/true,
                 [call](const std::string& /*text*/, const std::function<void()>& keep) {
                   if (call->settled_.exchange(true, std::memory_order_acq_rel)) return false;
                   call->poison_results();
                   keep();
                   call->gate_.open();
                   return true;
                 });
  }

 private:
  // True for whoever may write the results: the call that has ended, or give_up().
  bool claim() noexcept {
    // Acquire and release: the loser sees that the results are the winner's.
    settled_by_me_ = settled_by_me_ || !settled_.exchange(true, std::memory_order_acq_rel);
    return settled_by_me_;
  }

  void poison_results() {
    ProgressBoard::instance().fail(context_.run);
    for (const ArrayView& view : copies_->results()) poison(view);
  }

  std::shared_ptr<CallSite> site_;
  std::shared_ptr<HostCopies> copies_;
  cuda::StreamEvent fetched_;
  cuda::StreamGate gate_;
  bool sharded_;
  CallContext context_;
  std::atomic<bool> settled_{false};
  bool settled_by_me_ = false;  // the worker's alone
};

void hand_on(CudaCall& call, const std::shared_ptr<OwnThreadCall>& owned) {
  owned->hold(call.stream);
  cuda::keep_until(call.device, call.stream, owned);
  auto timeout = call.callee().timeout();
  Watchdog::Ticket ticket;
  if (timeout.count() > 0)
    ticket = Watchdog::instance().arm(timeout, [owned] { OwnThreadCall::give_up(owned); });
  bool taken = WorkerPool::instance().submit([owned, timeout, ticket] {
    owned->run();
    if (timeout.count() > 0) Watchdog::instance().disarm(ticket);
  });
  if (!taken) owned->run();  // the process is ending: it fails, but opens the stream
}

Outcome run_on_own_thread(CudaCall& call) {
  auto owned = std::make_shared<OwnThreadCall>(call, call.site.call_site);
  try {
    hand_on(call, owned);
  } catch (...) {
    owned->abandon(call.stream);
    throw;
  }
  return Outcome::success();
}

// -- deferred -------------------------------------------------------------------------------------

// The host's part of a deferred call; `kept` are the copies on the device of a site that wants
// some, else null. `replayed`: by a graph. Nothing is thrown.
void run_later(const CallSite& site, HostCopies& copies,
               const std::shared_ptr<cuda::KeptCopies>& kept, bool sharded, CallContext context,
               bool replayed = false) {
  Outcome outcome = guarded_outcome([&]() -> Outcome {
    ActiveCall active;
    if (!active.entered()) return shutting_down(*site.callee);
    Call call = on_host(copies, site.shards, sharded, context);
    if (!site.shards.runs(context.shard)) return Outcome::success();
    if (replayed) return site.site->run_replayed(call);
    if (kept == nullptr) return site.site->run_deferred(call);
    std::vector<ArrayView> operands(kept->arrays().begin(), kept->arrays().end());
    operands.insert(operands.end(), call.operands.begin(), call.operands.end());
    return site.site->run_kept({operands, {}, context}, kept);
  });
  if (!outcome.ok()) site.callee->defer(outcome.error());
}

void pass_on(CudaCall& call) {
  for (std::size_t i = 0; i < call.decoded.results().size(); ++i) {
    const ArrayView& to = call.decoded.results()[i];
    const ArrayView& from = call.decoded.operands()[call.call_site().site->copied_to(i)];
    if (to.data == from.data || to.nbytes() == 0) continue;
    cuda::check(cuda::driver().copy_on_device(reinterpret_cast<cuda::DevicePointer>(to.data),
                                              reinterpret_cast<cuda::DevicePointer>(from.data),
                                              to.nbytes(), call.stream),
                "cuMemcpyDtoDAsync_v2");
  }
}

void capture(CudaCall& call, HostCopies copies) {
  auto captured = std::make_shared<CapturedCall>(CapturedCall{
      call.site.call_site, std::move(copies), call.context, call.number.data != nullptr});
  captured->copies.fetch(call.stream);
  auto replay = [](void* data) {
    auto& self = *static_cast<CapturedCall*>(data);
    run_later(*self.site, self.copies, nullptr, self.sharded, self.context, /*replayed=*/true);
  };
  cuda::check(cuda::driver().launch_host_function(call.stream, replay, captured.get()),
              "cuLaunchHostFunc");
  if (cuda::give_to_graph(call.stream, captured)) return;
  std::lock_guard lock(call.site.mutex);
  call.site.captured.push_back(std::move(captured));
}

std::size_t nbytes(std::span<const ArrayView> views) {
  std::size_t sum = 0;
  for (const ArrayView& view : views) sum += view.nbytes();
  return sum;
}

Outcome no_memory_in_graphs(const Callee& callee) {
  return Outcome::failure(ErrorCode::kInternal,
                          "callgate: '" + callee.name() +
                              "' keeps copies on the device; expected a program that is not "
                              "recorded into a CUDA graph, where no memory can be allocated");
}

Outcome run_deferred(CudaCall& call) {
  pass_on(call);
  bool captured = cuda::capturing(call.stream);
  std::size_t kept_count = call.call_site().site->kept_on_device();
  if (captured && kept_count != 0) return no_memory_in_graphs(call.callee());
  std::optional<std::size_t> count = captured ? call.call_site().site->reads_replayed(call.call())
                                              : call.call_site().site->reads(call.call());
  if (!count) return Outcome::success();
  std::span<const ArrayView> sent = call.decoded.operands().first(*count).subspan(kept_count);
  std::vector<ArrayView> operands(sent.begin(), sent.end());
  bool sharded = call.number.data != nullptr;
  if (sharded) operands.push_back(call.number);
  if (captured) {
    cuda::RelaxedCapture relaxed;
    capture(call, HostCopies(call.device, operands, {}));
    return Outcome::success();
  }
  std::span<const ArrayView> to_keep = call.decoded.operands().first(kept_count);
  std::size_t bytes = nbytes(operands);
  auto room = std::make_shared<Backlog::Room>(bytes + nbytes(to_keep));
  std::shared_ptr<cuda::KeptCopies> kept;
  if (!to_keep.empty())
    kept = std::make_shared<cuda::KeptCopies>(call.device, call.stream, to_keep);
  auto copies = std::make_shared<HostCopies>(call.device, operands, std::span<const ArrayView>());
  bool aside = bytes > kCopiedInStream;
  if (!aside) copies->fetch(call.stream);
  cuda::StreamEvent end =
      aside ? copies->fetch_aside(call.stream) : cuda::StreamEvent(call.device, call.stream);
  cuda::Completions::of(call.device)
      .after(std::move(end), [site = call.site.call_site, copies, kept, room, sharded,
                              context = call.context](cuda::Result result) {
        // A stream that has failed fails its program, which says so.
        if (result == cuda::Result::kSuccess) run_later(*site, *copies, kept, sharded, context);
      });
  return Outcome::success();
}

// -- handlers -------------------------------------------------------------------------------------

std::unique_ptr<CudaGateState> instantiate_cuda_gate(const XLA_FFI_Attrs& attrs) {
  auto state = std::make_unique<CudaGateState>();
  state->site = std::make_shared<CudaSite>();
  state->site->call_site = make_call_site(ffi::Dictionary(&attrs));
  return state;
}

Outcome run(CudaCall& call) {
  switch (call.callee().on_device()) {
    case OnDevice::kNative: return run_native(call);
    case OnDevice::kDeferred: return run_deferred(call);
    case OnDevice::kStaged: break;
  }
  return call.settled(
      [&] { return call.callee().own_thread() ? run_on_own_thread(call) : run_staged(call); });
}

XLA_FFI_Error* execute_cuda_gate(XLA_FFI_CallFrame* frame) {
  CudaCall call(*StateOf<CudaGateState>::get(*frame).site, *frame);
  cuda::ContextScope current(call.device);
  Outcome outcome = run(call);
  if (outcome.ok()) return nullptr;
  ProgressBoard::instance().fail(call.context.run);
  return make_error(frame->api, outcome.error().code, outcome.error().message);
}

}  // namespace

XLA_FFI_Error* cuda_gate_instantiate(XLA_FFI_CallFrame* frame) {
  return StateOf<CudaGateState>::instantiate(frame, instantiate_cuda_gate);
}

XLA_FFI_Error* cuda_gate_execute(XLA_FFI_CallFrame* frame) {
  return StateOf<CudaGateState>::execute(frame, execute_cuda_gate);
}

XLA_FFI_Error* cuda_graph_execute(XLA_FFI_CallFrame* frame) {
  return StateOf<CudaGateState>::execute(frame, execute_cuda_gate,
                                         XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE);
}

}  // namespace callgate::xla_ffi
