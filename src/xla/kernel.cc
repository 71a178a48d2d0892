// SPDX-License-Identifier: Apache-2.0
// Kernels for the CPU and for CUDA, on XLA's threads, several at once; nothing waits for a device.
// The handlers read the raw frame, because this code is the overhead of a kernel's call.
#include "kernels/kernel.h"

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "core/call.h"
#include "core/lifecycle.h"
#include "core/lifetime.h"
#include "core/timeline.h"
#include "cuda/copies.h"
#include "cuda/device.h"
#include "cuda/launch.h"
#include "kernels/kernel_frame.h"
#include "xla/call_site.h"
#include "xla/cuda_call.h"
#include "xla/ffi.h"
#include "xla/handlers.h"

namespace callgate::xla_ffi {
namespace {

// --- The call site of a call, from its call frame ------------------------------------------------
//
// XLA's own look-up, State_Get, takes as long as the rest of a kernel's call. So a thread caches
// the sites of its last calls by the attribute `_key` of each kernel call in programs, a hash of
// the call's other attributes. Sites with one key are one object, shared by all executables with
// the call, so it lives as long as any of them. A key of two different sites, such as after a
// kernel was redefined under its name, is not cached. Any change of a key's site increments the
// generation, which clears every thread's cache.

// A kernel bound to one call of a program.
struct BoundKernel : Immovable {
  ~BoundKernel();

  std::unique_ptr<KernelSite> site;
  bool poison_on_error = false;  // see settled() in ffi.h
  Shards shards;
  std::string key;                     // of the call; "" if not cached
  Attributes contents;                 // of the call
  std::atomic<bool> remembered{true};  // the key belongs only to this one
};

// The site of a key.
struct KnownKernel {
  std::weak_ptr<BoundKernel> bound;
  bool ambiguous = false;  // for good: an older site of the key may still live
};

// For loading and unloading of programs, which XLA also does at exit; calls take no lock.
constinit std::mutex known_kernels_mutex;
std::unordered_map<std::string, KnownKernel>& known_kernels() {
  return immortal<std::unordered_map<std::string, KnownKernel>>();
}

BoundKernel::~BoundKernel() {
  if (key.empty()) return;
  // Threads may keep this cached: no call has the key until share() gives it another site.
  std::scoped_lock lock(known_kernels_mutex);
  auto it = known_kernels().find(key);
  if (it != known_kernels().end() && !it->second.ambiguous && it->second.bound.expired())
    known_kernels().erase(it);
}

// The site of a call, if this thread has it cached, otherwise the one from `get`, which is then
// cached. `get` returns a site that the call keeps alive.
class RecentKernels {
 public:
  static constexpr std::size_t kKeyBytes = 16;  // hexadecimal digits

  template <typename Get>
  static BoundKernel& find(const XLA_FFI_Attrs& attributes, Get&& get) {
    const char* key = key_of(attributes);
    if (key == nullptr) [[unlikely]]
      return get();
    // Acquire: a generation publishes the values of `remembered` at its start. A call comes after
    // the load of its executable, and so after the last relevant change.
    std::uint64_t now = generation_.load(std::memory_order_acquire);
    Slot& slot = slots_[static_cast<unsigned char>(key[0]) % kSlots];
    if (slot.generation == now && std::char_traits<char>::compare(slot.key, key, kKeyBytes) == 0)
        [[likely]] {
      return *slot.bound;
    }
    BoundKernel& bound = get();
    if (bound.remembered.load(std::memory_order_relaxed)) {  // see above
      slot.generation = now;
      slot.bound = &bound;
      std::char_traits<char>::copy(slot.key, key, kKeyBytes);
    }
    return bound;
  }

  // The first attribute's bytes, if it may be a key: attributes are sorted by name, and no other
  // attribute of programs looks like a key. Null otherwise.
  static const char* key_of(const XLA_FFI_Attrs& attributes) noexcept {
    if (attributes.size == 0 || attributes.types[0] != XLA_FFI_AttrType_STRING) return nullptr;
    const auto& text = *static_cast<const XLA_FFI_ByteSpan*>(attributes.attrs[0]);
    return text.len == kKeyBytes ? text.ptr : nullptr;
  }

