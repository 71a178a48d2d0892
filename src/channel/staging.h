// How payloads get from a device's memory into a record, and memory for large ones.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

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
// ring, and copies of what a consumer reads. Blocks that came back are kept, within the budget, for
// the next of their size: fresh memory costs more than the copy into it.
class SideMemory {
 public:
  explicit SideMemory(std::size_t budget) : budget_(budget) {}
  ~SideMemory();
  SideMemory(const SideMemory&) = delete;
  SideMemory& operator=(const SideMemory&) = delete;

  struct Block {
    char* data = nullptr;
    bool no_memory = false;  // the system has none: to wait for room would not help
  };

  // Null while less than `bytes` of the budget is left, the ring's share taken off. When nothing
  // else is in use, a block is granted whatever its size: nothing is too large to be sent.
  Block take(std::size_t bytes, const Ring& ring) noexcept;
  void give_back(char* block, std::size_t bytes) noexcept;

  // Takes back a block that has been let go before: its reader kept it for longer.
  void recycle(char* block, std::size_t bytes) noexcept;

  // Counts memory that is not ours, and no more.
  void hold(std::size_t bytes) noexcept;
  void let_go(std::size_t bytes) noexcept;

  // Sequentially consistent: a sender to the ring looks here, take() looks there.
  std::size_t claimed() const noexcept { return claimed_.load(std::memory_order_seq_cst); }
  // Without what take() is about to refuse. Relaxed: a gauge.
  std::size_t in_use() const noexcept { return in_use_.load(std::memory_order_relaxed); }

 private:
  bool claim(std::size_t bytes, const Ring& ring) noexcept;
  void keep(char* block, std::size_t bytes, std::size_t claimed) noexcept;

  std::size_t budget_;
  std::atomic<std::size_t> claimed_{0}, in_use_{0};
  std::mutex mutex_;
  // Blocks that nobody uses, all of one size, and no more of them than the budget has room for.
  std::vector<char*> kept_;
  std::size_t kept_bytes_ = 0;  // of each
};

// A block in the hands of who reads it, and of whom it is lent to.
struct SideBlock {
  SideBlock(std::shared_ptr<SideMemory> from, char* memory, std::size_t size)
      : owner(std::move(from)), data(memory), bytes(size) {}
  SideBlock(const SideBlock&) = delete;
  SideBlock& operator=(const SideBlock&) = delete;
  ~SideBlock() {
    if (data != nullptr) owner->recycle(data, bytes);
  }

  std::shared_ptr<SideMemory> owner;
  char* data;
  std::size_t bytes;
};

}  // namespace callgate
