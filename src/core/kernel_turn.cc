// See the header.
#include "core/kernel_turn.h"

#include <dlfcn.h>

#include <map>
#include <mutex>

namespace callgate {

std::shared_ptr<KernelTurn> turn_of_library(const void* address) {
  // Never destroyed: kernels may be made as long as the process lives.
  static auto* mutex = new std::mutex();
  static auto* turns = new std::map<const void*, std::weak_ptr<KernelTurn>>();
  Dl_info info{};
  if (dladdr(address, &info) == 0 || info.dli_fbase == nullptr) return nullptr;
  std::scoped_lock lock(*mutex);
  std::weak_ptr<KernelTurn>& known = (*turns)[info.dli_fbase];
  std::shared_ptr<KernelTurn> turn = known.lock();
  if (turn == nullptr) known = turn = std::make_shared<KernelTurn>();
  return turn;
}

}  // namespace callgate
