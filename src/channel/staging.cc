// See the header.
#include "channel/staging.h"

#include <cstdlib>
#include <cstring>
#include <utility>

namespace callgate {
namespace {

class HostStaging final : public Staging {
 public:
  void copy(const Source& source, std::span<const ArrayView> leaves,
            char* payload) noexcept override {
    for (std::size_t i = 0; i < leaves.size(); ++i) {
      const LeafType& leaf = source.leaves[i];
      if (leaf.nbytes != 0) std::memcpy(payload + leaf.offset, leaves[i].data, leaf.nbytes);
    }
  }
};

}  // namespace

Staging& host_staging() {
  static constinit HostStaging staging;
  return staging;
}

SideMemory::~SideMemory() { std::free(kept_); }

char* SideMemory::take(std::size_t bytes, std::size_t used) noexcept {
  std::size_t now = in_use_.load(std::memory_order_relaxed);  // confirmed by the exchange
  do {
    if (now != 0 && now + used + bytes > budget_) return nullptr;
    // Relaxed: the count alone matters; blocks pass under the mutex or through the ring.
  } while (!in_use_.compare_exchange_weak(now, now + bytes, std::memory_order_relaxed));
  {
    std::lock_guard lock(mutex_);
    if (kept_bytes_ == bytes) {
      kept_bytes_ = 0;
      return std::exchange(kept_, nullptr);
    }
  }
  auto* block = static_cast<char*>(std::aligned_alloc(kRecordAlignment, align_record(bytes)));
  if (block == nullptr) in_use_.fetch_sub(bytes, std::memory_order_relaxed);  // as above
  return block;
}

void SideMemory::give_back(char* block, std::size_t bytes) noexcept {
  in_use_.fetch_sub(bytes, std::memory_order_relaxed);  // as above
  {
    std::lock_guard lock(mutex_);
    std::swap(block, kept_);
    kept_bytes_ = bytes;
  }
  std::free(block);
}

}  // namespace callgate
