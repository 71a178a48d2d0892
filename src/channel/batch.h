// SPDX-License-Identifier: Apache-2.0
// A channel's memory besides its ring: blocks for large payloads, the batch in delivery, and
// records for which the store has no place.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "channel/record.h"
#include "core/lifetime.h"

namespace callgate {

// The start of each entry. Its payload follows, unless `record.payload` points elsewhere.
struct alignas(kRecordAlignment) Entry {
  enum class Kind : std::uint32_t { kInline, kAside, kKept, kFiller };

  std::uint64_t position = 0;
  std::uint32_t granules = 0;  // of the whole entry in the ring
  Kind kind = Kind::kInline;
  Record record;

  char* inline_payload() noexcept { return reinterpret_cast<char*>(this + 1); }

  // An entry of kind kKept has its payload in another owner's memory. Until the entry is taken, the
  // owner is stored in the payload's place.
  using Memory = std::shared_ptr<void>;
  void keep(const Memory& memory) noexcept { new (inline_payload()) Memory(memory); }
  Memory take_memory() noexcept {
    auto* held = reinterpret_cast<Memory*>(inline_payload());
    Memory memory = std::move(*held);
    held->~Memory();
    return memory;
  }
};
static_assert(sizeof(Entry) == kRecordAlignment);

// Memory besides a ring, within a budget that both share: payloads that are too large for the ring,
// and copies of payloads that a consumer reads. Returned blocks are kept, within the budget, for
// the next payload of their size, because fresh memory costs more than the copy into it.
class SideMemory : Immovable {
 public:
  explicit SideMemory(std::size_t budget) : budget_(budget) {}

  // A block, or null if the system has no memory, in which case waiting would not help. Returns
  // nothing while less than `bytes` of the budget is left after the ring's share. If nothing else
  // is in use, a block of any size is granted: no payload is too large to send.
  std::optional<char*> take(std::size_t bytes, const auto& ring_used) noexcept {
    if (!claim(bytes, ring_used)) return std::nullopt;
    char* block = nullptr;
    {
      std::lock_guard lock(mutex_);
      if (kept_bytes_ != bytes) kept_.clear();  // first, to stay within the budget
      if (!kept_.empty()) {
        block = kept_.back().release();
        kept_.pop_back();
      }
    }
    if (block == nullptr) block = allocate(bytes);
    if (block == nullptr) let_go(bytes);
    return block;
  }

  void give_back(char* block, std::size_t bytes) noexcept {
    keep(Memory(block), bytes, claimed() - bytes);
    let_go(bytes);
  }

  // Takes back a block that was released before, because its reader kept it longer.
  void recycle(char* block, std::size_t bytes) noexcept { keep(Memory(block), bytes, claimed()); }

  // Claims a share of the budget; false while less is left, see take(). A sender to the ring that
  // has already checked may still take room for its record.
  bool claim(std::size_t bytes, const auto& ring_used) noexcept {
    std::size_t before = claimed();
    do {
      const std::size_t in_use = before + ring_used();
      if (in_use != 0 && in_use + bytes > budget_) return false;
      // See claimed(), also on failure.
    } while (!claimed_.compare_exchange_weak(before, before + bytes, std::memory_order_seq_cst));
    return true;
  }

  // Counts memory that is not ours, and no more. Sequentially consistent, both: see claimed().
  void hold(std::size_t bytes) noexcept { claimed_.fetch_add(bytes, std::memory_order_seq_cst); }
  void let_go(std::size_t bytes) noexcept { claimed_.fetch_sub(bytes, std::memory_order_seq_cst); }

  // Sequentially consistent: a sender to the ring looks here, take() looks there.
  std::size_t claimed() const noexcept { return claimed_.load(std::memory_order_seq_cst); }

 private:
  struct Free {
    void operator()(char* memory) const noexcept { std::free(memory); }
  };
  using Memory = std::unique_ptr<char, Free>;

  static char* allocate(std::size_t bytes) noexcept {
    constexpr std::size_t kHugePage = std::size_t{2} << 20;
    const std::size_t alignment = bytes < 2 * kHugePage ? kRecordAlignment : kHugePage;
    const std::size_t size = (bytes + alignment - 1) / alignment * alignment;
    void* block = std::aligned_alloc(alignment, size);
#ifdef MADV_HUGEPAGE
    if (block != nullptr && alignment == kHugePage) madvise(block, size, MADV_HUGEPAGE);
#endif
    return static_cast<char*>(block);
  }

  // `claimed`: bytes claimed by others.
  void keep(Memory block, std::size_t bytes, std::size_t claimed) noexcept try {
    std::lock_guard lock(mutex_);
    if (std::exchange(kept_bytes_, bytes) != bytes) kept_.clear();
    if (claimed + (kept_.size() + 1) * bytes <= budget_) kept_.push_back(std::move(block));
  } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): it is freed
  }

  std::size_t budget_;
  std::atomic<std::size_t> claimed_{0};
  std::mutex mutex_;
  // Unused blocks, all of one size, as many as the budget has room for.
  std::vector<Memory> kept_;
  std::size_t kept_bytes_ = 0;  // per block
};

// The records in delivery, and their memory besides the ring's. Only the channel's thread uses it.
class Batch {
 public:
  // Called first, because the thread could not continue without memory for a place.
  void reserve() {
    records_.reserve(kMostRecords);
    copies_.reserve(kMostRecords);
    blocks_.reserve(kMostRecords);
  }
  bool has_place() const noexcept { return records_.size() < kMostRecords; }

