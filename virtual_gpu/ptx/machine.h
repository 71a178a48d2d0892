// SPDX-License-Identifier: Apache-2.0
// What runs: warps in blocks in clusters in a grid.
//
// A cluster (most often one block) runs on one host thread at a time, so that the blocks of a
// cluster and the warps of a block need no locks; only atomics and volatile accesses to global
// memory meet other threads. Nothing here waits: a warp that can't go on says so, the block tries
// the next one, and a cluster that has run for long goes back to the queue, so that one block may
// wait for what another writes.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstring>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "code.h"

namespace vgpu::ptx {

// What ends a launch. Thrown by instructions.
struct Fault {
  Result result;
  std::string what;
};

class Block;
class Cluster;

// What all threads of a launch share.
struct GridState {
  const Program* program = nullptr;
  const Launch* launch = nullptr;
  Memory* memory = nullptr;
  Dim cluster;  // blocks of a cluster
  std::uint64_t grid_id = 0;
  std::uint64_t step_limit = 0;
  std::atomic<std::uint64_t> steps{0};
  std::atomic<bool> stopped{false};  // another thread found a fault
};

// A host thread's: the ranges that addresses fell into last, by instruction.
class Worker {
 public:
  Worker(GridState& grid) : grid_(grid), ranges_(grid.program->caches + 1) {}
  GridState& grid() { return grid_; }
  // Where the host finds [address, address + bytes) of global memory. Throws Fault.
  std::byte* global(std::uint64_t address, std::uint32_t bytes, const Instruction& instruction) {
    const Range& range = ranges_[instruction.cache];
    if (address < range.begin || address > range.end - bytes || range.end < bytes) [[unlikely]] {
      return find(address, bytes, instruction);
    }
    return at(address + range.to_host);
  }

 private:
  static std::byte* at(std::uint64_t host) { return reinterpret_cast<std::byte*>(host); }
  std::byte* find(std::uint64_t address, std::uint32_t bytes, const Instruction& instruction);

  GridState& grid_;
  std::vector<Range> ranges_;
};

// A function's activation for the lanes that called it together.
struct Frame {
  const Code* code = nullptr;
  std::vector<std::byte> registers;
  Frame* parent = nullptr;
  std::uint32_t return_to = 0;  // an instruction of the parent's
  const CallSite* site = nullptr;
  std::uint32_t depth = 0;
  std::uint32_t local_base = 0;  // of a lane's local memory
  Lanes inside = 0;              // lanes that have neither returned nor ended
};

enum class Waiting : std::uint8_t {
  kNot,
  kTogether,  // for lanes of the warp that an instruction names
  kBarrier,   // for other warps of the block
  kCluster,   // for other blocks of the cluster
};

// Lanes that are at the same place.
struct Group {
  Frame* frame = nullptr;
  std::uint32_t at = 0;
  Lanes lanes = 0;
  Waiting waiting = Waiting::kNot;
  std::uint32_t barrier = 0;  // kBarrier: which
  Lanes needed = 0;           // kTogether: whom
};

class Warp {
 public:
  Warp(Block& block, std::uint32_t index) : block_(block), index_(index) {}
  // For the block's present number; keeps what it has allocated.
  void start(const Code& entry, Lanes lanes);

  enum class State : std::uint8_t { kRunning, kWaiting, kEnded };
  // Runs for at most so many instructions.
  State run(std::uint64_t& steps);

  // For instructions.
  template <typename T>
  T* row(std::uint32_t offset) {
    return reinterpret_cast<T*>(registers_ + offset);
  }
  Block& block() { return block_; }
  Worker& worker();
  std::uint32_t index() const { return index_; }
  Frame& frame() { return *groups_[now_].frame; }
  Group& group() { return groups_[now_]; }
  Lanes alive() const { return alive_; }
  // Where the host finds an address, `bytes` long and aligned to as many (16 at most).
  std::byte* resolve(Space space, std::uint64_t address, std::uint32_t bytes, std::uint32_t lane,
                     const Instruction& instruction);
  std::byte* shared(std::uint64_t address, std::uint32_t bytes, const Instruction& instruction);
  std::byte* local(std::uint64_t address, std::uint32_t bytes, std::uint32_t lane,
                   const Instruction& instruction);

  // For instructions with `control`. The group's place is already the next instruction.
  void branch(Lanes taken, std::uint32_t target);
  void exit(Lanes lanes);
  void enter(const Code& callee, const CallSite& site, Lanes lanes);
  void leave(Lanes lanes);
  // True when all `needed` lanes that live are at this instruction in one group; they run it. False
  // when the group waits for the others, and will come back to the instruction.
  bool together(Lanes needed, const Instruction& instruction);
  // The group waits; wake() lets all groups with the same reason go on.
  void wait(Waiting reason, std::uint32_t barrier, Lanes lanes);
  void wake(Waiting reason, std::uint32_t barrier);
  // The block's other warps, and other blocks, should go first now.
  void yield() { yields_ = true; }
  std::array<std::uint8_t, kLanes> carry{};  // the condition code
  std::uint64_t cluster_phase = 0;           // of its last barrier.cluster.arrive

