// SPDX-License-Identifier: Apache-2.0
// The frame of every call, devices and contexts. See world.h.
#include "world.h"

#include <cstdio>
#include <cstring>

namespace fakecuda {
namespace {

thread_local int thread_device = -1;

// True if an injected failure is due.
Result injected(World& world, const std::string& symbol) {
  for (auto it = world.failures.begin(); it != world.failures.end(); ++it) {
    if (it->symbol != symbol) continue;
    if (it->after > 0) {
      --it->after;
      continue;
    }
    Result result = it->result;
    bool last = it->count == 1;
    if (it->count > 0) --it->count;
    if (last) world.failures.erase(it);
    return result;
  }
  return Result::kSuccess;
}

}  // namespace

thread_local bool in_host_function = false;

World& World::instance() {
  static auto* world = new World();
  return *world;
}

std::string hex(std::uint64_t value) {
  char text[32];
  std::snprintf(text, sizeof(text), "0x%llx", static_cast<unsigned long long>(value));
  return text;
}

Result call(const char* symbol, unsigned needs, const std::function<Result(World&, Lock&)>& body) {
  World& world = World::instance();
  Lock lock(world.mutex);
  ++world.calls[symbol];
  if (Result result = injected(world, symbol); result != Result::kSuccess) return result;
  if (in_host_function && needs != kNothing && world.strict) {
    world.violation(std::string(symbol) + ": called in a host function");
    return Result::kNotPermitted;
  }
  if ((needs & kInit) != 0 && !world.initialised) return Result::kNotInitialized;
  if (needs != kNothing && world.lost) return Result::kLaunchFailed;
  if (needs != kNothing && (needs & kAnyway) == 0 && world.sticky != Result::kSuccess) {
    return world.sticky;
  }
  if ((needs & kContext) == kContext && thread_device < 0 && !world.strict) thread_device = 0;
  if ((needs & kContext) == kContext && thread_device < 0) {
    world.violation(std::string(symbol) + ": no context is current");
    return Result::kInvalidContext;
  }
  if ((needs & kUnsafe) != 0 && disturbs_capture(world)) return Result::kStreamCaptureUnsupported;
  return body(world, lock);
}

int current_device() { return thread_device; }
void set_current_device(int device) { thread_device = device; }

// Contexts are addresses in an array: distinct, and none can be used as memory by mistake.
static char contexts[64];
cu::Context context_of(int device) {
  return device < 0 ? nullptr : reinterpret_cast<cu::Context>(contexts + device);
}
int device_of(cu::Context context) {
  auto* place = reinterpret_cast<char*>(context);
  if (place < contexts || place >= contexts + sizeof(contexts)) return -1;
  return static_cast<int>(place - contexts);
}

namespace {

struct Text {
  int result;
  const char *name, *text;
};
constexpr Text kTexts[] = {
    {0, "CUDA_SUCCESS", "no error"},
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {4, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {200, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {209, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for the device"},
    {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {500, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {600, "CUDA_ERROR_NOT_READY", "device not ready"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {800, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {801, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
    {901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
     "operation failed due to a previous error during capture"},
    {903, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", "capture was not initiated in this stream"},
    {904, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED", "capturing stream has unjoined work"},
    {907, "CUDA_ERROR_CAPTURED_EVENT", "operation not permitted on an event of a capture"},
};

const Text* find_text(Result result) {
  for (const Text& text : kTexts) {
    if (text.result == static_cast<int>(result)) return &text;
  }
  return nullptr;
}

constexpr std::pair<int, int> kAttributes[] = {
    {1, 1024}, {8, 48 * 1024}, {16, 132}, {75, 9}, {76, 0}, {97, 227 * 1024},
};

Result ordinal_in_range(World& world, int ordinal) {
  return ordinal >= 0 && ordinal < world.device_count ? Result::kSuccess : Result{101};
}

}  // namespace

FAKECUDA_API Result cuInit(unsigned flags) {
  return call("cuInit", kNothing, [&](World& world, Lock&) {
    if (flags != 0) return Result::kInvalidValue;
    if (world.device_count == 0) return Result::kNoDevice;
    world.initialised = true;
    return Result::kSuccess;
  });
}
FAKECUDA_API Result cuDriverGetVersion(int* version) {
  return call("cuDriverGetVersion", kNothing, [&](World& world, Lock&) {
    *version = world.version;
    return Result::kSuccess;
  });
}
FAKECUDA_API Result cuGetErrorName(Result result, const char** text) {
  const Text* found = find_text(result);
  *text = found == nullptr ? nullptr : found->name;
  return found == nullptr ? Result::kInvalidValue : Result::kSuccess;
}
FAKECUDA_API Result cuGetErrorString(Result result, const char** text) {
  const Text* found = find_text(result);
  *text = found == nullptr ? nullptr : found->text;
  return found == nullptr ? Result::kInvalidValue : Result::kSuccess;
}
FAKECUDA_API Result cuDeviceGetCount(int* count) {
  return call("cuDeviceGetCount", kInit, [&](World& world, Lock&) {
    *count = world.device_count;
    return Result::kSuccess;
  });
}
FAKECUDA_API Result cuDeviceGet(cu::DeviceHandle* device, int ordinal) {
  return call("cuDeviceGet", kInit, [&](World& world, Lock&) {
    *device = ordinal;
    return ordinal_in_range(world, ordinal);
  });
}
FAKECUDA_API Result cuDeviceGetName(char* name, int length, cu::DeviceHandle device) {
  return call("cuDeviceGetName", kInit, [&](World& world, Lock&) {
    if (length <= 0) return Result::kInvalidValue;
    // XLA runs a program on devices of one name alone.
    std::snprintf(name, static_cast<std::size_t>(length),
                  world.load_ptx == nullptr ? "Fake GPU %d" : "Virtual GPU", device);
    return ordinal_in_range(world, device);
  });
}
FAKECUDA_API Result cuDeviceGetAttribute(int* value, cu::DeviceAttribute attribute,
                                         cu::DeviceHandle device) {
  return call("cuDeviceGetAttribute", kInit, [&](World& world, Lock&) {
    if (Result bad = ordinal_in_range(world, device); bad != Result::kSuccess) return bad;
    const auto& own = world.devices[device].attributes;
    auto key = static_cast<int>(attribute);
    if (auto it = own.find(key); it != own.end()) {
      *value = it->second;
      return Result::kSuccess;
    }
    for (auto [known, standard] : kAttributes) {
      if (known != key) continue;
      *value = standard;
      return Result::kSuccess;
    }
    *value = 0;
    return world.strict ? Result::kInvalidValue : Result::kSuccess;
  });
}
FAKECUDA_API Result cuDevicePrimaryCtxRetain(cu::Context* context, cu::DeviceHandle device) {
  return call("cuDevicePrimaryCtxRetain", kInit, [&](World& world, Lock&) {
    *context = context_of(device);
    return ordinal_in_range(world, device);
  });
}
FAKECUDA_API Result cuCtxGetCurrent(cu::Context* context) {
  return call("cuCtxGetCurrent", kInit | kAnyway, [&](World&, Lock&) {
    *context = context_of(thread_device);
    return Result::kSuccess;
  });
}
FAKECUDA_API Result cuCtxSetCurrent(cu::Context context) {
  return call("cuCtxSetCurrent", kInit | kAnyway, [&](World& world, Lock&) {
    if (context != nullptr && device_of(context) < 0) {
      world.violation("cuCtxSetCurrent: no context");
      return Result::kInvalidContext;
    }
    thread_device = device_of(context);
    return Result::kSuccess;
  });
}
FAKECUDA_API Result cuCtxGetDevice(cu::DeviceHandle* device) {
  return call("cuCtxGetDevice", kContext, [&](World&, Lock&) {
    *device = thread_device;
    return Result::kSuccess;
  });
}

}  // namespace fakecuda
