// SPDX-License-Identifier: Apache-2.0
// Memory for copies: pinned memory takes the driver a millisecond a megabyte to make, a device's a
// synchronisation to free. So both are kept, by size class, up to a budget: what copies on their
// way may take at once.
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

// Frees the blocks that nobody uses.
void trim_memory() noexcept;

inline constexpr std::size_t kMostOnTheWay = std::size_t{512} << 20;  // of all devices' taps
// The bytes of a pool: small blocks beside leave room for all large ones, of which none is made
// again each time.
inline constexpr std::size_t kMostKept = kMostOnTheWay + kMostOnTheWay / 4;

// Blocks of one kind that nobody uses: of a device's memory, or of pinned memory of the host, which
// all devices can use. Any thread, with any context or none.
//
// Pinned memory is the driver's, or the process's own, which the driver has registered. A fork's
// child shares the driver's with its parent, so nobody may keep that; of the process's own it has a
// copy.
class Pool : Immovable {
 public:
  // Null for the host's, which is the process's `own`, or the driver's.
  explicit Pool(const Device* device = nullptr, bool own = false) : device_(device), own_(own) {}
  static Pool& of_host() { return immortal<Pool>(); }
  static Pool& of_own();
  static PerDevice<Pool>& of_devices() { return immortal<PerDevice<Pool>>(); }
  static Pool& of(const Device& device) {
    return of_devices().at(device.index(), [&] { return std::make_unique<Pool>(&device); });
  }

  // A block of a size class. Throws Error where there is none. 0 where more than `most` would be in
  // use, and where the driver registers no memory of the process's own.
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

  // Frees what it has.
  void trim() noexcept;

  std::size_t in_use() noexcept;

  // In a fork's child, where the driver can't be called and a mutex may be held for ever.
  static void abandon_all() noexcept { abandoned_.store(true, std::memory_order_relaxed); }

 private:
  Result make(DevicePointer& block, std::size_t bytes) const;

  static Result make_own(DevicePointer& block, std::size_t bytes);
  static void free_own(void* block, std::size_t bytes);

  // In a device's context, since the thread may have none; not where the driver is gone.
  void free(std::span<const DevicePointer> blocks, std::size_t bytes) const noexcept;

  static inline std::atomic<bool> abandoned_{false};
  const Device* device_;
  const bool own_;
  std::mutex mutex_;
  std::map<std::size_t, std::vector<DevicePointer>> free_;
  std::size_t kept_ = 0, in_use_ = 0;
};

// A block of a pool, to which it goes back on any thread.
class Block {
 public:
  std::size_t size() const noexcept { return block_.get_deleter().bytes; }

 protected:
  Block() = default;
  // None where there would be more than `most` of the pool's in use.
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
  // At least `bytes`, aligned to 64. Throws Error where there is none.
  explicit PinnedBlock(std::size_t bytes) : Block(Pool::of_host(), bytes) {}
  char* data() const noexcept { return reinterpret_cast<char*>(address()); }
};

// Pinned memory of the process's own: whoever reads what was copied there may keep it, for as long
// as it likes. So there may be none, and never is much: data() is null then, and a PinnedBlock will
// do. Throws Error where the system has none.
class KeepableBlock : public Block {
 public:
  explicit KeepableBlock(std::size_t bytes) : Block(Pool::of_own(), bytes, most()) {}
  char* data() const noexcept { return reinterpret_cast<char*>(address()); }

 private:
  static std::size_t most();
};

// Device memory for copies that wait for their way to the host.
class DeviceBlock : public Block {
 public:
  DeviceBlock() = default;
  DeviceBlock(Device& device, std::size_t bytes) : Block(Pool::of(device), bytes) {}  // as above
  DevicePointer data() const noexcept { return address(); }
};

// Bytes of each kind that blocks in use have; for tests and stats.
struct MemoryInUse {
  std::size_t pinned = 0, device = 0;
};
MemoryInUse memory_in_use() noexcept;

}  // namespace callgate::cuda
