// A GPU as callgate uses it: its primary context, which is XLA's too, and what is made in it.
// Making an event costs more than recording it; pinned memory takes the driver a millisecond a
// megabyte to make, device memory a synchronisation to free. So these are kept, by size class, up
// to a budget.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <ranges>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/lifetime.h"
#include "cuda/driver.h"

namespace callgate::cuda {

struct DriverError : Error {  // what check() throws
  using Error::Error;
};

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

class Completions;

// Devices of a process; those beyond can't be used.
inline constexpr std::size_t kMostDevices = 64;

// Blocks of one kind that nobody uses: of a device's memory, or of pinned memory of the host, which
// all devices can use. Any thread, with any context or none.
class Pool : Immovable {
 public:
  explicit Pool(class Device* device = nullptr) : device_(device) {}  // null for the host's

  DevicePointer take(std::size_t bytes);  // of a size class. Throws Error where there is none.
  void give_back(DevicePointer block, std::size_t bytes) noexcept;
  void trim() noexcept;  // frees what it has
  std::size_t in_use() noexcept {
    std::lock_guard lock(mutex_);
    return in_use_;
  }

 private:
  Result make(DevicePointer& block, std::size_t bytes) const;
  void free(std::span<const DevicePointer> blocks) const noexcept;
  Device* device_;
  std::mutex mutex_;
  std::map<std::size_t, std::vector<DevicePointer>> free_;
  std::size_t kept_ = 0, in_use_ = 0;
};

// Never destroyed: programs may end last. But for its id and what it keeps, all is fixed.
class Device {
 public:
  // All throw Error where there is no such device, or no driver.
  static Device& of(Stream stream);
  static Device& at(int ordinal);
  static int count();
  static int capability_of(int ordinal);  // without taking the device into use
  // Pointers to those in use.
  static auto in_use() noexcept {
    // Acquire: a device was complete before it was published.
    auto load = [](const auto& slot) { return slot.load(std::memory_order_acquire); };
    auto known = [](Device* device) { return device != nullptr; };
    return by_ordinal_ | std::views::transform(load) | std::views::filter(known);
  }

  int ordinal() const noexcept { return ordinal_; }
  std::size_t index() const noexcept { return static_cast<std::size_t>(ordinal_); }  // of tables
  // jax.Device.id: differs from the ordinal in programs over several processes.
  std::int64_t id() const noexcept { return id_.load(std::memory_order_relaxed); }
  void set_id(std::int64_t id) noexcept { id_.store(id, std::memory_order_relaxed); }
  Context context() const noexcept { return context_; }
  const std::string& name() const noexcept { return name_; }
  int capability() const noexcept { return capability_; }  // 90 for 9.0
  int multiprocessors() const noexcept { return multiprocessors_; }
  Completions& completions() const noexcept { return *completions_; }
  Pool& pool() noexcept { return pool_; }

  // The stream of our own that copies in one direction take beside the programs'. Throws Error.
  enum class Direction : std::uint8_t { kToHost, kToDevice };
  Stream side_stream(Direction direction);

  Event take_event();  // throws Error
  void give_back(Event event) noexcept;

 private:
  Device(int ordinal, Context context);

  static inline std::array<std::atomic<Device*>, kMostDevices> by_ordinal_{};  // each filled once
  static inline constinit std::mutex making_;

  int ordinal_;
  std::atomic<std::int64_t> id_;  // relaxed: a number that stands for itself
  Context context_;
  std::string name_;
  int capability_;
  int multiprocessors_ = 0;
  Completions* completions_ = nullptr;
  Pool pool_{this};
  std::mutex mutex_;  // guards what follows
  std::vector<Event> events_;
  std::array<Stream, 2> side_streams_{};
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
  // Throws Error. The device's context is current.
  StreamEvent(Device& device, Stream stream);
  ~StreamEvent() {
    if (event_ != nullptr) device_->give_back(event_);
  }
  StreamEvent(StreamEvent&& other) noexcept
      : device_(other.device_), event_(std::exchange(other.event_, nullptr)) {}
  StreamEvent& operator=(StreamEvent&&) = delete;

  // Blocks the thread, which needs no context. Success, or what the stream failed with.
  Result wait() const noexcept { return driver().event_synchronize(event_); }
  bool reached() const noexcept { return driver().event_query(event_) != Result::kNotReady; }
  // Work that `stream` is given from here on starts after it.
  void hold_back(Stream stream) const {
    check(driver().stream_wait_event(stream, event_, 0), "cuStreamWaitEvent");
  }

 private:
  Device* device_;
  Event event_ = nullptr;
};

// A block of a pool, to which it goes back on any thread.
class Block {
 public:
  Block() = default;
  Block(Block&& other) noexcept
      : pool_(other.pool_), address_(std::exchange(other.address_, 0)), size_(other.size_) {}
  Block& operator=(Block other) noexcept {
    std::swap(pool_, other.pool_);
    std::swap(address_, other.address_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~Block() {
    if (address_ != 0) pool_->give_back(address_, size_);
  }

  std::size_t size() const noexcept { return size_; }

 protected:
  Block(Pool& pool, std::size_t bytes);
  DevicePointer address() const noexcept { return address_; }

 private:
  Pool* pool_ = nullptr;
  DevicePointer address_ = 0;
  std::size_t size_ = 0;
};

// Pinned host memory, usable with every device.
class PinnedBlock : public Block {
 public:
  PinnedBlock() = default;
  // At least `bytes`, aligned to 64. Throws Error where there is none.
  explicit PinnedBlock(std::size_t bytes);
  char* data() const noexcept { return reinterpret_cast<char*>(address()); }
};

// Device memory for copies that wait for their way to the host.
class DeviceBlock : public Block {
 public:
  DeviceBlock() = default;
  DeviceBlock(Device& device, std::size_t bytes) : Block(device.pool(), bytes) {}  // as above
  DevicePointer data() const noexcept { return address(); }
};

// Bytes of each kind that blocks in use have; for tests and stats.
struct MemoryInUse {
  std::size_t pinned = 0, device = 0;
};
MemoryInUse memory_in_use() noexcept;
void trim_memory() noexcept;  // frees the blocks that nobody uses

}  // namespace callgate::cuda
