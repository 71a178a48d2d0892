// SPDX-License-Identifier: Apache-2.0
// Counters of devices, and arrays that stay on them.
#include "channel/record.h"

#include <utility>

namespace callgate {

void DeviceCounters::add(const DeviceCounters& other) noexcept {
  for (const Slot& theirs : other.slots_) {
    // Relaxed, all: the callers have ordered their threads.
    std::int64_t device = theirs.device.load(std::memory_order_relaxed);
    if (device == kNone) continue;
    std::uint64_t count = theirs.count.load(std::memory_order_relaxed);
    slot_of(device).count.fetch_add(count, std::memory_order_relaxed);
  }
}

std::uint64_t DeviceCounters::sum() const noexcept {
  std::uint64_t sum = 0;
  // Acquire: a caller that reads several counts reads them in its order.
  for (const Slot& slot : slots_) sum += slot.count.load(std::memory_order_acquire);
  return sum;
}

std::uint64_t KeptArrays::keep(One one) {
  std::lock_guard lock(mutex_);
  return kept_.emplace(++last_, std::move(one)).first->first;
}

KeptArrays::One KeptArrays::at(std::uint64_t handle) const {
  std::lock_guard lock(mutex_);
  auto found = kept_.find(handle);
  return found == kept_.end() ? One{} : found->second;
}

void KeptArrays::drop(std::uint64_t handle) noexcept {
  std::unique_lock lock(mutex_);
  const auto dropped = kept_.extract(handle);
  lock.unlock();  // released before the destruction
}

LeafType& Source::add(std::string path, const ArrayView& type) {
  const std::size_t offset = payload_bytes;
  payload_bytes += align_record(type.nbytes());
  const std::vector<std::int64_t> dims(type.shape().begin(), type.shape().end());
  return leaves.emplace_back(LeafType{std::move(path), type.dtype, dims, offset, type.nbytes()});
}

}  // namespace callgate
