// SPDX-License-Identifier: Apache-2.0
// Devices by number, their events, and waits for them.
#include "cuda/device.h"

#include <chrono>
#include <new>
#include <thread>
#include <utility>

namespace callgate::cuda {

Device& Device::at(int ordinal) {
  if (ordinal < 0 || ordinal >= static_cast<int>(kMostDevices) || ordinal >= count())
    throw Error(ErrorCode::kNotFound, "CUDA",
                "a device number below " + std::to_string(std::min<int>(count(), kMostDevices)),
                std::to_string(ordinal));
  return table().at(static_cast<std::size_t>(ordinal), [&] {
    auto retain = driver().primary_context_retain;
    Context context = ask(retain, "cuDevicePrimaryCtxRetain", handle_of(ordinal));
    return std::unique_ptr<Device>(new Device(ordinal, context));
  });
}

int Device::capability_of(int ordinal) {
  DeviceHandle handle = handle_of(ordinal);
  return attribute(handle, DeviceAttribute::kComputeCapabilityMajor) * 10 +
         attribute(handle, DeviceAttribute::kComputeCapabilityMinor);
}

Stream Device::side_stream(Direction direction) {
  std::lock_guard lock(mutex_);
  Stream& stream = side_streams_[static_cast<std::size_t>(direction)];
  if (stream == nullptr) stream = ask(driver().stream_create, "cuStreamCreate", kStreamNonBlocking);
  return stream;
}

Event Device::take_event(Waiting how) {
  std::vector<Event>& kept = events_[static_cast<std::size_t>(how)];
  if (std::lock_guard lock(mutex_); !kept.empty()) {
    Event event = kept.back();
    kept.pop_back();
    return event;
  }
  unsigned asleep = how == Waiting::kAsleep ? kEventBlockingSync : 0;
  return ask(driver().event_create, "cuEventCreate", asleep | kEventDisableTiming);
}

void Device::give_back(Event event, Waiting how) noexcept try {
  std::lock_guard lock(mutex_);
  events_[static_cast<std::size_t>(how)].push_back(event);
} catch (const std::bad_alloc&) {
  driver().event_destroy(event);
}

Device::Device(int ordinal, Context context)
    : ordinal_(ordinal), id_(ordinal), context_(context), capability_(capability_of(ordinal)) {
  DeviceHandle handle = handle_of(ordinal);
  std::array<char, 256> name{};
  check(driver().device_name(name.data(), static_cast<int>(name.size()), handle),
        "cuDeviceGetName");
  name_ = name.data();
  multiprocessors_ = attribute(handle, DeviceAttribute::kMultiprocessorCount);
}

StreamEvent::StreamEvent(Device& device, Stream stream, Waiting how)
    : device_(&device), stream_(stream), event_(device.take_event(how)), how_(how) {
  Result recorded = driver().event_record(event_, stream);
  if (recorded == Result::kSuccess) [[likely]]
    return;
  device.give_back(event_, how);
  check(recorded, "cuEventRecord");
}

StreamEvent::StreamEvent(StreamEvent&& other) noexcept
    : device_(other.device_),
      stream_(other.stream_),
      event_(std::exchange(other.event_, nullptr)),
      how_(other.how_) {}

Result StreamEvent::wait() const noexcept {
  return settled(how_ == Waiting::kAsleep ? driver().event_synchronize(event_) : wait_asking());
}

Result StreamEvent::wait_asking() const noexcept {
  using Microseconds = std::chrono::duration<double, std::micro>;
  Result result = query();
  constexpr Microseconds kLongest(1000);
  for (Microseconds nap(20); result == Result::kNotReady; nap = std::min(nap * 1.25, kLongest)) {
    std::this_thread::sleep_for(nap);
    result = query();
  }
  return result;
}

Result StreamEvent::wait_near() const noexcept {
  using Clock = std::chrono::steady_clock;
  for (auto end = Clock::now() + std::chrono::microseconds(20); Clock::now() < end;)
    if (Result result = query(); result != Result::kNotReady) return settled(result);
  return wait();
}

}  // namespace callgate::cuda
