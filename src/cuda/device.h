// SPDX-License-Identifier: Apache-2.0
// A GPU as callgate uses it: its primary context, which XLA uses, too, and the objects in it.
// Events are kept, because creating one costs more than recording it.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <ranges>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "core/error.h"
#include "core/lifetime.h"
#include "cuda/driver.h"

namespace callgate::cuda {

struct DriverError : Error {  // thrown by check()
  using Error::Error;
};

// Calls the driver's function that writes to its first argument, and returns the value. Throws like
// check().
template <typename T, typename... Arguments>
T ask(Result (*function)(T*, Arguments...), const char* symbol,
      std::type_identity_t<Arguments>... arguments) {
  T value{};
  check(function(&value, arguments...), symbol);
  return value;
}

// Runs `body`, which makes a call of the callee of that name. Adds the name to the exceptions of
// check().
template <typename Body>
void named(const std::string& name, Body&& body) {
  try {
    body();
  } catch (const DriverError& error) {
    std::string_view text = error.what();
    text.remove_prefix(std::min(text.find(' ') + 1, text.size()));  // "callgate: "
    throw Error(error.code(), "'" + name + "': " + std::string(text));
  }
}

// The maximum number of devices of a process.
inline constexpr std::size_t kMostDevices = 64;

// An object per device, created at the first request and later found without a lock.
template <typename T>
class PerDevice : Immovable {
 public:
  ~PerDevice() {
    for (T* each : all()) delete each;  // NOLINT: made below
  }

  // `make` returns a std::unique_ptr, and may throw.
  template <typename Make>
  T& at(std::size_t ordinal, Make&& make) {
    std::atomic<T*>& slot = slots_[ordinal];
    if (T* known = slot.load(std::memory_order_acquire)) [[likely]]  // see below
      return *known;
    std::lock_guard lock(making_);
    if (T* known = slot.load(std::memory_order_acquire)) return *known;  // likewise
    std::unique_ptr<T> made = make();
    slot.store(made.get(), std::memory_order_release);  // readers find it complete
    return *made.release();                             // NOLINT: the slot's now
  }

  // Pointers to the existing objects.
  auto all() noexcept {
    auto load = [](const auto& slot) { return slot.load(std::memory_order_acquire); };  // see at()
    auto known = [](T* object) { return object != nullptr; };
    return slots_ | std::views::transform(load) | std::views::filter(known);
  }

 private:
  std::mutex making_;
  std::array<std::atomic<T*>, kMostDevices> slots_{};
};

// Never destroyed, because programs may end last. All members are constant except its id and its
// stored objects.
class Device {
 public:
  // Pointers to the devices in use.
  static auto in_use() noexcept { return table().all(); }

  // All throw Error if there is no such device, or no driver.
  static Device& of(Stream stream) {
    Context context = nullptr;
    check(driver().stream_context(stream, &context), "cuStreamGetCtx");
    for (Device* known : in_use())
      if (known->context() == context) return *known;
    Context before = ask(driver().context_current, "cuCtxGetCurrent");
    check(driver().context_set_current(context), "cuCtxSetCurrent");
    DeviceHandle handle = 0;
    Result found = driver().context_device(&handle);
    check(driver().context_set_current(before), "cuCtxSetCurrent");
    check(found, "cuCtxGetDevice");
    Device& device = at(handle);  // a device's handle is its number
    if (device.context() != context)
      throw Error("a program on " + device.name(), "a stream of the device's primary context",
                  "one of another context");
    return device;
  }

  static Device& at(int ordinal);

  static int count() { return ask(driver().device_count, "cuDeviceGetCount"); }

  // Doesn't take the device into use.
  static int capability_of(int ordinal);

  int ordinal() const noexcept { return ordinal_; }
  std::size_t index() const noexcept { return static_cast<std::size_t>(ordinal_); }  // of tables
  // jax.Device.id: differs from the ordinal in programs over several processes.
  std::int64_t id() const noexcept { return id_.load(std::memory_order_relaxed); }
  void set_id(std::int64_t id) noexcept { id_.store(id, std::memory_order_relaxed); }
  Context context() const noexcept { return context_; }
  const std::string& name() const noexcept { return name_; }
  int capability() const noexcept { return capability_; }  // 90 for 9.0
  int multiprocessors() const noexcept { return multiprocessors_; }

