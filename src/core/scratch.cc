// See the header. A block's description lies before its memory, so that a call's list of them needs
// no memory of its own.
#include "core/scratch.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <utility>

namespace callgate {
namespace {

constexpr std::size_t kBlockAlignment = 64;  // as XLA's own buffers

}  // namespace

struct alignas(kBlockAlignment) Scratch::Block {
  Block* next;
  std::size_t bytes;  // that follow this description
  void* memory;       // to give back to the system
  void* data() noexcept { return this + 1; }
};

// Free blocks of one thread, and what they take.
class ScratchCache {
 public:
  using Block = Scratch::Block;

  static ScratchCache& instance() noexcept {
    static thread_local ScratchCache cache;
    return cache;
  }
  ~ScratchCache() {
    for (Block* block : blocks_)
      if (block != nullptr) std::free(block->memory);
  }

  // The smallest block that is large enough and not more than twice as large.
  Block* take(std::size_t bytes) noexcept {
    Block** best = nullptr;
    for (Block*& block : blocks_) {
      if (block == nullptr || block->bytes < bytes || block->bytes / 2 > bytes) continue;
      if (best == nullptr || block->bytes < (*best)->bytes) best = &block;
    }
    if (best == nullptr) return nullptr;
    kept_ -= (*best)->bytes;
    return std::exchange(*best, nullptr);
  }

  // Makes room by giving up the oldest; a block that is too large alone is given up itself.
  void keep(Block* block) noexcept {
    if (block->bytes > kScratchKept) return std::free(block->memory);
    while (kept_ + block->bytes > kScratchKept || blocks_[next_] != nullptr) {
      if (Block* old = std::exchange(blocks_[next_], nullptr)) {
        kept_ -= old->bytes;
        std::free(old->memory);
      }
      if (kept_ + block->bytes > kScratchKept) next_ = (next_ + 1) % blocks_.size();
    }
    kept_ += block->bytes;
    blocks_[next_] = block;
    next_ = (next_ + 1) % blocks_.size();
  }

 private:
  std::array<Block*, 8> blocks_{};
  std::size_t next_ = 0;
  std::size_t kept_ = 0;
};

void* Scratch::take(std::size_t bytes, std::size_t alignment) noexcept {
  alignment = std::max(alignment, kBlockAlignment);
  if (bytes > SIZE_MAX / 2 || alignment > SIZE_MAX / 4) return nullptr;
  Block* block = alignment == kBlockAlignment ? ScratchCache::instance().take(bytes) : nullptr;
  if (block == nullptr) {
    // The description takes a whole step of the alignment, so that the memory after it is aligned.
    std::size_t size = (bytes / alignment + 1) * alignment;
    auto* memory = static_cast<std::byte*>(std::aligned_alloc(alignment, alignment + size));
    if (memory == nullptr) return nullptr;
    block = ::new (memory + alignment - sizeof(Block)) Block{nullptr, size, memory};
  }
  // Only ever pushed to while the call runs, so there is no ABA; release() comes after all pushes.
  block->next = blocks_.load(std::memory_order_relaxed);
  while (!blocks_.compare_exchange_weak(block->next, block, std::memory_order_release,
                                        std::memory_order_relaxed)) {
  }
  return block->data();
}

void Scratch::release() noexcept {
  // Sees the descriptions that other threads have pushed.
  Block* block = blocks_.exchange(nullptr, std::memory_order_acquire);
  while (block != nullptr) {
    Block* next = block->next;
    if (block->memory == block) {
      ScratchCache::instance().keep(block);
    } else {
      std::free(block->memory);  // of a larger alignment: rare
    }
    block = next;
  }
}

}  // namespace callgate
