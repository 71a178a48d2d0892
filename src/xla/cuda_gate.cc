// Gates and taps in programs for CUDA. Nothing here waits for a device but what says so.
#include <memory>

#include "core/lifecycle.h"
#include "core/progress.h"
#include "xla/cuda_call.h"
#include "xla/guard.h"
#include "xla/handlers.h"
#include "xla/state.h"

namespace callgate::xla_ffi {
namespace {

namespace ffi = ::xla::ffi;

// What XLA owns for the site. CUDA's plugin has a registry of types of its own.
struct CudaGateState {
  static ffi::TypeId id;
  static constexpr std::string_view kName = "callgate.cuda_gate_state";
  std::shared_ptr<CudaSite> site;
};

ffi::TypeId CudaGateState::id = {};

std::unique_ptr<CudaGateState> instantiate_cuda_gate(const XLA_FFI_Attrs& attrs) {
  auto state = std::make_unique<CudaGateState>();
  state->site = std::make_shared<CudaSite>();
  state->site->call_site = make_call_site(attrs);
  return state;
}

void run_native(CudaCall& call) {
  const CallSite& site = call.call_site();
  call.context.shard = call.site.shards.read(site.shards, call.number, call.device, call.stream);
  if (!site.shards.runs(call.context.shard))
    return cuda::clear_on_device(call.decoded.results(), call.stream);
  ActiveCall active;
  if (!active.entered()) return refuse_at_exit(call.callee());
  settled(
      site.poison_on_error, call.callee(), [&] { site.site->run(call.call()); },
      [&] { cuda::poison_on_device(call.decoded.results(), call.stream); });
}

void execute_cuda_gate(XLA_FFI_CallFrame* frame) {
  CudaCall call(*StateOf<CudaGateState>::get(*frame).site, *frame);
  cuda::ContextScope current(call.device);
  try {
    switch (call.callee().on_device()) {
      case OnDevice::kNative: return run_native(call);
      case OnDevice::kDeferred: return run_deferred(call);
      case OnDevice::kStaged: return run_staged(call);
    }
  } catch (const std::exception&) {
    ProgressBoard::instance().fail(call.context.run);  // with the program end its bars
    throw;
  }
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
