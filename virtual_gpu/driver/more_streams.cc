// SPDX-License-Identifier: Apache-2.0
// What else is asked of streams and events.
#include <atomic>
#include <chrono>

#include "../fake_driver/world.h"

namespace fakecuda {

FAKECUDA_API Result cuStreamCreate(cu::Stream* stream, unsigned flags);
FAKECUDA_API Result cuEventRecord(cu::Event event, cu::Stream stream);

FAKECUDA_API Result cuStreamCreateWithPriority(cu::Stream* stream, unsigned flags, int) {
  return cuStreamCreate(stream, flags);
}
FAKECUDA_API Result cuStreamQuery(cu::Stream stream) {
  return call("cuStreamQuery", kInit, [&](World& world, Lock&) {
    StreamState* found = find_stream(world, stream, "cuStreamQuery");
    if (found == nullptr) return Result::kInvalidHandle;
    return found->queue.empty() ? found->failed : Result::kNotReady;
  });
}
FAKECUDA_API Result cuStreamGetFlags(cu::Stream stream, unsigned* flags) {
  *flags = reinterpret_cast<std::uintptr_t>(stream) <= 2 ? 0 : cu::kStreamNonBlocking;
  return Result::kSuccess;
}
FAKECUDA_API Result cuStreamGetPriority(cu::Stream, int* priority) {
  *priority = 0;
  return Result::kSuccess;
}
FAKECUDA_API Result cuStreamGetDevice(cu::Stream stream, cu::DeviceHandle* device) {
  return call("cuStreamGetDevice", kInit, [&](World& world, Lock&) {
    StreamState* found = find_stream(world, stream, "cuStreamGetDevice");
    if (found == nullptr) return Result::kInvalidHandle;
    *device = found->device;
    return Result::kSuccess;
  });
}
FAKECUDA_API Result cuStreamGetId(cu::Stream stream, unsigned long long* id) {
  return call("cuStreamGetId", kInit, [&](World& world, Lock&) {
    StreamState* found = find_stream(world, stream, "cuStreamGetId");
    if (found == nullptr) return Result::kInvalidHandle;
    *id = static_cast<unsigned long long>(found->number);
    return Result::kSuccess;
  });
}
FAKECUDA_API Result cuEventRecordWithFlags(cu::Event event, cu::Stream stream, unsigned) {
  return cuEventRecord(event, stream);
}
// Without clocks of a device, no time passes that anyone could rely on.
FAKECUDA_API Result cuEventElapsedTime(float* milliseconds, cu::Event, cu::Event) {
  *milliseconds = 0.001F;
  return Result::kSuccess;
}
FAKECUDA_API Result cuEventElapsedTime_v2(float* milliseconds, cu::Event begin, cu::Event end) {
  return cuEventElapsedTime(milliseconds, begin, end);
}

FAKECUDA_API Result cuStreamWriteValue32_v2(cu::Stream stream, cu::DevicePointer address,
                                            std::uint32_t value, unsigned) {
  return call("cuStreamWriteValue32_v2", kInit, [&](World& world, Lock&) {
    StreamState* found = find_stream(world, stream, "cuStreamWriteValue32_v2");
    if (found == nullptr) return Result::kInvalidHandle;
    Work work;
    work.what = "a write of a value";
    work.run = [address, value](bool) {
      char* at = resolve(address, sizeof(value));
      if (at == nullptr) return Result::kIllegalAddress;
      // release: what was written before is seen by who sees the value.
      std::atomic_ref<std::uint32_t>(*reinterpret_cast<std::uint32_t*>(at))
          .store(value, std::memory_order_release);
      return Result::kSuccess;
    };
    return enqueue(world, *found, std::move(work), "cuStreamWriteValue32_v2");
  });
}
FAKECUDA_API Result cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, cu::Function, int,
                                                                std::size_t) {
  *blocks = 2;
  return Result::kSuccess;
}
FAKECUDA_API Result cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, cu::Function,
                                                                         int, std::size_t,
                                                                         unsigned) {
  *blocks = 2;
  return Result::kSuccess;
}
FAKECUDA_API Result cuOccupancyMaxPotentialBlockSize(int* grid, int* block, cu::Function, void*,
                                                     std::size_t, int) {
  *grid = 108;
  *block = 256;
  return Result::kSuccess;
}

}  // namespace fakecuda
