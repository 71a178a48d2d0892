// See the header.
#include "channel/staging.h"

#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace callgate {
namespace {

#ifdef __SSE2__
// From this size on, stores pass by the caches: the memory they go to was used long ago, and to
// fetch it first would cost more than the copy.
constexpr std::size_t kLeastStreamed = 4096;

// `to` is aligned to 16 bytes.
void stream(char* to, const char* from, std::size_t bytes) noexcept {
  std::size_t whole = bytes / 64 * 64;
  for (std::size_t i = 0; i < whole; i += 64) {
    auto* target = reinterpret_cast<__m128i*>(to + i);
    auto* source = reinterpret_cast<const __m128i*>(from + i);
    __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
    __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
  }
  std::memcpy(to + whole, from + whole, bytes - whole);
  _mm_sfence();  // such stores are not ordered by the atomics that publish them
}
#endif

void copy_leaf(char* to, const void* from, std::size_t bytes) noexcept {
#ifdef __SSE2__
  if (bytes >= kLeastStreamed) return stream(to, static_cast<const char*>(from), bytes);
#endif
  if (bytes != 0) std::memcpy(to, from, bytes);
}

class HostStaging final : public Staging {
 public:
  void copy(const Source& source, std::span<const ArrayView> leaves,
            char* payload) noexcept override {
    for (std::size_t i = 0; i < leaves.size(); ++i) {
      copy_leaf(payload + source.leaves[i].offset, leaves[i].data, source.leaves[i].nbytes);
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

SideMemory::Block SideMemory::take(std::size_t bytes, const Ring& ring) noexcept {
  if (!claim(bytes, ring)) return {};
  std::vector<char*> useless;
  {
    std::lock_guard lock(mutex_);
    if (kept_bytes_ == bytes && !kept_.empty()) {
      char* block = kept_.back();
      kept_.pop_back();
      in_use_.fetch_add(bytes, std::memory_order_relaxed);  // a gauge
      return {block};
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
  return {block, /*no_memory=*/block == nullptr};
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