  // A place must be reserved for each call. Takes over an entry's block, or copies its payload if
  // `copies`, counted in `aside`. False, without any change, if there is no memory.
  bool take(Entry& entry, const std::shared_ptr<SideMemory>& aside, bool copies) noexcept try {
    Record record = entry.record;
    const Source& source = *record.source;
    if (entry.kind == Entry::Kind::kAside || entry.kind == Entry::Kind::kKept) {
      blocks_.push_back(std::make_shared<Block>(aside, record.data(), source.payload_bytes));
      if (entry.kind == Entry::Kind::kKept) blocks_.back()->memory = entry.take_memory();
    } else if (copies) {
      copies_.push_back(std::make_unique_for_overwrite<char[]>(source.payload_bytes));
      std::memcpy(copies_.back().get(), record.payload,
                  source.kept ? source.written_bytes : source.payload_bytes);
      record.payload = copies_.back().get();
      aside->hold(source.payload_bytes);  // as the ring's memory that it leaves
      copied_bytes_ += source.payload_bytes;
    }
    records_.push_back(record);
    return true;
  } catch (const std::bad_alloc&) {
    return false;
  }

  // Takes over a payload that is in no store.
  void take(Record record, std::unique_ptr<char[]> payload) {
    record.payload = payload.get();
    records_.push_back(record);
    copies_.push_back(std::move(payload));
    bytes_besides_ += record.source->payload_bytes;
  }

  std::span<const Record> records() const noexcept { return records_; }
  // The bytes of payloads that are in no store.
  std::size_t bytes_besides() const noexcept { return bytes_besides_; }

  // See Channel::lend().
  std::shared_ptr<void> lend(const Record& record) const noexcept {
    auto found =
        std::ranges::find(blocks_, record.payload, [](auto& block) { return block->data; });
    return found == blocks_.end() ? nullptr : *found;
  }

  // Returns the memory of blocks and copies, except lent blocks.
  void give_back(SideMemory& aside) noexcept {
    for (auto& block : blocks_) {
      if (block.use_count() == 1 && block->memory == nullptr) {
        aside.give_back(std::exchange(block->data, nullptr), block->bytes);
      } else {
        aside.let_go(block->bytes);  // lent: owned by the consumer or another owner now
      }
    }
    if (copied_bytes_ != 0) aside.let_go(std::exchange(copied_bytes_, 0));
  }

  void clear() noexcept {
    records_.clear();
    copies_.clear();
    blocks_.clear();
    bytes_besides_ = 0;
  }

 private:
  static constexpr std::size_t kMostRecords = 4096;

  // Shared by its reader and the consumer to which it is lent.
  struct Block : Immovable {
    Block(std::shared_ptr<SideMemory> from, char* memory, std::size_t size)
        : owner(std::move(from)), data(memory), bytes(size) {}
    ~Block() {
      if (data != nullptr && memory == nullptr) owner->recycle(data, bytes);
    }

    std::shared_ptr<SideMemory> owner;
    std::shared_ptr<void> memory;  // the owner, if it isn't this object
    char* data;
    std::size_t bytes;
  };

  std::vector<Record> records_;
  std::vector<std::unique_ptr<char[]>> copies_;
  std::vector<std::shared_ptr<Block>> blocks_;
  std::size_t copied_bytes_ = 0;  // of copies, which count against the capacity
  std::size_t bytes_besides_ = 0;
};

// Records that the channel's own thread sends into a full store, where it would wait for itself.
// Each follows the records that were in the store at that time. The thread sends no other way until
// none of these is left. Unbounded. Only this thread uses it, except for some() and added(), which
// are relaxed: they cover the events that it has announced.
class Overflow {
 public:
  bool some() const noexcept { return some_.load(std::memory_order_relaxed); }
  // The total number of records added.
  std::uint64_t added() const noexcept { return added_.load(std::memory_order_relaxed); }
  std::uint64_t taken() const noexcept { return taken_; }
  // The bytes of the waiting records.
  std::size_t bytes() const noexcept { return bytes_; }

  // Adds a record behind `position` of the store.
  void add(std::uint64_t position, Record record, std::unique_ptr<char[]> payload) {
    waiting_.push_back({position, record, std::move(payload)});
    bytes_ += record.source->payload_bytes;
    added_.fetch_add(1, std::memory_order_relaxed);
    some_.store(true, std::memory_order_relaxed);
  }

  // Takes the records behind those before `position`.
  void collect(Batch& batch, std::uint64_t position) {
    while (!waiting_.empty() && waiting_.front().position <= position && batch.has_place()) {
      bytes_ -= waiting_.front().record.source->payload_bytes;
      batch.take(waiting_.front().record, std::move(waiting_.front().payload));
      waiting_.pop_front();
      ++taken_;
    }
    some_.store(!waiting_.empty(), std::memory_order_relaxed);
  }

 private:
  struct Waiting {
    std::uint64_t position;
    Record record;
    std::unique_ptr<char[]> payload;
  };
  std::deque<Waiting> waiting_;
  std::size_t bytes_ = 0;
  std::uint64_t taken_ = 0;
  std::atomic<std::uint64_t> added_{0};
  std::atomic<bool> some_{false};
};

}  // namespace callgate
