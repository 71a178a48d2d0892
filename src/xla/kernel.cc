// See the header. Reads the raw frame: what a call costs beside the kernel itself is here.
#include "xla/kernel.h"

#include <memory>
#include <string>
#include <utility>

#include "core/interrupt.h"
#include "core/kernel.h"
#include "core/registry.h"
#include "xla/attributes.h"
#include "xla/call_site.h"
#include "xla/decode.h"
#include "xla/executor.h"
#include "xla/guard.h"
#include "xla/kernel_cache.h"
#include "xla/state.h"

namespace callgate::xla_ffi {
namespace {

namespace ffi = ::xla::ffi;

// One call site of one executable.
struct KernelState {
  static ffi::TypeId id;
  static constexpr std::string_view kName = "callgate.kernel_state";
  std::shared_ptr<BoundKernel> bound;
};

ffi::TypeId KernelState::id = {};

// Throws.
std::unique_ptr<KernelState> instantiate_kernel(const XLA_FFI_Attrs& attrs) {
  ffi::Dictionary attributes(&attrs);
  auto text = [&](std::string_view name) { return text_attribute(attributes, name); };
  std::shared_ptr<Callee> callee = Registry::instance().find(text("name"));
  auto kernel = std::dynamic_pointer_cast<KernelCallee>(callee);
  if (kernel == nullptr) {
    throw Error(ErrorCode::kInvalidArgument, "the program's call of '" + callee->name() + "'",
                "a kernel for the CPU", "a gate, or a kernel for CUDA alone, of that name");
  }
  Interrupts::watch();
  auto state = std::make_unique<KernelState>();
  state->bound = share(attrs, *kernel, [&] {
    auto bound = std::make_shared<BoundKernel>();
    bound->site = kernel->bind(KernelSpec{text("signature"), text("site"), text("groups"),
                                          Lanes::parse(text("batch")),
                                          decode_attributes(attrs, "attributes")});
    bound->poison_on_error = text("on_error") == "poison";
    bound->shards = Shards(text("shards"));
    return bound;
  });
  return state;
}

XLA_FFI_Error* execute_kernel(XLA_FFI_CallFrame* frame) {
  BoundKernel& bound = RecentKernels::find(
      frame->attrs, [frame]() -> BoundKernel& { return *StateOf<KernelState>::get(*frame).bound; });
  DecodedCall decoded(*frame);
  if (!bound.shards.runs(bound.shards.take(decoded))) [[unlikely]] {
    for (const ArrayView& view : decoded.results()) clear(view);
    return nullptr;
  }
  if (Interrupts::ends(decode_run(*frame)) && !bound.poison_on_error) [[unlikely]] {
    Failure failure = interrupted(bound.site->callee().name());
    return make_error(frame->api, failure.code, failure.message);
  }
  XlaExecutor executor(*frame);
  auto run = [&] {
    return bound.site->run(Call{decoded.operands(), decoded.results(), {}}, &executor);
  };
  Outcome outcome =
      !bound.poison_on_error ? run() : poisoned_on_error(bound.site->callee(), run, [&] {
        for (const ArrayView& view : decoded.results()) poison(view);
      });
  if (outcome.ok()) [[likely]]
    return nullptr;
  return make_error(frame->api, outcome.error().code, outcome.error().message);
}

}  // namespace

XLA_FFI_Error* kernel_instantiate(XLA_FFI_CallFrame* frame) {
  return StateOf<KernelState>::instantiate(frame, instantiate_kernel);
}

XLA_FFI_Error* kernel_execute(XLA_FFI_CallFrame* frame) {
  return StateOf<KernelState>::execute(frame, execute_kernel);
}

}  // namespace callgate::xla_ffi
