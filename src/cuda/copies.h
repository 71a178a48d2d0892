// SPDX-License-Identifier: Apache-2.0
// Copies of arrays between host and device, and on a device. All are enqueued on streams; nobody
// waits but where it is said. What a copy reads and writes lives until it has ended: keep_until()
// sees to it. The device's context is current. All throw Error.
#pragma once

#include <cstddef>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "core/array_view.h"
#include "core/call.h"
#include "core/lifetime.h"
#include "cuda/completions.h"
#include "cuda/device.h"
#include "cuda/memory.h"

namespace callgate::cuda {

inline DevicePointer address(const void* data) { return reinterpret_cast<DevicePointer>(data); }

// Of no bytes: nothing.
inline void copy_to_host(void* to, DevicePointer from, std::size_t bytes, Stream stream) {
  if (bytes != 0) check(driver().copy_to_host(to, from, bytes, stream), "cuMemcpyDtoHAsync_v2");
}
inline void copy_to_device(DevicePointer to, const void* from, std::size_t bytes, Stream stream) {
  if (bytes != 0) check(driver().copy_to_device(to, from, bytes, stream), "cuMemcpyHtoDAsync_v2");
}
inline void copy_on_device(DevicePointer to, DevicePointer from, std::size_t bytes, Stream stream) {
  if (bytes != 0) check(driver().copy_on_device(to, from, bytes, stream), "cuMemcpyDtoDAsync_v2");
}

// As core's fill(), poison() and clear().
inline void fill_on_device(const ArrayView& view, unsigned char byte, Stream stream) {
  if (view.nbytes() == 0) return;
  check(driver().set_8(address(view.data), byte, view.nbytes(), stream), "cuMemsetD8Async");
}
inline void poison_on_device(std::span<const ArrayView> views, Stream stream) {
  for (const ArrayView& view : views)
    fill_on_device(view, is_inexact(view.dtype) ? 0xFF : 0, stream);
}
inline void clear_on_device(std::span<const ArrayView> views, Stream stream) {
  for (const ArrayView& view : views) fill_on_device(view, 0, stream);
}

// Blocks until the stream has done what it has been given so far.
inline void wait_for(Device& device, Stream stream) {
  check(StreamEvent(device, stream).wait(), "cuEventSynchronize");
}

// Runs `give`, which gives the stream work. Where it throws, what it gave may still use memory that
// the caller is about to free: waits for the stream first.
template <typename Give>
auto given(Stream stream, Give&& give) -> decltype(give()) {
  try {
    return give();
  } catch (const std::exception&) {
    driver().stream_synchronize(stream);
    throw;
  }
}

// Keeps something until the stream is done with what it has been given so far.
inline void keep_until(Device& device, Stream stream, const std::shared_ptr<void>& kept) {
  Completions& completions = Completions::of(device);
  bool keeps = given(
      stream, [&] { return completions.keep({device, stream, Device::Waiting::kAsking}, kept); });
  if (!keeps) driver().stream_synchronize(stream);  // nobody is there who would wait
}

// Gives `kept` to the CUDA graph that the stream is captured into, and to its copies. It dies soon
// after the last of them, on the device's completion thread. False where the driver can't: then it
// is still the caller's.
inline bool keep_in_graph(Device& device, Stream stream, const std::shared_ptr<void>& kept) {
  constexpr unsigned kNoDestructorSync = 1, kMoveReference = 1;
  struct Owned {
    Device& device;
    std::shared_ptr<void> kept;
  };
  // The graph lets go on a thread of the driver's, where CUDA must not be called; so the completion
  // thread destroys it, or nobody: where that has ended, the process does, too.
  auto let_go = [](void* data) {
    auto* owned = static_cast<Owned*>(data);
    try {
      Completions::of(owned->device).later([owned] { delete owned; });
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): no memory, and none freed
    }
  };
  const Driver& cuda = driver();
  if (cuda.capture_info == nullptr || cuda.user_object_create == nullptr ||
      cuda.graph_retain_object == nullptr)
    return false;
  CaptureStatus status = CaptureStatus::kNone;
  Graph graph = nullptr;
  Result found = cuda.capture_info(stream, &status, nullptr, &graph, nullptr, nullptr);
  if (found != Result::kSuccess || graph == nullptr) return false;
  auto owner = std::make_unique<Owned>(device, kept);
  UserObject object = nullptr;
  found = cuda.user_object_create(&object, owner.get(), let_go, 1, kNoDestructorSync);
  if (found != Result::kSuccess) return false;
  owner.release();  // NOLINT: the object's
  if (cuda.graph_retain_object(graph, object, 1, kMoveReference) == Result::kSuccess) return true;
  cuda.user_object_release(object, 1);
  return false;
}

