// SPDX-License-Identifier: Apache-2.0
// A kernel's call: its threads, its working memory, and the services that provide them.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>

#include "callgate/kernel_abi.h"
#include "core/call.h"
#include "core/lifetime.h"
#include "core/parallel.h"
#include "kernels/kernel_debug.h"

namespace callgate {

// Working memory of kernels, for one call.
//
// The thread that made a call keeps the call's blocks, up to kScratchKept bytes per thread, because
// the page faults of new blocks cost more than most kernels' work on them. A block's description
// precedes its memory, so a call's list of blocks needs no memory of its own.
inline constexpr std::size_t kScratchKept = std::size_t{64} << 20;
inline constexpr std::size_t kScratchAlignment = 64;  // as XLA's own buffers

struct alignas(kScratchAlignment) ScratchBlock {
  ScratchBlock* next;
  std::size_t bytes;  // of the memory behind this description
  void* memory;       // for the deallocation
};

// Free blocks of one thread, and their total size.
class ScratchCache {
 public:
  static ScratchCache& instance() noexcept {
    static thread_local ScratchCache cache;
    return cache;
  }
  ~ScratchCache();

  // The smallest block that is large enough and at most twice as large.
  ScratchBlock* take(std::size_t bytes) noexcept;

  // Makes room by freeing the oldest blocks; a block above the limit is freed itself.
  void keep(ScratchBlock* block) noexcept;

 private:
  std::array<ScratchBlock*, 8> blocks_{};
  std::size_t next_ = 0;
  std::size_t kept_ = 0;
};

// The blocks of one call. Thread-safe; destroyed when no thread uses a block.
class Scratch : Immovable {
 public:
  ~Scratch() {
    // All users of blocks have finished, and their accesses happened before.
    if (blocks_.load(std::memory_order_relaxed) != nullptr) [[unlikely]]
      release();
  }

  // Uninitialized memory of at least `bytes`, aligned to 64 or more; null if there is none.
  void* take(std::size_t bytes, std::size_t alignment) noexcept;

 private:
  void release() noexcept;

  std::atomic<ScratchBlock*> blocks_{nullptr};
};

// A call as a kernel sees it. On the call's stack; its construction allocates nothing.
class KernelFrame : public callgate_call, Immovable {
 public:
  // `executor` and `scratch` may be null. The frame has its own `services`, regardless of `call`.
  KernelFrame(const callgate_call& call, Executor* executor, ScratchSource* scratch,
              const CallContext& context = {}) noexcept
      : callgate_call(call),
        executor_(executor),
        source_(scratch),
        stream_(context.stream),
        ordinal_(context.ordinal) {
    static constexpr callgate_services kServices = {&run_parallel, &allocate, &threads, &device,
                                                    &fail};
    services = &kServices;
  }
  ~KernelFrame() {
    // A kernel that failed on another thread has joined it before it returned.
    if (std::string* message = message_.load(std::memory_order_relaxed)) [[unlikely]]
      delete message;
  }

  // The message of a failed kernel.
  std::string message() const {
    const std::string* message = message_.load(std::memory_order_acquire);  // see fail
    return message == nullptr ? "it failed without a message" : *message;
  }

  // The frame of a call, for callgate's own kernels, whose calls are always frames.
  static KernelFrame& of(const callgate_call* call) noexcept {
    return *static_cast<KernelFrame*>(const_cast<callgate_call*>(call));
  }
  // XLA's stream, which orders the kernel's work with a GPU's arrays; null on the CPU.
  void* stream() const noexcept { return stream_; }
  std::int32_t ordinal() const noexcept { return ordinal_; }  // of that GPU

 private:
  using Body = void (*)(void* data, std::int64_t first, std::int64_t last);
  static void run_parallel(const callgate_call* call, std::int64_t begin, std::int64_t end,
                           std::int64_t grain, Body body, void* data) {
    const KernelRecord* record = running_kernel();
    parallel_for(of(call).executor_, begin, end, grain, [=](std::int64_t first, std::int64_t last) {
      std::optional<RunningKernel> running;  // crashes of helpers belong to this kernel
      if (record != nullptr) [[unlikely]]
        running.emplace(record);
      body(data, first, last);
    });
  }

  static void* allocate(const callgate_call* call, std::size_t bytes, std::size_t alignment) {
    KernelFrame& frame = of(call);
    return frame.source_ != nullptr ? frame.source_->take(bytes, alignment)
                                    : frame.scratch_.take(bytes, alignment);
  }
  static std::int32_t threads(const callgate_call* call) {
    return of(call).executor_ == nullptr ? 1 : of(call).executor_->threads();
  }
  static std::int64_t device(const callgate_call* call) {
    return of(call).executor_ == nullptr ? -1 : of(call).executor_->device();
  }
  static void fail(const callgate_call* call, const char* message) {
    auto kept = std::make_unique<std::string>(message);
    std::string* none = nullptr;
    // The first message counts; release publishes its text to the reading thread.
    if (of(call).message_.compare_exchange_strong(none, kept.get(), std::memory_order_release,
                                                  std::memory_order_relaxed))
      kept.release();  // NOLINT: the frame's now
  }

  Executor* executor_;
  ScratchSource* source_;
  void* stream_;
  std::int32_t ordinal_;
  Scratch scratch_;
  std::atomic<std::string*> message_{nullptr};
};

}  // namespace callgate
