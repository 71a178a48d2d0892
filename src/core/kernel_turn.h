// Calls that must not run at once: those of a kernel that doesn't say that it is thread-safe, and
// of all such kernels of one shared library, whose functions may share what they keep.
//
// A call has its turn from before its first lane to behind its last one. It may call others of the
// same turn on its own thread; on other threads these would wait for it for ever. Nobody waits for
// a turn with the GIL, which the kernel that has it may need.
#pragma once

#include <array>
#include <memory>
#include <mutex>

#include "core/process.h"

namespace callgate {

class KernelTurn {
 public:
  using Hold = std::unique_lock<std::recursive_mutex>;

  // Waits for it. In a fork's child it is another one: who had it may be a thread of the parent.
  [[nodiscard]] Hold take() { return Hold(mutexes_[process_.here() ? 0 : 1]); }

 private:
  OfProcess process_;
  std::array<std::recursive_mutex, 2> mutexes_;
};

// The turn of the kernels whose code is in the same shared library as this address; null for code
// that is in none. Any thread.
std::shared_ptr<KernelTurn> turn_of_library(const void* address);

}  // namespace callgate
