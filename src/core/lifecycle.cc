// See the header. The instance is constant-initialised, so that calls pay for no guard.
#include "core/lifecycle.h"

#include <thread>

namespace callgate {

Lifecycle& Lifecycle::instance() {
  static constinit Lifecycle lifecycle;
  return lifecycle;
}

bool Lifecycle::enter() noexcept {
  // Acquire: what close() did before it set the bit is seen by whoever is refused.
  if ((state_.fetch_add(1, std::memory_order_acquire) & kClosed) == 0) return true;
  leave();
  return false;
}

void Lifecycle::leave() noexcept {
  // Release: the call's effects are seen by close() when it reads the count.
  state_.fetch_sub(1, std::memory_order_release);
}

bool Lifecycle::closed() const noexcept {
  return (state_.load(std::memory_order_acquire) & kClosed) != 0;  // pairs with close()
}

std::int64_t Lifecycle::active() const noexcept {
  return state_.load(std::memory_order_acquire) & ~kClosed;  // pairs with leave()
}

bool Lifecycle::close(std::chrono::nanoseconds wait) {
  // Both ways: later calls see the bit, and this thread sees what earlier calls did.
  state_.fetch_or(kClosed, std::memory_order_acq_rel);
  auto deadline = std::chrono::steady_clock::now() + wait;
  while (active() != 0) {
    if (std::chrono::steady_clock::now() >= deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

void LateCalls::add(const std::string& callee) noexcept {
  try {
    std::lock_guard lock(mutex_);
    ++counts_[callee];
  } catch (...) {  // NOLINT(bugprone-empty-catch): no memory to count with
  }
}

std::map<std::string, std::uint64_t> LateCalls::all() const {
  std::lock_guard lock(mutex_);
  return counts_;
}

}  // namespace callgate
