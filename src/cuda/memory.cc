// SPDX-License-Identifier: Apache-2.0
// Blocks of a device's memory by size class, kept for reuse.
#include "cuda/memory.h"

#include <algorithm>
#include <bit>
#include <new>

namespace callgate::cuda {

Pool& Pool::of_own() {
  static auto* pool = new Pool(nullptr, /*own=*/true);
  return *pool;
}

DevicePointer Pool::take(std::size_t bytes, std::size_t most) {
  DevicePointer block = 0;
  std::unique_lock lock(mutex_);
  if (in_use_ + bytes > most) return 0;
  in_use_ += bytes;
  if (std::vector<DevicePointer>& free = free_[bytes]; !free.empty()) {
    block = free.back();
    free.pop_back();
    kept_ -= bytes;
    return block;
  }
  lock.unlock();
  Result result = make(block, bytes);
  if (result == Result::kOutOfMemory) {  // kept blocks may have another size
    device_ != nullptr ? trim() : trim_memory();
    result = make(block, bytes);
  }
  if (result == Result::kSuccess) return block;
  lock.lock();
  in_use_ -= bytes;
  if (own_ && result != Result::kOutOfMemory) return 0;  // the driver's memory may work
  check(result, device_ != nullptr ? "cuMemAlloc_v2"
                : own_             ? "cuMemHostRegister_v2"
                                   : "cuMemHostAlloc");
  return 0;
}

void Pool::give_back(DevicePointer block, std::size_t bytes) noexcept {
  // Relaxed: set while no other thread exists.
  if (abandoned_.load(std::memory_order_relaxed)) return;
  try {
    std::lock_guard lock(mutex_);
    in_use_ -= bytes;
    if (kept_ + bytes <= kMostKept) {
      free_[bytes].push_back(block);
      kept_ += bytes;
      return;
    }
  } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): nor is there room to keep it
  }
  free({&block, 1}, bytes);
}

void Pool::trim() noexcept {
  std::map<std::size_t, std::vector<DevicePointer>> all;
  {
    std::lock_guard lock(mutex_);
    all.swap(free_);
    kept_ = 0;
  }
  for (const auto& [bytes, blocks] : all) free(blocks, bytes);
}

std::size_t Pool::in_use() noexcept {
  std::lock_guard lock(mutex_);
  return in_use_;
}

Result Pool::make(DevicePointer& block, std::size_t bytes) const {
  if (device_ != nullptr) return driver().mem_alloc(&block, bytes);
  void* made = nullptr;
  if (own_) return make_own(block, bytes);
  Result result = driver().mem_host_alloc(&made, bytes, kHostAllocPortable);
  block = reinterpret_cast<DevicePointer>(made);
  return result;
}

Result Pool::make_own(DevicePointer& block, std::size_t bytes) {
  void* made = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (made == MAP_FAILED) return Result::kOutOfMemory;
#ifdef MADV_HUGEPAGE
  madvise(made, bytes, MADV_HUGEPAGE);  // for pinning and reading; may fail
#endif
  Result result = driver().mem_host_register(made, bytes, kHostAllocPortable);
  if (result != Result::kSuccess) munmap(made, bytes);
  block = reinterpret_cast<DevicePointer>(made);
  return result;
}

void Pool::free_own(void* block, std::size_t bytes) {
  driver().mem_host_unregister(block);
  munmap(block, bytes);
}

void Pool::free(std::span<const DevicePointer> blocks, std::size_t bytes) const noexcept {
  auto devices = Device::in_use();
  if (blocks.empty() || devices.empty()) return;
  const Device& device = device_ != nullptr ? *device_ : *devices.front();
  const Driver& cuda = driver();
  Context before = nullptr;
  if (cuda.context_current(&before) != Result::kSuccess ||
      cuda.context_set_current(device.context()) != Result::kSuccess)
    return;
  for (DevicePointer block : blocks) {
    auto* on_host = reinterpret_cast<void*>(block);
    if (own_)
      free_own(on_host, bytes);
    else
      device_ != nullptr ? cuda.mem_free(block) : cuda.mem_free_host(on_host);
  }
  cuda.context_set_current(before);
}

std::size_t Block::size_class(std::size_t bytes) {
  constexpr std::size_t kMebi = std::size_t{1} << 20, kSmallest = 4096;
  if (bytes <= kMebi) return std::bit_ceil(std::max(bytes, kSmallest));
  return (bytes + kMebi - 1) / kMebi * kMebi;
}

std::size_t KeepableBlock::most() {
  const Driver& cuda = driver();
  bool can = cuda.mem_host_register != nullptr && cuda.mem_host_unregister != nullptr;
  return can ? kMostKept : 0;
}

MemoryInUse memory_in_use() noexcept {
  MemoryInUse in_use{Pool::of_host().in_use() + Pool::of_own().in_use(), 0};
  for (Pool* pool : Pool::of_devices().all()) in_use.device += pool->in_use();
  return in_use;
}

void trim_memory() noexcept {
  Pool::of_host().trim();
  Pool::of_own().trim();
  for (Pool* pool : Pool::of_devices().all()) pool->trim();
}

}  // namespace callgate::cuda
