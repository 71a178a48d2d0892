// Memory that copies between host and device go through, in pools.
//
// Pinned memory takes the driver a millisecond a megabyte to make, device memory a synchronisation
// to free; so blocks are kept, by size class, up to a budget. What is beyond it is freed when it
// comes back.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>

#include "cuda/device.h"

namespace callgate::cuda {

// Pinned host memory, usable with every device. Thread-safe; any thread may let a block go.
class PinnedBlock {
 public:
  PinnedBlock() = default;
  // At least `bytes`, aligned to 64. Throws Error where there is none.
  explicit PinnedBlock(std::size_t bytes);
  ~PinnedBlock() { reset(); }
  PinnedBlock(PinnedBlock&& other) noexcept { *this = std::move(other); }
  PinnedBlock& operator=(PinnedBlock&& other) noexcept;

  char* data() const noexcept { return data_; }
  std::size_t size() const noexcept { return size_; }

 private:
  void reset() noexcept;
  char* data_ = nullptr;
  std::size_t size_ = 0;
};

// Device memory for copies that wait for their way to the host. The same, on one device.
class DeviceBlock {
 public:
  DeviceBlock() = default;
  // Throws Error where there is none.
  DeviceBlock(Device& device, std::size_t bytes);
  ~DeviceBlock() { reset(); }
  DeviceBlock(DeviceBlock&& other) noexcept { *this = std::move(other); }
  DeviceBlock& operator=(DeviceBlock&& other) noexcept;

  DevicePointer data() const noexcept { return data_; }
  std::size_t size() const noexcept { return size_; }

 private:
  void reset() noexcept;
  Device* device_ = nullptr;
  DevicePointer data_ = 0;
  std::size_t size_ = 0;
};

// Bytes of each kind that blocks in use have; for tests and stats.
struct MemoryInUse {
  std::size_t pinned = 0, device = 0;
};
MemoryInUse memory_in_use() noexcept;

// Frees the blocks that nobody uses.
void trim_memory() noexcept;

}  // namespace callgate::cuda
