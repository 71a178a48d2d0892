// Copies of a program's arrays that stay on the device, for whoever wants to keep them.
//
// The copies are enqueued on the program's stream, which does not wait for anyone. The memory goes
// back to its pool when the last owner has let go, on any thread, and what XLA's stream had been
// given until then is over: a consumer's programs may still read it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/call.h"
#include "cuda/device.h"
#include "cuda/memory.h"

namespace callgate::cuda {

class KeptCopies final : public DeviceMemory {
 public:
  // Throws Error. The device's context is current.
  KeptCopies(Device& device, Stream stream, std::span<const ArrayView> arrays);
  ~KeptCopies() override;
  KeptCopies(const KeptCopies&) = delete;
  KeptCopies& operator=(const KeptCopies&) = delete;

  Device& device() const noexcept { return *device_; }
  Stream stream() const noexcept { return stream_; }
  // The copies: views of device memory, which live as long as this does.
  std::span<const ArrayView> arrays() const noexcept { return arrays_; }

 private:
  bool free_later() noexcept;

  Device* device_;
  Stream stream_;
  std::vector<ArrayView> arrays_;
  std::vector<std::int64_t> dims_;
  DeviceBlock memory_;
};

}  // namespace callgate::cuda