  std::string where(const Instruction& instruction, std::uint32_t lane) const;
  std::string waits_for() const;  // "lanes ffffffff at line 7 wait at barrier 0"

 private:
  bool select();
  void merge();
  Frame* new_frame(const Code& code);
  void drop(Frame* frame);
  void fill(Frame& frame);
  std::uint64_t special(const Special& special, std::uint32_t lane, const Frame& frame) const;
  Lanes guarded(const Instruction& instruction, Lanes lanes) const;
  // Until an instruction that changes which lanes run, or the place where another group waits.
  void run_group(std::uint64_t& steps);

  Block& block_;
  std::uint32_t index_;
  Lanes alive_ = 0;
  std::byte* registers_ = nullptr;  // of the group that runs
  std::vector<Group> groups_;
  std::size_t now_ = 0;
  std::uint32_t passed_over_ = 0;  // how often a group that could run was not chosen
  bool yields_ = false;
  std::vector<std::unique_ptr<Frame>> frames_, free_frames_;
  std::vector<std::byte> local_;  // lane by lane
  std::uint32_t local_stride_ = 0;
};

// bar.sync and its like: one of a block's sixteen.
struct BlockBarrier {
  std::uint32_t arrived = 0;
  std::uint32_t expected = 0;  // 0: all threads that live
  // What bar.red has gathered, and for whom.
  bool all = true, any = false;
  std::uint32_t count = 0;
  struct Asked {
    Warp* warp;
    Frame* frame;
    std::uint32_t row, option;
    Lanes lanes;
  };
  std::vector<Asked> asked;
};

class Block {
 public:
  Block(Cluster& cluster, std::uint32_t rank);
  void start(Dim index);
  Warp::State run(std::uint64_t& steps);

  Cluster& cluster() { return cluster_; }
  std::uint32_t rank() const { return rank_; }
  Dim index() const { return index_; }
  std::uint32_t threads() const { return threads_; }
  std::span<std::byte> shared() { return shared_; }
  // Threads arrive at a barrier; `expected` threads, 0 for all. Wakes those that wait when it is
  // complete, and says whether it was.
  bool arrive(std::uint32_t barrier, std::uint32_t threads, std::uint32_t expected);
  BlockBarrier& barrier(std::uint32_t number) { return barriers_[number]; }
  void ended(std::uint32_t threads);
  std::uint32_t live() const { return live_; }
  std::vector<std::unique_ptr<Warp>>& warps() { return warps_; }
  std::string waits_for() const;

 private:
  bool complete(std::uint32_t barrier);

  Cluster& cluster_;
  std::uint32_t rank_;
  Dim index_;
  std::uint32_t threads_ = 0, live_ = 0;
  std::vector<std::byte> shared_;
  std::vector<std::unique_ptr<Warp>> warps_;
  std::array<BlockBarrier, 16> barriers_;
};

class Cluster {
 public:
  explicit Cluster(GridState& grid);
  void start(std::uint64_t number);
  Warp::State run(Worker& worker, std::uint64_t steps);

  GridState& grid() { return grid_; }
  Worker& worker() { return *worker_; }
  Block& block(std::uint32_t rank) { return *blocks_[rank]; }
  std::uint32_t size() const { return static_cast<std::uint32_t>(blocks_.size()); }
  Dim number() const { return number_; }  // of the cluster in the grid
  // barrier.cluster: threads arrive; all that live must.
  void arrive(std::uint32_t threads);
  std::uint64_t phase() const { return phase_; }
  void check_arrivals();

 private:
  GridState& grid_;
  Worker* worker_ = nullptr;
  std::vector<std::unique_ptr<Block>> blocks_;
  Dim number_;
  std::uint32_t arrived_ = 0;
  std::uint64_t phase_ = 0;
};

// Runs all clusters of the launch.
Outcome run_grid(const Program& program, const Launch& launch, Memory& memory);

inline Worker& Warp::worker() { return block_.cluster().worker(); }

// Goes through lanes; fast where all of them run.
template <typename Body>
inline __attribute__((always_inline)) void each_lane(Lanes lanes, Body&& body) {
  if (lanes == kAllLanes) {
    for (std::uint32_t lane = 0; lane < kLanes; ++lane) body(lane);
  } else {
    for (; lanes != 0; lanes &= lanes - 1) {
      body(static_cast<std::uint32_t>(std::countr_zero(lanes)));
    }
  }
}

// The lanes whose predicate holds.
inline Lanes true_lanes(const std::uint8_t* predicates) {
  Lanes lanes = 0;
  for (std::uint32_t i = 0; i < 4; ++i) {
    std::uint64_t eight = 0;
    std::memcpy(&eight, predicates + std::size_t{8} * i, sizeof(eight));
    lanes |= static_cast<Lanes>((eight * 0x0102040810204080ULL) >> 56) << (8 * i);
  }
  return lanes;
}

// Throws a Fault where the address is no multiple of the bytes, or of 16 where they are more.
void check_alignment(std::uint64_t address, std::uint32_t bytes, const Instruction& instruction);

}  // namespace vgpu::ptx
