// A GPU as callgate uses it: its primary context, which is XLA's too, and what depends on it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/lifetime.h"
#include "cuda/types.h"

namespace callgate::cuda {

// Devices of a process; those beyond can't be used.
inline constexpr std::size_t kMostDevices = 64;

// Never destroyed: programs may end after everything else. But for its id, all is fixed once it is
// made.
class Device {
 public:
  // Throw Error where there is no such device, or no driver.
  static Device& of(Stream stream);
  static Device& at(int ordinal);
  static int count();
  // As capability(), without taking the device into use. Throws Error.
  static int capability_of(int ordinal);
  // One that is in use; null while none is.
  static Device* any() noexcept;

  int ordinal() const noexcept { return ordinal_; }
  std::size_t index() const noexcept { return static_cast<std::size_t>(ordinal_); }  // of tables
  // jax.Device.id: differs from the ordinal in programs over several processes.
  std::int64_t id() const noexcept { return id_.load(std::memory_order_relaxed); }
  void set_id(std::int64_t id) noexcept { id_.store(id, std::memory_order_relaxed); }
  Context context() const noexcept { return context_; }
  const std::string& name() const noexcept { return name_; }
  // 90 for compute capability 9.0.
  int capability() const noexcept { return capability_; }
  int multiprocessors() const noexcept { return multiprocessors_; }

 private:
  Device(int ordinal, Context context);
  int ordinal_;
  std::atomic<std::int64_t> id_;  // relaxed: a number that stands for itself
  Context context_;
  std::string name_;
  int capability_;
  int multiprocessors_ = 0;
};

// Makes a device's context the calling thread's, and puts back what was there.
class ContextScope : Immovable {
 public:
  explicit ContextScope(const Device& device);
  ~ContextScope();

 private:
  Context before_;
  bool changed_;
};

// Whether work on the stream is being recorded into a graph rather than run.
bool capturing(Stream stream);

// Lets the thread allocate and wait although some stream of it is being captured.
class RelaxedCapture : Immovable {
 public:
  RelaxedCapture();
  ~RelaxedCapture();

 private:
  CaptureMode mode_ = CaptureMode::kRelaxed;
};

}  // namespace callgate::cuda
