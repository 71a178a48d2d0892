// SPDX-License-Identifier: Apache-2.0
// Devices and contexts, as far as XLA and Python's libraries ask. See fake_driver/world.h.
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "../fake_driver/world.h"
#include "driver.h"

namespace fakecuda {
namespace {

constexpr int kUuidBytes = 16;

// The contexts that the thread has pushed; the current one is not among them.
thread_local std::vector<int> pushed;

Result check_device(World& world, int device) {
  return device >= 0 && device < world.device_count ? Result::kSuccess : Result::kInvalidDevice;
}

}  // namespace

FAKECUDA_API Result cuDeviceGetUuid(char* uuid, cu::DeviceHandle device) {
  return call("cuDeviceGetUuid", kInit, [&](World& world, Lock&) {
    std::memset(uuid, 0x70 + device, kUuidBytes);
    return check_device(world, device);
  });
}
FAKECUDA_API Result cuDeviceGetUuid_v2(char* uuid, cu::DeviceHandle device) {
  return cuDeviceGetUuid(uuid, device);
}
FAKECUDA_API Result cuDeviceTotalMem_v2(std::size_t* bytes, cu::DeviceHandle device) {
  return call("cuDeviceTotalMem_v2", kInit, [&](World& world, Lock&) {
    *bytes = memory_of_a_device();
    return check_device(world, device);
  });
}
FAKECUDA_API Result cuDeviceGetPCIBusId(char* text, int length, cu::DeviceHandle device) {
  return call("cuDeviceGetPCIBusId", kInit, [&](World& world, Lock&) {
    std::snprintf(text, static_cast<std::size_t>(std::max(length, 0)), "0000:00:%02x.0",
                  static_cast<unsigned>(device + 1));
    return check_device(world, device);
  });
}
FAKECUDA_API Result cuDeviceComputeCapability(int* major, int* minor, cu::DeviceHandle device) {
  return call("cuDeviceComputeCapability", kInit, [&](World& world, Lock&) {
    *major = world.devices[device].attributes[75];
    *minor = world.devices[device].attributes[76];
    return check_device(world, device);
  });
}
FAKECUDA_API Result cuDeviceCanAccessPeer(int* can, cu::DeviceHandle, cu::DeviceHandle) {
  *can = 1;
  return Result::kSuccess;
}
FAKECUDA_API Result cuDeviceGetP2PAttribute(int* value, int, cu::DeviceHandle, cu::DeviceHandle) {
  *value = 1;
  return Result::kSuccess;
}
FAKECUDA_API Result cuCtxEnablePeerAccess(cu::Context, unsigned) { return Result::kSuccess; }

FAKECUDA_API Result cuDevicePrimaryCtxRelease_v2(cu::DeviceHandle) { return Result::kSuccess; }
FAKECUDA_API Result cuDevicePrimaryCtxSetFlags_v2(cu::DeviceHandle, unsigned) {
  return Result::kSuccess;
}
FAKECUDA_API Result cuDevicePrimaryCtxGetState(cu::DeviceHandle, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return Result::kSuccess;
}
FAKECUDA_API Result cuCtxGetApiVersion(cu::Context, unsigned* version) {
  *version = 3020;
  return Result::kSuccess;
}
FAKECUDA_API Result cuCtxGetFlags(unsigned* flags) {
  *flags = 0;
  return Result::kSuccess;
}
FAKECUDA_API Result cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return Result::kSuccess;
}
FAKECUDA_API Result cuCtxSetLimit(int, std::size_t) { return Result::kSuccess; }
FAKECUDA_API Result cuCtxGetLimit(std::size_t* value, int) {
  *value = 8 << 20;
  return Result::kSuccess;
}
FAKECUDA_API Result cuCtxPushCurrent_v2(cu::Context context) {
  return call("cuCtxPushCurrent_v2", kInit | kAnyway, [&](World&, Lock&) {
    pushed.push_back(current_device());
    set_current_device(device_of(context));
    return Result::kSuccess;
  });
}
FAKECUDA_API Result cuCtxPopCurrent_v2(cu::Context* context) {
  return call("cuCtxPopCurrent_v2", kInit | kAnyway, [&](World&, Lock&) {
    if (context != nullptr) *context = context_of(current_device());
    set_current_device(pushed.empty() ? -1 : pushed.back());
    if (!pushed.empty()) pushed.pop_back();
    return Result::kSuccess;
  });
}
FAKECUDA_API Result cuCtxSynchronize() {
  return call("cuCtxSynchronize", kContext, [&](World& world, Lock& lock) {
    const int device = current_device();
    Result result = Result::kSuccess;
    for (StreamState* stream : std::vector(world.stream_order)) {
      if (!stream->alive || stream->device != device || stream->capture != nullptr) continue;
      Result each = synchronise(world, lock, *stream);
      if (result == Result::kSuccess) result = each;
    }
    return result;
  });
}
FAKECUDA_API Result cuMemGetInfo_v2(std::size_t* free_bytes, std::size_t* total) {
  return call("cuMemGetInfo_v2", kContext, [&](World& world, Lock&) {
    std::size_t used = 0;
    for (const auto& [address, memory] : world.memory) {
      if (!memory->freed && !memory->pinned && memory->device == current_device()) {
        used += memory->bytes;
      }
    }
    *total = memory_of_a_device();
    *free_bytes = *total - std::min(*total, used);
    return Result::kSuccess;
  });
}
FAKECUDA_API Result cuProfilerStart() { return Result::kSuccess; }
FAKECUDA_API Result cuProfilerStop() { return Result::kSuccess; }

}  // namespace fakecuda
