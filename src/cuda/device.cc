// See the header.
#include "cuda/device.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>

#include "core/error.h"
#include "cuda/driver.h"

namespace callgate::cuda {
namespace {

// Devices in use, by ordinal; never destroyed. A slot is filled once.
struct Table {
  std::mutex mutex;
  std::array<std::atomic<Device*>, kMostDevices> by_ordinal{};
};

Table& table() { return immortal<Table>(); }

int attribute(DeviceHandle device, DeviceAttribute which) {
  int value = 0;
  check(driver().device_attribute(&value, which, device), "cuDeviceGetAttribute");
  return value;
}

Context current_context() {
  Context context = nullptr;
  check(driver().context_current(&context), "cuCtxGetCurrent");
  return context;
}

}  // namespace

Device::Device(int ordinal, Context context)
    : ordinal_(ordinal), id_(ordinal), context_(context), capability_(capability_of(ordinal)) {
  const Driver& cuda = driver();
  DeviceHandle handle = 0;
  check(cuda.device_get(&handle, ordinal), "cuDeviceGet");
  std::array<char, 256> name{};
  check(cuda.device_name(name.data(), static_cast<int>(name.size()), handle), "cuDeviceGetName");
  name_ = name.data();
  multiprocessors_ = attribute(handle, DeviceAttribute::kMultiprocessorCount);
}

int Device::capability_of(int ordinal) {
  DeviceHandle handle = 0;
  check(driver().device_get(&handle, ordinal), "cuDeviceGet");
  return attribute(handle, DeviceAttribute::kComputeCapabilityMajor) * 10 +
         attribute(handle, DeviceAttribute::kComputeCapabilityMinor);
}

int Device::count() {
  int devices = 0;
  check(driver().device_count(&devices), "cuDeviceGetCount");
  return devices;
}

Device& Device::at(int ordinal) {
  if (ordinal < 0 || ordinal >= static_cast<int>(kMostDevices) || ordinal >= count()) {
    throw Error(ErrorCode::kNotFound, "CUDA",
                "a device number below " + std::to_string(std::min<int>(count(), kMostDevices)),
                std::to_string(ordinal));
  }
  std::atomic<Device*>& slot = table().by_ordinal[static_cast<std::size_t>(ordinal)];
  // Acquire: the device was complete before it was published.
  if (Device* known = slot.load(std::memory_order_acquire)) return *known;
  std::lock_guard lock(table().mutex);
  if (Device* known = slot.load(std::memory_order_acquire)) return *known;  // as above
  const Driver& cuda = driver();
  DeviceHandle handle = 0;
  check(cuda.device_get(&handle, ordinal), "cuDeviceGet");
  Context context = nullptr;
  check(cuda.primary_context_retain(&context, handle), "cuDevicePrimaryCtxRetain");
  auto* device = new Device(ordinal, context);    // NOLINT: never destroyed
  slot.store(device, std::memory_order_release);  // see above
  return *device;
}

Device* Device::any() noexcept {
  for (const std::atomic<Device*>& slot : table().by_ordinal) {
    if (Device* known = slot.load(std::memory_order_acquire)) return known;  // see at()
  }
  return nullptr;
}

Device& Device::of(Stream stream) {
  Context context = nullptr;
  check(driver().stream_context(stream, &context), "cuStreamGetCtx");
  for (const std::atomic<Device*>& slot : table().by_ordinal) {
    Device* known = slot.load(std::memory_order_acquire);  // see at()
    if (known != nullptr && known->context() == context) return *known;
  }
  Context before = current_context();
  check(driver().context_set_current(context), "cuCtxSetCurrent");
  DeviceHandle handle = 0;
  Result found = driver().context_device(&handle);
  check(driver().context_set_current(before), "cuCtxSetCurrent");
  check(found, "cuCtxGetDevice");
  Device& device = at(handle);  // a device's handle is its number
  if (device.context() != context) {
    throw Error("a program on " + device.name(), "a stream of the device's primary context",
                "one of another context");
  }
  return device;
}

ContextScope::ContextScope(const Device& device)
    : before_(current_context()), changed_(before_ != device.context()) {
  if (changed_) check(driver().context_set_current(device.context()), "cuCtxSetCurrent");
}

ContextScope::~ContextScope() {
  if (changed_) driver().context_set_current(before_);
}

bool capturing(Stream stream) {
  CaptureStatus status = CaptureStatus::kNone;
  check(driver().stream_is_capturing(stream, &status), "cuStreamIsCapturing");
  return status == CaptureStatus::kActive;
}

RelaxedCapture::RelaxedCapture() {
  check(driver().exchange_capture_mode(&mode_), "cuThreadExchangeStreamCaptureMode");
}

RelaxedCapture::~RelaxedCapture() { driver().exchange_capture_mode(&mode_); }

}  // namespace callgate::cuda
