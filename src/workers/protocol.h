// SPDX-License-Identifier: Apache-2.0
// The layout of the memory that a process and its worker share.
//
// Each worker has a piece of memory of its own. The first page holds `WorkerControl`; from
// kMessages on lies the one message that is under way. The process writes a request there and adds
// to `requests`; the worker answers it in place, writes `Reply`, sets `answered` and adds to the
// event count of the call, which lies in the pool's memory (one for each call under way); kStart
// and kForget, which are no call's, it answers by a byte on its socket. Until it has answered the
// memory is the worker's, and after that the process's: either may make it larger.
//
// Offsets count from the memory's begin, so that both sides may have it at any address.
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

// Workers keep definitions by numbers, and with this bit objects.
inline constexpr std::uint64_t kObject = std::uint64_t{1} << 63;
enum class ReplyKind : std::uint32_t {
  kDone,
  kRaised,     // by a lane's call; `bytes` are what the worker made of it
  kUndefined,  // likewise, before the first lane: by a definition
};

// Bytes in the memory.
struct Extent {
  std::uint64_t offset = 0, bytes = 0;
};

struct Reply {
  ReplyKind kind = ReplyKind::kDone;
  std::uint32_t unused = 0;
  std::int64_t lane = 0;         // that raised
  std::int64_t nanoseconds = 0;  // that all lanes took
  Extent raised;
};

// An event count in a cache line of its own.
struct alignas(64) SharedCount : EventCount {};

struct WorkerControl {
  SharedCount requests;
  alignas(64) std::atomic<std::uint32_t> answered{0};  // as `requests` was then
  std::atomic<std::uint32_t> running{0};               // likewise, once it runs the lanes
  std::atomic<std::uint32_t> interrupted{0};           // likewise, where it is to end
  std::atomic<std::uint32_t> unwinding{0};             // likewise, where it was told so
  std::atomic<std::int32_t> runs_on{-1};               // the worker's core, at its last request
  std::int32_t asked_on = -1;                          // the core that the request came from
  std::uint32_t call = 0;                              // whose event count the worker adds to
  std::uint64_t bytes = 0;                             // of the memory
  Reply reply;
};

// One array of a call; its extents follow the arrays.
struct ArrayHead {
  std::uint32_t dtype = 0;
  std::int32_t rank = 0;
  std::uint64_t dims = 0;  // offset
  std::uint64_t data = 0;  // of results: those of the lanes follow each other. Operands: see below
};

struct DefinitionHead {
  std::uint64_t id = 0, of = 0;
  Extent bytes;
};

struct Request {
  RequestKind kind = RequestKind::kRun;
  std::uint32_t check_writes = 0;
  Extent text;                         // of kStart
  std::uint64_t site = 0;              // the definition that runs
  std::int64_t device = -1, run = -1;  // see CallContext
  std::int64_t first = 0, step = 1;    // of the lanes, in the call
  std::int64_t first_lane = 0;         // the number of the call's first
  std::uint64_t lanes = 0;             // how many
  std::uint32_t operands = 0, results = 0;
  std::uint64_t arrays = 0;  // offset of the ArrayHeads, operands first
  std::uint64_t places = 0;  // offset of the operands' offsets, of each lane those of all operands
  std::uint32_t definitions = 0, forgotten = 0;
  std::uint64_t definition_heads = 0, forgotten_ids = 0;  // offsets
};

inline constexpr std::size_t kMessages = 4096, kAlignment = 64;
static_assert(sizeof(WorkerControl) <= kMessages);

// The event counts of a pool's calls.
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

// Hands out offsets of a message that is being laid out.
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
