// SPDX-License-Identifier: Apache-2.0
// Copies of arrays between host and device, and on a device. All are enqueued on streams; only
// functions that say so wait. A copy's memory lives until the copy has ended, by keep_until(). The
// device's context is current. All throw Error.
#pragma once

#include <cstddef>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "core/array_view.h"
#include "core/call.h"
#include "core/lifetime.h"
#include "cuda/completions.h"
#include "cuda/device.h"
#include "cuda/memory.h"

namespace callgate::cuda {

inline DevicePointer address(const void* data) { return reinterpret_cast<DevicePointer>(data); }

// A copy of no bytes does nothing.
inline void copy_to_host(void* to, DevicePointer from, std::size_t bytes, Stream stream) {
  if (bytes != 0) check(driver().copy_to_host(to, from, bytes, stream), "cuMemcpyDtoHAsync_v2");
}
inline void copy_to_device(DevicePointer to, const void* from, std::size_t bytes, Stream stream) {
  if (bytes != 0) check(driver().copy_to_device(to, from, bytes, stream), "cuMemcpyHtoDAsync_v2");
}
inline void copy_on_device(DevicePointer to, DevicePointer from, std::size_t bytes, Stream stream) {
  if (bytes != 0) check(driver().copy_on_device(to, from, bytes, stream), "cuMemcpyDtoDAsync_v2");
}

// Like fill(), poison() and clear() of the core.
void fill_on_device(const ArrayView& view, unsigned char byte, Stream stream);
void poison_on_device(std::span<const ArrayView> views, Stream stream);
inline void clear_on_device(std::span<const ArrayView> views, Stream stream) {
  for (const ArrayView& view : views) fill_on_device(view, 0, stream);
}

// Blocks until the stream has finished its current work.
inline void wait_for(Device& device, Stream stream) {
  check(StreamEvent(device, stream).wait(), "cuEventSynchronize");
}

// Runs `give`, which enqueues work. If it throws, the enqueued work may still use memory that the
// caller is about to free, so this waits for the stream first.
template <typename Give>
auto given(Stream stream, Give&& give) -> decltype(give()) {
  try {
    return give();
  } catch (const std::exception&) {
    driver().stream_synchronize(stream);
    throw;
  }
}

// Keeps an object until the stream has finished its current work.
void keep_until(Device& device, Stream stream, const std::shared_ptr<void>& kept);

// Transfers `kept` to the CUDA graph into which the stream is captured, and to the graph's copies.
// It dies soon after the last of them, on the device's completion thread. False if the driver can't
// do this; then the caller keeps it.
bool keep_in_graph(Device& device, Stream stream, const std::shared_ptr<void>& kept);

inline constexpr std::size_t kHostAlignment = 64;
inline constexpr std::size_t kKeptAlignment = 256;  // as XLA requires for programs' arguments

constexpr std::size_t round_up(std::size_t bytes, std::size_t alignment) noexcept {
  return (bytes + alignment - 1) / alignment * alignment;
}

// The offset of a view in memory that begins at `first`.
inline std::size_t offset(const ArrayView& view, const char* first) {
  return static_cast<std::size_t>(static_cast<const char*>(view.data) - first);
}

// A call's device arrays as host arrays, in pinned memory. Readers of the views first wait for the
// stream. Results are host memory that `publish` copies to the device.
class HostCopies {
 public:
  // Results that share memory with an operand on the device do so here. `for_keeping`: large copies
  // use memory that may be kept, if available; see memory().
  HostCopies(Device& device, std::span<const ArrayView> operands,
             std::span<const ArrayView> results, bool for_keeping = false);

  // Enqueues the copies of the operands to the host.
  void fetch(Stream stream);

  // The same, with the event of their end. If it throws, no copy is in flight.
  StreamEvent fetch_with_event(Stream stream, Device::Waiting how);

  // The same on callgate's own stream, for large arrays: `stream` continues after a copy on the
  // device.
  StreamEvent fetch_aside(Stream stream);

  std::span<const ArrayView> operands() const noexcept { return operands_.all(); }
  std::span<ArrayView> results() noexcept { return results_.all(); }
  std::size_t operand_bytes() const noexcept { return operand_bytes_; }
  // The owner of the operands' memory, for callers that keep it; null if it can't be kept.
  std::shared_ptr<void> memory() const noexcept { return may_be_kept_ ? memory_ : nullptr; }

  // Enqueues the copies of the results to the device.
  void publish(Stream stream);

 private:
  // The operand that shares a result's device memory; null for none.
  const ArrayView* shared_with(const ArrayView& result) const;

  Device* device_;
  OwnedViews operands_, results_;
  std::vector<DevicePointer> sources_, targets_;  // of each
  std::size_t operand_bytes_ = 0;
  // False if there is no memory.
  template <typename Memory>
  bool keep_in(std::size_t bytes) {
    auto block = std::make_shared<Memory>(bytes);
    if (block->data() != nullptr) memory_ = {block, block->data()};
    return block->data() != nullptr;
  }

  static constexpr std::size_t kLeastKept = std::size_t{1} << 20;  // smaller copies are fast

  std::shared_ptr<char> memory_;
  bool may_be_kept_ = false;
  DeviceBlock aside_;
};

// Copies of a program's arrays that stay on the device, for callers that keep them. The memory
// returns to its pool when the last owner has released it, on any thread, and XLA's stream has
// finished the work enqueued until then: a consumer's programs may still read it.
class KeptCopies final : public DeviceMemory, Immovable {
 public:
  KeptCopies(Device& device, Stream stream, std::span<const ArrayView> arrays);

  ~KeptCopies() override;

  Device& device() const noexcept { return *device_; }
  Stream stream() const noexcept { return stream_; }
  // The copies: views of device memory, which live as long as this object.
  std::span<const ArrayView> arrays() const noexcept { return arrays_.all(); }

 private:
  Device* device_;
  Stream stream_;
  OwnedViews arrays_;
  DeviceBlock memory_;
};

// Arrays on their way to a device, ahead of the program that will request them. A stream of the
// device's own copies them from pinned memory, in parallel to programs. A program's stream then
// waits for this and copies on the device, into its own memory. Any context may be current.
class Upload : Immovable {
 public:
  // Room for arrays of these types; their data is not read.
  Upload(Device& device, std::span<const ArrayView> types);

  // The copy to the device may still be in flight, if no program has requested it.
  ~Upload();

  Device& device() const noexcept { return *device_; }
  // Written before start().
  std::span<const ArrayView> host() const noexcept { return host_.all(); }

  // Enqueues the copy to the device. Called once.
  void start();

  // Makes a program's stream copy the arrays to `targets` on the device; `self` lives until then.
  static void give(const std::shared_ptr<Upload>& self, std::span<void* const> targets,
                   Stream stream);

 private:
  struct Memory {
    PinnedBlock pinned;
    DeviceBlock block;
  };

  Device* device_;
  OwnedViews host_;
  std::size_t bytes_ = 0;
  std::shared_ptr<Memory> memory_ = std::make_shared<Memory>();  // may outlive this
  std::optional<StreamEvent> arrived_;
};

}  // namespace callgate::cuda
