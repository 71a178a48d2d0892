// See the header.
#include "cuda/upload.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "cuda/completions.h"
#include "cuda/copies.h"
#include "cuda/driver.h"
#include "cuda/host_copies.h"

namespace callgate::cuda {
namespace {

constexpr std::size_t kUploadAlignment = 64;

}  // namespace

Upload::Upload(Device& device, std::span<const ArrayView> types)
    : device_(&device), host_(types.begin(), types.end()), memory_(std::make_shared<Memory>()) {
  dims_ = own_dims({host_});
  for (const ArrayView& view : host_) {
    offsets_.push_back(bytes_);
    bytes_ += round_up(view.nbytes(), kUploadAlignment);
  }
  ContextScope current(device);
  memory_->pinned = PinnedBlock(std::max<std::size_t>(bytes_, 1));
  memory_->block = DeviceBlock(device, std::max<std::size_t>(bytes_, 1));
  for (std::size_t i = 0; i < host_.size(); ++i)
    host_[i].data = memory_->pinned.data() + offsets_[i];
}

void Upload::start() {
  ContextScope current(*device_);
  Stream stream = side_stream(*device_, Direction::kToDevice);
  if (bytes_ != 0) {
    check(driver().copy_to_device(memory_->block.data(), memory_->pinned.data(), bytes_, stream),
          "cuMemcpyHtoDAsync_v2");
  }
  arrived_.emplace(*device_, stream);
}

void Upload::give(const std::shared_ptr<Upload>& self, std::span<void* const> targets,
                  Stream stream) {
  ContextScope current(*self->device_);
  if (self->arrived_) self->arrived_->hold_back(stream);
  for (std::size_t i = 0; i < self->host_.size(); ++i) {
    std::size_t bytes = self->host_[i].nbytes();
    if (bytes == 0) continue;
    check(driver().copy_on_device(reinterpret_cast<DevicePointer>(targets[i]),
                                  self->memory_->block.data() + self->offsets_[i], bytes, stream),
          "cuMemcpyDtoDAsync_v2");
  }
  keep_until(*self->device_, stream, self);
}

// The copy to the device may still be under way: nobody may have asked for it.
Upload::~Upload() {
  if (!arrived_ || arrived_->reached()) return;
  Completions::of(*device_).keep(std::move(*arrived_), memory_);
}

}  // namespace callgate::cuda
