// SPDX-License-Identifier: Apache-2.0
// One record of a channel, as consumers see it.
//
// A record is a header and payloads, one per leaf of the tapped value, each aligned to 64 bytes.
// The common part of all records of a tap is its `Source`, which lives at least as long as its
// records.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/array_view.h"
#include "core/call.h"
#include "core/lanes.h"

namespace callgate {

class Consumer;

inline constexpr std::size_t kRecordAlignment = 64;

constexpr std::size_t align_record(std::size_t bytes) noexcept {
  return (bytes + kRecordAlignment - 1) / kRecordAlignment * kRecordAlignment;
}

enum class Role : std::uint8_t { kPrimal = 0, kTangent = 1, kCotangent = 2 };

constexpr std::string_view role_name(Role role) noexcept {
  return role == Role::kTangent ? "tangent" : role == Role::kCotangent ? "cotangent" : "primal";
}

enum RecordFlags : std::uint32_t {
  kRepeated = 1,  // the tap ran before in this execution: the second pass of jax.checkpoint
};

// The wall clock, since the Unix epoch.
inline std::int64_t wall_time_ns() noexcept {
  return std::chrono::nanoseconds(std::chrono::system_clock::now().time_since_epoch()).count();
}

// A number for each object of a kind, from 1, unique in the process.
template <typename Kind>
std::uint64_t next_id() noexcept {
  static std::atomic<std::uint64_t> next{1};
  return next.fetch_add(1, std::memory_order_relaxed);  // only a number, no order
}

// A count for each sending device, without locks. Ids of devices are global: with many processes
// they are large and far apart (2048 may be the first of the second process), so a device gets its
// slot at its first count. Any thread may count; slots are never removed.
class DeviceCounters {
 public:
  // The device's next number, from 0.
  std::uint64_t next(std::int64_t device) noexcept {
    // Relaxed: only a number, no order.
    return slot_of(device).count.fetch_add(1, std::memory_order_relaxed);
  }

  // Continues from the counts of `other`, while no thread counts in either.
  void add(const DeviceCounters& other) noexcept;

  // The sum over all devices.
  std::uint64_t sum() const noexcept;

 private:
  static constexpr std::size_t kSlots = 256;  // the last one also counts devices without a slot
  static constexpr std::int64_t kNone = std::numeric_limits<std::int64_t>::min();

  struct Slot {
    std::atomic<std::int64_t> device{kNone};
    std::atomic<std::uint64_t> count{0};
  };

  Slot& slot_of(std::int64_t device) noexcept {
    auto first = static_cast<std::size_t>(device) % kSlots;
    for (std::size_t i = 0; i < kSlots; ++i) {
      Slot& slot = slots_[(first + i) % kSlots];
      // Relaxed, both: the key doesn't publish other memory.
      std::int64_t found = slot.device.load(std::memory_order_relaxed);
      if (found == kNone &&
          slot.device.compare_exchange_strong(found, device, std::memory_order_relaxed))
        return slot;
      if (found == device) return slot;
    }
    return slots_.back();
  }

  std::array<Slot, kSlots> slots_;
};

// From this bit on, flags hold the shard's number plus one; 0 for a record of whole arrays.
inline constexpr int kShardBit = 8;

// One leaf of a tapped value: its place in the pytree and its type.
struct LeafType {
  std::string path;  // as written by jax.tree_util.keystr: "['w'][0]"; "" for a lone leaf
  DType dtype = DType::kInvalid;
  std::vector<std::int64_t> dims;  // including leading batch axes
  std::size_t offset = 0;          // of its payload, from the first payload
  std::size_t nbytes = 0;
  auto operator<=>(const LeafType&) const = default;
};

// The position of an array in a program over several devices: its whole extents, and the start of
// each shard, by the shards' numbers.
struct Parts {
  std::vector<std::int64_t> whole;
  std::vector<std::vector<std::int64_t>> starts;
  auto operator<=>(const Parts&) const = default;
};

// A leaf whose payload has padding: another leaf has the used size.
struct Padded {
  std::size_t leaf = 0;
  // An array in shards has its whole extents and each shard's start. Sizes refer to the whole.
  std::vector<std::int64_t> whole;
  std::vector<std::vector<std::int64_t>> starts;
};

// Arrays of a tap's records on a device, by the handle in their payloads. Thread-safe.
class KeptArrays {
 public:
  struct One {
    std::shared_ptr<DeviceMemory> memory;
    std::vector<void*> data;  // per value leaf
  };

