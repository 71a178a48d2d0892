// SPDX-License-Identifier: Apache-2.0
// Working memory of kernels, and the services of a call.
#include "kernels/kernel_frame.h"

#include <cstdlib>
#include <new>
#include <utility>

namespace callgate {

ScratchCache::~ScratchCache() {
  for (ScratchBlock* block : blocks_)
    if (block != nullptr) std::free(block->memory);
}

ScratchBlock* ScratchCache::take(std::size_t bytes) noexcept {
  ScratchBlock** best = nullptr;
  for (ScratchBlock*& block : blocks_) {
    if (block == nullptr || block->bytes < bytes || block->bytes / 2 > bytes) continue;
    if (best == nullptr || block->bytes < (*best)->bytes) best = &block;
  }
  if (best == nullptr) return nullptr;
  kept_ -= (*best)->bytes;
  return std::exchange(*best, nullptr);
}

void ScratchCache::keep(ScratchBlock* block) noexcept {
  if (block->bytes > kScratchKept) return std::free(block->memory);
  std::size_t place = 0;
  do {
    place = std::exchange(next_, (next_ + 1) % blocks_.size());
    if (ScratchBlock* old = std::exchange(blocks_[place], nullptr)) {
      kept_ -= old->bytes;
      std::free(old->memory);
    }
  } while (kept_ + block->bytes > kScratchKept);
  kept_ += block->bytes;
  blocks_[place] = block;
}

void* Scratch::take(std::size_t bytes, std::size_t alignment) noexcept {
  alignment = std::max(alignment, kScratchAlignment);
  if (bytes > SIZE_MAX / 2 || alignment > SIZE_MAX / 4) return nullptr;
  bool usual = alignment == kScratchAlignment;
  ScratchBlock* block = usual ? ScratchCache::instance().take(bytes) : nullptr;
  if (block == nullptr) {
    // The description takes a whole alignment step, so the memory behind it stays aligned.
    std::size_t size = (bytes / alignment + 1) * alignment;
    auto* memory = static_cast<std::byte*>(std::aligned_alloc(alignment, alignment + size));
    if (memory == nullptr) return nullptr;
    std::byte* place = memory + alignment - sizeof(ScratchBlock);
    block = ::new (place) ScratchBlock{nullptr, size, memory};
  }
  // Blocks are only pushed while the call runs, so ABA can't occur; release() follows all pushes.
  block->next = blocks_.load(std::memory_order_relaxed);
  while (!blocks_.compare_exchange_weak(block->next, block, std::memory_order_release,
                                        std::memory_order_relaxed)) {
  }
  return block + 1;
}

void Scratch::release() noexcept {
  // Sees the descriptions that other threads have pushed.
  ScratchBlock* block = blocks_.exchange(nullptr, std::memory_order_acquire);
  while (block != nullptr) {
    ScratchBlock* done = std::exchange(block, block->next);
    bool usual = done->memory == done;  // a larger alignment is rare
    usual ? ScratchCache::instance().keep(done) : std::free(done->memory);
  }
}

}  // namespace callgate
