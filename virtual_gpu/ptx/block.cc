// SPDX-License-Identifier: Apache-2.0
// Blocks and clusters: their warps' turns, and their barriers. See machine.h.
#include <algorithm>

#include "machine.h"

namespace vgpu::ptx {
namespace {

constexpr std::uint64_t kWarpSlice = 1U << 16;

}  // namespace

Block::Block(Cluster& cluster, std::uint32_t rank) : cluster_(cluster), rank_(rank) {
  const GridState& grid = cluster.grid();
  threads_ = static_cast<std::uint32_t>(grid.launch->block.count());
  shared_.resize(grid.program->dynamic_offset + grid.launch->dynamic_shared);
  for (std::uint32_t i = 0; i * kLanes < threads_; ++i) {
    warps_.push_back(std::make_unique<Warp>(*this, i));
  }
}

void Block::start(Dim index) {
  index_ = index;
  live_ = threads_;
  barriers_ = {};
  for (std::uint32_t i = 0; i < warps_.size(); ++i) {
    std::uint32_t count = std::min(kLanes, threads_ - i * kLanes);
    warps_[i]->start(*cluster_.grid().program->entry,
                     count == kLanes ? kAllLanes : (Lanes{1} << count) - 1);
  }
}

Warp::State Block::run(std::uint64_t& steps) {
  bool running = false, waiting = false;
  for (const auto& warp : warps_) {
    std::uint64_t slice = std::min(steps, kWarpSlice), before = slice;
    Warp::State state = warp->run(slice);
    steps -= before - slice;
    running |= state == Warp::State::kRunning || before != slice;
    waiting |= state == Warp::State::kWaiting;
    if (steps == 0) return Warp::State::kRunning;
  }
  return running ? Warp::State::kRunning : waiting ? Warp::State::kWaiting : Warp::State::kEnded;
}

bool Block::arrive(std::uint32_t number, std::uint32_t threads, std::uint32_t expected) {
  BlockBarrier& barrier = barriers_[number];
  barrier.arrived += threads;
  barrier.expected = expected;
  return complete(number);
}

bool Block::complete(std::uint32_t number) {
  BlockBarrier& barrier = barriers_[number];
  std::uint32_t needed = barrier.expected != 0 ? barrier.expected : live_;
  if (barrier.arrived == 0 || barrier.arrived < needed) return false;
  for (const BlockBarrier::Asked& each : barrier.asked) {
    auto* row = each.frame->registers.data() + each.row;
    each_lane(each.lanes, [&](std::uint32_t lane) {
      if (each.option == 0) {
        std::memcpy(row + std::size_t{4} * lane, &barrier.count, sizeof(barrier.count));
      } else {
        row[lane] = std::byte{(each.option == 1 ? barrier.all : barrier.any)};
      }
    });
  }
  barrier = {};
  for (const auto& warp : warps_) warp->wake(Waiting::kBarrier, number);
  return true;
}

void Block::ended(std::uint32_t threads) {
  live_ -= threads;
  for (std::uint32_t i = 0; i < barriers_.size(); ++i) {
    if (barriers_[i].arrived > 0) complete(i);
  }
  cluster_.check_arrivals();
}

std::string Block::waits_for() const {
  std::string text;
  for (const auto& warp : warps_) {
    std::string each = warp->waits_for();
    if (!each.empty()) text += (text.empty() ? "" : "; ") + each;
    if (text.size() > 400) return text + "; ...";
  }
  return text;
}

Cluster::Cluster(GridState& grid) : grid_(grid) {
  for (std::uint32_t rank = 0; rank < grid.cluster.count(); ++rank) {
    blocks_.push_back(std::make_unique<Block>(*this, rank));
  }
}

void Cluster::start(std::uint64_t number) {
  const Dim size = grid_.cluster, blocks = grid_.launch->grid;
  const Dim all = {blocks.x / size.x, blocks.y / size.y, blocks.z / size.z};
  number_ = {static_cast<std::uint32_t>(number % all.x),
             static_cast<std::uint32_t>(number / all.x % all.y),
             static_cast<std::uint32_t>(number / all.x / all.y)};
  arrived_ = 0;
  phase_ = 0;
  for (std::uint32_t rank = 0; rank < blocks_.size(); ++rank) {
    blocks_[rank]->start({number_.x * size.x + rank % size.x,
                          number_.y * size.y + rank / size.x % size.y,
                          number_.z * size.z + rank / size.x / size.y});
  }
}

Warp::State Cluster::run(Worker& worker, std::uint64_t steps) {
  worker_ = &worker;
  for (;;) {
    bool running = false, waiting = false;
    for (const auto& block : blocks_) {
      Warp::State state = block->run(steps);
      running |= state == Warp::State::kRunning;
      waiting |= state == Warp::State::kWaiting;
      if (steps == 0) return Warp::State::kRunning;
    }
    if (running) {
      if (grid_.stopped.load(std::memory_order_relaxed)) return Warp::State::kRunning;
      continue;
    }
    if (!waiting) return Warp::State::kEnded;
    std::string text;
    for (const auto& block : blocks_) text += block->waits_for();
    throw Fault{Result::kLaunchFailed, "threads wait for ever: " + text};
  }
}

void Cluster::arrive(std::uint32_t threads) {
  arrived_ += threads;
  check_arrivals();
}

void Cluster::check_arrivals() {
  std::uint32_t live = 0;
  for (const auto& block : blocks_) live += block->live();
  if (arrived_ == 0 || arrived_ < live) return;
  arrived_ = 0;
  ++phase_;
  for (const auto& block : blocks_) {
    for (const auto& warp : block->warps()) warp->wake(Waiting::kCluster, 0);
  }
}

}  // namespace vgpu::ptx