  std::uint64_t keep(One one);
  // Empty if it was dropped.
  One at(std::uint64_t handle) const;
  void drop(std::uint64_t handle) noexcept;

 private:
  mutable std::mutex mutex_;
  std::map<std::uint64_t, One> kept_;
  std::uint64_t last_ = 0;
};

// The description of a tap's call site in its records.
struct SourceInfo {
  std::string name;         // the tap's name for users
  std::string description;  // JSON for Python: the tree, transforms and more
  Role role = Role::kPrimal;
  std::size_t value_leaves = 0;  // the leaves of the tapped value, then sizes
  std::vector<Padded> padded;    // one per size; the sizes are the last value leaves
  std::vector<Parts> parts;      // per leaf of the value; empty in a program on one device
  bool ordered = false;          // consumers get its records in the order of all records
  bool has_where = false;        // leaf `value_leaves` is a bool for each lane: true if it is sent
  bool on_device = false;        // consumers want arrays on the device
};

// The common part of the records of one tap in one program. Immutable once records exist.
struct Source : SourceInfo {
  std::uint64_t id = 0;           // unique in the process
  Lanes lanes;                    // batch levels; empty for a tap without vmap
  std::vector<LeafType> leaves;   // value leaves, then control leaves, as a tap's operands
  std::size_t payload_bytes = 0;  // of a whole record
  // Arrays that stay on the device; null for a source whose payloads are all on the host. With kept
  // arrays, `payload_bytes` includes them, but only `written_bytes` are written.
  std::shared_ptr<KeptArrays> kept;
  std::size_t written_bytes = 0;
  std::shared_ptr<Consumer> consumer;  // in addition to the channel's; null for none

  // Appends a leaf.
  LeafType& add(std::string path, const ArrayView& type);
  std::size_t values() const noexcept { return value_leaves - padded.size(); }
};

struct Record {
  const Source* source = nullptr;
  std::uint64_t seq = 0;     // per channel and device, from 0, including dropped records
  std::int64_t time_ns = 0;  // wall clock, since the Unix epoch
  std::int64_t run = -1;     // XLA's id of the execution
  std::int32_t device = -1;  // global device id
  std::uint32_t flags = 0;   // RecordFlags, and the shard
  const char* payload = nullptr;

  const char* data(const LeafType& leaf) const noexcept { return payload + leaf.offset; }
  // The shard's number; -1 for whole arrays.
  std::int64_t shard() const noexcept { return std::int64_t{flags >> kShardBit} - 1; }
  // For the maker of the record: the address to write the payload to.
  char* data() const noexcept { return const_cast<char*>(payload); }

  // The handle of a record whose source has arrays on a device.
  std::uint64_t handle() const noexcept { return *reinterpret_cast<const std::uint64_t*>(payload); }
  // Reports that no consumer reads the record any more.
  void let_go() const noexcept {
    if (source->kept != nullptr) source->kept->drop(handle());
  }
};

// Calls visit(run) for each run of records that have the same key(record).
template <typename Key, typename Visit>
void each_run(std::span<const Record> records, Key&& key, Visit&& visit) {
  while (!records.empty()) {
    const auto first = key(records.front());
    auto other = std::ranges::find_if(records, [&](const auto& its) { return its != first; }, key);
    auto count = static_cast<std::size_t>(other - records.begin());
    visit(records.first(count));
    records = records.subspan(count);
  }
}

}  // namespace callgate
