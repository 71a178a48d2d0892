// SPDX-License-Identifier: Apache-2.0
// Addresses without memory, memory without addresses, and their mapping; other ways to memory.
//
// A reserved range is the host's, and can't be touched; what is mapped there is an allocation like
// others, whose bytes the handle owns.
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "../fake_driver/world.h"
#include "driver.h"

namespace fakecuda {
namespace {

constexpr std::size_t kGranularity = std::size_t{2} << 20;

// What cuMemCreate made: freed when it is released and mapped nowhere.
struct Physical {
  char* bytes = nullptr;
  std::size_t size = 0;
  int device = 0;
  ~Physical() { std::free(bytes); }
};

std::map<std::uint64_t, std::shared_ptr<Physical>>& handles() {
  static auto* all = new std::map<std::uint64_t, std::shared_ptr<Physical>>();
  return *all;
}
// By the address of what is mapped.
std::map<std::uint64_t, std::shared_ptr<Physical>>& mappings() {
  static auto* all = new std::map<std::uint64_t, std::shared_ptr<Physical>>();
  return *all;
}

// CUmemAllocationProp, as far as it is read.
struct AllocationProperties {
  int type, handle_types;
  struct {
    int type, id;
  } location;
};

}  // namespace

FAKECUDA_API Result cuMemGetAllocationGranularity(std::size_t* bytes, const void*, int) {
  *bytes = kGranularity;
  return Result::kSuccess;
}
FAKECUDA_API Result cuMemAddressReserve(cu::DevicePointer* pointer, std::size_t bytes, std::size_t,
                                        cu::DevicePointer, unsigned long long) {
  return call("cuMemAddressReserve", kInit, [&](World&, Lock&) {
    void* at = mmap(nullptr, bytes + kGranularity, PROT_NONE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) return Result::kOutOfMemory;
    auto address = reinterpret_cast<std::uint64_t>(at);
    *pointer = (address + kGranularity - 1) / kGranularity * kGranularity;
    return Result::kSuccess;
  });
}
// Addresses stay taken, so that none is given twice.
FAKECUDA_API Result cuMemAddressFree(cu::DevicePointer, std::size_t) { return Result::kSuccess; }

FAKECUDA_API Result cuMemCreate(std::uint64_t* handle, std::size_t bytes,
                                const AllocationProperties* properties, unsigned long long) {
  return call("cuMemCreate", kInit, [&](World&, Lock&) {
    static std::uint64_t next = 1;
    auto physical = std::make_shared<Physical>();
    physical->bytes = static_cast<char*>(std::malloc(bytes));
    if (physical->bytes == nullptr) return Result::kOutOfMemory;
    physical->size = bytes;
    physical->device = properties->location.id;
    *handle = next++;
    handles()[*handle] = std::move(physical);
    return Result::kSuccess;
  });
}
FAKECUDA_API Result cuMemRelease(std::uint64_t handle) {
  return call("cuMemRelease", kInit, [&](World&, Lock&) {
    return handles().erase(handle) == 1 ? Result::kSuccess : Result::kInvalidValue;
  });
}
FAKECUDA_API Result cuMemMap(cu::DevicePointer pointer, std::size_t bytes, std::size_t offset,
                             std::uint64_t handle, unsigned long long) {
  return call("cuMemMap", kInit, [&](World& world, Lock&) {
    auto found = handles().find(handle);
    if (found == handles().end() || offset + bytes > found->second->size) {
      return Result::kInvalidValue;
    }
    auto allocation = std::make_shared<Allocation>();
    allocation->base = pointer;
    allocation->bytes = bytes;
    allocation->device = found->second->device;
    allocation->host = found->second->bytes + offset;
    world.memory[pointer] = allocation;
    mappings()[pointer] = found->second;
    return Result::kSuccess;
  });
}
FAKECUDA_API Result cuMemUnmap(cu::DevicePointer pointer, std::size_t) {
  return call("cuMemUnmap", kInit, [&](World& world, Lock& lock) {
    wait_for_all(world, lock);
    auto found = find_memory(world, pointer);
    if (found == nullptr || found->base != pointer) return Result::kInvalidValue;
    found->freed = true;
    found->host = nullptr;
    world.memory.erase(pointer);
    mappings().erase(pointer);
    return Result::kSuccess;
  });
}
FAKECUDA_API Result cuMemSetAccess(cu::DevicePointer, std::size_t, const void*, std::size_t) {
  return Result::kSuccess;
}
FAKECUDA_API Result cuMemRetainAllocationHandle(std::uint64_t* handle, void* pointer) {
  return call("cuMemRetainAllocationHandle", kInit, [&](World&, Lock&) {
    auto it = mappings().upper_bound(reinterpret_cast<std::uint64_t>(pointer));
    if (it == mappings().begin()) return Result::kInvalidValue;
    --it;
    *handle = 0x1000000 + handles().size();
    handles()[*handle] = it->second;
    return Result::kSuccess;
  });
}

// Memory that is ordered by a stream is taken and freed at once here: the free waits.
FAKECUDA_API Result cuMemAlloc_v2(cu::DevicePointer* pointer, std::size_t bytes);
FAKECUDA_API Result cuMemFree_v2(cu::DevicePointer pointer);
FAKECUDA_API Result cuMemHostAlloc(void** pointer, std::size_t bytes, unsigned flags);
FAKECUDA_API Result cuMemAllocAsync(cu::DevicePointer* pointer, std::size_t bytes, cu::Stream) {
  return cuMemAlloc_v2(pointer, bytes);
}
FAKECUDA_API Result cuMemFreeAsync(cu::DevicePointer pointer, cu::Stream) {
  return cuMemFree_v2(pointer);
}
FAKECUDA_API Result cuMemAllocHost_v2(void** pointer, std::size_t bytes) {
  return cuMemHostAlloc(pointer, bytes, 0);
}

FAKECUDA_API Result cuMemHostGetDevicePointer_v2(cu::DevicePointer* device, void* host, unsigned) {
  *device = reinterpret_cast<std::uint64_t>(host);
  return Result::kSuccess;
}
FAKECUDA_API Result cuMemHostGetFlags(unsigned* flags, void*) {
  *flags = 0;
  return Result::kSuccess;
}
FAKECUDA_API Result cuMemGetAddressRange_v2(cu::DevicePointer* base, std::size_t* bytes,
                                            cu::DevicePointer pointer) {
  return call("cuMemGetAddressRange_v2", kInit, [&](World& world, Lock&) {
    auto found = find_memory(world, pointer);
    if (found == nullptr || found->freed) return Result::kInvalidValue;
    if (base != nullptr) *base = found->base;
    if (bytes != nullptr) *bytes = found->bytes;
    return Result::kSuccess;
  });
}

}  // namespace fakecuda
