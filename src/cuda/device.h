// SPDX-License-Identifier: Apache-2.0
// A GPU as callgate uses it: its primary context, which is XLA's too, and what is made in it.
// Making an event costs more than recording it, so events are kept.
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

struct DriverError : Error {  // what check() throws
  using Error::Error;
};

// Calls a function of the driver's for its first argument, a result. Throws as check() does.
template <typename T, typename... Arguments>
T ask(Result (*function)(T*, Arguments...), const char* symbol,
      std::type_identity_t<Arguments>... arguments) {
  T value{};
  check(function(&value, arguments...), symbol);
  return value;
}

// Runs `body`, which makes a call of the callee of that name; what check() throws there says so.
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

// Devices of a process; those beyond can't be used.
inline constexpr std::size_t kMostDevices = 64;

// An object for each device, made when it is first asked for; then it is found without a lock.
template <typename T>
class PerDevice : Immovable {
 public:
  ~PerDevice() {
    for (T* each : all()) delete each;  // NOLINT: made below
  }

  // `make` gives a std::unique_ptr, and may throw.
  template <typename Make>
  T& at(std::size_t ordinal, Make&& make) {
    std::atomic<T*>& slot = slots_[ordinal];
    if (T* known = slot.load(std::memory_order_acquire)) [[likely]]  // see below
      return *known;
    std::lock_guard lock(making_);
    if (T* known = slot.load(std::memory_order_acquire)) return *known;  // likewise
    std::unique_ptr<T> made = make();
    slot.store(made.get(), std::memory_order_release);  // who finds it finds it complete
    return *made.release();                             // NOLINT: the slot's now
  }

  // Pointers to those that are there.
  auto all() noexcept {
    auto load = [](const auto& slot) { return slot.load(std::memory_order_acquire); };  // see at()
    auto known = [](T* object) { return object != nullptr; };
    return slots_ | std::views::transform(load) | std::views::filter(known);
  }

 private:
  std::mutex making_;
  std::array<std::atomic<T*>, kMostDevices> slots_{};
};

// Never destroyed: programs may end last. But for its id and what it keeps, all is fixed.
class Device {
 public:
  // Pointers to those in use.
  static auto in_use() noexcept { return table().all(); }

  // All throw Error where there is no such device, or no driver.
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

  // Without taking the device into use.
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

  // The stream of our own that copies in one direction take beside the programs'. Throws Error.
  enum class Direction : std::uint8_t { kToHost, kToDevice };
  Stream side_stream(Direction direction);

  // How the host learns that an event has come: asleep, until the device interrupts it, or by
  // asking now and then. An interrupt takes the system longer than a small copy takes the device.
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
  std::atomic<std::int64_t> id_;  // relaxed: a number that stands for itself
  Context context_;
  std::string name_;
  int capability_;
  int multiprocessors_ = 0;
  std::mutex mutex_;                          // guards what follows
  std::array<std::vector<Event>, 2> events_;  // by how they are waited for
  std::array<Stream, 2> side_streams_{};
};

// Makes a device's context the calling thread's, and puts back what was there.
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

// True if work on the stream is being recorded into a graph rather than run.
inline bool capturing(Stream stream) {
  CaptureStatus status = CaptureStatus::kNone;
  check(driver().stream_is_capturing(stream, &status), "cuStreamIsCapturing");
  return status == CaptureStatus::kActive;
}

// Lets the thread allocate and wait although some stream of it is being captured.
class RelaxedCapture : Immovable {
 public:
  RelaxedCapture() {
    check(driver().exchange_capture_mode(&mode_), "cuThreadExchangeStreamCaptureMode");
  }
  ~RelaxedCapture() { driver().exchange_capture_mode(&mode_); }

 private:
  CaptureMode mode_ = CaptureMode::kRelaxed;
};

// A point in a stream. Its event goes back to the device when it dies.
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

  // Blocks the thread, which needs no context. Success, or what the stream failed with. Unless the
  // device is lost, the stream has come so far even where the driver's answer was another error:
  // the memory that its work uses may be freed.
  Result wait() const noexcept;
  // The same where the point is near: to put the thread to sleep would take longer than the work.
  Result wait_near() const noexcept;
  // Success when the stream has come so far, kNotReady, or what it failed with.
  Result query() const noexcept { return driver().event_query(event_); }
  bool reached() const noexcept { return query() == Result::kSuccess; }
  Stream stream() const noexcept { return stream_; }
  // Work that `stream` is given from here on starts after it.
  void hold_back(Stream stream) const {
    check(driver().stream_wait_event(stream, event_, 0), "cuStreamWaitEvent");
  }

 private:
  Result wait_asking() const noexcept;
  // The result of a wait, once the stream has come so far.
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