  // Clears all threads' caches, because a cached site may be gone.
  static void forget() noexcept { generation_.fetch_add(1, std::memory_order_release); }

 private:
  static constexpr std::size_t kSlots = 8;
  struct Slot {
    std::uint64_t generation;  // 0: empty
    BoundKernel* bound;
    char key[kKeyBytes];
  };

  static inline constinit std::atomic<std::uint64_t> generation_{1};
  static inline constinit thread_local Slot slots_[kSlots] = {};
};

// The live site of a call of `kernel` with these attributes, or the one from `make`.
template <typename Make>
std::shared_ptr<BoundKernel> share(const XLA_FFI_Attrs& attributes, const KernelCallee& kernel,
                                   Make&& make) {
  const char* key = RecentKernels::key_of(attributes);
  if (key == nullptr) {
    std::shared_ptr<BoundKernel> made = make();
    made->remembered.store(false, std::memory_order_relaxed);  // not shared yet
    return made;
  }
  Attributes contents = decode_attributes(attributes);
  std::shared_ptr<BoundKernel> mine = make(), other;  // `other` outlives the lock
  std::scoped_lock lock(known_kernels_mutex);
  KnownKernel& slot = known_kernels()[std::string(key, RecentKernels::kKeyBytes)];
  other = slot.bound.lock();
  if (other != nullptr && !slot.ambiguous && other->contents == contents &&
      &other->site->callee() == &kernel)
    return other;
  if (other != nullptr) {
    slot.ambiguous = true;
    other->remembered.store(false, std::memory_order_relaxed);  // published by the generation
  }
  if (slot.ambiguous) mine->remembered.store(false, std::memory_order_relaxed);
  mine->key.assign(key, RecentKernels::kKeyBytes);
  mine->contents = std::move(contents);
  slot.bound = mine;
  RecentKernels::forget();
  return mine;
}

// --- For the CPU ---------------------------------------------------------------------------------

// The kernel that a call names. Throws Error for another callee: a gate, or a kernel for `other`.
template <typename Kernel>
std::shared_ptr<Kernel> kernel_of(const Attributes& held, const std::string& program,
                                  const char* expected, const std::string& other) {
  Interrupts::watch();
  std::shared_ptr<Callee> callee = Registry::instance().find(held.text("name"));
  if (auto kernel = std::dynamic_pointer_cast<Kernel>(callee)) return kernel;
  throw Error(program + "'s call of '" + callee->name() + "'", expected,
              "a gate, or a kernel only for " + other + ", of that name");
}

// Removes the kernel's attributes from the call's. Throws Error.
std::unique_ptr<KernelSite> bind_kernel(KernelCallee& kernel, Attributes& held) {
  const auto groups = held.integers("groups");
  return kernel.bind(KernelSpec{std::string(held.text("signature")),
                                std::string(held.text("site")),
                                {groups.begin(), groups.end()},
                                Lanes::of(held.dictionary("batch")),
                                held.take_dictionary("attributes")});
}

// XLA's state for one call site of one executable.
struct KernelState {
  static inline ::xla::ffi::TypeId id = {};
  static constexpr std::string_view kName = "callgate.kernel_state";
  static std::unique_ptr<KernelState> make(const XLA_FFI_Attrs& attributes);
  static void execute(XLA_FFI_CallFrame* frame);

