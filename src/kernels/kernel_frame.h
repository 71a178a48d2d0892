// SPDX-License-Identifier: Apache-2.0
// A kernel's call: its threads, its working memory, and the services that hand them out.
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
#include "kernels/kernel_debug.h"

namespace callgate {

// Lends a call threads, and loops that are split over them.
class Executor {
 public:
  virtual ~Executor() = default;
  // Threads that tasks may run on, the calling one included.
  virtual int threads() const noexcept = 0;
  // Runs the task soon, on any thread; false when it can't. The task must not throw.
  virtual bool schedule(std::function<void()> task) noexcept = 0;
  // The global number of the device that the call runs on; -1 where it has none.
  virtual std::int64_t device() const noexcept { return -1; }
};

// Runs body(first, last) on parts of [begin, end), each of at least `grain` but the last, on the
// calling thread and as many others of `executor` (null for none) as are free. Returns when all
// parts are done. Never waits for a thread that has not started, so that loops inside loops, and
// on a pool whose threads are all busy, come to an end. `body` must not throw.
template <typename Body>
void parallel_for(Executor* executor, std::int64_t begin, std::int64_t end, std::int64_t grain,
                  Body&& body) {
  // Shared: a helper that starts late finds nothing left to do.
  struct Loop {
    std::int64_t end, part;
    std::remove_reference_t<Body>& body;   // touched only while a part is held
    std::atomic<std::int64_t> next, left;  // `left`: of the elements that are not done

    void work() {
      for (;;) {
        // Order between parts is nobody's business; `left` publishes what they wrote.
        std::int64_t first = next.fetch_add(part, std::memory_order_relaxed);
        if (first >= end) return;
        std::int64_t last = std::min(end, first + part);
        body(first, last);
        if (left.fetch_sub(last - first, std::memory_order_acq_rel) == last - first)
          left.notify_all();
      }
    }
  };
  // Enough parts to even out threads of unlike speed, few enough that taking one costs nothing.
  constexpr std::int64_t kPartsAThread = 4;
  std::int64_t count = end - begin;
  if (count <= 0) return;
  grain = std::max<std::int64_t>(grain, 1);
  std::int64_t threads = executor == nullptr ? 1 : std::max(executor->threads(), 1);
  std::int64_t helpers = std::min(threads, (count - 1) / grain + 1) - 1;
  if (helpers <= 0) return body(begin, end);
  std::int64_t parts = (helpers + 1) * kPartsAThread;
  // Both counters are published by schedule().
  auto loop =
      std::make_shared<Loop>(end, std::max(grain, (count + parts - 1) / parts), body, begin, count);
  for (std::int64_t i = 0; i < helpers; ++i)
    if (!executor->schedule([loop] { loop->work(); })) break;
  loop->work();
  for (std::int64_t left; (left = loop->left.load(std::memory_order_acquire)) != 0;)
    loop->left.wait(left, std::memory_order_acquire);
}

// Working memory of kernels, for one call.
//
// Blocks of a finished call are kept by the thread that made it, up to kScratchKept bytes a thread:
// page faults of new ones cost more than most kernels' work on them. A block's description lies
// before its memory, so that a call's list of them needs no memory of its own.
inline constexpr std::size_t kScratchKept = std::size_t{64} << 20;
inline constexpr std::size_t kScratchAlignment = 64;  // as XLA's own buffers

struct alignas(kScratchAlignment) ScratchBlock {
  ScratchBlock* next;
  std::size_t bytes;  // that follow this description
  void* memory;       // to give back to the system
};

// Free blocks of one thread, and what they take.
class ScratchCache {
 public:
  static ScratchCache& instance() noexcept {
    static thread_local ScratchCache cache;
    return cache;
  }
  ~ScratchCache();

  // The smallest block that is large enough and not more than twice as large.
  ScratchBlock* take(std::size_t bytes) noexcept;

  // Makes room by giving up the oldest; a block that is too large alone is given up itself.
  void keep(ScratchBlock* block) noexcept;

 private:
  std::array<ScratchBlock*, 8> blocks_{};
  std::size_t next_ = 0;
  std::size_t kept_ = 0;
};

// The blocks of one call. Any thread may take one; destroyed when none of them uses any.
class Scratch : Immovable {
 public:
  ~Scratch() {
    // Whoever took a block is done, and what it did happened before.
    if (blocks_.load(std::memory_order_relaxed) != nullptr) [[unlikely]]
      release();
  }

  // Uninitialised memory of at least `bytes`, aligned to 64 or more; null where there is none.
  void* take(std::size_t bytes, std::size_t alignment) noexcept;

 private:
  void release() noexcept;

  std::atomic<ScratchBlock*> blocks_{nullptr};
};

// A call as a kernel sees it. On the stack of the call; making one allocates nothing.
class KernelFrame : public callgate_call, Immovable {
 public:
  // `executor` and `scratch` may be null. The frame's `services` are its own, whatever `call` has.
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
    // A kernel that failed on another thread has met it again before it returned.
    if (std::string* message = message_.load(std::memory_order_relaxed)) [[unlikely]]
      delete message;
  }

  // The kernel's message when it failed.
  std::string message() const {
    const std::string* message = message_.load(std::memory_order_acquire);  // see fail
    return message == nullptr ? "it failed without a message" : *message;
  }

  // The frame of a call; for kernels of callgate's own, which know that it is one.
  static KernelFrame& of(const callgate_call* call) noexcept {
    return *static_cast<KernelFrame*>(const_cast<callgate_call*>(call));
  }
  // XLA's stream, which orders what the kernel does with a GPU's arrays; null on the CPU.
  void* stream() const noexcept { return stream_; }
  std::int32_t ordinal() const noexcept { return ordinal_; }  // of that GPU

 private:
  using Body = void (*)(void* data, std::int64_t first, std::int64_t last);
  static void run_parallel(const callgate_call* call, std::int64_t begin, std::int64_t end,
                           std::int64_t grain, Body body, void* data) {
    const KernelRecord* record = running_kernel();
    parallel_for(of(call).executor_, begin, end, grain, [=](std::int64_t first, std::int64_t last) {
      std::optional<RunningKernel> running;  // the helpers' crashes are this kernel's
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
    // The first one counts; release publishes its text to the thread that reads it.
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