  // callgate's own stream for copies in one direction, in parallel to programs. Throws Error.
  enum class Direction : std::uint8_t { kToHost, kToDevice };
  Stream side_stream(Direction direction);

  // The way in which the host waits for an event: asleep, until the device interrupts it, or by
  // repeated queries. An interrupt takes the system longer than a small copy takes the device.
  enum class Waiting : std::uint8_t { kAsleep, kAsking };

  // Throws Error.
  Event take_event(Waiting how);

  void give_back(Event event, Waiting how) noexcept;

 private:
  static PerDevice<Device>& table() { return immortal<PerDevice<Device>>(); }

  Device(int ordinal, Context context);

  static int attribute(DeviceHandle device, DeviceAttribute which) {
    return ask(driver().device_attribute, "cuDeviceGetAttribute", which, device);
  }
  static DeviceHandle handle_of(int ordinal) {
    return ask(driver().device_get, "cuDeviceGet", ordinal);
  }

  int ordinal_;
  std::atomic<std::int64_t> id_;  // relaxed: a number on its own
  Context context_;
  std::string name_;
  int capability_;
  int multiprocessors_ = 0;
  std::mutex mutex_;                          // guards the members below
  std::array<std::vector<Event>, 2> events_;  // by the way of waiting
  std::array<Stream, 2> side_streams_{};
};

// Makes a device's context current on this thread, and restores the previous one.
class ContextScope : Immovable {
 public:
  explicit ContextScope(const Device& device)
      : before_(ask(driver().context_current, "cuCtxGetCurrent")),
        changed_(before_ != device.context()) {
    if (changed_) check(driver().context_set_current(device.context()), "cuCtxSetCurrent");
  }

  ~ContextScope() {
    if (changed_) driver().context_set_current(before_);
  }

 private:
  Context before_;
  bool changed_;
};

// True if the stream is being captured into a graph.
inline bool capturing(Stream stream) {
  CaptureStatus status = CaptureStatus::kNone;
  check(driver().stream_is_capturing(stream, &status), "cuStreamIsCapturing");
  return status == CaptureStatus::kActive;
}

// Lets the thread allocate and wait while one of its streams is being captured.
class RelaxedCapture : Immovable {
 public:
  RelaxedCapture() {
    check(driver().exchange_capture_mode(&mode_), "cuThreadExchangeStreamCaptureMode");
  }
  ~RelaxedCapture() { driver().exchange_capture_mode(&mode_); }

 private:
  CaptureMode mode_ = CaptureMode::kRelaxed;
};

// A point in a stream. Its event returns to the device on destruction.
class StreamEvent {
 public:
  using Waiting = Device::Waiting;

  // Throws Error. The device's context is current.
  StreamEvent(Device& device, Stream stream, Waiting how = Waiting::kAsleep);
  ~StreamEvent() {
    if (event_ != nullptr) device_->give_back(event_, how_);
  }
  StreamEvent(StreamEvent&& other) noexcept;
  StreamEvent& operator=(StreamEvent&&) = delete;

  // Blocks the thread, which needs no context. Returns success, or the stream's failure. Unless the
  // device is lost, the stream has reached the point even if the driver returned another error, so
  // the memory of its work may be freed.
  Result wait() const noexcept;
  // The same for a near point, for which putting the thread to sleep would take longer than the
  // work.
  Result wait_near() const noexcept;
  // Success if the stream has reached the point, kNotReady, or the stream's failure.
  Result query() const noexcept { return driver().event_query(event_); }
  bool reached() const noexcept { return query() == Result::kSuccess; }
  Stream stream() const noexcept { return stream_; }
  // Later work of `stream` starts after the point.
  void hold_back(Stream stream) const {
    check(driver().stream_wait_event(stream, event_, 0), "cuStreamWaitEvent");
  }

 private:
  Result wait_asking() const noexcept;
  // The result of a wait, once the stream has reached the point.
  Result settled(Result result) const noexcept {
    if (result != Result::kSuccess) driver().event_synchronize(event_);
    return result;
  }

  Device* device_;
  Stream stream_;
  Event event_ = nullptr;
  Waiting how_;
};

}  // namespace callgate::cuda