  std::shared_ptr<BoundKernel> bound;
};

std::unique_ptr<KernelState> KernelState::make(const XLA_FFI_Attrs& attributes) {
  Attributes held = decode_attributes(attributes);
  auto text = [&](std::string_view name) { return std::string(held.text(name)); };
  auto kernel = kernel_of<KernelCallee>(held, "the program", "a kernel for the CPU", "CUDA");
  auto state = std::make_unique<KernelState>();
  state->bound = share(attributes, *kernel, [&] {
    auto bound = std::make_shared<BoundKernel>();
    bound->site = bind_kernel(*kernel, held);
    bound->poison_on_error = text("on_error") == "poison";
    bound->shards = Shards(text("shards"));
    return bound;
  });
  return state;
}

// XLA's own threads, for one call. Borrows the frame, which lives until the handler returns.
class XlaExecutor final : public Executor {
 public:
  explicit XlaExecutor(const XLA_FFI_CallFrame& frame) noexcept : frame_(frame) {}

  int threads() const noexcept override {
    std::int64_t count = 1;
    XLA_FFI_ThreadPool_NumThreads_Args args{XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE, nullptr,
                                            frame_.ctx, &count};
    bool told = succeeded(frame_.api, frame_.api->XLA_FFI_ThreadPool_NumThreads(&args));
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
                                          frame_.ctx, run, owned.get()};
    if (!succeeded(frame_.api, frame_.api->XLA_FFI_ThreadPool_Schedule(&args))) return false;
    owned.release();  // NOLINT: the task deletes itself
    return true;
  }

  std::int64_t device() const noexcept override { return decode_device(frame_); }

 private:
  const XLA_FFI_CallFrame& frame_;
};

void KernelState::execute(XLA_FFI_CallFrame* frame) {
  BoundKernel& bound = RecentKernels::find(
      frame->attrs, [frame]() -> BoundKernel& { return *StateOf<KernelState>::get(*frame).bound; });
  DecodedCall decoded(*frame);
  if (!bound.shards.runs(bound.shards.take(decoded))) [[unlikely]]
    return clear(decoded.results());
  if (Interrupts::ends(decode_run(*frame)) && !bound.poison_on_error) [[unlikely]]
    throw interrupted(bound.site->callee().name());
  XlaExecutor executor(*frame);
  TimelineSpan span("kernel", bound.site->callee().name());
  settled(
      bound.poison_on_error, bound.site->callee(),
      [&] { bound.site->run(Call{decoded.operands(), decoded.results(), {}}, &executor); },
      [&] { poison(decoded.results()); });
}

// --- For CUDA ------------------------------------------------------------------------------------

// One call site of one executable. CUDA's plugin has its own registry of types.
struct CudaKernelState {
  static inline ::xla::ffi::TypeId id = {};
  static constexpr std::string_view kName = "callgate.cuda_kernel_state";
  static std::unique_ptr<CudaKernelState> make(const XLA_FFI_Attrs& attributes);
  static void execute(XLA_FFI_CallFrame* frame);

  Callee& callee() const noexcept {
    return native != nullptr ? static_cast<Callee&>(native->callee()) : site->callee();
  }

  // One of the two: launches, or a native function that works on the stream itself.
  std::unique_ptr<cuda::LaunchSite> site;
  std::unique_ptr<KernelSite> native;
  bool poison_on_error = false;  // see settled() in ffi.h
  Shards shards;
  DeviceShards numbers;
};

std::unique_ptr<CudaKernelState> CudaKernelState::make(const XLA_FFI_Attrs& attributes) {
  Attributes held = decode_attributes(attributes);
  auto text = [&](std::string_view name) { return std::string(held.text(name)); };
  auto state = std::make_unique<CudaKernelState>();
  Interrupts::watch();
  auto known = Registry::instance().find(held.text("name"));
  if (auto native = std::dynamic_pointer_cast<KernelCallee>(known);
      native != nullptr && native->info().on_stream) {
    state->native = bind_kernel(*native, held);
  } else {
    auto kernel = kernel_of<cuda::LaunchCallee>(
        held, "the CUDA program",
        "a kernel for CUDA (callgate.cuda, or callgate.cpp with cuda_source=)", "the CPU");
    state->site = kernel->bind({cuda::LaunchPlan::of(held.dictionary("plan")), text("site"),
                                Lanes::of(held.dictionary("batch"))});
  }
  state->poison_on_error = text("on_error") == "poison";
  state->shards = Shards(text("shards"));
  return state;
}

// The blocks of one call, from XLA's allocator. They are returned when the call has been enqueued:
// the next owner uses them later on the same stream.
class ScratchBlocks : Immovable {
 public:
  ScratchBlocks(const XLA_FFI_CallFrame& frame, std::span<const std::size_t> sizes)
      : frame_(frame), sizes_(sizes), addresses_(sizes.size()) {}
  ~ScratchBlocks() {
    for (std::size_t i = 0; i < count_; ++i) release(sizes_[i], addresses_.data()[i]);
  }

