// Kernels for CUDA. XLA's threads, several at once; nothing waits for a device.
#include <array>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/lifecycle.h"
#include "core/registry.h"
#include "cuda/copies.h"
#include "cuda/device.h"
#include "cuda/launch.h"
#include "xla/cuda_call.h"
#include "xla/decode.h"
#include "xla/ffi.h"
#include "xla/handlers.h"

namespace callgate::xla_ffi {
namespace {

// One call site of one executable. CUDA's plugin has a registry of types of its own.
struct CudaKernelState {
  static inline ::xla::ffi::TypeId id = {};
  static constexpr std::string_view kName = "callgate.cuda_kernel_state";
  std::unique_ptr<cuda::LaunchSite> site;
  bool poison_on_error = false;  // see settled() in ffi.h
  Shards shards;
  DeviceShards numbers;
};

// Throws.
std::unique_ptr<CudaKernelState> instantiate_cuda_kernel(const XLA_FFI_Attrs& attrs) {
  Interrupts::watch();
  Attributes held = decode_attributes(attrs);
  auto text = [&](std::string_view name) { return std::string(held.text(name)); };
  std::shared_ptr<Callee> callee = Registry::instance().find(text("name"));
  auto kernel = std::dynamic_pointer_cast<cuda::LaunchCallee>(callee);
  if (kernel == nullptr)
    throw Error("the CUDA program's call of '" + callee->name() + "'",
                "a kernel for CUDA (callgate.cuda, or callgate.cpp with cuda_source=)",
                "a gate, or a kernel for the CPU alone, of that name");
  auto state = std::make_unique<CudaKernelState>();
  state->site = kernel->bind({cuda::LaunchPlan::of(held.dictionary("plan")), text("site"),
                              Lanes::of(held.dictionary("batch"))});
  state->poison_on_error = text("on_error") == "poison";
  state->shards = Shards(text("shards"));
  return state;
}

// The blocks of one call, from XLA's allocator. They are given back when the call has been
// enqueued: whoever gets them next uses them on the same stream, later.
class ScratchBlocks : Immovable {
 public:
  ScratchBlocks(const XLA_FFI_CallFrame& frame, std::span<const std::size_t> sizes)
      : ScratchBlocks(frame) {  // from here on a failure runs the destructor
    sizes_ = sizes;
    if (sizes.size() > inline_.size()) overflow_.resize(sizes.size());
    for (; count_ < sizes.size(); ++count_) addresses()[count_] = allocate(sizes[count_]);
  }
  ~ScratchBlocks() {
    for (std::size_t i = 0; i < count_; ++i) release(sizes_[i], addresses()[i]);
  }

  std::span<const cuda::DevicePointer> blocks() noexcept { return {addresses(), sizes_.size()}; }

 private:
  // The most that XLA takes; its allocators align to more. What CUDA's widest loads need.
  static constexpr std::size_t kAlignment = 16;

  explicit ScratchBlocks(const XLA_FFI_CallFrame& frame) : frame_(frame) {}

  cuda::DevicePointer* addresses() noexcept {
    return overflow_.empty() ? inline_.data() : overflow_.data();
  }

  cuda::DevicePointer allocate(std::size_t bytes) {
    if (bytes == 0) return 0;
    XLA_FFI_DeviceMemory_Allocate_Args args{XLA_FFI_DeviceMemory_Allocate_Args_STRUCT_SIZE,
                                            nullptr,
                                            frame_.ctx,
                                            bytes,
                                            kAlignment,
                                            nullptr};
    if (XLA_FFI_Error* error = frame_.api->XLA_FFI_DeviceMemory_Allocate(&args)) {
      throw Error(ErrorCode::kInternal, "a kernel's scratch memory",
                  std::to_string(bytes) + " bytes on the device", take_message(frame_.api, error));
    }
    return reinterpret_cast<cuda::DevicePointer>(args.data);
  }

  void release(std::size_t bytes, cuda::DevicePointer address) noexcept {
    if (bytes == 0) return;
    XLA_FFI_DeviceMemory_Free_Args args{XLA_FFI_DeviceMemory_Free_Args_STRUCT_SIZE, nullptr,
                                        frame_.ctx, bytes, reinterpret_cast<void*>(address)};
    (void)succeeded(frame_.api, frame_.api->XLA_FFI_DeviceMemory_Free(&args));
  }

  const XLA_FFI_CallFrame& frame_;
  std::span<const std::size_t> sizes_;
  std::array<cuda::DevicePointer, 4> inline_{};
  std::vector<cuda::DevicePointer> overflow_;
  std::size_t count_ = 0;  // allocated so far
};

// Whether this device makes the call. The partition's number is looked at only where it matters.
bool runs(CudaKernelState& state, DecodedCall& decoded, cuda::Device& device, cuda::Stream stream) {
  ArrayView number = state.shards.take_operand(decoded);
  return number.data == nullptr || state.shards.all_run() ||
         state.shards.runs(state.numbers.read(state.shards, number, device, stream));
}

void run_call(CudaKernelState& state, const XLA_FFI_CallFrame& frame) {
  auto* stream = static_cast<cuda::Stream>(decode_stream(frame));
  cuda::Device& device = cuda::Device::of(stream);
  cuda::ContextScope current(device);
  if (Interrupts::ends(decode_run(frame)) && !state.poison_on_error && !cuda::capturing(stream))
      [[unlikely]]
    throw interrupted(state.site->callee().name());
  DecodedCall decoded(frame);
  if (!runs(state, decoded, device, stream)) [[unlikely]]
    return cuda::clear_on_device(decoded.results(), stream);
  Call call{decoded.operands(), decoded.results(), {.stream = stream}};
  if (state.site->scratch().empty()) [[likely]]
    return state.site->run(call, device, {});
  ScratchBlocks scratch(frame, state.site->scratch());
  state.site->run(call, device, scratch.blocks());
}

void execute_cuda_kernel(XLA_FFI_CallFrame* frame) {
  CudaKernelState& state = StateOf<CudaKernelState>::get(*frame);
  Callee& callee = state.site->callee();
  settled(
      state.poison_on_error, callee,
      [&] { cuda::named(callee.name(), [&] { run_call(state, *frame); }); },
      [&] { poison_on_device(*frame); });
}

}  // namespace

XLA_FFI_Error* cuda_kernel_instantiate(XLA_FFI_CallFrame* frame) {
  return StateOf<CudaKernelState>::instantiate(frame, instantiate_cuda_kernel);
}

XLA_FFI_Error* cuda_kernel_execute(XLA_FFI_CallFrame* frame) {
  return StateOf<CudaKernelState>::execute(frame, execute_cuda_kernel,
                                           XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE);
}

XLA_FFI_Error* cuda_kernel_scratch_execute(XLA_FFI_CallFrame* frame) {
  return StateOf<CudaKernelState>::execute(frame, execute_cuda_kernel);
}

}  // namespace callgate::xla_ffi
