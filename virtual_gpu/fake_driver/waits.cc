// SPDX-License-Identifier: Apache-2.0
// Streams that wait for a number in memory, which the host or a device writes. See world.h.
#include <atomic>
#include <chrono>

#include "world.h"

namespace fakecuda {

FAKECUDA_API Result cuStreamWaitValue32_v2(cu::Stream stream, cu::DevicePointer address,
                                           std::uint32_t value, unsigned flags) {
  return call("cuStreamWaitValue32_v2", kInit, [&](World& world, Lock&) {
    StreamState* found = find_stream(world, stream, "cuStreamWaitValue32_v2");
    if (found == nullptr) return Result::kInvalidHandle;
    if (flags != cu::kWaitValueGeq || address % 4 != 0) return Result::kInvalidValue;
    Work work;
    work.what = "a wait for a value";
    auto memory = find_memory(world, address);
    if (memory == nullptr || memory->freed) {
      world.violation("cuStreamWaitValue32_v2: freed or no memory at " + hex(address));
      return Result::kInvalidValue;
    }
    work.run = [memory, address, value](bool) {
      auto* place = reinterpret_cast<std::uint32_t*>(memory->host + (address - memory->base));
      World& now = World::instance();
      // acquire: what was written before the number is seen by the work that follows.
      while (static_cast<std::int32_t>(
                 std::atomic_ref<std::uint32_t>(*place).load(std::memory_order_acquire) - value) <
             0) {
        Lock lock(now.mutex);
        if (now.lost) return Result::kLaunchFailed;
        lock.unlock();
        std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
      return Result::kSuccess;
    };
    return enqueue(world, *found, std::move(work), "cuStreamWaitValue32_v2");
  });
}

}  // namespace fakecuda
