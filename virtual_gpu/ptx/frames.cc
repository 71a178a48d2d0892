// SPDX-License-Identifier: Apache-2.0
// Frames of a warp's calls: registers, constants, local memory. See machine.h.
#include <algorithm>

#include "machine.h"

namespace vgpu::ptx {
namespace {

constexpr std::uint32_t kMaxLocal = 512 * 1024;  // bytes of a thread, as the devices have
constexpr std::uint32_t kMaxDepth = 512;

void put(std::byte* row, std::uint32_t bytes, std::uint32_t lane, const void* value) {
  std::memcpy(row + std::size_t{lane} * bytes, value, bytes);
}

std::uint32_t part(Dim dim, SpecialKind kind, SpecialKind x) {
  switch (static_cast<int>(kind) - static_cast<int>(x)) {
    case 0: return dim.x;
    case 1: return dim.y;
    default: return dim.z;
  }
}

Dim thread_of(std::uint32_t number, Dim block) {
  return {number % block.x, number / block.x % block.y, number / block.x / block.y};
}

}  // namespace

Frame* Warp::new_frame(const Code& code) {
  auto known = std::find_if(free_frames_.begin(), free_frames_.end(),
                            [&](const auto& each) { return each->code == &code; });
  if (known != free_frames_.end()) {  // with its constants
    frames_.push_back(std::move(*known));
    free_frames_.erase(known);
  } else {
    auto frame = std::make_unique<Frame>();
    frame->code = &code;
    frame->registers.resize(code.register_bytes);
    for (const Constant& each : code.constants) {
      std::uint64_t value[2] = {each.low, each.high};
      for (std::uint32_t lane = 0; lane < kLanes; ++lane) {
        put(frame->registers.data() + each.row, each.bytes, lane, value);
      }
    }
    frames_.push_back(std::move(frame));
  }
  Frame* frame = frames_.back().get();
  frame->parent = nullptr;
  frame->site = nullptr;
  frame->depth = 0;
  frame->local_base = 0;
  return frame;
}

void Warp::drop(Frame* frame) {
  auto it = std::find_if(frames_.begin(), frames_.end(),
                         [&](const auto& each) { return each.get() == frame; });
  free_frames_.push_back(std::move(*it));
  frames_.erase(it);
}

void Warp::fill(Frame& frame) {
  std::uint32_t needed = frame.local_base + frame.code->local_bytes;
  if (needed > kMaxLocal) {
    throw Fault{Result::kIllegalAddress, "more than 512 KiB of local memory in '" +
                                             frame.code->name + "' and what called it"};
  }
  if (needed > local_stride_) {
    std::uint32_t stride = std::max(needed, 2 * local_stride_);
    std::vector<std::byte> larger(std::size_t{stride} * kLanes);
    for (std::uint32_t lane = 0; lane < kLanes && local_stride_ > 0; ++lane) {
      std::memcpy(larger.data() + std::size_t{lane} * stride,
                  local_.data() + std::size_t{lane} * local_stride_, local_stride_);
    }
    local_ = std::move(larger);
    local_stride_ = stride;
  }
  for (const Special& each : frame.code->specials) {
    for (std::uint32_t lane = 0; lane < kLanes; ++lane) {
      std::uint64_t value = special(each, lane, frame);
      put(frame.registers.data() + each.row, each.bytes, lane, &value);
    }
  }
}

void Warp::enter(const Code& callee, const CallSite& site, Lanes lanes) {
  Group& here = group();
  Frame* caller = here.frame;
  if (caller->depth >= kMaxDepth) {
    throw Fault{Result::kIllegalAddress,
                "calls nested more than 512 deep in '" + callee.name + "'"};
  }
  if (site.parameters.size() != callee.parameter_offsets.size()) {
    throw Fault{Result::kLaunchFailed,
                "a call of '" + callee.name + "' with " + std::to_string(site.parameters.size()) +
                    " parameters, it has " + std::to_string(callee.parameter_offsets.size())};
  }
  if (site.results.size() > callee.result_offsets.size()) {
    throw Fault{Result::kLaunchFailed,
                "a call of '" + callee.name + "' for " + std::to_string(site.results.size()) +
                    " results, it has " + std::to_string(callee.result_offsets.size())};
  }
  Frame* frame = new_frame(callee);
  frame->parent = caller;
  frame->return_to = here.at;
  frame->site = &site;
  frame->depth = caller->depth + 1;
  frame->local_base = (caller->local_base + caller->code->local_bytes + 15U) & ~15U;
  frame->inside = lanes;
  fill(*frame);
  for (std::size_t i = 0; i < site.parameters.size(); ++i) {
    each_lane(lanes, [&](std::uint32_t lane) {
      std::byte* own = local_.data() + std::size_t{lane} * local_stride_;
      std::memcpy(own + frame->local_base + callee.parameter_offsets[i],
                  own + caller->local_base + site.parameters[i], site.parameter_bytes[i]);
    });
  }
  const bool all = here.lanes == lanes;
  branch(lanes, 0);  // `here` may be gone
  (all ? group() : groups_.back()).frame = frame;
}

void Warp::leave(Lanes lanes) {
  Frame* frame = group().frame;
  Frame* caller = frame->parent;
  if (caller == nullptr) return exit(lanes);
  const CallSite& site = *frame->site;
  for (std::size_t i = 0; i < site.results.size(); ++i) {
    each_lane(lanes, [&](std::uint32_t lane) {
      std::byte* own = local_.data() + std::size_t{lane} * local_stride_;
      std::memcpy(own + caller->local_base + site.results[i],
                  own + frame->local_base + frame->code->result_offsets[i], site.result_bytes[i]);
    });
  }
  const bool all = group().lanes == lanes;
  branch(lanes, frame->return_to);
  (all ? group() : groups_.back()).frame = caller;
  frame->inside &= ~lanes;
  if (frame->inside == 0) drop(frame);
}

std::uint64_t Warp::special(const Special& special, std::uint32_t lane, const Frame& frame) const {
  using Kind = SpecialKind;
  const Kind kind = special.kind;
  Cluster& cluster = block_.cluster();
  const GridState& grid = cluster.grid();
  const Launch& launch = *grid.launch;
  const Dim in_cluster = {block_.index().x % grid.cluster.x, block_.index().y % grid.cluster.y,
                          block_.index().z % grid.cluster.z};
  const Dim clusters = {launch.grid.x / grid.cluster.x, launch.grid.y / grid.cluster.y,
                        launch.grid.z / grid.cluster.z};
  auto between = [kind](Kind first, Kind last) { return kind >= first && kind <= last; };
  if (between(Kind::kTidX, Kind::kTidZ))
    return part(thread_of(index_ * kLanes + lane, launch.block), kind, Kind::kTidX);
  if (between(Kind::kNtidX, Kind::kNtidZ)) return part(launch.block, kind, Kind::kNtidX);
  if (between(Kind::kCtaidX, Kind::kCtaidZ)) return part(block_.index(), kind, Kind::kCtaidX);
  if (between(Kind::kNctaidX, Kind::kNctaidZ)) return part(launch.grid, kind, Kind::kNctaidX);
  if (between(Kind::kClusterIdX, Kind::kClusterIdZ))
    return part(cluster.number(), kind, Kind::kClusterIdX);
  if (between(Kind::kNclusterIdX, Kind::kNclusterIdZ))
    return part(clusters, kind, Kind::kNclusterIdX);
  if (between(Kind::kClusterCtaIdX, Kind::kClusterCtaIdZ))
    return part(in_cluster, kind, Kind::kClusterCtaIdX);
  if (between(Kind::kClusterNctaIdX, Kind::kClusterNctaIdZ))
    return part(grid.cluster, kind, Kind::kClusterNctaIdX);
  const std::uint64_t shared_base = block_.rank() * kSharedStride;
  auto shared_offset = [&] {  // of a variable, and what the program adds
    return grid.program->shared[special.index & 0xFFFFFFFF].offset + (special.index >> 32);
  };
  const std::uint64_t shared_bytes = grid.program->dynamic_offset + launch.dynamic_shared;
  switch (kind) {
    case Kind::kLaneId: return lane;
    case Kind::kWarpId: return index_;
    case Kind::kNwarpId: return (launch.block.count() + kLanes - 1) / kLanes;
    case Kind::kSmId: return 0;
    case Kind::kNsmId: return 1;
    case Kind::kGridId: return grid.grid_id;
    case Kind::kLanemaskEq: return Lanes{1} << lane;
    case Kind::kLanemaskLt: return (Lanes{1} << lane) - 1;
    case Kind::kLanemaskLe: return (Lanes{2} << lane) - 1;
    case Kind::kLanemaskGe: return ~((Lanes{1} << lane) - 1);
    case Kind::kLanemaskGt: return ~((Lanes{2} << lane) - 1);
    case Kind::kClusterCtaRank: return block_.rank();
    case Kind::kClusterNctaRank: return grid.cluster.count();
    case Kind::kDynamicSharedSize: return launch.dynamic_shared;
    case Kind::kTotalSharedSize:
    case Kind::kAggregateSharedSize: return shared_bytes;
    case Kind::kSharedAddress: return shared_base + shared_offset();
    case Kind::kSharedGenericAddress: return kSharedWindow + shared_base + shared_offset();
    case Kind::kLocalAddress: return frame.local_base + special.index;
    case Kind::kLocalGenericAddress: return kLocalWindow + frame.local_base + special.index;
    default: return 0;
  }
}

}  // namespace vgpu::ptx
