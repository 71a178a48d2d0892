// See the header.
#include "xla/self_wait.h"

#include <chrono>

#include "core/watchdog.h"
#include "core/worker_pool.h"

namespace callgate::xla_ffi {
namespace {

constexpr auto kInterval = std::chrono::seconds(1);

// On a worker, since it takes the GIL.
void look(const std::weak_ptr<WatchedCall>& watched) {
  std::shared_ptr<WatchedCall> call = watched.lock();
  if (call == nullptr) return;
  // Relaxed: a number. Who comes too early looks again.
  unsigned long thread = call->thread.load(std::memory_order_relaxed);
  std::string text = thread == 0 ? "" : call->site->callee->self_wait(thread);
  if (!text.empty()) return call->settle(text);
  watch_for_self_wait(watched);
}

}  // namespace

void watch_for_self_wait(const std::weak_ptr<WatchedCall>& call) {
  Watchdog::instance().arm(kInterval, [call] {
    if (call.expired()) return;
    (void)WorkerPool::instance().submit([call] { look(call); });  // not while the process ends
  });
}

}  // namespace callgate::xla_ffi
