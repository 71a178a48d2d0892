// SPDX-License-Identifier: Apache-2.0
// The test program's operator new: it counts, and fails when a test says so.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>

namespace callgate::fake {

// That this thread has made.
std::size_t allocations() noexcept;

// While it lives the allocation number `nth`, from 0, finds no memory, or it and all later ones.
// One of each kind at a time.
class NoMemory {
 public:
  enum class Fails : std::uint8_t { kOne, kAllLater };
  enum class Of : std::uint8_t { kThisThread, kAllThreads };

  NoMemory(std::size_t nth, Fails fails, Of of = Of::kThisThread);
  ~NoMemory();
  NoMemory(const NoMemory&) = delete;
  NoMemory& operator=(const NoMemory&) = delete;

  // True if an allocation has failed.
  bool struck() const noexcept { return struck_.load(); }

  // For operator new: an allocation is asked for.
  bool strikes() noexcept;

 private:
  std::size_t nth_;
  Fails fails_;
  Of of_;
  std::atomic<std::size_t> met_{0};
  std::atomic<bool> struck_{false};
};

}  // namespace callgate::fake
