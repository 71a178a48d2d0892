// SPDX-License-Identifier: Apache-2.0
// See the header. This file replaces the test program's operator new.
#include "allocations.h"

#include <cstdlib>
#include <new>

namespace {

using callgate::fake::NoMemory;

thread_local std::size_t g_allocations = 0;
thread_local NoMemory* t_without = nullptr;  // of this thread
std::atomic<NoMemory*> g_without{nullptr};   // of all threads
std::atomic<int> g_asking{0};                // who uses what g_without points to

// True if this allocation is one that fails.
bool fails() noexcept {
  if (t_without != nullptr && t_without->strikes()) return true;
  if (g_without.load(std::memory_order_relaxed) == nullptr) return false;
  g_asking.fetch_add(1);
  NoMemory* without = g_without.load();
  const bool strikes = without != nullptr && without->strikes();
  g_asking.fetch_sub(1);
  return strikes;
}

void* counted(std::size_t size, std::size_t alignment) {
  ++g_allocations;
  if (fails()) throw std::bad_alloc();
  std::size_t rounded = (size + alignment) / alignment * alignment;
  if (void* memory = std::aligned_alloc(alignment, rounded)) return memory;
  throw std::bad_alloc();
}

}  // namespace

// Forms that are left out come down to these, but not all of them do so under sanitizers.
void* operator new(std::size_t size) { return counted(size, alignof(std::max_align_t)); }
void* operator new[](std::size_t size) { return counted(size, alignof(std::max_align_t)); }
void* operator new(std::size_t size, const std::nothrow_t& /*tag*/) noexcept {
  try {
    return counted(size, alignof(std::max_align_t));
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
void* operator new(std::size_t size, std::align_val_t alignment) {
  return counted(size, static_cast<std::size_t>(alignment));
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }

namespace callgate::fake {

std::size_t allocations() noexcept { return g_allocations; }

NoMemory::NoMemory(std::size_t nth, Fails fails, Of of) : nth_(nth), fails_(fails), of_(of) {
  if (of_ == Of::kThisThread) {
    t_without = this;
  } else {
    g_without.store(this);
  }
}

NoMemory::~NoMemory() {
  if (of_ == Of::kThisThread) {
    t_without = nullptr;
    return;
  }
  g_without.store(nullptr);
  while (g_asking.load() != 0) std::this_thread::yield();
}

bool NoMemory::strikes() noexcept {
  const std::size_t number = met_.fetch_add(1);
  const bool strikes = fails_ == Fails::kOne ? number == nth_ : number >= nth_;
  if (strikes) struck_.store(true);
  return strikes;
}

}  // namespace callgate::fake
