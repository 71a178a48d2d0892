// See the header. State and calls are plain C++; the callee alone knows about Python.
#include "xla/gate.h"

#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "core/lifecycle.h"
#include "core/registry.h"
#include "core/watchdog.h"
#include "core/worker_pool.h"
#include "xla/decode.h"
#include "xla/future.h"
#include "xla/guard.h"

namespace callgate::xla_ffi {
namespace {

namespace ffi = ::xla::ffi;

// One call site of one executable. Shared, since a call on its own thread that was given up by the
// watchdog may outlive the executable.
struct CallSite {
  std::shared_ptr<Callee> callee;
  std::shared_ptr<Site> site;
};

// What XLA owns for the site, through the deleter in kStateInfo.
struct GateState {
  static ffi::TypeId id;
  std::shared_ptr<CallSite> call_site;
};

ffi::TypeId GateState::id = {};

constexpr XLA_FFI_TypeInfo kStateInfo = ffi::MakeTypeInfo<GateState>();

ffi::ErrorOr<std::unique_ptr<GateState>> instantiate(std::string_view name, std::string_view spec,
                                                     std::string_view site,
                                                     std::string_view batch) {
  try {
    auto state = std::make_unique<GateState>();
    state->call_site = std::make_shared<CallSite>();
    state->call_site->callee = Registry::instance().find(name);
    state->call_site->site = state->call_site->callee->specialise(
        SiteSpec{std::string(spec), std::string(site), Lanes::parse(batch)});
    return state;
  } catch (const Error& error) {
    return ffi::Unexpected(ffi::Error(to_xla(error.code()), error.what()));
  } catch (const std::exception& error) {
    return ffi::Unexpected(ffi::Error(ffi::ErrorCode::kInternal, error.what()));
  }
}

XLA_FFI_DEFINE_HANDLER(kInstantiate, instantiate,
                       ffi::Ffi::BindInstantiate()
                           .Attr<std::string_view>("name")
                           .Attr<std::string_view>("spec")
                           .Attr<std::string_view>("site")
                           .Attr<std::string_view>("batch"));

// Only ever asked for its metadata; gate_execute does the work on the raw frame.
XLA_FFI_DEFINE_HANDLER(kExecuteMetadata, [](GateState*) { return ffi::Error::Success(); },
                       ffi::Ffi::Bind().Ctx<ffi::State<GateState>>());

// XLA asks each handler for its metadata when the target is registered with a backend, which is the
// first time that a type id can be had without private API and without disturbing the backend.
XLA_FFI_Error* register_state_type(const XLA_FFI_Api* api) {
  if (GateState::id.type_id != 0) return nullptr;
  return ffi::Ffi::RegisterTypeId(api, "callgate.gate_state", &GateState::id, &kStateInfo);
}

GateState* state_of(const XLA_FFI_CallFrame& frame) {
  XLA_FFI_State_Get_Args args{};
  args.struct_size = XLA_FFI_State_Get_Args_STRUCT_SIZE;
  args.stage = XLA_FFI_ExecutionStage_INSTANTIATE;
  args.ctx = frame.ctx;
  args.type_id = &GateState::id;
  if (XLA_FFI_Error* error = frame.api->XLA_FFI_State_Get(&args)) {
    std::string message = ffi::internal::GetErrorMessage(frame.api, error);
    ffi::internal::DestroyError(frame.api, error);
    throw Error(ErrorCode::kInternal, "no state for the call site: " + message);
  }
  return static_cast<GateState*>(args.state);
}

Outcome shutting_down(const Callee& callee) {
  return Outcome::failure(ErrorCode::kAborted, "callgate: gate '" + callee.name() +
                                                   "' was called while the process is ending");
}

// A call that outlives its handler: the frame's descriptors die with it, so they are copied. With a
// timeout the memory is private too, since XLA frees its own when the watchdog fails the program
// while user code may still be reading and writing.
class OwnedCall {
 public:
  OwnedCall(DecodedCall& decoded, const CallContext& context, bool private_memory)
      : targets_(decoded.results().begin(), decoded.results().end()), context_(context) {
    keep(decoded.operands(), operands_);
    keep(decoded.results(), results_);
    keep(decoded.results(), targets_);
    if (!private_memory) return;
    for (ArrayView& view : operands_) copy_in(view);
    for (ArrayView& view : results_) allocate(view);
  }

  Call call() { return Call{operands_, results_, context_}; }

  // Copies private results to XLA's memory.
  void publish() const {
    for (std::size_t i = 0; i < results_.size(); ++i) {
      if (results_[i].data == targets_[i].data || results_[i].nbytes() == 0) continue;
      std::memcpy(targets_[i].data, results_[i].data, results_[i].nbytes());
    }
  }

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

void run_owned(const std::shared_ptr<CallSite>& site, OwnedCall& call, Promise& promise) {
  ActiveCall active;
  Outcome outcome = active.entered() ? site->site->run(call.call()) : shutting_down(*site->callee);
  if (outcome.ok()) {
    promise.succeed([&] { call.publish(); });
  } else {
    promise.fail(outcome.error().code, outcome.error().message);
  }
}

XLA_FFI_Error* execute_on_own_thread(XLA_FFI_CallFrame* frame, std::shared_ptr<CallSite> site,
                                     DecodedCall& decoded) {
  auto timeout = site->callee->timeout();
  auto call = std::make_shared<OwnedCall>(decoded, decode_context(*frame),
                                          /*private_memory=*/timeout.count() > 0);
  auto promise = std::make_shared<Promise>(frame->api);
  XLA_FFI_Future* future = promise->future();
  Watchdog::Ticket ticket;
  if (timeout.count() > 0) {
    ticket = Watchdog::instance().arm(timeout, [site, call, promise] {
      std::string report = site->callee->stall_report(call->describe());
      promise->fail(ErrorCode::kDeadlineExceeded, report);
    });
  }
  bool taken = WorkerPool::instance().submit([site, call, promise, timeout, ticket] {
    try {
      run_owned(site, *call, *promise);
    } catch (abi::__forced_unwind&) {
      for (;;) pause();  // as guarded()
    } catch (const std::exception& error) {
      promise->fail(ErrorCode::kInternal, std::string("callgate: ") + error.what());
    }
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
  const std::shared_ptr<CallSite>& site = state_of(*frame)->call_site;
  DecodedCall decoded(*frame);
  if (site->callee->own_thread()) return execute_on_own_thread(frame, site, decoded);
  ActiveCall active;
  Outcome outcome = active.entered() ? site->site->run(Call{decoded.operands(), decoded.results(),
                                                            decode_context(*frame)})
                                     : shutting_down(*site->callee);
  if (outcome.ok()) return nullptr;
  return make_error(frame->api, outcome.error().code, outcome.error().message);
}

}  // namespace

XLA_FFI_Error* gate_instantiate(XLA_FFI_CallFrame* frame) {
  if (XLA_FFI_Error* error = register_state_type(frame->api)) return error;
  return kInstantiate(frame);
}

XLA_FFI_Error* gate_execute(XLA_FFI_CallFrame* frame) {
  if (frame->extension_start != nullptr &&
      frame->extension_start->type == XLA_FFI_Extension_Metadata) {
    if (XLA_FFI_Error* error = register_state_type(frame->api)) return error;
    return kExecuteMetadata(frame);
  }
  return guarded(frame->api, [frame] { return execute(frame); });
}

}  // namespace callgate::xla_ffi
