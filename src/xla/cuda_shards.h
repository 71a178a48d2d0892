// The partition that a device has in a program, read from the device's memory once.
//
// It never changes for an executable on a device, so a call site that needs it before its operands
// are on the host asks for it at its first call there, which waits for the stream.
#pragma once

#include <array>
#include <atomic>

#include "core/array_view.h"
#include "cuda/device.h"
#include "xla/shards.h"

namespace callgate::xla_ffi {

class DeviceShards {
 public:
  // `number`: what Shards::take_operand gave. -1 for a call on whole arrays. Throws Error.
  std::int32_t read(const Shards& shards, const ArrayView& number, cuda::Device& device,
                    cuda::Stream stream);

 private:
  static constexpr std::size_t kDevices = 64;
  // By ordinal: the partition plus one; 0 while it is not known.
  std::array<std::atomic<std::int32_t>, kDevices> known_{};
};

}  // namespace callgate::xla_ffi
