// SPDX-License-Identifier: Apache-2.0
// Copies and fills beside those of fake_driver: between devices, and ones that wait.
#include "../fake_driver/world.h"

namespace fakecuda {

FAKECUDA_API Result cuMemsetD8Async(cu::DevicePointer to, unsigned char value, std::size_t count,
                                    cu::Stream stream);
FAKECUDA_API Result cuMemsetD16Async(cu::DevicePointer to, unsigned short value, std::size_t count,
                                     cu::Stream stream);
FAKECUDA_API Result cuMemsetD32Async(cu::DevicePointer to, unsigned value, std::size_t count,
                                     cu::Stream stream);
FAKECUDA_API Result cuStreamSynchronize(cu::Stream stream);

namespace {

// True if an address is the driver's to look up: otherwise it is the host's own.
bool is_ours(World& world, std::uint64_t address) {
  auto found = find_memory(world, address);
  return found != nullptr && !found->freed;
}

Result copy(const char* symbol, std::uint64_t to, std::uint64_t from, std::size_t bytes,
            cu::Stream stream, bool waits) {
  return call(symbol, kContext, [&](World& world, Lock& lock) {
    StreamState* here = find_stream(world, stream, symbol);
    if (here == nullptr) return Result::kInvalidHandle;
    if (bytes == 0) return Result::kSuccess;
    bool to_host = !is_ours(world, to), from_host = !is_ours(world, from);
    Result result = loose_copy(world, lock, {symbol, to, from, bytes, to_host, from_host}, *here);
    return waits && result == Result::kSuccess ? synchronise(world, lock, *here) : result;
  });
}

std::uint64_t address(const void* pointer) { return reinterpret_cast<std::uint64_t>(pointer); }

Result then_wait(Result result) {
  return result == Result::kSuccess ? cuStreamSynchronize(nullptr) : result;
}

}  // namespace

FAKECUDA_API Result cuMemcpyAsync(cu::DevicePointer to, cu::DevicePointer from, std::size_t bytes,
                                  cu::Stream stream) {
  return copy("cuMemcpyAsync", to, from, bytes, stream, /*waits=*/false);
}
FAKECUDA_API Result cuMemcpyPeerAsync(cu::DevicePointer to, cu::Context, cu::DevicePointer from,
                                      cu::Context, std::size_t bytes, cu::Stream stream) {
  return copy("cuMemcpyPeerAsync", to, from, bytes, stream, /*waits=*/false);
}
FAKECUDA_API Result cuMemcpy(cu::DevicePointer to, cu::DevicePointer from, std::size_t bytes) {
  return copy("cuMemcpy", to, from, bytes, nullptr, /*waits=*/true);
}
FAKECUDA_API Result cuMemcpyHtoD_v2(cu::DevicePointer to, const void* from, std::size_t bytes) {
  return copy("cuMemcpyHtoD_v2", to, address(from), bytes, nullptr, /*waits=*/true);
}
FAKECUDA_API Result cuMemcpyDtoH_v2(void* to, cu::DevicePointer from, std::size_t bytes) {
  return copy("cuMemcpyDtoH_v2", address(to), from, bytes, nullptr, /*waits=*/true);
}
FAKECUDA_API Result cuMemcpyDtoD_v2(cu::DevicePointer to, cu::DevicePointer from,
                                    std::size_t bytes) {
  return copy("cuMemcpyDtoD_v2", to, from, bytes, nullptr, /*waits=*/true);
}
FAKECUDA_API Result cuMemsetD8_v2(cu::DevicePointer to, unsigned char value, std::size_t count) {
  return then_wait(cuMemsetD8Async(to, value, count, nullptr));
}
FAKECUDA_API Result cuMemsetD16_v2(cu::DevicePointer to, unsigned short value, std::size_t count) {
  return then_wait(cuMemsetD16Async(to, value, count, nullptr));
}
FAKECUDA_API Result cuMemsetD32_v2(cu::DevicePointer to, unsigned value, std::size_t count) {
  return then_wait(cuMemsetD32Async(to, value, count, nullptr));
}

}  // namespace fakecuda
