// Calls that must not run at once: those of a kernel that doesn't say that it is thread-safe, and
// of all such kernels of one shared library, whose functions may share what they keep.
//
// A call has its turn from before its first lane to behind its last one. It may call others of the
// same turn on its own thread; on other threads these would wait for it for ever. Nobody waits for
// a turn with the GIL, which the kernel that has it may need.
#pragma once

#include <dlfcn.h>

#include <array>
#include <map>
#include <memory>
#include <mutex>

#include "core/lifetime.h"
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
inline std::shared_ptr<KernelTurn> turn_of_library(const void* address) {
  struct Turns {
    std::mutex mutex;
    std::map<const void*, std::weak_ptr<KernelTurn>> by_library;
  };
  auto& turns = immortal<Turns>();  // kernels may be made as long as the process lives
  Dl_info info{};
  if (dladdr(address, &info) == 0 || info.dli_fbase == nullptr) return nullptr;
  std::scoped_lock lock(turns.mutex);
  std::weak_ptr<KernelTurn>& known = turns.by_library[info.dli_fbase];
  std::shared_ptr<KernelTurn> turn = known.lock();
  if (turn == nullptr) known = turn = std::make_shared<KernelTurn>();
  return turn;
}

}  // namespace callgate