  // Called once. Throws Error.
  std::span<const cuda::DevicePointer> allocate() {
    for (; count_ < sizes_.size(); ++count_) addresses_.data()[count_] = allocate(sizes_[count_]);
    return {addresses_.data(), count_};
  }

 private:
  cuda::DevicePointer allocate(std::size_t bytes) {
    if (bytes == 0) return 0;
    XLA_FFI_DeviceMemory_Allocate_Args args{};
    args.struct_size = XLA_FFI_DeviceMemory_Allocate_Args_STRUCT_SIZE;
    args.ctx = frame_.ctx;
    args.size = bytes;
    args.alignment = 16;  // XLA's maximum, and enough for CUDA's widest loads
    if (XLA_FFI_Error* error = frame_.api->XLA_FFI_DeviceMemory_Allocate(&args))
      throw Error(ErrorCode::kInternal, "a kernel's scratch memory",
                  std::to_string(bytes) + " bytes on the device", take_message(frame_.api, error));
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
  SmallBuffer<cuda::DevicePointer, 4> addresses_;
  std::size_t count_ = 0;  // allocated so far
};

void run_call(CudaKernelState& state, const XLA_FFI_CallFrame& frame) {
  auto* stream = static_cast<cuda::Stream>(decode_stream(frame));
  cuda::Device& device = cuda::Device::of(stream);
  cuda::ContextScope current(device);
  if (Interrupts::ends(decode_run(frame)) && !state.poison_on_error && !cuda::capturing(stream))
      [[unlikely]]
    throw interrupted(state.callee().name());
  DecodedCall decoded(frame);
  // The partition's number is only read if it matters.
  ArrayView number = state.shards.take_operand(decoded);
  if (number.data != nullptr && !state.shards.all_run() &&
      !state.shards.runs(state.numbers.read(state.shards, number, device, stream))) [[unlikely]]
    return cuda::clear_on_device(decoded.results(), stream);
  Call call{decoded.operands(), decoded.results(), {.stream = stream, .ordinal = device.ordinal()}};
  if (state.native != nullptr) return state.native->run(call, /*executor=*/nullptr);
  if (state.site->scratch().empty()) [[likely]]
    return state.site->run(call, device, {});
  ScratchBlocks scratch(frame, state.site->scratch());
  state.site->run(call, device, scratch.allocate());
}

void CudaKernelState::execute(XLA_FFI_CallFrame* frame) {
  CudaKernelState& state = StateOf<CudaKernelState>::get(*frame);
  TimelineSpan span("kernel", state.callee().name());  // of the host, which enqueues the work
  settled_on_device(*frame, state.poison_on_error, state.callee(),
                    [&] { run_call(state, *frame); });
}

}  // namespace

XLA_FFI_Handler& kernel_instantiate = StateOf<KernelState>::instantiate;
XLA_FFI_Handler& kernel_execute = StateOf<KernelState>::execute<>;
XLA_FFI_Handler& cuda_kernel_instantiate = StateOf<CudaKernelState>::instantiate;
XLA_FFI_Handler& cuda_kernel_execute =
    StateOf<CudaKernelState>::execute<XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE>;
XLA_FFI_Handler& cuda_kernel_scratch_execute = StateOf<CudaKernelState>::execute<>;

}  // namespace callgate::xla_ffi
