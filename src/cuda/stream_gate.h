// Holds a stream back until the host says so, without a thread that waits.
//
// By a memory operation, where the device takes it: the stream waits for a word of pinned memory.
// Else by a host function that blocks.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "core/lifetime.h"
#include "cuda/device.h"

namespace callgate::cuda {

class StreamGate : Immovable {
 public:
  StreamGate() { word().store(0, std::memory_order_relaxed); }  // nobody else knows of it yet

  // Work that the stream is given from here on starts after open(). Throws Error. Whoever calls it
  // keeps the gate until the stream has come by.
  void hold(Stream stream) {
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

  // What was written to host memory before is seen by the work behind. Any thread, once.
  void open() noexcept {
    word().store(1, std::memory_order_release);  // what was written before goes with it
    std::lock_guard lock(mutex_);
    open_ = true;
    opened_.notify_all();
  }

 private:
  // As host and device see it: pinned memory has one address for both.
  std::atomic_ref<std::uint32_t> word() const noexcept {
    return std::atomic_ref(*reinterpret_cast<std::uint32_t*>(word_.data()));
  }

  PinnedBlock word_{sizeof(std::uint32_t)};
  std::mutex mutex_;
  std::condition_variable opened_;
  bool open_ = false;
};

}  // namespace callgate::cuda
