// See the header.
#include "cuda/stream_gate.h"

#include <atomic>
#include <cstdint>

#include "cuda/driver.h"

namespace callgate::cuda {
namespace {

// The word as host and device see it. Pinned memory has one address for both.
std::atomic_ref<std::uint32_t> as_atomic(const PinnedBlock& block) noexcept {
  return std::atomic_ref(*reinterpret_cast<std::uint32_t*>(block.data()));
}

}  // namespace

StreamGate::StreamGate() : word_(sizeof(std::uint32_t)) {
  as_atomic(word_).store(0, std::memory_order_relaxed);  // nobody else knows of it yet
}

void StreamGate::hold(Stream stream) {
  if (driver().stream_wait_value != nullptr) {
    auto address = reinterpret_cast<DevicePointer>(word_.data());
    Result result = driver().stream_wait_value(stream, address, 1, kWaitValueGeq);
    if (result == Result::kSuccess) return;
    if (result != Result::kNotSupported) check(result, "cuStreamWaitValue32_v2");
  }
  auto wait = [](void* data) {
    auto& gate = *static_cast<StreamGate*>(data);
    std::unique_lock lock(gate.mutex_);
    gate.opened_.wait(lock, [&] { return gate.open_; });
  };
  check(driver().launch_host_function(stream, wait, this), "cuLaunchHostFunc");
}

void StreamGate::open() noexcept {
  as_atomic(word_).store(1, std::memory_order_release);  // what was written before goes with it
  std::lock_guard lock(mutex_);
  open_ = true;
  opened_.notify_all();
}

}  // namespace callgate::cuda
