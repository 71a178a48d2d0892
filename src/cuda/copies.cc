// SPDX-License-Identifier: Apache-2.0
// Copies between the host and a device, and the lifetimes of their memory.
#include "cuda/copies.h"

#include <utility>

namespace callgate::cuda {
namespace {

// The bytes of aligned arrays, one after another.
std::size_t room_for(std::span<const ArrayView> views, std::size_t alignment) noexcept {
  std::size_t bytes = 0;
  for (const ArrayView& view : views) bytes += round_up(view.nbytes(), alignment);
  return bytes;
}

// Places the arrays so from an address on, and returns the next address.
void* lay_out(std::span<ArrayView> views, void* at, std::size_t alignment) noexcept {
  for (ArrayView& view : views) {
    view.data = at;
    at = static_cast<char*>(at) + round_up(view.nbytes(), alignment);
  }
  return at;
}

}  // namespace

void fill_on_device(const ArrayView& view, unsigned char byte, Stream stream) {
  if (view.nbytes() == 0) return;
  check(driver().set_8(address(view.data), byte, view.nbytes(), stream), "cuMemsetD8Async");
}

void poison_on_device(std::span<const ArrayView> views, Stream stream) {
  for (const ArrayView& view : views)
    fill_on_device(view, is_inexact(view.dtype) ? 0xFF : 0, stream);
}

void keep_until(Device& device, Stream stream, const std::shared_ptr<void>& kept) {
  Completions& completions = Completions::of(device);
  bool keeps = given(
      stream, [&] { return completions.keep({device, stream, Device::Waiting::kAsking}, kept); });
  if (!keeps) driver().stream_synchronize(stream);  // no other waits for it
}

bool keep_in_graph(Device& device, Stream stream, const std::shared_ptr<void>& kept) {
  constexpr unsigned kNoDestructorSync = 1, kMoveReference = 1;
  struct Owned {
    Device& device;
    std::shared_ptr<void> kept;
  };
  // The graph releases the data on a driver's thread, where CUDA must not be called. So the
  // completion thread destroys it. If this thread has ended, so has the process.
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

HostCopies::HostCopies(Device& device, std::span<const ArrayView> operands,
                       std::span<const ArrayView> results, bool for_keeping)
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

void HostCopies::fetch(Stream stream) {
  for (std::size_t i = 0; i < operands_.size(); ++i)
    copy_to_host(operands_[i].data, sources_[i], operands_[i].nbytes(), stream);
}

StreamEvent HostCopies::fetch_with_event(Stream stream, Device::Waiting how) {
  return given(stream, [&] {
    fetch(stream);
    return StreamEvent(*device_, stream, how);
  });
}

StreamEvent HostCopies::fetch_aside(Stream stream) {
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
    // One copy for all, because operands have the same layout in both memories.
    copy_to_host(memory_.get(), aside_.data(), operand_bytes_, side);
    return StreamEvent(*device_, side, kAsking);
  });
}

void HostCopies::publish(Stream stream) {
  for (std::size_t i = 0; i < results_.size(); ++i)
    copy_to_device(targets_[i], results_[i].data, results_[i].nbytes(), stream);
}

const ArrayView* HostCopies::shared_with(const ArrayView& result) const {
  for (std::size_t i = 0; i < sources_.size(); ++i)
    if (sources_[i] == address(result.data) && operands_[i].nbytes() == result.nbytes() &&
        result.nbytes() != 0)
      return &operands_[i];
  return nullptr;
}

KeptCopies::KeptCopies(Device& device, Stream stream, std::span<const ArrayView> arrays)
    : device_(&device), stream_(stream), arrays_(arrays) {
  memory_ = DeviceBlock(device, room_for(arrays, kKeptAlignment));
  lay_out(arrays_.all(), reinterpret_cast<void*>(memory_.data()), kKeptAlignment);
  given(stream, [&] {
    for (std::size_t i = 0; i < arrays.size(); ++i)
      copy_on_device(address(arrays_[i].data), address(arrays[i].data), arrays[i].nbytes(), stream);
  });
}

KeptCopies::~KeptCopies() {
  try {
    auto kept = std::make_shared<DeviceBlock>(std::move(memory_));
    Completions& completions = Completions::of(*device_);
    if (completions.stopped()) {
      // The process is ending, and XLA may have destroyed its stream: the memory ends with the
      // process.
      new std::shared_ptr<DeviceBlock>(std::move(kept));
      return;
    }
    ContextScope current(*device_);
    completions.keep({*device_, stream_, Device::Waiting::kAsking}, kept);
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch)
    // A failed wait means that the device is lost, and runs nothing more.
  }
}

Upload::Upload(Device& device, std::span<const ArrayView> types)
    : device_(&device), host_(types), bytes_(room_for(types, kHostAlignment)) {
  ContextScope current(device);
  memory_->pinned = PinnedBlock(bytes_);
  memory_->block = DeviceBlock(device, bytes_);
  lay_out(host_.all(), memory_->pinned.data(), kHostAlignment);
}

Upload::~Upload() {
  if (!arrived_ || arrived_->reached()) return;
  Completions::of(*device_).keep(std::move(*arrived_), memory_);
}

void Upload::start() {
  ContextScope current(*device_);
  Stream stream = device_->side_stream(Device::Direction::kToDevice);
  given(stream, [&] {
    copy_to_device(memory_->block.data(), memory_->pinned.data(), bytes_, stream);
    arrived_.emplace(*device_, stream);
  });
}

void Upload::give(const std::shared_ptr<Upload>& self, std::span<void* const> targets,
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

}  // namespace callgate::cuda
