// Arrays on their way to a device ahead of the program that will ask for them.
//
// They are written into pinned memory and copied from there by a stream of the device's own, beside
// those of programs. A program's stream then waits for that copy's event and copies on the device,
// into memory of its own. Nobody on the host waits for anything.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "core/array_view.h"
#include "cuda/device.h"
#include "cuda/event.h"
#include "cuda/memory.h"

namespace callgate::cuda {

class Upload {
 public:
  // Room for arrays of these types; their data is not looked at. Throws Error.
  Upload(Device& device, std::span<const ArrayView> types);
  ~Upload();
  Upload(const Upload&) = delete;
  Upload& operator=(const Upload&) = delete;

  Device& device() const noexcept { return *device_; }
  // To be written before start().
  std::span<const ArrayView> host() const noexcept { return host_; }

  // Enqueues the copy to the device. Once. Throws Error.
  void start();

  // Has a program's stream copy the arrays to `targets`, one of the device's addresses for each,
  // when they are there; `self` lives until then. Throws Error.
  static void give(const std::shared_ptr<Upload>& self, std::span<void* const> targets,
                   Stream stream);

 private:
  // The memory, as the copies on the device need it.
  struct Memory {
    PinnedBlock pinned;
    DeviceBlock block;
  };

  Device* device_;
  std::size_t bytes_ = 0;
  std::vector<ArrayView> host_;
  std::vector<std::size_t> offsets_;
  std::vector<std::int64_t> dims_;
  std::shared_ptr<Memory> memory_;
  std::optional<StreamEvent> arrived_;
};

}  // namespace callgate::cuda
