// SPDX-License-Identifier: Apache-2.0
// libnccl within one process: communicators whose ranks are devices of the virtual GPU.
//
// What a rank calls between ncclGroupStart and ncclGroupEnd is a batch: one host function on its
// stream. When that runs it meets the batches of the other ranks, in the order in which each rank's
// run, so that it works in replayed graphs too. The last to come does the collective for all; sends
// are posted, and received by copies. Streams are threads, so a rank may wait for another.
#pragma once

#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace vgpu::nccl {

enum Result : int { kSuccess = 0, kInternalError = 3, kInvalidArgument = 4, kInvalidUsage = 5 };

enum class Kind {
  kAllReduce,
  kReduce,
  kBroadcast,
  kAllGather,
  kReduceScatter,
  kAllToAll,
  kSend,
  kReceive
};

enum class Type : int { kI8, kU8, kI32, kU32, kI64, kU64, kF16, kF32, kF64, kBF16, kE4M3, kE5M2 };
enum class Reduction : int { kSum, kProduct, kMax, kMin, kAverage };

struct Call {
  Kind kind;
  std::uint64_t send, receive;  // device addresses
  std::size_t count;            // elements, as NCCL's function of that kind counts them
  Type type;
  Reduction reduction = Reduction::kSum;
  int peer = 0;  // or the root
};

std::size_t size_of(Type type);
// Does what one collective is for all ranks; `calls` has each rank's. False where they differ.
bool run_collective(const std::vector<const Call*>& calls);

// One collective, until all ranks have come to it.
struct Meeting {
  std::vector<const Call*> calls;
  int arrived = 0, left = 0;
  bool done = false;
};

// A send, until it is received.
struct Post {
  const Call* call = nullptr;
  bool taken = false;
};

struct Split {
  std::map<int, std::pair<int, int>> asked;  // by rank: color and key
};

// What the ranks of a communicator share.
struct Clique {
  explicit Clique(int ranks) : size(ranks), reached(static_cast<std::size_t>(ranks)) {}
  const int size;
  std::mutex mutex;
  std::condition_variable changed;
  bool aborted = false;
  std::vector<std::uint64_t> reached;  // collectives that each rank has come to
  std::map<std::uint64_t, Meeting> meetings;
  std::map<std::pair<int, int>, std::deque<std::shared_ptr<Post>>> posts;  // by sender, receiver
  std::vector<Split> splits;
  std::map<std::pair<std::size_t, int>, std::shared_ptr<Clique>> parts;  // by split and color
};

struct Communicator {
  std::shared_ptr<Clique> clique;
  int rank = 0, device = 0;
  std::size_t splits = 0;
};

// One rank's batch, on its stream's thread: returns when this rank's part of it is done.
void run_batch(Clique& clique, int rank, const std::vector<Call>& calls);

}  // namespace vgpu::nccl
