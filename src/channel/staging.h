// How payloads get from a device's memory into a record, and memory for large ones.
#pragma once

#include <atomic>
#include <cstddef>
#include <mutex>
#include <span>

#include "channel/record.h"
#include "channel/ring.h"

namespace callgate {

// Copies the leaves of a call into a record's payload. The host's is a memcpy; a device's may start
// copies that end later, and then publishes the record when they have.
class Staging {
 public:
  virtual ~Staging() = default;
  virtual void copy(const Source& source, std::span<const ArrayView> leaves,
                    char* payload) noexcept = 0;
};

// The host's.
Staging& host_staging();

// Memory besides the ring, within a budget that the two share: payloads that are too large for the
// ring, and copies of what a consumer reads. The last block that came back is kept for the next of
// its size: fresh memory costs more than the copy into it.
class SideMemory {
 public:
  explicit SideMemory(std::size_t budget) : budget_(budget) {}
  ~SideMemory();
  SideMemory(const SideMemory&) = delete;
  SideMemory& operator=(const SideMemory&) = delete;

  // Null while less than `bytes` of the budget is left, the ring's share taken off. When nothing
  // else is in use, a block is granted whatever its size: nothing is too large to be sent.
  char* take(std::size_t bytes, const Ring& ring) noexcept;
  void give_back(char* block, std::size_t bytes) noexcept;

  // Counts memory that is not ours, and no more.
  void hold(std::size_t bytes) noexcept;
  void let_go(std::size_t bytes) noexcept;

  // Sequentially consistent: a sender to the ring looks here, take() looks there.
  std::size_t claimed() const noexcept { return claimed_.load(std::memory_order_seq_cst); }
  // Without what take() is about to refuse. Relaxed: a gauge.
  std::size_t in_use() const noexcept { return in_use_.load(std::memory_order_relaxed); }

 private:
  bool claim(std::size_t bytes, const Ring& ring) noexcept;

  std::size_t budget_;
  std::atomic<std::size_t> claimed_{0}, in_use_{0};
  std::mutex mutex_;
  char* kept_ = nullptr;
  std::size_t kept_bytes_ = 0;
};

}  // namespace callgate
