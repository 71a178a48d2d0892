// See the header.
#include "channel/staging.h"

#include <cstdlib>
#include <cstring>
#include <new>
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

SideMemory::~SideMemory() {
  for (char* block : kept_) std::free(block);
}

bool SideMemory::claim(std::size_t bytes, const Ring& ring) noexcept {
  auto fits = [&](std::size_t before) {
    std::size_t in_use = before + ring.used();
    return in_use == 0 || in_use + bytes <= budget_;
  };
  if (!fits(claimed())) return false;
  // Claimed first, then looked at once more: a sender that comes to the ring from here on sees the
  // claim. One that is past its look may still take the room for its record besides.
  std::size_t before = claimed_.fetch_add(bytes, std::memory_order_seq_cst);  // see claimed()
  if (fits(before)) return true;
  claimed_.fetch_sub(bytes, std::memory_order_seq_cst);
  return false;
}

char* SideMemory::take(std::size_t bytes, const Ring& ring) noexcept {
  if (!claim(bytes, ring)) return nullptr;
  std::vector<char*> useless;
  {
    std::lock_guard lock(mutex_);
    if (kept_bytes_ == bytes && !kept_.empty()) {
      char* block = kept_.back();
      kept_.pop_back();
      in_use_.fetch_add(bytes, std::memory_order_relaxed);  // a gauge
      return block;
    }
    useless.swap(kept_);
  }
  for (char* other : useless) std::free(other);  // before more is taken: the budget is kept
  auto* block = static_cast<char*>(std::aligned_alloc(kRecordAlignment, align_record(bytes)));
  if (block != nullptr) {
    in_use_.fetch_add(bytes, std::memory_order_relaxed);  // a gauge
  } else {
    claimed_.fetch_sub(bytes, std::memory_order_seq_cst);  // see claimed()
  }
  return block;
}

void SideMemory::give_back(char* block, std::size_t bytes) noexcept {
  keep(block, bytes, claimed() - bytes);
  let_go(bytes);
}

void SideMemory::recycle(char* block, std::size_t bytes) noexcept { keep(block, bytes, claimed()); }

// `claimed`: by others.
void SideMemory::keep(char* block, std::size_t bytes, std::size_t claimed) noexcept try {
  std::lock_guard lock(mutex_);
  if (kept_bytes_ != bytes) {
    for (char* other : kept_) std::free(other);
    kept_.clear();
    kept_bytes_ = bytes;
  }
  if (claimed + (kept_.size() + 1) * bytes <= budget_) {
    kept_.push_back(block);
  } else {
    std::free(block);
  }
} catch (const std::bad_alloc&) {
  std::free(block);
}

void SideMemory::hold(std::size_t bytes) noexcept {
  claimed_.fetch_add(bytes, std::memory_order_seq_cst);  // see claimed()
  in_use_.fetch_add(bytes, std::memory_order_relaxed);   // a gauge
}

void SideMemory::let_go(std::size_t bytes) noexcept {
  in_use_.fetch_sub(bytes, std::memory_order_relaxed);   // a gauge
  claimed_.fetch_sub(bytes, std::memory_order_seq_cst);  // see claimed()
}

}  // namespace callgate
