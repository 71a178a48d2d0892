// The partition that a device has in a program, read from the device's memory once.
//
// It never changes for an executable on a device, so a call site that needs it before its operands
// are on the host asks for it at its first call there, which waits for the stream.
#pragma once

#include <array>
#include <atomic>

#include "core/array_view.h"
#include "core/error.h"
#include "cuda/copies.h"
#include "cuda/device.h"
#include "xla/shards.h"

namespace callgate::xla_ffi {

class DeviceShards {
 public:
  // `number`: what Shards::take_operand gave. -1 for a call on whole arrays. Throws Error.
  std::int32_t read(const Shards& shards, const ArrayView& number, cuda::Device& device,
                    cuda::Stream stream) {
    if (number.data == nullptr) [[likely]]
      return -1;
    std::atomic<std::int32_t>& known = known_[device.index()];
    // Relaxed: a number that stands for itself; two threads may both read it.
    if (std::int32_t value = known.load(std::memory_order_relaxed)) return value - 1;
    if (cuda::capturing(stream)) {
      throw Error(ErrorCode::kInternal,
                  "a call on shards was captured into a CUDA graph before its partition was known");
    }
    cuda::PinnedBlock memory(sizeof(std::uint32_t));
    cuda::copy_to_host(memory.data(), cuda::address(number.data), sizeof(std::uint32_t), stream);
    cuda::wait_for(device, stream);
    std::int32_t shard = shards.read(memory.data());
    known.store(shard + 1, std::memory_order_relaxed);  // as above
    return shard;
  }

 private:
  // By ordinal: the partition plus one; 0 while it is not known.
  std::array<std::atomic<std::int32_t>, cuda::kMostDevices> known_{};
};

}  // namespace callgate::xla_ffi
