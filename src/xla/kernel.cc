// Kernels for the CPU. Reads the raw frame: what a call costs beside the kernel itself is here.
#include "core/kernel.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <utility>

#include "core/interrupt.h"
#include "core/kernel_frame.h"
#include "core/registry.h"
#include "xla/attributes.h"
#include "xla/call_site.h"
#include "xla/decode.h"
#include "xla/ffi.h"
#include "xla/handlers.h"
#include "xla/kernel_cache.h"

namespace callgate::xla_ffi {
namespace {

// One call site of one executable.
struct KernelState {
  static inline ::xla::ffi::TypeId id = {};
  static constexpr std::string_view kName = "callgate.kernel_state";
  std::shared_ptr<BoundKernel> bound;
};

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

// XLA's own threads, for one call. Borrows the frame, which lives until the handler returns.
class XlaExecutor final : public Executor {
 public:
  explicit XlaExecutor(const XLA_FFI_CallFrame& frame) noexcept
      : api_(frame.api), context_(frame.ctx) {}

  int threads() const noexcept override {
    std::int64_t count = 1;
    XLA_FFI_ThreadPool_NumThreads_Args args{XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE, nullptr,
                                            context_, &count};
    bool told = succeeded(api_, api_->XLA_FFI_ThreadPool_NumThreads(&args));
    return told ? static_cast<int>(count) : 1;
  }

  bool schedule(std::function<void()> task) noexcept override {
    using Task = std::function<void()>;
    std::unique_ptr<Task> owned(new (std::nothrow) Task(std::move(task)));
    if (owned == nullptr) return false;
    XLA_FFI_Task* run = [](void* data) {
      std::unique_ptr<Task> mine(static_cast<Task*>(data));
      (*mine)();
    };
    XLA_FFI_ThreadPool_Schedule_Args args{XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE, nullptr,
                                          context_, run, owned.get()};
    if (!succeeded(api_, api_->XLA_FFI_ThreadPool_Schedule(&args))) return false;
    owned.release();  // NOLINT: the task deletes itself
    return true;
  }

  std::int64_t device() const noexcept override {
    XLA_FFI_DeviceOrdinal_Get_Args args{XLA_FFI_DeviceOrdinal_Get_Args_STRUCT_SIZE, nullptr,
                                        context_, -1};
    bool told = succeeded(api_, api_->XLA_FFI_DeviceOrdinal_Get(&args));
    return told ? args.device_ordinal : -1;
  }

 private:
  const XLA_FFI_Api* api_;
  XLA_FFI_ExecutionContext* context_;
};

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
