// SPDX-License-Identifier: Apache-2.0
// Memory for copies. Pinned memory takes the driver a millisecond per megabyte to create; a
// device's takes a synchronization to free. So both are kept, by size class, up to a budget: the
// maximum of copies in flight.
#pragma once

#include <sys/mman.h>

#include <atomic>
#include <cstddef>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "core/lifetime.h"
#include "cuda/device.h"

namespace callgate::cuda {

// Frees the unused blocks.
void trim_memory() noexcept;

inline constexpr std::size_t kMostOnTheWay = std::size_t{512} << 20;  // for all devices' taps
// The bytes of a pool, with room for all large blocks beside small ones, so that no large block is
// created again each time.
inline constexpr std::size_t kMostKept = kMostOnTheWay + kMostOnTheWay / 4;

// Unused blocks of one kind: of a device's memory, or of pinned host memory, which all devices can
// use. Thread-safe, with any context or none.
//
// Pinned memory is the driver's, or the process's own memory, registered with the driver. A fork's
// child shares the driver's with its parent, so it can't be kept; of the process's own it has a
// copy.
class Pool : Immovable {
 public:
  // Null for the host's, which is the process's `own` or the driver's.
  explicit Pool(const Device* device = nullptr, bool own = false) : device_(device), own_(own) {}
  static Pool& of_host() { return immortal<Pool>(); }
  static Pool& of_own();
  static PerDevice<Pool>& of_devices() { return immortal<PerDevice<Pool>>(); }
  static Pool& of(const Device& device) {
    return of_devices().at(device.index(), [&] { return std::make_unique<Pool>(&device); });
  }

  // A block of a size class. Throws Error if there is no memory. Returns 0 if more than `most`
  // would be in use, or if the driver can't register the process's own memory.
  DevicePointer take(std::size_t bytes, std::size_t most);

  void give_back(DevicePointer block, std::size_t bytes) noexcept;

  // For std::unique_ptr.
  struct GiveBack {
    void operator()(void* block) const noexcept {
      pool->give_back(reinterpret_cast<DevicePointer>(block), bytes);
    }
    Pool* pool = nullptr;
    std::size_t bytes = 0;
  };

  // Frees its blocks.
  void trim() noexcept;

  std::size_t in_use() noexcept;

  // In a fork's child, which can't call the driver, and where a mutex may never be released.
  static void abandon_all() noexcept { abandoned_.store(true, std::memory_order_relaxed); }

 private:
  Result make(DevicePointer& block, std::size_t bytes) const;

  static Result make_own(DevicePointer& block, std::size_t bytes);
  static void free_own(void* block, std::size_t bytes);

  // In a device's context, because the thread may have none; does nothing if the driver is gone.
  void free(std::span<const DevicePointer> blocks, std::size_t bytes) const noexcept;

  static inline std::atomic<bool> abandoned_{false};
  const Device* device_;
  const bool own_;
  std::mutex mutex_;
  std::map<std::size_t, std::vector<DevicePointer>> free_;
  std::size_t kept_ = 0, in_use_ = 0;
};

// A block of a pool, to which it returns on any thread.
class Block {
 public:
  std::size_t size() const noexcept { return block_.get_deleter().bytes; }

 protected:
  Block() = default;
  // Has no memory if more than `most` of the pool's would be in use.
  Block(Pool& pool, std::size_t bytes, std::size_t most = std::numeric_limits<std::size_t>::max())
      : block_(reinterpret_cast<void*>(pool.take(size_class(bytes), most)),
               Pool::GiveBack{&pool, size_class(bytes)}) {}
  DevicePointer address() const noexcept { return reinterpret_cast<DevicePointer>(block_.get()); }

 private:
  // Powers of two up to 1 MiB, then whole MiB: large blocks waste little.
  static std::size_t size_class(std::size_t bytes);

  std::unique_ptr<void, Pool::GiveBack> block_;
};

// Pinned host memory, usable with every device.
class PinnedBlock : public Block {
 public:
  PinnedBlock() = default;
  // At least `bytes`, aligned to 64. Throws Error if there is no memory.
  explicit PinnedBlock(std::size_t bytes) : Block(Pool::of_host(), bytes) {}
  char* data() const noexcept { return reinterpret_cast<char*>(address()); }
};

// Pinned memory of the process's own: a reader of the copied data may keep it for any time. Its
// amount is limited; beyond, data() is null, and a PinnedBlock is the alternative. Throws Error if
// the system has no memory.
class KeepableBlock : public Block {
 public:
  explicit KeepableBlock(std::size_t bytes) : Block(Pool::of_own(), bytes, most()) {}
  char* data() const noexcept { return reinterpret_cast<char*>(address()); }

 private:
  static std::size_t most();
};

// Device memory for copies that wait for their transfer to the host.
class DeviceBlock : public Block {
 public:
  DeviceBlock() = default;
  DeviceBlock(Device& device, std::size_t bytes) : Block(Pool::of(device), bytes) {}  // as above
  DevicePointer data() const noexcept { return address(); }
};

// The bytes of each kind in use, for tests and statistics.
struct MemoryInUse {
  std::size_t pinned = 0, device = 0;
};
MemoryInUse memory_in_use() noexcept;

}  // namespace callgate::cuda
