// A call as a kernel sees it, and what its services need. On the stack of the call; making one
// allocates nothing.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <string>

#include "callgate/kernel_abi.h"
#include "core/executor.h"
#include "core/lifetime.h"
#include "core/scratch.h"

namespace callgate {

// Takes the place of the call's scratch memory, to see what becomes of it.
class ScratchSource {
 public:
  virtual ~ScratchSource() = default;
  virtual void* take(std::size_t bytes, std::size_t alignment) noexcept = 0;
};

class KernelFrame : public callgate_call, Immovable {
 public:
  // `executor` and `scratch` may be null. The frame's `services` are its own, whatever `call` has.
  KernelFrame(const callgate_call& call, Executor* executor, ScratchSource* scratch) noexcept
      : callgate_call(call), executor_(executor), source_(scratch) {
    services = &kServices;
  }
  ~KernelFrame() {
    // A kernel that failed on another thread has met it again before it returned.
    if (std::string* message = message_.load(std::memory_order_relaxed)) [[unlikely]]
      delete message;
  }

  // What the kernel said when it failed.
  std::string message() const {
    const std::string* message = message_.load(std::memory_order_acquire);  // see fail
    return message == nullptr ? "it failed without a message" : *message;
  }

 private:
  static KernelFrame& of(const callgate_call* call) noexcept {
    return *static_cast<KernelFrame*>(const_cast<callgate_call*>(call));
  }
  static void run_parallel(const callgate_call* call, std::int64_t begin, std::int64_t end,
                           std::int64_t grain, void (*body)(void*, std::int64_t, std::int64_t),
                           void* data);
  static void* allocate(const callgate_call* call, std::size_t bytes, std::size_t alignment);
  static std::int32_t threads(const callgate_call* call);
  static std::int64_t device(const callgate_call* call);
  static void fail(const callgate_call* call, const char* message);
  static const callgate_services kServices;

  Executor* executor_;
  ScratchSource* source_;
  Scratch scratch_;
  std::atomic<std::string*> message_{nullptr};
};

}  // namespace callgate
