// See the header.
#include "cuda/memory.h"

#include <algorithm>
#include <array>
#include <bit>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "core/error.h"
#include "cuda/driver.h"

namespace callgate::cuda {
namespace {

constexpr std::size_t kSmallest = 4096;
constexpr std::size_t kKept = std::size_t{256} << 20;  // of a pool

// Powers of two up to 1 MiB, then whole MiB: large blocks waste little, and blocks of one size find
// each other again.
std::size_t size_class(std::size_t bytes) {
  constexpr std::size_t kMebi = std::size_t{1} << 20;
  if (bytes <= kMebi) return std::bit_ceil(std::max(bytes, kSmallest));
  return (bytes + kMebi - 1) / kMebi * kMebi;
}

// Blocks of one kind that nobody uses.
template <typename Handle>
class Pool {
 public:
  // A block of the class, or a null one.
  Handle take(std::size_t bytes) {
    std::lock_guard lock(mutex_);
    in_use_ += bytes;
    std::vector<Handle>& free = free_[bytes];
    if (free.empty()) return Handle{};
    Handle block = free.back();
    free.pop_back();
    kept_ -= bytes;
    return block;
  }

  // False when the block is to be freed.
  bool keep(Handle block, std::size_t bytes) noexcept try {
    std::lock_guard lock(mutex_);
    in_use_ -= bytes;
    if (kept_ + bytes > kKept) return false;
    free_[bytes].push_back(block);
    kept_ += bytes;
    return true;
  } catch (const std::bad_alloc&) {
    return false;
  }

  void failed(std::size_t bytes) {
    std::lock_guard lock(mutex_);
    in_use_ -= bytes;
  }

  std::vector<Handle> take_all() {
    std::lock_guard lock(mutex_);
    std::vector<Handle> all;
    for (auto& [bytes, free] : free_) {
      all.insert(all.end(), free.begin(), free.end());
      free.clear();
    }
    kept_ = 0;
    return all;
  }

  std::size_t in_use() {
    std::lock_guard lock(mutex_);
    return in_use_;
  }

 private:
  std::mutex mutex_;
  std::map<std::size_t, std::vector<Handle>> free_;
  std::size_t kept_ = 0, in_use_ = 0;
};

// Of the host, and of each device.
Pool<char*>& pinned() { return immortal<Pool<char*>>(); }
std::array<Pool<DevicePointer>, kMostDevices>& pools() {
  return immortal<std::array<Pool<DevicePointer>, kMostDevices>>();
}

// Does something in the device's context; not at all where the driver is gone, and with it memory.
template <typename Body>
void within(const Device& device, Body&& body) noexcept {
  const Driver& cuda = driver();
  Context before = nullptr;
  if (cuda.context_current(&before) != Result::kSuccess) return;
  if (cuda.context_set_current(device.context()) != Result::kSuccess) return;
  body();
  cuda.context_set_current(before);
}

// Blocks may come back on threads that have no context, and freeing takes one.
void free_pinned(const std::vector<char*>& blocks) noexcept {
  Device* any = Device::any();
  if (blocks.empty() || any == nullptr) return;
  within(*any, [&] {
    for (char* block : blocks) driver().mem_free_host(block);
  });
}

void free_blocks(const Device& device, const std::vector<DevicePointer>& blocks) noexcept {
  if (blocks.empty()) return;
  within(device, [&] {
    for (DevicePointer block : blocks) driver().mem_free(block);
  });
}

}  // namespace

PinnedBlock::PinnedBlock(std::size_t bytes) : size_(size_class(bytes)) {
  data_ = pinned().take(size_);
  if (data_ != nullptr) return;
  void* made = nullptr;
  Result result = driver().mem_host_alloc(&made, size_, kHostAllocPortable);
  if (result == Result::kOutOfMemory) {  // what others have kept may be of another size
    trim_memory();
    result = driver().mem_host_alloc(&made, size_, kHostAllocPortable);
  }
  if (result != Result::kSuccess) pinned().failed(size_);
  check(result, "cuMemHostAlloc");
  data_ = static_cast<char*>(made);
}

PinnedBlock& PinnedBlock::operator=(PinnedBlock&& other) noexcept {
  if (this == &other) return *this;
  reset();
  data_ = std::exchange(other.data_, nullptr);
  size_ = std::exchange(other.size_, 0);
  return *this;
}

void PinnedBlock::reset() noexcept {
  if (data_ != nullptr && !pinned().keep(data_, size_)) free_pinned({data_});
  data_ = nullptr;
}

DeviceBlock::DeviceBlock(Device& device, std::size_t bytes)
    : device_(&device), size_(size_class(bytes)) {
  Pool<DevicePointer>& pool = pools()[device.index()];
  data_ = pool.take(size_);
  if (data_ != 0) return;
  Result result = driver().mem_alloc(&data_, size_);
  if (result == Result::kOutOfMemory) {
    free_blocks(device, pool.take_all());
    result = driver().mem_alloc(&data_, size_);
  }
  if (result != Result::kSuccess) {
    data_ = 0;
    pool.failed(size_);
  }
  check(result, "cuMemAlloc_v2");
}

DeviceBlock& DeviceBlock::operator=(DeviceBlock&& other) noexcept {
  if (this == &other) return *this;
  reset();
  device_ = other.device_;
  data_ = std::exchange(other.data_, 0);
  size_ = std::exchange(other.size_, 0);
  return *this;
}

void DeviceBlock::reset() noexcept {
  if (data_ != 0 && !pools()[device_->index()].keep(data_, size_)) free_blocks(*device_, {data_});
  data_ = 0;
}

MemoryInUse memory_in_use() noexcept {
  MemoryInUse in_use{pinned().in_use(), 0};
  for (Pool<DevicePointer>& pool : pools()) in_use.device += pool.in_use();
  return in_use;
}

void trim_memory() noexcept {
  free_pinned(pinned().take_all());
  for (std::size_t i = 0; i < kMostDevices; ++i) {
    std::vector<DevicePointer> blocks = pools()[i].take_all();
    if (!blocks.empty()) free_blocks(Device::at(static_cast<int>(i)), blocks);
  }
}

}  // namespace callgate::cuda
