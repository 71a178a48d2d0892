// SPDX-License-Identifier: Apache-2.0
// The layout of the memory that a process and its worker share.
//
// Each worker has its own piece of memory. The first page holds `WorkerControl`. The current
// message begins at kMessages. The process writes a request there and increments `requests`. The
// worker answers in place, writes `Reply`, sets `answered` and increments the call's event count,
// which is in the pool's memory (one per active call). It answers kStart and kForget, which belong
// to no call, by a byte on its socket. The memory is the worker's until its answer, and then the
// process's; both may grow it.
//
// Offsets count from the memory's start, so both sides may map it at any address.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include "core/array_view.h"
#include "core/event_count.h"
#include "workers/memory.h"

namespace callgate {

enum class RequestKind : std::uint32_t { kStart, kRun, kForget, kStop };

// Workers store definitions by numbers, and objects by numbers with this bit.
inline constexpr std::uint64_t kObject = std::uint64_t{1} << 63;
enum class ReplyKind : std::uint32_t {
  kDone,
  kRaised,     // by a lane's call; `bytes` is the worker's exception
  kUndefined,  // the same, before the first lane, by a definition
};

// A range of bytes in the memory.
struct Extent {
  std::uint64_t offset = 0, bytes = 0;
};

struct Reply {
  ReplyKind kind = ReplyKind::kDone;
  std::uint32_t unused = 0;
  std::int64_t lane = 0;         // that raised
  std::int64_t nanoseconds = 0;  // the time of all lanes
  Extent raised;
};

// An event count in a cache line of its own.
struct alignas(64) SharedCount : EventCount {};

struct WorkerControl {
  SharedCount requests;
  alignas(64) std::atomic<std::uint32_t> answered{0};  // the value of `requests` then
  std::atomic<std::uint32_t> running{0};               // the same, once it runs the lanes
  std::atomic<std::uint32_t> interrupted{0};           // the same, if it must end
  std::atomic<std::uint32_t> unwinding{0};             // the same, once it is ending
  std::atomic<std::int32_t> runs_on{-1};               // the worker's core at its last request
  std::int32_t asked_on = -1;                          // the core of the request's sender
  std::uint32_t call = 0;                              // the event count to increment
  std::uint64_t bytes = 0;                             // of the memory
  Reply reply;
};

// One array of a call; its extents follow the arrays.
struct ArrayHead {
  std::uint32_t dtype = 0;
  std::int32_t rank = 0;
  std::uint64_t dims = 0;  // offset
  std::uint64_t data = 0;  // of results: the lanes' follow each other. Operands: see below
};

struct DefinitionHead {
  std::uint64_t id = 0, of = 0;
  Extent bytes;
};

struct Request {
  RequestKind kind = RequestKind::kRun;
  std::uint32_t check_writes = 0;
  Extent text;                         // of kStart
  std::uint64_t site = 0;              // the definition to run
  std::int64_t device = -1, run = -1;  // see CallContext
  std::int64_t first = 0, step = 1;    // of the lanes, in the call
  std::int64_t first_lane = 0;         // the number of the call's first
  std::uint64_t lanes = 0;             // their number
  std::uint32_t operands = 0, results = 0;
  std::uint64_t arrays = 0;  // offset of the ArrayHeads, operands first
  std::uint64_t places = 0;  // offset of the operands' offsets, for each lane all operands
  std::uint32_t definitions = 0, forgotten = 0;
  std::uint64_t definition_heads = 0, forgotten_ids = 0;  // offsets
};

inline constexpr std::size_t kMessages = 4096, kAlignment = 64;
static_assert(sizeof(WorkerControl) <= kMessages);

// The number of event counts of a pool's calls.
inline constexpr std::size_t kMostCalls = 1024;
using CallEvents = std::array<SharedCount, kMostCalls>;

template <typename T>
T* at(std::byte* memory, std::uint64_t offset) noexcept {
  return reinterpret_cast<T*>(memory + offset);
}

inline WorkerControl& control_of(const SharedMemory& memory) noexcept {
  return *at<WorkerControl>(memory.data(), 0);
}
inline Request& request_of(const SharedMemory& memory) noexcept {
  return *at<Request>(memory.data(), kMessages);
}

// Assigns offsets in a message that is being laid out.
class Layout {
 public:
  std::uint64_t take(std::size_t bytes, std::size_t alignment = 8) noexcept {
    end_ = (end_ + alignment - 1) / alignment * alignment;
    std::uint64_t offset = end_;
    end_ += bytes;
    return offset;
  }
  std::size_t end() const noexcept { return end_; }

 private:
  std::size_t end_ = kMessages + sizeof(Request);
};

}  // namespace callgate