inline constexpr std::size_t kHostAlignment = 64;
inline constexpr std::size_t kKeptAlignment = 256;  // as XLA expects of its programs' arguments

constexpr std::size_t round_up(std::size_t bytes, std::size_t alignment) noexcept {
  return (bytes + alignment - 1) / alignment * alignment;
}

// What arrays one after another take, each aligned.
inline std::size_t room_for(std::span<const ArrayView> views, std::size_t alignment) noexcept {
  std::size_t bytes = 0;
  for (const ArrayView& view : views) bytes += round_up(view.nbytes(), alignment);
  return bytes;
}

// Has them lie so from an address on, and returns the next.
inline void* lay_out(std::span<ArrayView> views, void* at, std::size_t alignment) noexcept {
  for (ArrayView& view : views) {
    view.data = at;
    at = static_cast<char*>(at) + round_up(view.nbytes(), alignment);
  }
  return at;
}

// Where a view lies in memory that begins at `first`.
inline std::size_t offset(const ArrayView& view, const char* first) {
  return static_cast<std::size_t>(static_cast<const char*>(view.data) - first);
}

// A call's device arrays as host arrays, in pinned memory. Who reads the views waits for the stream
// first. Results are room of the host's that `publish` copies to the device.
class HostCopies {
 public:
  // Results that share memory with an operand on the device do so here. `for_keeping`: large copies
  // lie in memory that may be kept, where there is such; see memory().
  HostCopies(Device& device, std::span<const ArrayView> operands,
             std::span<const ArrayView> results, bool for_keeping = false)
      : device_(&device),
        operands_(operands),
        results_(results),
        operand_bytes_(room_for(operands, kHostAlignment)) {
    for (const ArrayView& view : operands) sources_.push_back(address(view.data));
    std::size_t bytes = operand_bytes_;
    for (const ArrayView& view : results) {
      targets_.push_back(address(view.data));
      if (shared_with(view) == nullptr) bytes += round_up(view.nbytes(), kHostAlignment);
    }
    may_be_kept_ = for_keeping && bytes >= kLeastKept && keep_in<KeepableBlock>(bytes);
    if (!may_be_kept_) keep_in<PinnedBlock>(bytes);
    void* next = lay_out(operands_.all(), memory_.get(), kHostAlignment);
    for (ArrayView& view : results_.all()) {
      const ArrayView* shared = shared_with(view);
      if (shared == nullptr) next = lay_out({&view, 1}, next, kHostAlignment);
      if (shared != nullptr) view.data = shared->data;
    }
  }

  // Enqueues the copies of the operands to the host.
  void fetch(Stream stream) {
    for (std::size_t i = 0; i < operands_.size(); ++i)
      copy_to_host(operands_[i].data, sources_[i], operands_[i].nbytes(), stream);
  }

  // The same, and the event of their end. Where it throws, none is under way.
  StreamEvent fetch_with_event(Stream stream, Device::Waiting how) {
    return given(stream, [&] {
      fetch(stream);
      return StreamEvent(*device_, stream, how);
    });
  }

  // The same by a stream of ours, for large arrays: `stream` goes on after a copy on the device.
  StreamEvent fetch_aside(Stream stream) {
    constexpr auto kAsking = Device::Waiting::kAsking;
    if (operand_bytes_ == 0) return {*device_, stream, kAsking};
    aside_ = DeviceBlock(*device_, operand_bytes_);
    Stream side = device_->side_stream(Device::Direction::kToHost);
    given(stream, [&] {
      for (std::size_t i = 0; i < operands_.size(); ++i) {
        DevicePointer to = aside_.data() + offset(operands_[i], memory_.get());
        copy_on_device(to, sources_[i], operands_[i].nbytes(), stream);
      }
      StreamEvent(*device_, stream).hold_back(side);
    });
    return given(side, [&] {
      // One copy for all: operands lie in both as they lie in the other.
      copy_to_host(memory_.get(), aside_.data(), operand_bytes_, side);
      return StreamEvent(*device_, side, kAsking);
    });
  }

  std::span<const ArrayView> operands() const noexcept { return operands_.all(); }
  std::span<ArrayView> results() noexcept { return results_.all(); }
  std::size_t operand_bytes() const noexcept { return operand_bytes_; }
  // Who holds the operands' memory, for whoever wants to keep it; null where nobody may.
  std::shared_ptr<void> memory() const noexcept { return may_be_kept_ ? memory_ : nullptr; }

  // Enqueues the copies of the results to the device.
  void publish(Stream stream) {
    for (std::size_t i = 0; i < results_.size(); ++i)
      copy_to_device(targets_[i], results_[i].data, results_[i].nbytes(), stream);
  }

