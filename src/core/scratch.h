// Working memory of kernels, for one call.
//
// Blocks of a finished call are kept by the thread that made it, up to kScratchKept bytes a thread:
// large ones would else come from the system anew at every call, and their page faults cost more
// than most kernels' work on them.
#pragma once

#include <atomic>
#include <cstddef>

#include "core/lifetime.h"

namespace callgate {

inline constexpr std::size_t kScratchKept = std::size_t{64} << 20;

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
  friend class ScratchCache;
  struct Block;
  void release() noexcept;

  std::atomic<Block*> blocks_{nullptr};
};

}  // namespace callgate
