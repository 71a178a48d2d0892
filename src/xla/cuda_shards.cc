// See the header.
#include "xla/cuda_shards.h"

#include "core/error.h"
#include "cuda/driver.h"
#include "cuda/event.h"
#include "cuda/memory.h"

namespace callgate::xla_ffi {

std::int32_t DeviceShards::read(const Shards& shards, const ArrayView& number, cuda::Device& device,
                                cuda::Stream stream) {
  if (number.data == nullptr) [[likely]]
    return -1;
  std::atomic<std::int32_t>& known = known_[static_cast<std::size_t>(device.ordinal())];
  // Relaxed: a number that stands for itself; two threads may both read it.
  if (std::int32_t value = known.load(std::memory_order_relaxed)) return value - 1;
  if (cuda::capturing(stream)) {
    throw Error(ErrorCode::kInternal,
                "a call on shards was captured into a CUDA graph before its partition was known");
  }
  cuda::PinnedBlock memory(sizeof(std::uint32_t));
  cuda::check(
      cuda::driver().copy_to_host(memory.data(), reinterpret_cast<cuda::DevicePointer>(number.data),
                                  sizeof(std::uint32_t), stream),
      "cuMemcpyDtoHAsync_v2");
  cuda::check(cuda::StreamEvent(device, stream).wait(), "cuEventSynchronize");
  std::int32_t shard = shards.read(memory.data());
  known.store(shard + 1, std::memory_order_relaxed);  // as above
  return shard;
}

}  // namespace callgate::xla_ffi
