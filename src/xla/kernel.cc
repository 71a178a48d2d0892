// Kernels for the CPU. Reads the raw frame: what a call costs beside the kernel itself is here.
#include "core/kernel.h"

#include <memory>
#include <string>
#include <utility>

#include "core/interrupt.h"
#include "core/registry.h"
#include "xla/attributes.h"
#include "xla/call_site.h"
#include "xla/decode.h"
#include "xla/executor.h"
#include "xla/guard.h"
#include "xla/handlers.h"
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
  Attributes held = decode_attributes(attrs);
  auto text = [&](std::string_view name) { return std::string(held.text(name)); };
  std::shared_ptr<Callee> callee = Registry::instance().find(text("name"));
  auto kernel = std::dynamic_pointer_cast<KernelCallee>(callee);
  if (kernel == nullptr) {
    throw Error("the program's call of '" + callee->name() + "'", "a kernel for the CPU",
                "a gate, or a kernel for CUDA alone, of that name");
  }
  Interrupts::watch();
  auto state = std::make_unique<KernelState>();
  state->bound = share(attrs, *kernel, [&] {
    auto bound = std::make_shared<BoundKernel>();
    const auto groups = held.integers("groups");
    bound->site = kernel->bind(KernelSpec{text("signature"),
                                          text("site"),
                                          {groups.begin(), groups.end()},
                                          Lanes::of(held.dictionary("batch")),
                                          held.take_dictionary("attributes")});
    bound->poison_on_error = text("on_error") == "poison";
    bound->shards = Shards(text("shards"));
    return bound;
  });
  return state;
}

void execute_kernel(XLA_FFI_CallFrame* frame) {
  BoundKernel& bound = RecentKernels::find(
      frame->attrs, [frame]() -> BoundKernel& { return *StateOf<KernelState>::get(*frame).bound; });
  DecodedCall decoded(*frame);
  if (!bound.shards.runs(bound.shards.take(decoded))) [[unlikely]]
    return clear(decoded.results());
  if (Interrupts::ends(decode_run(*frame)) && !bound.poison_on_error) [[unlikely]]
    throw interrupted(bound.site->callee().name());
  XlaExecutor executor(*frame);
  settled(
      bound.poison_on_error, bound.site->callee(),
      [&] { bound.site->run(Call{decoded.operands(), decoded.results(), {}}, &executor); },
      [&] { poison(decoded.results()); });
}

}  // namespace

XLA_FFI_Error* kernel_instantiate(XLA_FFI_CallFrame* frame) {
  return StateOf<KernelState>::instantiate(frame, instantiate_kernel);
}

XLA_FFI_Error* kernel_execute(XLA_FFI_CallFrame* frame) {
  return StateOf<KernelState>::execute(frame, execute_kernel);
}

}  // namespace callgate::xla_ffi