 private:
  // The operand that has the memory of a result on the device; null for none.
  const ArrayView* shared_with(const ArrayView& result) const {
    for (std::size_t i = 0; i < sources_.size(); ++i)
      if (sources_[i] == address(result.data) && operands_[i].nbytes() == result.nbytes() &&
          result.nbytes() != 0)
        return &operands_[i];
    return nullptr;
  }

  Device* device_;
  OwnedViews operands_, results_;
  std::vector<DevicePointer> sources_, targets_;  // of each
  std::size_t operand_bytes_ = 0;
  // False where there is none.
  template <typename Memory>
  bool keep_in(std::size_t bytes) {
    auto block = std::make_shared<Memory>(bytes);
    if (block->data() != nullptr) memory_ = {block, block->data()};
    return block->data() != nullptr;
  }

  static constexpr std::size_t kLeastKept = std::size_t{1} << 20;  // less is soon copied

  std::shared_ptr<char> memory_;
  bool may_be_kept_ = false;
  DeviceBlock aside_;
};

// Copies of a program's arrays that stay on the device, for whoever wants to keep them. The memory
// goes back to its pool when the last owner has let go, on any thread, and what XLA's
// stream had been given until then is over: a consumer's programs may still read it.
class KeptCopies final : public DeviceMemory, Immovable {
 public:
  KeptCopies(Device& device, Stream stream, std::span<const ArrayView> arrays)
      : device_(&device), stream_(stream), arrays_(arrays) {
    memory_ = DeviceBlock(device, room_for(arrays, kKeptAlignment));
    lay_out(arrays_.all(), reinterpret_cast<void*>(memory_.data()), kKeptAlignment);
    given(stream, [&] {
      for (std::size_t i = 0; i < arrays.size(); ++i)
        copy_on_device(address(arrays_[i].data), address(arrays[i].data), arrays[i].nbytes(),
                       stream);
    });
  }

  ~KeptCopies() override {
    try {
      auto kept = std::make_shared<DeviceBlock>(std::move(memory_));
      Completions& completions = Completions::of(*device_);
      if (completions.stopped()) {
        // The process ends, and XLA may have destroyed its stream: the memory goes with the
        // process.
        new std::shared_ptr<DeviceBlock>(std::move(kept));
        return;
      }
      ContextScope current(*device_);
      completions.keep({*device_, stream_, Device::Waiting::kAsking}, kept);
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch)
      // Where it can't wait the device is lost, and nothing more will run on it.
    }
  }

  Device& device() const noexcept { return *device_; }
  Stream stream() const noexcept { return stream_; }
  // The copies: views of device memory, which live as long as this does.
  std::span<const ArrayView> arrays() const noexcept { return arrays_.all(); }

 private:
  Device* device_;
  Stream stream_;
  OwnedViews arrays_;
  DeviceBlock memory_;
};

// Arrays on their way to a device ahead of the program that will ask for them: copied from pinned
// memory by a stream of the device's own, beside those of programs. A program's stream then waits
// for that and copies on the device, into memory of its own. Any context may be current.
class Upload : Immovable {
 public:
  // Room for arrays of these types; their data is not looked at.
  Upload(Device& device, std::span<const ArrayView> types)
      : device_(&device), host_(types), bytes_(room_for(types, kHostAlignment)) {
    ContextScope current(device);
    memory_->pinned = PinnedBlock(bytes_);
    memory_->block = DeviceBlock(device, bytes_);
    lay_out(host_.all(), memory_->pinned.data(), kHostAlignment);
  }

  // The copy to the device may still be under way: nobody may have asked for it.
  ~Upload() {
    if (!arrived_ || arrived_->reached()) return;
    Completions::of(*device_).keep(std::move(*arrived_), memory_);
  }

  Device& device() const noexcept { return *device_; }
  // To be written before start().
  std::span<const ArrayView> host() const noexcept { return host_.all(); }

  // Enqueues the copy to the device. Once.
  void start() {
    ContextScope current(*device_);
    Stream stream = device_->side_stream(Device::Direction::kToDevice);
    given(stream, [&] {
      copy_to_device(memory_->block.data(), memory_->pinned.data(), bytes_, stream);
      arrived_.emplace(*device_, stream);
    });
  }

  // Has a program's stream copy the arrays to `targets` on the device; `self` lives until then.
  static void give(const std::shared_ptr<Upload>& self, std::span<void* const> targets,
                   Stream stream) {
    ContextScope current(*self->device_);
    if (self->arrived_) self->arrived_->hold_back(stream);
    const Memory& memory = *self->memory_;
    given(stream, [&] {
      for (std::size_t i = 0; i < self->host_.size(); ++i) {
        DevicePointer from = memory.block.data() + offset(self->host_[i], memory.pinned.data());
        copy_on_device(address(targets[i]), from, self->host_[i].nbytes(), stream);
      }
    });
    keep_until(*self->device_, stream, self);
  }

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
